"""Downloading data sets from their public sources, and verifying them.

Files arrive in a temporary folder, are compared with the published sizes and checksums, and only
then move to their final place: an interrupted download leaves nothing behind.
"""

import os
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO
from urllib.error import HTTPError

from gradherd.lab.tasks.cifar10 import read_batches
from gradherd.lab.tasks.data_files import LocalDataSet, find_in_folder
from gradherd.lab.tasks.datasets import DataSet, Download
from gradherd.lab.tasks.hmda import read_hmda
from gradherd.lab.tasks.safe_readers import ZIP_ERRORS, DamagedData, error_line, read_zip_member

# Sets whose files have no checksum of their own; all others are read file by file.
_READERS: dict[str, Callable[[LocalDataSet], object]] = {
    "cifar10": read_batches,
    "hmda-2017": read_hmda,
}


def verify_dataset(found: LocalDataSet) -> None:
    """Read a whole data set and compare it with what was published.

    Raises:
        DamagedData: A file is damaged; the message names it.
    """
    reader = _READERS.get(found.dataset.name)
    if reader is not None:
        reader(found)
        return
    for file in found.form.files:
        found.read(file.name)


DownloadProgress = Callable[[str, int, int | None], None]
"""Told a file's name, the bytes that came so far, and how many there are (None: not known)."""

_TIMEOUT = 30.0
_CHUNK = 1 << 18


class DownloadError(RuntimeError):
    """A data set could not be fetched: one sentence says which, why, and what to do."""


def download_dataset(dataset: DataSet, root: Path, progress: DownloadProgress) -> LocalDataSet:
    """Download a data set into `root`/name, unless it is there and whole, and return it.

    Raises:
        FetchError: There is no network, no such file, no space, or something else came.
    """
    folder = root / dataset.name
    there = _find_intact(dataset, folder)
    if there is not None:
        return there
    if not dataset.downloads:
        raise DownloadError(
            f"no download is known for {dataset.name!r}: {dataset.by_hand} into {root}"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{dataset.name}-", dir=root) as name:
            _download_all(dataset, Path(name), progress)
            came = find_in_folder(dataset, Path(name))
            if came is None:
                raise DamagedData("some files did not come")
            verify_dataset(came)
            folder.mkdir(exist_ok=True)
            for path in came.paths.values():
                os.replace(path, folder / path.name)
    except DamagedData as error:
        raise DownloadError(
            f"what came for {dataset.name!r} is not the published set: {error}; "
            f"{dataset.by_hand} into {root}"
        ) from None
    except OSError as error:
        raise DownloadError(f"cannot write {dataset.name!r} into {root}: {error}") from None
    found = find_in_folder(dataset, folder)
    assert found is not None
    return found


def _find_intact(dataset: DataSet, folder: Path) -> LocalDataSet | None:
    found = find_in_folder(dataset, folder)
    try:
        if found is not None:
            verify_dataset(found)
    except DamagedData:
        return None
    return found


def _download_all(dataset: DataSet, folder: Path, progress: DownloadProgress) -> None:
    for download in dataset.downloads:
        try:
            _download_file(download, folder / download.name, progress)
        except (OSError, HTTPException, ValueError) as error:
            cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
            raise DownloadError(
                f"cannot fetch {download.url}: {cause}; try again, or {dataset.by_hand} "
                f"into {folder.parent}"
            ) from None
        if download.members:
            _unzip(download, folder)


def _download_file(download: Download, path: Path, progress: DownloadProgress) -> None:
    request = urllib.request.Request(download.url, headers={"User-Agent": "gradherd"})
    try:
        opened = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()  # it holds the connection
        raise
    with opened as answer, path.open("wb") as file:
        size = int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        came = _copy(answer, file, lambda done: progress(download.name, done, size))
    if size is not None and came != size:
        raise OSError(f"the connection ended after {came:,} of {size:,} bytes")


def _copy(source: BinaryIO, target: BinaryIO, tell: Callable[[int], None]) -> int:
    done = 0
    while chunk := source.read(_CHUNK):
        target.write(chunk)
        done += len(chunk)
        tell(done)
    return done


def _unzip(download: Download, folder: Path) -> None:
    try:
        with zipfile.ZipFile(folder / download.name) as archive:
            members = {name: read_zip_member(archive, path) for path, name in download.members}
    except (ValueError, OSError, EOFError, *ZIP_ERRORS) as error:
        raise DamagedData(f"{download.url} is no good archive: {error_line(error)}") from None
    for name, content in members.items():
        (folder / name).write_bytes(content)
