"""`m4-mlp`: a small network that continues weekly series, one step after the other.

Shapes: n windows, 20 values in, 6 (training) or 13 (test) values to come.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from gradherd.lab.tasks.data_files import LocalDataSet, find_dataset
from gradherd.lab.tasks.metrics import mean_over_examples
from gradherd.lab.tasks.safe_readers import DamagedData, error_line, parse_table, printable
from gradherd.lab.tasks.task import Defaults, Split

SEEN, AHEAD, STRIDE, HORIZON = 20, 6, 3, 13
_LARGEST = 1e30


class Forecaster(nn.Module):
    """20-64-64-1, ReLU: says the next value, then takes it for the last one seen."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(SEEN, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, seen: Tensor, steps: int = AHEAD) -> Tensor:
        """Continue (n, 20) values by (n, steps)."""
        said: list[Tensor] = []
        for _ in range(steps):
            said.append(self.net(seen))
            seen = torch.cat([seen[:, 1:], said[-1]], 1)
        return torch.cat(said, 1)


@dataclass(frozen=True)
class M4MLP:
    """A network of 5,569 parameters on windows of the M4 competition's weekly series.

    As in the CD-GraB paper: each series is standardised with its own mean and deviation, windows
    of 20 + 6 values begin at every third, 90 % of them are trained on (the rest is left out).
    The test continues every series by 13 weeks.
    """

    name: ClassVar = "m4-mlp"
    description: ClassVar = "a 20-64-64-1 network on weekly series, 5,569 parameters"
    data: ClassVar = ("m4",)
    metric_name: ClassVar = "test sMAPE (%)"
    higher_is_better: ClassVar = False
    defaults: ClassVar = Defaults(
        workers=32,
        batch_size=1,
        lr=1e-3,
        momentum=0.9,
        lr_drop=0.25,
        lr_drop_every=10,
        epochs=30,
        seeds=5,
        source="CD-GraB paper (arXiv:2302.00845) and its code, M4 weekly experiment: 32 workers "
        "with one window each, lr 1e-3 times 0.25 every 10 epochs, momentum 0.9.",
    )

    def load(self, data_dir: Path | None = None, limit: int | None = None) -> Split:
        """Read windows and what follows them.

        Train: (n, 20) and (n, 6), standardised. Test: (s, 20) standardised ends of the series,
        (s, 13) true values, (s, 1) means and (s, 1) deviations.
        """
        seen, true = read_m4(find_dataset("m4", data_dir))
        means = np.array([[series.mean()] for series in seen])
        scales = np.array([[series.std() or 1.0] for series in seen])
        windows, ends = [], []
        for series, mean, scale in zip(seen, means, scales, strict=True):
            standard = (series - mean) / scale
            starts = range(0, len(standard) - SEEN - AHEAD, STRIDE)
            windows += [standard[start : start + SEEN + AHEAD] for start in starts]
            ends.append(standard[-SEEN:])
        order = np.random.RandomState(0).permutation(len(windows))
        kept = _tensor(np.stack(windows)[order[: max(1, len(windows) * 9 // 10)]])
        return Split(
            (kept[:, :SEEN], kept[:, SEEN:]),
            (_tensor(np.stack(ends)), _tensor(true), _tensor(means), _tensor(scales)),
        ).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return Forecaster()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean squared error of the six values."""
        seen, ahead = tensors
        return F.mse_loss(model(seen, ahead.shape[1]), ahead)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the symmetric mean absolute percentage error, 200 |p - y| / (|p| + |y|)."""

        def smape(model: nn.Module, *tensors: Tensor) -> Tensor:
            seen, true, means, scales = tensors
            said: Tensor = model(seen, true.shape[1]) * scales + means
            return (200 * (said - true).abs() / (said.abs() + true.abs())).mean(1)

        return mean_over_examples(model, smape, *tensors)


def read_m4(found: LocalDataSet) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the series, of different lengths, and the (s, 13) values that follow them."""
    seen, ahead = (_series(found, name) for name in ("Weekly-train.csv", "Weekly-test.csv"))
    if list(seen) != list(ahead):
        raise DamagedData(f"{found.folder}: the two files are not about the same series")
    for name, values in seen.items():
        if len(values) <= SEEN + AHEAD or len(ahead[name]) != HORIZON:
            raise DamagedData(
                f"{found.folder}: series {printable(name, 40)} has {len(values)} + "
                f"{len(ahead[name])} values, "
                f"expected more than {SEEN + AHEAD} and {HORIZON}"
            )
    return list(seen.values()), np.stack(list(ahead.values()))


def _series(found: LocalDataSet, name: str) -> dict[str, NDArray[np.float64]]:
    path, series = found.paths[name], {}
    for row in parse_table(found.text(name), path):
        try:
            values = np.array([float(cell) for cell in row[1:] if cell not in ("", "NA")])
        except ValueError as error:
            raise DamagedData(
                f"{path}: series {printable(row[0], 40)}: {error_line(error)}; fetch it again"
            ) from None
        # Beyond that, float32 has no number: nothing that is weighed, paid or counted is so large.
        if not row or not (np.abs(values) < _LARGEST).all():
            told = printable("".join(row[:1]), 40)
            raise DamagedData(
                f"{path}: series {told!r} is not all finite numbers below {_LARGEST:g}; "
                "fetch it again"
            )
        series[row[0]] = values
    return series


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
