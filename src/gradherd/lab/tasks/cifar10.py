"""CIFAR-10 in memory, from any of the forms it comes in.

All forms are turned into the rows of the binary one, a label byte and 3,072 pixels, whose
checksums are known.
"""

import gzip
import itertools
import tarfile
import zlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset, verify_file
from gradherd.lab.tasks.datasets import CIFAR_BATCHES, DATASETS
from gradherd.lab.tasks.pickle_reader import parse_plain_pickle
from gradherd.lab.tasks.safe_readers import (
    MAX_BYTES,
    DamagedData,
    error_line,
    parse_npz,
    parse_tiles,
)
from gradherd.lab.tasks.task import Split, check_limit

ROW_BYTES = 1 + 3 * 32 * 32
BATCH_NAMES = tuple(name for name, _ in CIFAR_BATCHES)
Rows = NDArray[np.uint8]


def load_cifar10(data_dir: Path | None = None, limit: int | None = None) -> Split:
    """Return (n, 3, 32, 32) pixels as bytes and (n,) kinds, 50,000 + 10,000 of them."""
    check_limit(limit)
    found = find_dataset("cifar10", data_dir)
    # Small limits are met by the first batch; the others need not be read then.
    rows = read_batches(found, BATCH_NAMES if limit is None else (BATCH_NAMES[0], BATCH_NAMES[-1]))
    if limit is not None and limit > len(rows[BATCH_NAMES[0]]):
        rows |= read_batches(found, BATCH_NAMES[1:-1])
    train = np.concatenate([rows[name] for name in BATCH_NAMES[:-1] if name in rows])
    return Split(_columns(train), _columns(rows[BATCH_NAMES[-1]])).first(limit)


def read_batches(found: LocalDataSet, names: Iterable[str] = BATCH_NAMES) -> dict[str, Rows]:
    """Return (m, 3073) rows of some batches, checked against the published ones."""
    names = tuple(names)
    archive = found.form.name == "archive"
    contents = _read_archive(found, names) if archive else {}
    place = found.paths["cifar-10-binary.tar.gz"] if archive else found.folder
    published = {file.name: file for file in DATASETS["cifar10"].form("binary").files}
    batches = {}
    for name in names:
        content = contents[name] if name in contents else _read_batch(found, name)
        where = f"{place}: {name}"
        verify_file(published[f"{name}.bin"], content, where)
        if len(content) % ROW_BYTES or not content:
            raise DamagedData(
                f"{where} is {len(content):,} bytes, no multiple of {ROW_BYTES}; fetch it again"
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, ROW_BYTES)
        if rows[:, 0].max() > 9:
            raise DamagedData(
                f"{where} has label {rows[:, 0].max()}, expected 0 to 9; fetch it again"
            )
        batches[name] = rows
    return batches


def normalize(pixels: Tensor) -> Tensor:
    """Return pixels as numbers, each channel with mean 0 and deviation 1 over the set."""
    mean, scale = _statistics(pixels.device)
    return (pixels.float() - mean) / scale


@cache
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device) * 255
    scale = torch.tensor([0.2023, 0.1994, 0.2010], device=device) * 255
    return mean.view(3, 1, 1), scale.view(3, 1, 1)


def _columns(rows: Rows) -> tuple[Tensor, Tensor]:
    pixels = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.from_numpy(rows[:, 0].astype(np.int64))


def _read_batch(found: LocalDataSet, name: str) -> bytes:
    if found.form.name == "sheets":
        return _from_sheet(found, name)
    if found.form.name == "pickles":
        return _from_pickle(found, name)
    return found.read(f"{name}.bin")


def _from_sheet(found: LocalDataSet, name: str) -> bytes:
    path = found.paths["labels.npz"]
    (labels,) = parse_npz(found.read("labels.npz"), path, (name,))
    image = f"{name}.webp"
    tiles = parse_tiles(found.read(image), found.paths[image], 32).reshape(-1, ROW_BYTES - 1)
    if labels.shape != (len(tiles),) or labels.dtype != np.uint8:
        raise DamagedData(
            f"{path}: {name} has labels {labels.shape} of {labels.dtype} "
            f"for {len(tiles):,} tiles, expected one byte for each; fetch it again"
        )
    return np.concatenate([labels[:, None], tiles], 1).tobytes()


def _from_pickle(found: LocalDataSet, name: str) -> bytes:
    path = found.paths[name]
    batch = parse_plain_pickle(found.read(name), path)
    pixels = batch.get(b"data")
    kinds = batch.get(b"labels")
    if not isinstance(kinds, list) or not all(type(k) is int and 0 <= k < 10 for k in kinds):
        raise DamagedData(f"{path} has no labels from 0 to 9; fetch it again")
    labels = np.array(kinds, np.uint8)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        pixels = np.empty(0, np.uint8)
    if pixels.shape != (len(labels), ROW_BYTES - 1):
        raise DamagedData(f"{path} has no pixels of {len(labels):,} images; fetch it again")
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


def _read_archive(found: LocalDataSet, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read some batches out of the archive in one pass; nothing is written to disk."""
    (path,) = found.paths.values()
    wanted = {f"cifar-10-batches-bin/{name}.bin": name for name in names}
    contents: dict[str, bytes] = {}
    try:
        # As a stream: nothing can send us back to where we were.
        with _BoundedGzip(path) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            for member in itertools.islice(archive, _MAX_MEMBERS):
                # No links, and no files with holes, which are larger than what is in them.
                whole = member.isreg() and not member.issparse() and member.size <= MAX_BYTES
                file = archive.extractfile(member) if whole and member.name in wanted else None
                if file is not None:
                    contents[wanted[member.name]] = file.read()
                if len(contents) == len(wanted):
                    break
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise DamagedData(
            f"{path} is no good archive: {error_line(error)}; fetch it again"
        ) from None
    for name in names:
        if name not in contents:
            raise DamagedData(f"{path} lacks {name}.bin; fetch it again")
    return contents


_MAX_MEMBERS = 1000
"""Files that are looked at in the archive; it has eight."""


class _BoundedGzip(gzip.GzipFile):
    """An unpacked file that ends in an error if it has more than an archive of CIFAR-10 has."""

    _left = MAX_BYTES

    def read(self, size: int | None = -1) -> bytes:
        """Return up to so many bytes."""
        asked = self._left + 1 if size is None or size < 0 else size
        content = super().read(min(asked, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes unpacked")
        return content
