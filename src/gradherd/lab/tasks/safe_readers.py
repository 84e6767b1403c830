"""Readers for files that may be damaged or hostile.

What a reader returns is complete; otherwise it raises DamagedData, which names the file. No size
that a file declares about itself is trusted: decompression stops at the largest size that a file of
its kind can have, and arrays are only as large as the bytes present. No pickle is ever executed.
"""

import csv
import gzip
import io
import lzma
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradherd.lab.text import printable

MAX_BYTES = 1 << 28
"""Largest decompressed size of a file whose size is not known in advance."""
_XZ_MEMORY = 1 << 28
"""Memory limit for decompressing .xz in bytes; files made with `xz -9` need a quarter of it."""
_MAX_PIXELS = 1 << 25
"""Largest image: three times the pixels of one CIFAR-10 sheet."""

ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, KeyError, RuntimeError)
"""What `zipfile` raises on damaged or crafted archives, besides ValueError and OSError.

RuntimeError covers encrypted members and, as NotImplementedError, features of newer zip versions.
"""
# An .npy header is a Python literal: a crafted one can break the parser in any of these ways, or
# declare an array that no memory holds.
_HEADER_ERRORS = (
    *(ValueError, TypeError, SyntaxError, OverflowError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)
# The methods that numpy writes. Python cannot bound the output of the others while decompressing.
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class DamagedData(ValueError):
    """A file is truncated, damaged or not what its name says; the message starts with its path."""

    def __init__(self, message: str) -> None:
        """Take a message that may quote a file; make it safe to print on a terminal."""
        # Shortened first: escaping a line of megabytes would take seconds.
        super().__init__(printable(message[:2000], 1000))


def error_line(error: Exception) -> str:
    """Return the message of an error as one short, printable line."""
    return printable(str(error)[:2000], 200) or type(error).__name__


# Files and text.


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file, decompressed if its name ends in .xz or .gz.

    Args:
        path: The file.
        max_bytes: Largest decompressed size; no more memory than that is allocated.

    Raises:
        DamagedData: The file cannot be read or decompressed, or is larger.
    """
    try:
        if not path.is_file():  # Reading a named pipe would block forever.
            raise OSError("it is not a file")
        with path.open("rb") as file:
            if path.suffix == ".xz":
                # Compressed data is shorter than its content, or it is not the file that we want.
                content = _decompress_xz(file.read(max_bytes + 1), max_bytes)
            elif path.suffix == ".gz":
                # Reads no further than asked: a bomb stops after one byte too many.
                content = gzip.GzipFile(fileobj=file).read(max_bytes + 1)
            else:
                content = file.read(max_bytes + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DamagedData(f"{path} cannot be read: {error_line(error)}; fetch it again") from None
    if len(content) > max_bytes:
        raise DamagedData(
            f"{path} is not the expected file: it has more than {max_bytes:,} bytes unpacked"
        )
    return content


def _decompress_xz(packed: bytes, max_bytes: int) -> bytes:
    """Return up to `max_bytes` + 1 bytes of one or more concatenated .xz streams."""
    parts: list[bytes] = []
    left = max_bytes + 1
    # Files joined with cat have several streams, and a decompressor ends with the first.
    while packed and left:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        parts.append(stream.decompress(packed, left))
        left -= len(parts[-1])
        if left and not stream.eof:
            raise EOFError("it ends before its end marker")
        # The format allows zero bytes as padding between streams.
        packed = stream.unused_data.lstrip(b"\0")
    if not parts:
        raise EOFError("it is empty")
    return b"".join(parts)


def decode_utf8(content: bytes, path: Path) -> str:
    """Return UTF-8 content as text."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path} is not text in UTF-8: {error_line(error)}; fetch it again"
        ) from None


def split_lines(text: str) -> Iterator[str]:
    r"""Yield lines with their ends; only \n ends a line, unlike in `str.splitlines`."""
    return iter(io.StringIO(text, newline="\n"))


def parse_table(text: str, path: Path, delimiter: str = ",") -> list[list[str]]:
    """Return the rows below the header of a table; only comma-separated files have quotes."""
    if delimiter != ",":
        # GLUE's phrases hold quotation marks that csv would take for quoting.
        rows = [line.rstrip("\n").split(delimiter) for line in split_lines(text)]
    else:
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise DamagedData(f"{path} is not a table: {error_line(error)}") from None
    if len(rows) < 2:
        raise DamagedData(f"{path} has no rows below its header")
    return rows[1:]


# Images.


def parse_idx(content: bytes, path: Path, dims: int) -> NDArray[np.uint8]:
    """Return a uint8 array in the idx format of MNIST.

    Args:
        content: The decompressed file.
        path: What an error message names.
        dims: Number of dimensions that the array must have.
    """
    start = 4 + 4 * dims
    if len(content) < start or content[:4] != struct.pack(">I", 0x800 + dims):
        raise DamagedData(f"{path} is not an idx file of {dims} dimensions; fetch it again")
    # Big-endian, as MNIST's authors defined it.
    shape = struct.unpack(f">{dims}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise DamagedData(
            f"{path} holds {len(content) - start:,} bytes, but declares {shape}; fetch it again"
        )
    return np.frombuffer(content[start:], np.uint8).reshape(shape)


def parse_tiles(content: bytes, path: Path, side: int) -> NDArray[np.uint8]:
    """Return the tiles of a WebP image, row by row: (tiles, 3, side, side)."""
    try:
        # Optional: only one form of one data set needs it.
        from PIL import Image
    except ImportError:
        raise ValueError(
            f"{path} needs Pillow to be read: pip install pillow, or use the binary "
            "version of the set"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # WebP only: a file of this name must not reach Pillow's other decoders.
            with Image.open(io.BytesIO(content), formats=("WEBP",)) as image:
                width, height = image.size
                if width * height > _MAX_PIXELS:
                    raise ValueError(f"{width} x {height} pixels are too many")
                pixels = np.asarray(image.convert("RGB"))
    # Decoders report damage in many ways; Pillow even raises SyntaxError.
    except (
        *(OSError, ValueError, SyntaxError, EOFError, TypeError, RuntimeError),
        Image.DecompressionBombError,
    ) as error:
        raise DamagedData(
            f"{path} is not a valid image: {error_line(error)}; fetch it again"
        ) from None
    if height % side or width % side:
        raise DamagedData(
            f"{path} is {width} x {height} pixels, which is not a grid of {side} x {side} tiles"
        )
    grid = pixels.reshape(height // side, side, width // side, side, 3)
    return grid.transpose(0, 2, 4, 1, 3).reshape(-1, 3, side, side)


# NumPy archives.


def parse_npz(content: bytes, path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Return the arrays of these names from an .npz archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            present = archive.namelist()
            missing = [name for name in names if f"{name}.npy" not in present]
            if missing:
                raise ValueError(f"it has no array {missing[0]!r}")
            members = [io.BytesIO(read_zip_member(archive, f"{name}.npy")) for name in names]
        with warnings.catch_warnings():
            # numpy warns about headers written by Python 2, and then reads them correctly.
            warnings.simplefilter("ignore")
            arrays = [np.load(member, allow_pickle=False) for member in members]
        if not all(array.nbytes for array in arrays):
            raise ValueError("it holds an empty array")
        return arrays
    except (OSError, EOFError, *ZIP_ERRORS, *_HEADER_ERRORS) as error:
        raise DamagedData(
            f"{path} is not a valid .npz archive: {error_line(error)}; fetch it again"
        ) from None


def read_zip_member(archive: zipfile.ZipFile, name: str, max_bytes: int = MAX_BYTES) -> bytes:
    """Return a member of a zip archive; raise ValueError before it takes too much memory."""
    info = archive.getinfo(name)
    if info.compress_type not in _ZIP_METHODS:
        raise ValueError(f"{name} uses an unsupported compression method")
    # Checked before reading; the header may still lie, which is checked after.
    if info.file_size > max_bytes:
        raise ValueError(f"{name} would have {info.file_size:,} bytes, {max_bytes:,} are allowed")
    with archive.open(info) as file:
        # Always with a size: the data may decompress to more than the header declares.
        content = file.read(info.file_size)
    if len(content) != info.file_size:
        raise ValueError(f"{name} has {len(content):,} bytes, but declares {info.file_size:,}")
    return content
