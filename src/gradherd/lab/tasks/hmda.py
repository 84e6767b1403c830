"""`hmda`: will a mortgage be granted? Logistic regression on 18 columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.safe_readers import DamagedData, parse_npz
from gradherd.lab.tasks.task import Defaults, Split

COLUMNS = 18
_FILE = "hmda-2017-NJ.npz"
_LARGEST = 1e15


@dataclass(frozen=True)
class HMDA:
    """Logistic regression on mortgage applications of 2017: 19 parameters, convex.

    As in the CD-GraB paper, except for the state: New Jersey instead of New York. Columns are
    standardised with mean and deviation of the training part.
    """

    name: ClassVar = "hmda"
    description: ClassVar = "logistic regression on mortgage applications, 19 parameters, convex"
    data: ClassVar = ("hmda-2017",)
    metric_name: ClassVar = "test accuracy (%)"
    higher_is_better: ClassVar = True
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
        """Read (n, 18) standardised columns and (n,) answers, 1 = granted, split 80 to 20."""
        rows, answers = read_hmda(find_dataset("hmda-2017", data_dir))
        order = np.random.RandomState(0).permutation(len(rows))
        cut = max(1, len(rows) * 4 // 5)
        # In double: some columns are large next to their deviation.
        x = rows[order].astype(np.float64)
        scale = x[:cut].std(0)
        x = (x - x[:cut].mean(0)) / np.where(scale > 0, scale, 1)
        inputs = torch.from_numpy(x.astype(np.float32))
        targets = torch.from_numpy(answers[order].astype(np.float32))
        return Split((inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])).first(limit)

    def model(self) -> nn.Module:
        """Return a linear layer to one logit."""
        return nn.Linear(COLUMNS, 1)

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean binary cross-entropy."""
        inputs, targets = tensors
        return F.binary_cross_entropy_with_logits(model(inputs).squeeze(1), targets)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the share of right answers in percent."""

        def right(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
            logits: Tensor = model(inputs).squeeze(1)
            return (logits > 0) == (targets > 0)

        return 100 * mean_over_examples(model, right, *tensors, chunk=100_000)


def read_hmda(found: LocalDataSet) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (n, 18) columns and (n,) answers as they are in the file."""
    path = found.paths[_FILE]
    rows, answers = parse_npz(found.read(_FILE), path, ("X", "y"))
    if rows.ndim != 2 or rows.shape[1] != COLUMNS or answers.shape != (len(rows),):
        raise DamagedData(
            f"{path} holds X {rows.shape} and y {answers.shape}, expected (n, {COLUMNS}) and (n,)"
        )
    numbers = all(array.dtype.kind in "fiub" for array in (rows, answers))
    if not numbers or len(rows) < 2:
        raise DamagedData(f"{path} holds {len(rows)} rows of {rows.dtype}, expected numbers")
    if not (np.abs(rows) < _LARGEST).all() or not np.isin(answers, (0, 1)).all():
        raise DamagedData(
            f"{path} holds values that are not finite and below {_LARGEST:g}, or answers other "
            "than 0, 1; make it again"
        )
    return rows, answers
