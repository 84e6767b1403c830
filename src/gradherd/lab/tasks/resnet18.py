"""`cifar10-resnet18`: a deep residual network on CIFAR-10.

Shapes: B images, C channels.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.cifar10 import load_cifar10, normalize
from gradherd.lab.tasks.metrics import accuracy
from gradherd.lab.tasks.task import Defaults, Split


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.around = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Turn (B, before, H, W) into (B, after, H / stride, W / stride)."""
        inner = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(inner)) + self.around(images))


def resnet18() -> nn.Sequential:
    """Return ResNet-18 for 32 x 32 images: no pooling at the start, 10 scores at the end."""
    blocks, before = [], 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
        before = after
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Cifar10ResNet18:
    """ResNet-18 on CIFAR-10: 11,173,962 parameters, BatchNorm.

    Unlike in the ExDyna experiments images are not cropped and mirrored at random unless
    `augment` is set: an example's gradient then says more about its next one, and workers in
    one process draw the same numbers as workers in several.
    """

    augment: bool = False
    """Crop (after padding by 4) and mirror at random while the model is in training mode."""

    name: ClassVar = "cifar10-resnet18"
    description: ClassVar = "ResNet-18 on CIFAR-10 images, 11,173,962 parameters"
    data: ClassVar = ("cifar10",)
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
    defaults: ClassVar = Defaults(
        workers=8,
        batch_size=32,
        unit=32,
        lr=0.2,
        momentum=0.9,
        weight_decay=1e-4,
        lr_drop=0.1,
        lr_drop_every=150,
        epochs=200,
        seeds=1,
        source="ExDyna paper (arXiv:2402.13781) and its code: 8 workers with 32 images each, "
        "lr 0.2 divided by 10 at epoch 150, momentum 0.9, weight decay 1e-4; without its five "
        "epochs of warm-up.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read (n, 3, 32, 32) pixels as bytes and (n,) kinds."""
        return load_cifar10(data_dir, limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return resnet18()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        pixels, kinds = tensors
        images = normalize(pixels)
        if self.augment and model.training:
            images = _augment(images)
        return F.cross_entropy(model(images), kinds)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right kinds in percent."""
        return accuracy(model, *tensors, prepare=normalize, chunk=250)


def _augment(images: Tensor) -> Tensor:
    """Return (B, C, 32, 32) images, each moved by up to 4 pixels and mirrored or not."""
    count, _, high, wide = images.shape
    # Drawn on the CPU: the same numbers wherever the images are.
    top, left, mirror = (torch.randint(n, (count, 1), device="cpu") for n in (9, 9, 2))
    rows = (top + torch.arange(high)).to(images.device)
    steps = torch.arange(wide).expand(count, wide)
    columns = (left + torch.where(mirror > 0, wide - 1 - steps, steps)).to(images.device)
    padded = F.pad(images, (4, 4, 4, 4)).movedim(1, 3)
    at = torch.arange(count, device=images.device).view(-1, 1, 1)
    return padded[at, rows[:, :, None], columns[:, None, :]].movedim(3, 1).contiguous()
