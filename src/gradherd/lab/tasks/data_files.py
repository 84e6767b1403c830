"""Finding data: in a folder that is named, in GRADHERD_DATA, or in the cache folder."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gradherd.lab.tasks.datasets import DATASETS, DataFile, DataSet, Form
from gradherd.lab.tasks.safe_readers import (
    MAX_BYTES,
    DamagedData,
    decode_utf8,
    printable,
    read_file,
)

_PACKED = ("", ".xz", ".gz")


class MissingData(ValueError):
    """A data set is not there: one sentence says what, where was looked, and what to do."""

    def __init__(self, message: str) -> None:
        """Take a message with names of folders in it: it is for a terminal."""
        super().__init__(printable(message, most=10_000))


@dataclass(frozen=True)
class LocalDataSet:
    """A data set that is there: each of its files by name, and where it lies."""

    dataset: DataSet
    form: Form
    folder: Path
    paths: Mapping[str, Path]

    def read(self, name: str) -> bytes:
        """Return a file, unpacked and checked.

        Raises:
            DamagedData: It cannot be unpacked, or is not the file that was published.
        """
        file = next(file for file in self.form.files if file.name == name)
        # Line ends of another system are no reason to have twice the size.
        content = read_file(self.paths[name], MAX_BYTES if file.size is None else 2 * file.size)
        if file.text:
            content = content.replace(b"\r\n", b"\n")
        verify_file(file, content, self.paths[name])
        return content

    def text(self, name: str) -> str:
        """Return a text file, unpacked and checked."""
        return decode_utf8(self.read(name), self.paths[name])


def cache_dir() -> Path:
    """Return the folder for downloads and for what is made of them; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative one is to be ignored, says the standard.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "gradherd"


def data_dirs(data_dir: Path | None = None) -> list[Path]:
    """Return the folders where data is looked for, in order."""
    given = [str(data_dir)] if data_dir is not None else []
    named = os.environ.get("GRADHERD_DATA", "")
    folders = [*given, *([named] if named else []), str(cache_dir())]
    return list(dict.fromkeys(expand_user(Path(folder)) for folder in folders))


def expand_user(path: Path) -> Path:
    """Return a path with ~ for the home folder; of a user that there is not, as it is."""
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def find_dataset(name: str, data_dir: Path | None = None) -> LocalDataSet:
    """Find a data set.

    Args:
        name: One of SETS.
        data_dir: Folder to look in first.

    Raises:
        MissingData: It is in none of the folders.
        ValueError: `data_dir` is no folder.
    """
    if data_dir is not None and not _is_dir(expand_user(Path(data_dir))):
        raise ValueError(f"data_dir must be a folder, got {str(data_dir)!r}: there is none")
    dataset, folders = DATASETS[name], data_dirs(data_dir)
    most, nearly = 0, ""
    for root in folders:
        for form in dataset.forms:
            for folder in (root / below for below in form.folders):
                paths = _present(folder, form.files)
                if len(paths) == len(form.files):
                    return LocalDataSet(dataset, form, folder, paths)
                if len(paths) > most:
                    lack = next(file.name for file in form.files if file.name not in paths)
                    most, nearly = len(paths), f" ({folder} lacks {lack})"
    fetch = f"run `gradherd data get {name}`, or " if dataset.downloads else ""
    looked = ", ".join(f"{root}{'' if _is_dir(root) else ' (no such folder)'}" for root in folders)
    raise MissingData(
        f"data set {name!r} ({dataset.title}) was not found in {looked}{nearly}: "
        f"{fetch}{dataset.by_hand} into one of them"
    )


def find_in_folder(dataset: DataSet, folder: Path) -> LocalDataSet | None:
    """Return the data set if its files, in one of its forms, lie right in this folder."""
    for form in dataset.forms:
        paths = _present(folder, form.files)
        if len(paths) == len(form.files):
            return LocalDataSet(dataset, form, folder, paths)
    return None


def verify_file(file: DataFile, content: bytes, where: object) -> None:
    """Raise DamagedData if unpacked content is not what was published."""
    if file.size is not None and len(content) != file.size:
        state = "cut" if len(content) < file.size else "not the published file"
        raise DamagedData(
            f"{where} is {state}: {len(content):,} bytes unpacked instead of {file.size:,}; "
            "fetch it again"
        )
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise DamagedData(
            f"{where} is damaged, or not the published file: its sha256 is not "
            f"{file.sha256}; fetch it again"
        )


def _present(folder: Path, files: tuple[DataFile, ...]) -> dict[str, Path]:
    """Return those of the files that lie in a folder, in whichever name and packing."""
    paths = {}
    for file in files:
        for path in (
            folder / f"{name}{end}" for name in (file.name, *file.aliases) for end in _PACKED
        ):
            if is_file(path):
                paths[file.name] = path
                break
    return paths


def is_file(path: Path) -> bool:
    """Return whether there is a file, no pipe and no folder."""
    try:
        return path.is_file()
    except OSError:  # A folder that may not be looked into, a name that is too long.
        return False


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # A name that is too long.
        return False
