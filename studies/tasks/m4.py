"""A small network that forecasts weekly series one step at a time.

Shapes: n windows, s series; 20 values in, 6 (training) or 13 (test) values ahead.
"""

import csv
import io
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
from gradherd.lab.tasks.task import Defaults, Split, Task

WINDOW, AHEAD, STRIDE, HORIZON = 20, 6, 3, 13


class Forecaster(nn.Module):
    """20-64-64-1 with ReLU: predicts the next value, then appends it to its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(WINDOW, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
        )

    def forward(self, window: Tensor, steps: int = AHEAD) -> Tensor:
        """Forecast (n, steps) values from (n, 20)."""
        forecast: list[Tensor] = []
        for _ in range(steps):
            forecast.append(self.net(window))
            window = torch.cat([window[:, 1:], forecast[-1]], 1)
        return torch.cat(forecast, 1)


@dataclass(frozen=True)
class M4MLP(Task):
    """A network of 5,569 parameters on windows of the M4 competition's weekly series.

    As in the CD-GraB paper: each series is standardised with its own mean and standard deviation,
    windows of 20 + 6 values start at every third value, and 90 % of them are used for training (the
    rest is unused). The test forecasts every series for 13 weeks.
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
        """Load windows and the values that follow them.

        Train: (n, 20) and (n, 6), standardised. Test: (s, 20) last values of each series,
        standardised, (s, 13) true values, (s, 1) means and (s, 1) standard deviations.
        """
        history, true = read_m4(find_dataset("m4", data_dir))
        means = np.array([[series.mean()] for series in history])
        # A constant series has no deviation to divide by.
        scales = np.array([[series.std() or 1.0] for series in history])
        windows, ends = [], []
        for series, mean, scale in zip(history, means, scales, strict=True):
            standard = (series - mean) / scale
            starts = range(0, len(standard) - WINDOW - AHEAD, STRIDE)
            windows += [standard[start : start + WINDOW + AHEAD] for start in starts]
            ends.append(standard[-WINDOW:])
        order = np.random.RandomState(0).permutation(len(windows))
        train = _tensor(np.stack(windows)[order[: max(1, len(windows) * 9 // 10)]])
        return Split(
            (train[:, :WINDOW], train[:, WINDOW:]),
            (_tensor(np.stack(ends)), _tensor(true), _tensor(means), _tensor(scales)),
        ).first(limit)

    def model(self) -> nn.Module:
        """Return the network."""
        return Forecaster()

    def loss(self, model: nn.Module, *tensors: Tensor) -> Tensor:
        """Return the mean squared error of the six values."""
        window, ahead = tensors
        # The forecast is fed back within the forward, so the model is still called once.
        return F.mse_loss(model(window, ahead.shape[1]), ahead)

    def metric(self, model: nn.Module, *tensors: Tensor) -> float:
        """Return the symmetric mean absolute percentage error, 200 |p - y| / (|p| + |y|)."""

        def smape(model: nn.Module, *tensors: Tensor) -> Tensor:
            window, true, means, scales = tensors
            # sMAPE is relative to the values themselves, so the standardisation is undone.
            forecast: Tensor = model(window, true.shape[1]) * scales + means
            return (200 * (forecast - true).abs() / (forecast.abs() + true.abs())).mean(1)

        return mean_over_examples(model, smape, *tensors)


def read_m4(local: LocalDataSet) -> tuple[list[NDArray[np.float64]], NDArray[np.float64]]:
    """Return the series, of different lengths, and the (s, 13) values that follow them."""
    history, ahead = (
        {
            # Shorter series are padded with empty cells or NA.
            name: np.array([float(cell) for cell in cells if cell not in ("", "NA")])
            for name, *cells in list(csv.reader(io.StringIO(local.text(f"Weekly-{part}.csv"))))[1:]
        }
        for part in ("train", "test")
    )
    return list(history.values()), np.stack([ahead[name] for name in history])


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))
