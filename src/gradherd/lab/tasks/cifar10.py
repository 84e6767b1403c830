"""CIFAR-10 in memory, from any of the forms it is distributed in.

Every form is converted to rows of the binary form, one label byte and 3,072 pixels, whose checksums
are known.
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
import torch.nn.functional as F
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

# A label byte, then red, green and blue planes of 32 x 32 pixels.
ROW_BYTES = 1 + 3 * 32 * 32
BATCH_NAMES = tuple(name for name, _ in CIFAR_BATCHES)
Rows = NDArray[np.uint8]
_MAX_MEMBERS = 1000
"""Members of the archive that are examined; the real one has eight."""


def load_cifar10(data_dir: Path | None = None, limit: int | None = None) -> Split:
    """Load CIFAR-10.

    Pixels stay uint8 and are normalised in the loss: as float32 the set would take four times the
    memory.

    Args:
        data_dir: Folder to search first.
        limit: Load only the first `limit` examples of each part.

    Returns:
        (n, 3, 32, 32) uint8 pixels and (n,) labels: 50,000 for training, 10,000 for test.

    Raises:
        MissingData: The data set is in none of the folders.
        DamagedData: A file is damaged.
    """
    check_limit(limit)
    local = find_dataset("cifar10", data_dir)
    # The first batch is enough for small limits: reading all of them takes seconds.
    rows = read_batches(local, BATCH_NAMES if limit is None else (BATCH_NAMES[0], BATCH_NAMES[-1]))
    if limit is not None and limit > len(rows[BATCH_NAMES[0]]):
        rows |= read_batches(local, BATCH_NAMES[1:-1])
    train = np.concatenate([rows[name] for name in BATCH_NAMES[:-1] if name in rows])
    return Split(_to_tensors(train), _to_tensors(rows[BATCH_NAMES[-1]])).first(limit)


def read_batches(local: LocalDataSet, names: Iterable[str] = BATCH_NAMES) -> dict[str, Rows]:
    """Read some batches, verified against the published checksums.

    Args:
        local: The data set on disk, in any form.
        names: Batches to read, from BATCH_NAMES.

    Returns:
        (m, 3073) uint8 rows of each batch.
    """
    names = tuple(names)
    is_archive = local.form.name == "archive"
    # One scan for all batches: a compressed archive cannot be entered in the middle.
    contents = _read_archive(local, names) if is_archive else {}
    # What an error names: the file that the user can fetch again.
    place = local.paths["cifar-10-binary.tar.gz"] if is_archive else local.folder
    # Only the binary form has published checksums. All forms are converted to it, so one list
    # verifies all of them, lossless WebP included.
    published = {file.name: file for file in DATASETS["cifar10"].form("binary").files}
    batches = {}
    for name in names:
        content = contents[name] if name in contents else _read_batch(local, name)
        location = f"{place}: {name}"
        verify_file(published[f"{name}.bin"], content, location)
        if len(content) % ROW_BYTES or not content:
            raise DamagedData(
                f"{location} is {len(content):,} bytes, not a multiple of {ROW_BYTES}; "
                "fetch it again"
            )
        rows = np.frombuffer(content, np.uint8).reshape(-1, ROW_BYTES)
        if rows[:, 0].max() > 9:
            raise DamagedData(
                f"{location} has label {rows[:, 0].max()}, expected 0 to 9; fetch it again"
            )
        batches[name] = rows
    return batches


def normalize(pixels: Tensor) -> Tensor:
    """Return float pixels, each channel with mean 0 and standard deviation 1 over the set."""
    mean, std = _statistics(pixels.device)
    return (pixels.float() - mean) / std


@cache  # Else every step would copy them to the GPU.
def _statistics(device: torch.device) -> tuple[Tensor, Tensor]:
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=device) * 255
    std = torch.tensor([0.2023, 0.1994, 0.2010], device=device) * 255
    return mean.view(3, 1, 1), std.view(3, 1, 1)


def crop_and_flip(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Return (n, 3, 32, 32) images, each shifted by up to 4 pixels and mirrored at random.

    Args:
        pixels: (n, 3, 32, 32) images; what is shifted in is black.
        generator: A generator on the CPU, so that a GPU run sees the same crops.
    """
    moved = torch.empty_like(pixels)
    size, device = pixels.shape[-1], pixels.device
    offsets, channel = torch.arange(size), torch.arange(3, device=device).view(3, 1, 1)
    # In parts: padded copies of all images at once would take twice the memory.
    for part, out in zip(pixels.split(10_000), moved.split(10_000), strict=True):
        top, left, flip = (torch.randint(n, (len(part), 1), generator=generator) for n in (9, 9, 2))
        rows = (top + offsets).to(device).view(-1, 1, size, 1)
        columns = left + torch.where(flip > 0, size - 1 - offsets, offsets)
        example = torch.arange(len(part), device=device).view(-1, 1, 1, 1)
        padded = F.pad(part, (4, 4, 4, 4))
        out.copy_(padded[example, channel, rows, columns.to(device).view(-1, 1, 1, size)])
    return moved


def _to_tensors(rows: Rows) -> tuple[Tensor, Tensor]:
    # Rows have 3,073 bytes: without a copy, images would not be contiguous.
    pixels = np.ascontiguousarray(rows[:, 1:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(pixels), torch.from_numpy(rows[:, 0].astype(np.int64))


def _read_batch(local: LocalDataSet, name: str) -> bytes:
    if local.form.name == "sheets":
        return _from_sheet(local, name)
    if local.form.name == "pickles":
        return _from_pickle(local, name)
    return local.read(f"{name}.bin")


def _from_sheet(local: LocalDataSet, name: str) -> bytes:
    path = local.paths["labels.npz"]
    (labels,) = parse_npz(local.read("labels.npz"), path, (name,))
    image = f"{name}.webp"
    tiles = parse_tiles(local.read(image), local.paths[image], 32).reshape(-1, ROW_BYTES - 1)
    if labels.shape != (len(tiles),) or labels.dtype != np.uint8:
        raise DamagedData(
            f"{path}: {name} has labels {labels.shape} of {labels.dtype} "
            f"for {len(tiles):,} tiles, expected one byte for each; fetch it again"
        )
    return np.concatenate([labels[:, None], tiles], 1).tobytes()


def _from_pickle(local: LocalDataSet, name: str) -> bytes:
    path = local.paths[name]
    batch = parse_plain_pickle(local.read(name), path)
    pixels, classes = batch.get(b"data"), batch.get(b"labels")
    # Exact types: a nested list that shares its parts would take exponential time to convert.
    if not isinstance(classes, list) or not all(type(c) is int and 0 <= c < 10 for c in classes):
        raise DamagedData(f"{path} has no labels from 0 to 9; fetch it again")
    labels = np.array(classes, np.uint8)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8:
        pixels = np.empty(0, np.uint8)
    if pixels.shape != (len(labels), ROW_BYTES - 1):
        raise DamagedData(f"{path} has no pixels of {len(labels):,} images; fetch it again")
    return np.concatenate([labels[:, None], pixels], 1).tobytes()


def _read_archive(local: LocalDataSet, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read some batches from the archive in one scan; nothing is written to disk."""
    (path,) = local.paths.values()
    wanted = {f"cifar-10-batches-bin/{name}.bin": name for name in names}
    contents: dict[str, bytes] = {}
    try:
        # In stream mode ("r|") no header can make tarfile seek backwards and loop.
        with _BoundedGzip(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in itertools.islice(archive, _MAX_MEMBERS):
                # No links, and no sparse files, which expand to more than the archive holds.
                plain = member.isreg() and not member.issparse() and member.size <= MAX_BYTES
                file = archive.extractfile(member) if plain and member.name in wanted else None
                if file is not None:
                    contents[wanted[member.name]] = file.read()
                # Decompressing the rest would take seconds.
                if len(contents) == len(wanted):
                    break
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise DamagedData(
            f"{path} is not a valid archive: {error_line(error)}; fetch it again"
        ) from None
    for name in names:
        if name not in contents:
            raise DamagedData(f"{path} lacks {name}.bin; fetch it again")
    return contents


class _BoundedGzip(gzip.GzipFile):
    """A gzip file that raises ValueError once it decompresses to more than MAX_BYTES."""

    _left = MAX_BYTES

    def read(self, size: int | None = -1) -> bytes:
        """Return up to `size` bytes."""
        # One byte more than allowed, to tell a file that is too long from one that just fits.
        requested = self._left + 1 if size is None or size < 0 else size
        content = super().read(min(requested, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise ValueError(f"it has more than {MAX_BYTES:,} bytes unpacked")
        return content
