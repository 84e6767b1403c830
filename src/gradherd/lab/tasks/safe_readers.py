"""Readers for files that may be damaged or hostile.

What a reader returns is complete; otherwise it raises DamagedData with the file's path. No size
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


class DamagedData(ValueError):
    """A file is cut, damaged or not what its name says; the message begins with its path."""

    def __init__(self, message: str) -> None:
        """Take a message that may have come out of a file: it is for a terminal."""
        super().__init__(printable(message, most=1000))


MAX_BYTES = 1 << 28
"""Bytes that a file may have when unpacked, where nothing else is known about it."""
_XZ_MEMORY = 1 << 28
"""Bytes that unpacking .xz may take: `xz -9` needs a quarter."""


def read_file(path: Path, most: int = MAX_BYTES) -> bytes:
    """Return the content of a file, unpacked if its name ends in .xz or .gz.

    Args:
        path: The file.
        most: Bytes that it may have when unpacked; of more than these no memory is taken.
    """
    try:
        if not path.is_file():  # A pipe would never end.
            raise OSError("it is not a file")
        with path.open("rb") as file:
            if path.suffix == ".xz":
                content = _decompress_xz(file.read(most + 1), most)
            elif path.suffix == ".gz":
                content = gzip.GzipFile(fileobj=file).read(most + 1)
            else:
                content = file.read(most + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DamagedData(f"{path} cannot be read: {error_line(error)}; fetch it again") from None
    if len(content) > most:
        raise DamagedData(f"{path} is no such file: it has more than {most:,} bytes unpacked")
    return content


def _decompress_xz(packed: bytes, most: int) -> bytes:
    """Return up to `most` + 1 unpacked bytes of one stream or several."""
    parts: list[bytes] = []
    left = most + 1
    while packed and left:
        stream = lzma.LZMADecompressor(memlimit=_XZ_MEMORY)
        parts.append(stream.decompress(packed, left))
        left -= len(parts[-1])
        if left and not stream.eof:
            raise EOFError("it ends before its end was marked")
        packed = stream.unused_data.lstrip(b"\0")
    if not parts:
        raise EOFError("it is empty")
    return b"".join(parts)


def decode_utf8(content: bytes, path: Path) -> str:
    """Return the text in UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path} is not text in UTF-8: {error_line(error)}; fetch it again"
        ) from None


def split_lines(text: str) -> Iterator[str]:
    r"""Return the lines, each with its end; only \n ends one, whatever Unicode says."""
    return iter(io.StringIO(text, newline="\n"))


def parse_idx(content: bytes, path: Path, axes: int) -> NDArray[np.uint8]:
    """Return an array of bytes in the idx format of MNIST."""
    size = 4 + 4 * axes
    if len(content) < size or content[:4] != struct.pack(">I", 0x800 + axes):
        raise DamagedData(f"{path} is no idx file of bytes with {axes} axes; fetch it again")
    shape = struct.unpack(f">{axes}I", content[4:size])
    if len(content) - size != math.prod(shape):
        raise DamagedData(
            f"{path} holds {len(content) - size:,} bytes, not the {shape} it says; fetch it again"
        )
    return np.frombuffer(content[size:], np.uint8).reshape(shape)


def parse_table(text: str, path: Path, delimiter: str = ",") -> list[list[str]]:
    """Return the rows below the header of a table; quotes count in .csv files only."""
    if delimiter != ",":
        rows = [line.rstrip("\n").split(delimiter) for line in split_lines(text)]
    else:
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise DamagedData(f"{path} is no table: {error_line(error)}") from None
    if len(rows) < 2:
        raise DamagedData(f"{path} has no rows below its header")
    return rows[1:]


def parse_tiles(content: bytes, path: Path, side: int) -> NDArray[np.uint8]:
    """Return the tiles of a WebP image, row by row: (tiles, 3, side, side)."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(
            f"{path} needs Pillow to be read: pip install 'gradherd[tasks]', or use the "
            "binary version of the set"
        ) from None
    try:
        # One format: others have decoders that nobody expects behind this name.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=("WEBP",)) as image:
                wide, high = image.size
                if wide * high > _MAX_PIXELS:
                    raise ValueError(f"{wide} x {high} pixels are too many")
                pixels = np.asarray(image.convert("RGB"))
    # Decoders complain in their own ways: SyntaxError is one of Pillow's.
    except (
        *(OSError, ValueError, SyntaxError, EOFError, TypeError, RuntimeError),
        Image.DecompressionBombError,
    ) as error:
        raise DamagedData(f"{path} is no good image: {error_line(error)}; fetch it again") from None
    if high % side or wide % side:
        raise DamagedData(f"{path} is {wide} x {high} pixels, which are no tiles of {side}")
    tiles = pixels.reshape(high // side, side, wide // side, side, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, side, side)


_MAX_PIXELS = 1 << 25
"""An image may have so many: three times those of a sheet of CIFAR-10."""


def error_line(error: Exception) -> str:
    """Return what an error says, in one short line that a terminal can show."""
    line = " ".join(str(error).split()) or type(error).__name__
    return printable(line)


def printable(text: str, most: int = 200) -> str:
    """Return text out of a file as it can be told: shortened, without control characters.

    >>> printable("W1" + chr(27) + "[31m" + chr(10)), printable("12345", 4)
    ('W1?[31m?', '1234...')
    """
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:most])
    return shown if len(text) <= most else f"{shown}..."


ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, KeyError, RuntimeError)
"""What a zip archive that is damaged or made up can raise, besides ValueError and OSError."""
_HEADER_ERRORS = (
    *(ValueError, KeyError, TypeError, SyntaxError, OverflowError),
    *(RecursionError, MemoryError, tokenize.TokenError),
)
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How arrays are packed in an .npz; other ways cannot be stopped in time."""


def parse_npz(content: bytes, path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Return the arrays of these names from an .npz archive."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            there = archive.namelist()
            lack = [name for name in names if f"{name}.npy" not in there]
            if lack:
                raise ValueError(f"it has no array {lack[0]!r}")
            return [parse_npy(read_zip_member(archive, f"{name}.npy")) for name in names]
    # RuntimeError: it is encrypted; NotImplementedError: it needs a newer zip.
    except (ValueError, OSError, EOFError, *ZIP_ERRORS) as error:
        raise DamagedData(
            f"{path} is no good .npz archive: {error_line(error)}; fetch it again"
        ) from None


def read_zip_member(archive: zipfile.ZipFile, name: str, most: int = MAX_BYTES) -> bytes:
    """Return a file of a zip archive, or raise ValueError before it takes too much memory."""
    info = archive.getinfo(name)
    if info.compress_type not in _ZIP_METHODS:
        raise ValueError(f"{name} is packed in an unusual way")
    if info.file_size > most:
        raise ValueError(f"{name} would have {info.file_size:,} bytes, {most:,} are allowed")
    with archive.open(info) as file:
        # Never without a size: the one in the header may be smaller than what comes out.
        content = file.read(info.file_size)
    if len(content) != info.file_size:
        raise ValueError(f"{name} has {len(content):,} bytes, not the {info.file_size:,} it says")
    return content


def parse_npy(content: bytes) -> NDArray[Any]:
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
        except _HEADER_ERRORS as error:
            raise ValueError(f"its header is no array's ({error_line(error)})") from None
    if dtype.hasobject:
        raise ValueError("it holds objects, which are pickles (allow_pickle=False)")
    if min(shape, default=0) < 0 or dtype.itemsize * math.prod(shape) != len(content) - file.tell():
        raise ValueError(f"it has no content of shape {printable(str(shape), 60)} and {dtype.str}")
    if not dtype.itemsize:
        raise ValueError("it holds nothing")
    values = np.frombuffer(content, dtype, offset=file.tell())
    return values.reshape(shape, order="F" if fortran else "C")
