"""Finding and reading data sets: in a given folder, in GRADHERD_DATA or in the cache folder.

A file may be damaged or hostile. What was published has a checksum, so whatever is read is either
the published content or refused with DamagedData, which names the file; only files without a
checksum are examined further. No file takes more memory than its kind can need, and no pickle is
read.
"""

import gzip
import hashlib
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradherd.lab.tasks.datasets import DATASETS, DataFile, DataSet, Form
from gradherd.lab.text import printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

# How a file is opened, by its suffix. The plain file first: it is the fastest to read.
_OPENERS: dict[str, Any] = {"": open, ".xz": lzma.open, ".gz": gzip.open}
_MAX_BYTES = 1 << 28
"""Largest decompressed size of a file whose size is not known in advance."""


class MissingData(ValueError):
    """A data set was not found: one sentence says which, in which folders, and what to do."""

    def __init__(self, message: str) -> None:
        """Take a message that quotes folder names; make it safe to print on a terminal."""
        super().__init__(printable(message))


class DamagedData(ValueError):
    """A file is truncated, damaged or not what its name says; the message starts with its path."""

    def __init__(self, message: str) -> None:
        """Take a message that may quote a file; make it safe to print on a terminal."""
        # Shortened first: escaping a line of megabytes would take seconds.
        super().__init__(printable(message[:2000], 1000))


def read_file(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Return the content of a file, decompressed if its name ends in .xz or .gz.

    Args:
        path: The file.
        max_bytes: Largest decompressed size; no more is decompressed than that.

    Raises:
        DamagedData: The file cannot be read or decompressed, or is larger.
    """
    try:
        if not path.is_file():  # Reading a named pipe would block forever.
            raise OSError("it is not a file")
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            content: bytes = file.read(max_bytes + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DamagedData(f"{path} cannot be read: {error}; fetch it again") from None
    if len(content) > max_bytes:
        raise DamagedData(
            f"{path} is not the expected file: it has more than {max_bytes:,} bytes unpacked"
        )
    return content


def read_arrays(path: Path, names: tuple[str, ...]) -> "list[NDArray[Any]]":
    """Return the arrays of these names from an .npz archive; raise DamagedData if it has none."""
    import numpy as np  # not needed to find files

    content = io.BytesIO(read_file(path))
    try:
        size = sum(member.file_size for member in zipfile.ZipFile(content).infolist())
        if size > _MAX_BYTES:
            raise ValueError(f"it would have {size:,} bytes, {_MAX_BYTES:,} are allowed")
        with np.load(content, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except Exception as error:  # A crafted archive breaks zipfile and numpy in a dozen ways.
        raise DamagedData(f"{path} is not a valid .npz archive: {error}; fetch it again") from None


@dataclass(frozen=True)
class LocalDataSet:
    """A data set that was found on disk: its form, its folder, and the path of every file."""

    dataset: DataSet
    form: Form
    folder: Path
    paths: Mapping[str, Path]

    def read(self, name: str) -> bytes:
        """Return a file, decompressed and verified.

        Raises:
            DamagedData: It cannot be decompressed, or is not the published file.
        """
        file = next(file for file in self.form.files if file.name == name)
        # Text with Windows line ends is larger than published, but never twice as large.
        content = read_file(self.paths[name], _MAX_BYTES if file.size is None else 2 * file.size)
        if file.text:
            # git and editors on Windows change line ends.
            content = content.replace(b"\r\n", b"\n")
        verify_file(file, content, self.paths[name])
        return content

    def text(self, name: str) -> str:
        """Return a text file, decompressed and verified."""
        return self.read(name).decode()


def cache_dir() -> Path:
    """Return the folder for downloads and cached tokens; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gradherd"


def data_dirs(data_dir: Path | None = None) -> list[Path]:
    """Return the folders that are searched for data, in order."""
    given = [str(data_dir)] if data_dir is not None else []
    from_environment = os.environ.get("GRADHERD_DATA", "")
    folders = [*given, *([from_environment] if from_environment else []), str(cache_dir())]
    # Two of them may be the same folder; errors should name it once. Not by Path's own methods,
    # here and below: these raise for an unknown user, and for a name that is too long.
    return list(dict.fromkeys(Path(os.path.expanduser(folder)) for folder in folders))


def check_data_dir(data_dir: Path | None) -> None:
    """Raise ValueError if a folder is named that does not exist."""
    if data_dir is not None and not os.path.isdir(os.path.expanduser(data_dir)):
        raise ValueError(f"data_dir must be a folder that exists, got {str(data_dir)!r}")


def find_dataset(name: str, data_dir: Path | None = None) -> LocalDataSet:
    """Find a data set.

    Args:
        name: A key of DATASETS.
        data_dir: Folder to search first.

    Raises:
        MissingData: It is in none of the folders.
        ValueError: `data_dir` is not a folder.
    """
    check_data_dir(data_dir)
    dataset, roots = DATASETS[name], data_dirs(data_dir)
    # Folder by folder, not form by form: the folder that the user named wins, even if another one
    # has a form that is faster to read.
    for root in roots:
        if (found := find_below(dataset, root)) is not None:
            return found
    places = [
        (_present(folder, form.files), form.files, folder)
        for root in roots
        for form, folder in dataset.places(root)
    ]
    # What the most complete one lacks.
    paths, files, folder = max(places, key=lambda place: len(place[0]))
    missing = next(file.name for file in files if file.name not in paths)
    hint = f" ({folder} lacks {missing})" if paths else ""
    download = f"run `gradherd data get {name}`, or " if dataset.downloads else ""
    searched = ", ".join(
        f"{root}{'' if os.path.isdir(root) else ' (no such folder)'}" for root in roots
    )
    raise MissingData(
        f"data set {name!r} ({dataset.title}) was not found in {searched}{hint}: "
        f"{download}{dataset.by_hand} into one of them"
    )


def find_below(dataset: DataSet, root: Path) -> LocalDataSet | None:
    """Return the data set if one of its forms is complete in this data folder."""
    for form, folder in dataset.places(root):
        paths = _present(folder, form.files)
        if len(paths) == len(form.files):
            return LocalDataSet(dataset, form, folder, paths)
    return None


def verify_file(file: DataFile, content: bytes, location: object) -> None:
    """Compare decompressed content with what was published.

    Args:
        file: The published size and checksum, as far as they are known.
        content: The decompressed content.
        location: What an error message names.

    Raises:
        DamagedData: They differ.
    """
    # The size first: it tells a download that was cut off from another edition.
    if file.size is not None and len(content) != file.size:
        problem = "truncated" if len(content) < file.size else "not the published file"
        raise DamagedData(
            f"{location} is {problem}: {len(content):,} bytes unpacked instead of {file.size:,}; "
            "fetch it again"
        )
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedData(
            f"{location} is damaged, or not the published file: its sha256 is not "
            f"{file.sha256}; fetch it again"
        )


def _present(folder: Path, files: tuple[DataFile, ...]) -> dict[str, Path]:
    """Return the paths of the files in a folder, under any of their names, compressed or not."""
    paths = {}
    for file in files:
        for path in (
            folder / f"{name}{suffix}" for name in (file.name, *file.aliases) for suffix in _OPENERS
        ):
            if os.path.isfile(path):
                paths[file.name] = path
                break
    return paths
