"""`digits` and `digits-mlp`: logistic regression and an MLP on scikit-learn's 8 x 8 digits."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gradherd.lab.tasks.data_files import MissingData
from gradherd.lab.tasks.task import Classifier, Defaults, Split

TRAIN = 1440
"""Training examples, of 1,797: a number that many worker counts divide."""


@dataclass(frozen=True)
class Digits(Classifier):
    """Logistic regression, 64 pixels to 10 digits: 650 parameters, convex.

    The weights start at zero, so all seeds start at the same point. L2 regularisation is the
    weight decay of the defaults, not part of `loss`.
    """

    name: ClassVar = "digits"
    description: ClassVar = "logistic regression on 8 x 8 digits, 650 parameters, convex"
    data: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=4,
        lr=0.2,
        momentum=0.9,
        weight_decay=1e-3,
        epochs=20,
        seeds=3,
        source="Our own choice: a convex task that comes close to its optimum within 20 epochs, so "
        "that what is left is the noise of the order.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 64) pixels in [0, 1] and (n,) digits, shuffled and split with a fixed seed."""
        pixels, digits = _read_digits()
        # The same split whatever the seed of a run; the stream of RandomState is frozen across
        # versions of numpy.
        order = np.random.RandomState(0).permutation(len(digits))
        # Pixels are counts from 0 to 16.
        x = torch.tensor(pixels[order] / 16, dtype=torch.float32)
        y = torch.tensor(digits[order], dtype=torch.int64)
        return Split((x[:TRAIN], y[:TRAIN]), (x[TRAIN:], y[TRAIN:])).first(limit)

    def model(self) -> nn.Module:
        """Return a linear layer, initialised to zero."""
        model = nn.Linear(64, 10)
        # A convex problem needs no random start, and all arms then begin with the same loss.
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model


@dataclass(frozen=True)
class DigitsMLP(Digits):
    """Two hidden layers of 512 with ReLU: 301,066 parameters, enough to sparsify."""

    name: ClassVar = "digits-mlp"
    description: ClassVar = "a 64-512-512-10 network on 8 x 8 digits, 301,066 parameters"
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=8,
        lr=0.05,
        momentum=0.9,
        weight_decay=1e-4,
        epochs=20,
        seeds=3,
        source="Our own choice: a task that sparsifiers can be compared on in seconds.",
    )

    def model(self) -> nn.Module:
        """Return the network."""
        return nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )


def _read_digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return (1797, 64) pixels and (1797,) digits, as `sklearn.datasets.load_digits` does."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        # Optional: only these two tasks need it.
        raise MissingData(
            "the digits come with scikit-learn, which is not installed: pip install scikit-learn"
        )
    # Read, not imported: importing sklearn.datasets takes longer than a short training, and every
    # rank would do so.
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1].astype(np.int64)
