"""LeNet for small images, as in the CD-GraB paper: ReLU and max-pooling."""

from torch import nn


def lenet(channels: int, padding: int = 0) -> nn.Sequential:
    """Return the network from (B, channels, 32, 32) images to 10 scores.

    Args:
        channels: Channels of the images.
        padding: Zeros put around the images; 2 makes 28 x 28 ones as large as wanted.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 120, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, 10),
    )
