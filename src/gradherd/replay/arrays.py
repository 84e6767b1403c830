"""Arrays that were recorded, opened with care: a file may be anything."""

import tokenize
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def open_array(path: Path, axes: tuple[str, ...]) -> NDArray[np.number]:
    """Map an .npy file of real numbers with these axes into memory, read-only.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    name = printable(str(path))
    try:
        if path.exists() and not path.is_file():  # A pipe would never end.
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            magic = file.read(6)
        if magic[:2] == b"PK":
            raise ValueError("an archive of several arrays")
        if magic != b"\x93NUMPY":
            raise ValueError("it does not begin like one")
        # Headers of Python 2, and shapes beyond all numbers, are told about in warnings.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Never pickle: an object array could run code.
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{name}: no such file") from None
    # A header is a Python literal: what is no shape or no dtype is noticed in many places.
    except _BAD_HEADER as error:
        raise ValueError(f"{name}: not a .npy file of numbers ({_short(error)})") from None
    assert isinstance(array, np.ndarray)
    if array.ndim != len(axes):
        raise ValueError(
            f"{name}: array has shape {array.shape}, expected {len(axes)} axes ({', '.join(axes)})"
        )
    if array.dtype.kind not in "fiub":  # no times either, which numpy counts as numbers
        real = "real " if array.dtype.kind == "c" else ""
        raise ValueError(f"{name}: array holds {array.dtype.str}, expected {real}numbers")
    if 0 in array.shape:
        raise ValueError(f"{name}: array of shape {array.shape} is empty; every axis needs one")
    return array


_BAD_HEADER = (
    *(ValueError, OSError, EOFError, TypeError, KeyError, SyntaxError, OverflowError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)


def _short(error: Exception) -> str:
    return printable((str(error).splitlines() or [""])[0][:200]) or type(error).__name__


def printable(text: str) -> str:
    """Return text as a terminal can show it, on one line: names of files may be anything."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
