"""Open recorded arrays safely: a file may hold anything, and must not run code or hang."""

import tokenize
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gradherd.lab.text import printable


def open_array(path: Path, axes: tuple[str, ...]) -> NDArray[np.number]:
    """Map an .npy file of real numbers into memory, read-only.

    Args:
        path: The file.
        axes: Names of the expected axes, for the message if their number is wrong.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    name = printable(str(path))
    try:
        if path.exists() and not path.is_file():  # reading a pipe could block forever
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            magic = file.read(6)
        if magic[:2] == b"PK":
            raise ValueError("an archive of several arrays")
        if magic != b"\x93NUMPY":
            raise ValueError("it does not start like one")
        # numpy warns about headers written by Python 2 and about overflowing shapes.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Never unpickle: an object array could run code.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    except _BAD_HEADER as error:
        reason = printable(str(error), 200) or type(error).__name__
        if "objects" in reason:  # numpy speaks of dtypes and memory maps
            reason = "it holds Python objects"
        raise ValueError(f"{name}: not a .npy file of numbers ({reason})") from None
    assert isinstance(array, np.ndarray)
    if array.ndim != len(axes):
        raise ValueError(
            f"{name}: array has shape {array.shape}, expected {len(axes)} axes ({', '.join(axes)})"
        )
    if array.dtype.kind not in "fiub":  # excludes dates and times, which are np.number too
        real = "real " if array.dtype.kind == "c" else ""
        raise ValueError(f"{name}: array holds {array.dtype.str}, expected {real}numbers")
    if 0 in array.shape:
        raise ValueError(
            f"{name}: array of shape {array.shape} is empty; every axis needs at least one entry"
        )
    return array


# numpy parses the header as a Python literal and checks shape and dtype in many places.
_BAD_HEADER = (
    *(ValueError, OSError, EOFError, TypeError, KeyError, SyntaxError, OverflowError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)
