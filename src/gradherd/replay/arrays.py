"""Arrays that were recorded, opened with care: a file may be anything."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def open_array(path: Path, axes: tuple[str, ...]) -> NDArray[np.number]:
    """Map an .npy file of real numbers with these axes into memory, read-only.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(6)
        if magic[:2] == b"PK":
            raise ValueError("an archive of several arrays")
        if magic != b"\x93NUMPY":
            raise ValueError("it does not begin like one")
        # Never pickle: an object array could run code.
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path}: not a .npy file of numbers ({_first_line(error)})") from None
    assert isinstance(array, np.ndarray)
    if array.ndim != len(axes):
        raise ValueError(
            f"{path}: array has shape {array.shape}, expected {len(axes)} axes ({', '.join(axes)})"
        )
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        raise ValueError(f"{path}: array holds {array.dtype}, expected numbers")
    if np.issubdtype(array.dtype, np.complexfloating):
        raise ValueError(f"{path}: array holds {array.dtype}, expected real numbers")
    if 0 in array.shape:
        raise ValueError(f"{path}: array of shape {array.shape} is empty; every axis needs one")
    return array


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
