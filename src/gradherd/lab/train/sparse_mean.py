"""The sparsified mean of one run among those that are trained side by side."""

import time

import torch
from torch import Tensor, nn

from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.fleet import Tally
from gradherd.lab.train.turns import Exchange
from gradherd.rows.flat import FlatSpec


class SparseMean:
    """Averages the workers' gradients of one run, sparsified."""

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self._exchange = Exchange(config, dict(model.named_parameters()))
        self.series = self._exchange.series
        spec = FlatSpec.of(model)
        spans = dict(zip(spec.names, zip(spec.offsets, spec.numels, strict=True), strict=True))
        # What is sparsified lies in another order than what is stepped.
        self._places = torch.cat(
            [
                torch.arange(begin, begin + count)
                for begin, count in (spans[name] for name in self._exchange.layout.names)
            ]
        ).to(config.device)

    def __call__(self, grads: Tensor, tally: Tally) -> Tensor:
        """Return (D,) the mean of (R, D) gradients, zero where nothing travelled."""
        begin = time.perf_counter()
        self._exchange.average(grads[:, self._places], tally)
        mean = self._exchange.mean
        placed = torch.empty_like(mean).index_copy_(0, self._places, mean)
        tally.exchange_seconds += time.perf_counter() - begin
        return placed

    def end_epoch(self, tally: Tally) -> None:
        """Take down what worker 0 keeps after the last step."""
        self._exchange.end_epoch(tally)
