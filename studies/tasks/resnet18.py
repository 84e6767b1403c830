"""ResNet-18 on CIFAR-10.

Shapes: B images, C channels.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.lab.tasks.images import Cifar10LeNet
from gradherd.lab.tasks.task import Defaults


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions with a shortcut around them."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        # No bias: BatchNorm subtracts the mean, and with it any bias.
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False),
                nn.BatchNorm2d(channels_out),
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, C', H / stride, W / stride)."""
        inner = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


def resnet18() -> nn.Sequential:
    """Return ResNet-18 for 32 x 32 images: no initial pooling, 10 classes."""
    blocks, channels_in = [], 64
    for channels, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [
            ResidualBlock(channels_in, channels, stride),
            ResidualBlock(channels, channels, 1),
        ]
        channels_in = channels
    return nn.Sequential(
        # 3 x 3 with stride 1, not 7 x 7 with stride 2 as for ImageNet: images have 32 pixels a
        # side.
        nn.Conv2d(3, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@dataclass(frozen=True)
class Cifar10ResNet18(Cifar10LeNet):
    """ResNet-18 on CIFAR-10: 11,173,962 parameters, BatchNorm.

    Unlike in the ExDyna experiments, images are cropped and flipped at random only in runs with
    `augment`: without it an example's gradient predicts its next one better.
    """

    name: ClassVar = "cifar10-resnet18"
    description: ClassVar = "ResNet-18 on CIFAR-10 images, 11,173,962 parameters"
    evaluation_chunk: ClassVar = 1000
    metric_chunk: ClassVar = 250
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

    def model(self) -> nn.Module:
        """Return the network."""
        return resnet18()

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return normalised images, on a GPU in the layout that its convolutions like best."""
        images = super().prepare(inputs)
        return images.contiguous(memory_format=torch.channels_last) if images.is_cuda else images
