"""Arrays out of zip archives, of no more memory than they should take; never a pickle."""

import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradherd.lab.tasks.read import MOST, DamagedData, printable, reason

BAD_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, KeyError, RuntimeError)
"""What a zip archive that is damaged or made up can raise, besides ValueError and OSError."""
_BAD_HEADER = (
    *(ValueError, KeyError, TypeError, SyntaxError, OverflowError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How arrays are packed in an .npz; other ways cannot be stopped in time."""


def npz(content: bytes, path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Return the arrays of these names from an .npz archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            there = archive.namelist()
            lack = [name for name in names if f"{name}.npy" not in there]
            if lack:
                raise ValueError(f"it has no array {lack[0]!r}")
            return [npy(member(archive, f"{name}.npy")) for name in names]
    # RuntimeError: it is encrypted; NotImplementedError: it needs a newer zip.
    except (ValueError, OSError, EOFError, *BAD_ZIP) as error:
        raise DamagedData(
            f"{path} is no good .npz archive: {reason(error)}; fetch it again"
        ) from None


def member(archive: zipfile.ZipFile, name: str, most: int = MOST) -> bytes:
    """Return a file of a zip archive, or raise ValueError before it takes too much memory."""
    info = archive.getinfo(name)
    if info.compress_type not in _PACKED:
        raise ValueError(f"{name} is packed in an unusual way")
    if info.file_size > most:
        raise ValueError(f"{name} would have {info.file_size:,} bytes, {most:,} are allowed")
    with archive.open(info) as file:
        # Never without a size: the one in the header may be smaller than what comes out.
        content = file.read(info.file_size)
    if len(content) != info.file_size:
        raise ValueError(f"{name} has {len(content):,} bytes, not the {info.file_size:,} it says")
    return content


def npy(content: bytes) -> NDArray[Any]:
    """Return an array of the .npy format, read-only, or raise ValueError; never a pickle."""
    file = io.BytesIO(content)
    # Headers of Python 2 are told about in a warning, and then read well.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read = {
                (1, 0): np.lib.format.read_array_header_1_0,
                (2, 0): np.lib.format.read_array_header_2_0,
            }[np.lib.format.read_magic(file)]
            shape, fortran, dtype = read(file)
        # A header is a Python literal: one that is nested deeply breaks its parser.
        except _BAD_HEADER as error:
            raise ValueError(f"its header is no array's ({reason(error)})") from None
    if dtype.hasobject:
        raise ValueError("it holds objects, which are pickles (allow_pickle=False)")
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) != len(content) - file.tell():
        raise ValueError(f"it has no content of shape {printable(str(shape), 60)} and {dtype.str}")
    if not dtype.itemsize:
        raise ValueError("it holds nothing")
    values = np.frombuffer(content, dtype, offset=file.tell())
    return values.reshape(shape, order="F" if fortran else "C")
