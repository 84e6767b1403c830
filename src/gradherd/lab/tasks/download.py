"""Downloading data sets from their public sources, and verifying them.

Files arrive in a temporary folder, are compared with the published sizes and checksums, and only
then move to their final place: an interrupted download leaves nothing behind.
"""

import contextlib
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from gradherd.lab.tasks.data_files import DamagedData, LocalDataSet, find_below
from gradherd.lab.tasks.datasets import DataSet
from gradherd.lab.tasks.hmda import read_hmda
from gradherd.lab.tasks.images import read_batches

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
    if local.dataset.name in _READERS:
        _READERS[local.dataset.name](local)
        return
    for file in local.form.files:
        local.read(file.name)


def download_dataset(dataset: DataSet, root: Path, progress: DownloadProgress) -> LocalDataSet:
    """Download a data set into `root`/name, unless an intact copy is in `root`, and return it.

    Raises:
        DownloadError: No network, no such file, no space, or unexpected content.
    """
    # Verified, not only present: `data get` is also the way to repair a damaged set.
    existing = find_below(dataset, root)
    if existing is not None:
        with contextlib.suppress(DamagedData):
            verify_dataset(existing)
            return existing
    if not dataset.downloads:
        raise DownloadError(
            f"no download is known for {dataset.name!r}: {dataset.by_hand} into {root}"
        )
    folder = root / dataset.name if existing is None else existing.folder
    created = [one for one in (root, *root.parents) if not one.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Below `root`, so that the final move is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{dataset.name}-", dir=root) as name:
            for url in dataset.downloads:
                _fetch(url, dataset, Path(name), progress)
            downloaded = find_below(dataset, Path(name))
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
        why = error.strerror or error
        raise DownloadError(f"cannot write {dataset.name!r} into {root}: {why}") from None
    finally:
        for one in created:  # a download that failed leaves no empty folders
            with contextlib.suppress(OSError):
                one.rmdir()
    local = find_below(dataset, root)
    assert local is not None
    return local


def _fetch(url: str, dataset: DataSet, root: Path, progress: DownloadProgress) -> None:
    """Download a file into the data set's folder below `root`, or an archive and unpack it."""
    path = root / dataset.name / url.rpartition("/")[2]
    path.parent.mkdir(exist_ok=True)
    try:
        _download_file(url, path, progress)
    # HTTPException is no OSError: http.client raises it for malformed answers. ValueError: a
    # Content-Length that is no number.
    except (OSError, HTTPException, ValueError) as error:
        # A URLError hides the real reason, such as a failed name lookup, in `reason`; that of
        # an HTTPError lacks the status code.
        cause = error if isinstance(error, HTTPError) else getattr(error, "reason", error)
        words = getattr(cause, "strerror", None) or cause  # without the system's own number
        raise DownloadError(
            f"cannot fetch {url}: {words}; try again, or {dataset.by_hand} into {root.parent}"
        ) from None
    if url.endswith((".tar.gz", ".zip")):
        _unpack(url, path, root)


def _unpack(url: str, path: Path, root: Path) -> None:
    # The filter refuses links and paths that lead out of the folder; zip has none.
    safely: dict[str, Any] = {"filter": "data"} if url.endswith(".tar.gz") else {}
    try:
        shutil.unpack_archive(path, root, **safely)
    except Exception as error:  # zipfile, tarfile and zlib raise much on a damaged archive
        raise DamagedData(f"{url} is not a valid archive: {error}") from None


def _download_file(url: str, path: Path, progress: DownloadProgress) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "gradherd"})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        error.close()  # The exception holds the connection open.
        raise
    received = 0
    with response, path.open("wb") as file:
        length = response.headers.get("Content-Length")
        size = None if length is None else int(length)
        while chunk := response.read(_CHUNK):
            received += file.write(chunk)
            progress(path.name, received, size)
    # urllib does not report a connection that ends early.
    if size is not None and received != size:
        raise OSError(f"the connection ended after {received:,} of {size:,} bytes")
