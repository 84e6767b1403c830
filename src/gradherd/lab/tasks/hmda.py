"""`hmda`: predict whether a mortgage is granted; logistic regression on 18 features."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import DamagedData, LocalDataSet, find_dataset, read_arrays
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.task import Classifier, Defaults, Split

FEATURES = 18
_FILE = "hmda-2017-NJ.npz"
_MAX_VALUE = 1e15


@dataclass(frozen=True)
class HMDA(Classifier):
    """Logistic regression on mortgage applications of 2017: 19 parameters, convex.

    As in the CD-GraB paper, except for the state: New Jersey instead of New York. Features
    are standardised with the mean and standard deviation of the training part.
    """

    name: ClassVar = "hmda"
    description: ClassVar = "logistic regression on mortgage applications, 19 parameters, convex"
    data: ClassVar = ("hmda-2017",)
    file: ClassVar = _FILE
    defaults: ClassVar = Defaults(
        workers=4,
        batch_size=4,
        lr=5e-3,
        momentum=0.9,
        epochs=50,
        seeds=5,
        source="CD-GraB paper (arXiv:2302.00845), its HMDA experiment: global batch 16, "
        "lr 5e-3, momentum 0.9.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Load (n, 18) standardised features and (n,) labels, 1 = granted, split 80 to 20."""
        features, labels = read_hmda(find_dataset("hmda-2017", data_dir), self.file)
        # The same split whatever the seed of a run.
        order = np.random.RandomState(0).permutation(len(features))
        cut = max(1, len(features) * 4 // 5)
        # In double precision: some features are large compared with their deviation.
        x = features[order].astype(np.float64)
        # Of the training part alone: the test set must not leak into the features.
        scale = x[:cut].std(0)
        # A feature that never varies stays 0 instead of becoming NaN.
        x = (x - x[:cut].mean(0)) / np.where(scale > 0, scale, 1)
        inputs = torch.from_numpy(x.astype(np.float32))
        targets = torch.from_numpy(labels[order].astype(np.float32))
        return Split((inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])).first(limit)

    def model(self) -> nn.Module:
        """Return a linear layer with one logit."""
        return nn.Linear(FEATURES, 1)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean binary cross-entropy."""
        inputs, targets = tensors
        return F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the accuracy in percent."""

        def correct(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            logits: Tensor = model(inputs).squeeze(1)
            return (logits > 0) == (targets > 0)

        return 100 * mean_over_examples(model, correct, *tensors, chunk=100_000)


def read_hmda(local: LocalDataSet, name: str = _FILE) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (n, 18) features and (n,) labels as stored in the file of a state."""
    # Other states lie beside the one that the data set must have.
    path = local.paths.get(name, local.folder / name)
    features, labels = read_arrays(path, ("X", "y"))
    if features.ndim != 2 or features.shape[1] != FEATURES or labels.shape != (len(features),):
        raise DamagedData(
            f"{path} holds X {features.shape} and y {labels.shape}, "
            f"expected (n, {FEATURES}) and (n,)"
        )
    # Text and objects would fail somewhere inside numpy.
    numeric = all(array.dtype.kind in "fiub" for array in (features, labels))
    if not numeric or len(features) < 2:
        raise DamagedData(
            f"{path} holds {len(features)} rows of {features.dtype}, expected numbers"
        )
    # NaN fails the comparison, too. The bound keeps squares finite, even in float32.
    if not (np.abs(features) < _MAX_VALUE).all() or not np.isin(labels, (0, 1)).all():
        raise DamagedData(
            f"{path} holds values that are not finite and below {_MAX_VALUE:g}, or labels other "
            "than 0, 1; create it again"
        )
    return features, labels
