"""Reading files that may be anything: what comes back is whole, or DamagedData names the file.

No pickle is ever executed: arrays are read without, and pickled batches by an unpickler that
knows plain values and numpy arrays and nothing else.
"""

import csv
import gzip
import io
import lzma
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class DamagedData(ValueError):
    """A file is cut, damaged or not what its name says; the message begins with its path."""


def unpack(path: Path) -> bytes:
    """Return the content of a file, unpacked if its name ends in .xz or .gz."""
    try:
        content = path.read_bytes()
        if path.suffix == ".xz":
            return lzma.decompress(content)
        if path.suffix == ".gz":
            return gzip.decompress(content)
        return content
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DamagedData(f"{path} cannot be read: {_reason(error)}") from None


def decode(content: bytes, path: Path) -> str:
    """Return the text in UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedData(f"{path} is not text in UTF-8: {_reason(error)}") from None


def lines(text: str) -> Iterator[str]:
    r"""Return the lines, each with its end; only \n ends one, whatever Unicode says."""
    return iter(io.StringIO(text, newline="\n"))


def npz(content: bytes, path: Path, names: tuple[str, ...]) -> list[NDArray[Any]]:
    """Return the arrays of these names from an .npz archive."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            lack = [name for name in names if name not in archive]
            if lack:
                raise ValueError(f"it has no array {lack[0]!r}")
            return [np.asarray(archive[name]) for name in names]
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DamagedData(f"{path} is no good .npz archive: {_reason(error)}") from None


def idx(content: bytes, path: Path, axes: int) -> NDArray[np.uint8]:
    """Return an array of bytes in the idx format of MNIST."""
    head = np.frombuffer(content[: 4 + 4 * axes], ">u4")
    if len(head) != axes + 1 or head[0] != 0x800 + axes:
        raise DamagedData(f"{path} is no idx file of bytes with {axes} axes")
    shape = [int(size) for size in head[1:]]
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * axes)
    if len(values) != np.prod(shape, dtype=object):
        raise DamagedData(f"{path} holds {len(values):,} bytes, not the {shape} it says")
    return values.reshape(shape)


def table(text: str, path: Path, delimiter: str = ",") -> list[list[str]]:
    """Return the rows below the header of a table; quotes count in .csv files only."""
    if delimiter != ",":
        rows = [line.rstrip("\n").split(delimiter) for line in lines(text)]
    else:
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise DamagedData(f"{path} is no table: {_reason(error)}") from None
    if len(rows) < 2:
        raise DamagedData(f"{path} has no rows below its header")
    return rows[1:]


def sheet(path: Path, side: int) -> NDArray[np.uint8]:
    """Return the tiles of an image, row by row: (tiles, 3, side, side)."""
    try:
        from PIL import Image
    except ImportError:
        raise ValueError(
            f"{path} needs Pillow to be read: pip install 'gradherd[tasks]', or use the "
            "binary version of the set"
        ) from None
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
    # Decoders complain in their own ways: SyntaxError is one of Pillow's.
    except (OSError, ValueError, SyntaxError, EOFError) as error:
        raise DamagedData(f"{path} is no good image: {_reason(error)}") from None
    high, wide, _ = pixels.shape
    if high % side or wide % side:
        raise DamagedData(f"{path} is {wide} x {high} pixels, which are no tiles of {side}")
    tiles = pixels.reshape(high // side, side, wide // side, side, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, side, side)


def plain_pickle(content: bytes, path: Path) -> dict[bytes, Any]:
    """Return a pickled dict of plain values and arrays; anything else is refused unexecuted."""
    try:
        value = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    # A pickle that is cut or made up can fail in any way; none of its code runs.
    except Exception as error:
        raise DamagedData(f"{path} is no plain pickle: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise DamagedData(f"{path} holds a pickled {type(value).__name__}, not a dict")
    return {key if isinstance(key, bytes) else str(key).encode(): value[key] for key in value}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return what an array is rebuilt with, and nothing else."""
        # numpy 1 and 2 keep it in different modules, and files tell the one they were made with.
        core = ("numpy.core.multiarray", "numpy._core.multiarray")
        if module in core and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        if module == "numpy" and name in ("ndarray", "dtype"):
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not allowed")


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
