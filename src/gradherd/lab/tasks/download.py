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

from gradherd.lab.tasks.data_files import LocalDataSet, find_in_folder
from gradherd.lab.tasks.datasets import DataSet, Download
from gradherd.lab.tasks.hmda import read_hmda
from gradherd.lab.tasks.images import read_batches
from gradherd.lab.tasks.safe_readers import ZIP_ERRORS, DamagedData, error_line, read_zip_member

DownloadProgress = Callable[[str, int, int | None], None]
"""Called with a file's name, the bytes received so far, and the total (None if unknown)."""

# Data sets with files that have no published checksum: these are parsed and checked. For all
# others it is enough to read every file, which compares its checksum.
_READERS: dict[str, Callable[[LocalDataSet], object]] = {
    "cifar10": read_batches,
    "hmda-2017": read_hmda,
}
_TIMEOUT = 30.0  # seconds without any data
_CHUNK = 1 << 18  # bytes


class DownloadError(RuntimeError):
    """A data set could not be downloaded: one sentence says which, why, and what to do."""


def verify_dataset(local: LocalDataSet) -> None:
    """Read a whole data set and compare it with what was published.

    Raises:
        DamagedData: A file is damaged; the message names it.
    """
    reader = _READERS.get(local.dataset.name)
    if reader is not None:
        reader(local)
        return
    for file in local.form.files:
        local.read(file.name)


def download_dataset(dataset: DataSet, root: Path, progress: DownloadProgress) -> LocalDataSet:
    """Download a data set into `root`/name, unless an intact copy is there, and return it.

    Raises:
        DownloadError: No network, no such file, no space, or unexpected content.
    """
    folder = root / dataset.name
    # Verified, not only present: `data get` is also the way to repair a damaged set.
    existing = _find_intact(dataset, folder)
    if existing is not None:
        return existing
    if not dataset.downloads:
        raise DownloadError(
            f"no download is known for {dataset.name!r}: {dataset.by_hand} into {root}"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Below `root`, so that the final move is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{dataset.name}-", dir=root) as name:
            _download_all(dataset, Path(name), progress)
            downloaded = find_in_folder(dataset, Path(name))
            if downloaded is None:
                raise DamagedData("some files are missing")
            # Before the files move: what is in the cache folder is always complete and intact.
            verify_dataset(downloaded)
            folder.mkdir(exist_ok=True)
            for path in downloaded.paths.values():
                # Replaces damaged files of an earlier attempt.
                os.replace(path, folder / path.name)
    except DamagedData as error:
        raise DownloadError(
            f"the download of {dataset.name!r} is not the published data set: {error}; "
            f"{dataset.by_hand} into {root}"
        ) from None
    except OSError as error:
        raise DownloadError(f"cannot write {dataset.name!r} into {root}: {error}") from None
    local = find_in_folder(dataset, folder)
    assert local is not None
    return local


def _find_intact(dataset: DataSet, folder: Path) -> LocalDataSet | None:
    local = find_in_folder(dataset, folder)
    try:
        if local is not None:
            verify_dataset(local)
    except DamagedData:
        return None
    return local


def _download_all(dataset: DataSet, folder: Path, progress: DownloadProgress) -> None:
    for download in dataset.downloads:
        try:
            _download_file(download, folder / download.name, progress)
        # HTTPException is no OSError: http.client raises it for malformed answers. ValueError: a
        # Content-Length that is no number.
        except (OSError, HTTPException, ValueError) as error:
            # A URLError hides the real reason, such as a failed name lookup, in `reason`; that of
            # an HTTPError lacks the status code.
            cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
            words = getattr(cause, "strerror", None) or cause  # without the system's own number
            raise DownloadError(
                f"cannot fetch {download.url}: {words}; try again, or {dataset.by_hand} "
                f"into {folder.parent}"
            ) from None
        if download.members:
            _unzip(download, folder)


def _download_file(download: Download, path: Path, progress: DownloadProgress) -> None:
    request = urllib.request.Request(download.url, headers={"User-Agent": "gradherd"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()  # The exception holds the connection open.
        raise
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        size = None if length is None else int(length)
        received = _copy(response, file, lambda done: progress(download.name, done, size))
    # urllib does not report a connection that ends early.
    if size is not None and received != size:
        raise OSError(f"the connection ended after {received:,} of {size:,} bytes")


def _copy(source: BinaryIO, target: BinaryIO, progress: Callable[[int], None]) -> int:
    done = 0
    while chunk := source.read(_CHUNK):
        target.write(chunk)
        done += len(chunk)
        progress(done)
    return done


def _unzip(download: Download, folder: Path) -> None:
    try:
        with zipfile.ZipFile(folder / download.name) as archive:
            # Under names of our own: a path in an archive may point outside of the folder.
            members = {name: read_zip_member(archive, path) for path, name in download.members}
    except (ValueError, OSError, EOFError, *ZIP_ERRORS) as error:
        raise DamagedData(f"{download.url} is not a valid archive: {error_line(error)}") from None
    for name, content in members.items():
        (folder / name).write_bytes(content)
