"""`cifar10-lenet` and `fashion-lenet`, and the data that they read.

CIFAR-10 is read as rows of its binary form: one label byte and 3,072 pixels.

Shapes: B images, C channels.
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import (
    DamagedData,
    LocalDataSet,
    find_dataset,
    read_arrays,
    verify_file,
)
from gradherd.lab.tasks.datasets import CIFAR_BATCHES, DATASETS
from gradherd.lab.tasks.task import Classifier, Defaults, Split, Tensors, check_limit

# A label byte, then red, green and blue planes of 32 x 32 pixels.
ROW_BYTES = 1 + 3 * 32 * 32
BATCH_NAMES = tuple(name for name, _ in CIFAR_BATCHES)
Rows = NDArray[np.uint8]
_MAX_PIXELS = 1 << 25
"""Largest image: three times the pixels of one CIFAR-10 sheet."""


def lenet(channels: int, padding: int = 0) -> nn.Sequential:
    """Return LeNet with ReLU and max-pooling, from (B, channels, 32, 32) images to 10 classes.

    Args:
        channels: Channels of the images.
        padding: Zero padding of the first layer; 2 turns 28 x 28 images into 32 x 32.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        # On 5 x 5 maps this is a full connection, as in the original.
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )


@dataclass(frozen=True)
class Cifar10LeNet(Classifier):
    """LeNet on CIFAR-10: 62,006 parameters; channels normalised, augmented on request only."""

    name: ClassVar = "cifar10-lenet"
    description: ClassVar = "LeNet on CIFAR-10 images, 62,006 parameters"
    data: ClassVar = ("cifar10",)
    defaults: ClassVar = Defaults(
        workers=64,
        batch_size=1,
        lr=1e-3,
        momentum=0.9,
        weight_decay=1e-2,
        epochs=100,
        seeds=3,
        source="CD-GraB paper (arXiv:2302.00845), its LeNet ablation: 64 workers, global batch "
        "64, lr 1e-3, momentum 0.9, weight decay 1e-2.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 3, 32, 32) uint8 pixels and (n,) labels."""
        return load_cifar10(data_dir, limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(3)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return float pixels, each channel with mean 0 and standard deviation 1 over the set."""
        mean, std = _statistics(inputs.device)
        return (inputs.float() - mean) / std

    def augment(self, generator: torch.Generator, *tensors: Tensor) -> Tensors:
        """Return the training examples cropped (after padding by 4) and flipped at random."""
        pixels, labels = tensors
        return crop_and_flip(pixels, generator), labels


@dataclass(frozen=True)
class FashionLeNet(Classifier):
    """LeNet on Fashion-MNIST: 61,706 parameters; no augmentation, pixels normalised."""

    name: ClassVar = "fashion-lenet"
    description: ClassVar = "LeNet on Fashion-MNIST images, 61,706 parameters"
    data: ClassVar = ("fashion-mnist",)
    defaults: ClassVar = Defaults(
        workers=64,
        batch_size=1,
        lr=3e-3,
        momentum=0.9,
        epochs=22,
        seeds=3,
        source="Our own choice: the workers and batch of the CD-GraB paper's LeNet ablation "
        "(arXiv:2302.00845), with lr 3e-3 and no weight decay.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 1, 28, 28) uint8 pixels and (n,) labels, 60,000 + 10,000 of them."""
        local = find_dataset("fashion-mnist", data_dir)
        return Split(_read_fashion(local, "train"), _read_fashion(local, "t10k")).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return lenet(1, padding=2)

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return float pixels, mean 0 and standard deviation 1 over the 60,000 training images."""
        return (inputs.float() / 255 - 0.2860) / 0.3530


def load_cifar10(data_dir: Path | None = None, limit: int | None = None) -> Split:
    """Load CIFAR-10.

    Pixels stay uint8 and are normalised in the loss: as float32 the set would take four times the
    memory.

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

    Returns:
        (m, 3073) uint8 rows of each batch.
    """
    batches = {}
    for name in names:
        if local.form.name == "sheets":
            content = _read_sheet(local, name)
            # The published checksums are those of the binary form: sheets are converted to it.
            binary = DATASETS["cifar10"].forms[0]
            (published,) = (file for file in binary.files if file.name == f"{name}.bin")
            verify_file(published, content, f"{local.folder}: {name}")
        else:
            content = local.read(f"{name}.bin")
        batches[name] = np.frombuffer(content, np.uint8).reshape(-1, ROW_BYTES)
    return batches


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


def _read_sheet(local: LocalDataSet, name: str) -> bytes:
    """Return a batch in the binary form, from tiles of a lossless WebP image."""
    try:
        # Optional: only one form of one data set needs it.
        from PIL import Image
    except ImportError:
        raise ValueError(
            f"{local.paths[f'{name}.webp']} needs Pillow to be read: pip install pillow, or use "
            "the binary version of the set"
        ) from None
    (labels,) = read_arrays(local.paths["labels.npz"], (name,))
    path = local.paths[f"{name}.webp"]
    try:
        # WebP only: a file of this name must not reach Pillow's other decoders.
        with Image.open(io.BytesIO(local.read(path.name)), formats=("WEBP",)) as image:
            if image.width * image.height > _MAX_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            pixels = np.asarray(image.convert("RGB"))
        tiles = pixels.reshape(image.height // 32, 32, image.width // 32, 32, 3)
        rows = tiles.transpose(0, 2, 4, 1, 3).reshape(-1, ROW_BYTES - 1)
        return np.concatenate([labels[:, None], rows], 1).tobytes()
    # Decoders report damage in many ways, and numpy refuses labels that do not match.
    except Exception as error:
        raise DamagedData(f"{path} is not a valid image: {error}; fetch it again") from None


def _read_fashion(local: LocalDataSet, part: str) -> tuple[Tensor, Tensor]:
    pixels, labels = (
        # Behind a header: what it is, and the length of each dimension.
        np.frombuffer(local.read(f"{part}-{name}-ubyte"), np.uint8, offset=4 + 4 * dims)
        for name, dims in (("images-idx3", 3), ("labels-idx1", 1))
    )
    # Copies, since the arrays share read-only memory with the file's bytes.
    return torch.tensor(pixels).view(-1, 1, 28, 28), torch.from_numpy(labels.astype(np.int64))
