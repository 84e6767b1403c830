"""Files of recorded gradients, read for `gradherd replay`.

A file may hold anything, and must not run code or hang.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.lab.text import printable

_LARGEST = 1e100  # inner products of larger values could overflow float64


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
    except PermissionError:
        raise ValueError(f"{name}: it may not be read: permission denied") from None
    except Exception as error:  # numpy reads the header as a Python literal: many kinds
        reason = printable(str(error), 200) or type(error).__name__
        if "objects" in reason:  # numpy speaks of dtypes and memory maps
            reason = "it holds Python objects"
        if "mmap" in reason:
            reason = "its end is missing"
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


def load_vectors(path: Path) -> Tensor:
    """Read an (M, N, D) array from an .npy file, as float64.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    array = open_array(path, ("workers", "units", "dim"))
    name = printable(str(path))
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # long doubles may become infinite
            copied = np.array(array, dtype=np.float64)  # the memory map is read-only
    except MemoryError:
        raise ValueError(
            f"{name}: {array.size:,} elements do not fit into memory; replay a part of them"
        ) from None
    vectors = torch.from_numpy(copied)
    if float(vectors.abs().nan_to_num(0, 0).max()) > _LARGEST:
        raise ValueError(
            f"{name}: values must be below {_LARGEST:g}: products of larger ones overflow"
        )
    bad = (~vectors.isfinite()).nonzero()
    if len(bad):
        worker, unit, column = bad[0].tolist()
        raise ValueError(
            f"{name}: {len(bad)} values are NaN or infinite, the first at worker {worker}, "
            f"unit {unit}, column {column}"
        )
    return vectors
