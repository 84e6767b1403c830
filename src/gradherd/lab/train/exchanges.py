"""How workers in one process turn their gradients into the next weights, and what that costs.

Two seams for other methods. What averages gradients at every step has the members of
`VirtualWorkers` (sparsifiers, PowerSGD). What has weights, or an optimizer, of its own on each
worker is a `VirtualExchange` (local steps).

PowerSGD, the low-rank exchange that sparsifiers are compared with: Vogels et al., "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization" (arXiv:1905.13727), Algorithm
1, with error feedback and a warm start, as torch's own hook, which is for real ranks, does it.

Letters: R workers, D parameters, (m, n) a parameter as a matrix, r rank.
"""

import contextlib
import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.sliced_mean import mean_bytes, mean_of_rows
from gradherd.flat import FlatSpec
from gradherd.hooks.flat_weights import FlatWeights
from gradherd.hooks.local_steps import MAX_CALLED_OFF
from gradherd.lab.train import POWERSGD
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.measurements import DeviceTimer
from gradherd.lab.train.optimizers import (
    clip_and_step,
    make_optimizer,
    mean_clip,
    set_lr,
    sparse_settings,
)
from gradherd.lab.train.trainer import EpochCounters
from gradherd.local.exchange import Arrival, SharedWeights
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers


class VirtualExchange(ABC):
    """What R workers in one process do with their gradients."""

    models: list[nn.Module]
    """One that all workers share, or one of each worker."""
    parameters: list[list[nn.Parameter]]
    """The trained parameters of each model, in the order of the flat gradients."""
    mean: Tensor | None = None
    """(D,) the last average of gradients, before clipping; None if they are not averaged."""
    diverged: bool = False
    """Whether training must end: several exchanges in a row were called off."""

    @abstractmethod
    def step(self, grads: Tensor, lr: float, counters: EpochCounters) -> None:
        """Take a step of all workers with their (R, D) gradients, and count what it costs."""

    @abstractmethod
    def end_epoch(self, counters: EpochCounters, *, last: bool) -> None:
        """Count what is known at the end of an epoch; exchange what is left after the last one."""

    def evaluated(self) -> AbstractContextManager[None]:
        """Let the first model hold, inside, the weights that are evaluated."""
        return contextlib.nullcontext()


class SharedModel(VirtualExchange):
    """One model for all workers, whose gradients are averaged: whole, sparsified or of low rank."""

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        self.models = [model]
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        settings = None
        if config.density is not None and config.sparsify != POWERSGD:
            settings = sparse_settings(config)
        # The layout of real ranks, so that partitions and thresholds cover the same elements.
        layout = FlatSpec.small_last(named, 0 if settings is None else settings.dense_below)
        self.parameters = [[named[name] for name in layout.names]]
        (own,), device = self.parameters, torch.device(config.device)
        self._workers: VirtualWorkers | LowRankWorkers | None = None
        if settings is not None:
            self._workers = _sparse_workers(settings, layout, config.workers, device=device)
        elif config.density is not None:
            self._workers = LowRankWorkers(layout.shapes, config.density, config.workers, device)
        self._trained, self._clip = list(named.values()), mean_clip(config)
        self._optimizer = make_optimizer(self._trained, config)
        self._timer = DeviceTimer(device)
        # One place for the model's gradient: making views takes a host longer than a GPU's copy.
        self._flat = torch.zeros(layout.size, dtype=own[0].dtype, device=device)
        self._grads = layout.views(self._flat).values()

    def step(self, grads: Tensor, lr: float, counters: EpochCounters) -> None:
        """Average the (R, D) gradients and take a step with the mean."""
        with self._timer.measure():
            self.mean = self._average(grads, counters)
        # A copy: clipping writes to the model's gradient, and `mean` must stay as it is.
        self._flat.copy_(self.mean)
        for parameter, grad in zip(self.parameters[0], self._grads, strict=True):
            parameter.grad = grad
        set_lr(self._optimizer, lr)
        clip_and_step(self._optimizer, self._trained, self._clip)

    def _average(self, grads: Tensor, counters: EpochCounters) -> Tensor:
        """Return (D,) the mean of (R, D) gradients, and count what it costs."""
        if self._workers is None:
            counters.bytes += mean_bytes(grads.shape[1], len(grads), grads.element_size())
            # In the bits that ranks would get.
            return mean_of_rows(grads, out=torch.empty_like(grads[0]))
        mean, metrics = self._workers.step(grads), self._workers.metrics
        counters.add_sparse(metrics)
        counters.bytes += self._workers.bytes
        counters.skipped_steps += not metrics  # called off: something was not finite
        return mean

    def end_epoch(self, counters: EpochCounters, *, last: bool) -> None:
        """Count the time of exchanges, and the residual of worker 0."""
        counters.exchange_seconds = self._timer.reset()
        if self._workers is not None:
            residual = self._workers.residuals()[0]
            counters.residual_norm = float(torch.linalg.vector_norm(residual))


class LocalModels(VirtualExchange):
    """A model and an optimizer for each worker, which exchange weights from time to time.

    The exchange is that of real ranks (`local.exchange`), with the same bits and bytes. Evaluated
    are the shared weights, with worker 0's buffers.
    """

    def __init__(self, config: RunConfig, model: nn.Module) -> None:
        settings = self._settings = config.local()
        device = torch.device(config.device)
        self.models = [model, *(copy.deepcopy(model) for _ in range(config.workers - 1))]
        self._weights = [FlatWeights(one, settings.dense_below, device) for one in self.models]
        self.parameters = [list(weights.parameters.values()) for weights in self._weights]
        self._spec = FlatSpec.of(model)  # of gradients, in the order of the model
        self._optimizers = [make_optimizer(own, config) for own in self.parameters]
        self._clip, self._timer = config.clip, DeviceTimer(device)
        first = self._weights[0]
        self._shared = SharedWeights.simulate(
            settings, first.layout.sparse, first.layout.whole, first.buffer_elements,
            config.workers, dtype=first.dtype, device=device,
        )  # fmt: skip
        for weights in self._weights:
            weights.gap = self._shared.length - first.layout.sparse
        self._shared.start(first.read())
        self._arrival: Arrival | None = None  # of an exchange whose result was not applied yet
        self._taken = self._steps = self._called_off = 0

    def step(self, grads: Tensor, lr: float, counters: EpochCounters) -> None:
        """Take a step of each worker with its own gradient; exchange if it ends a phase."""
        for own, optimizer, flat in zip(self.parameters, self._optimizers, grads, strict=True):
            set_lr(optimizer, lr)
            for parameter, grad in zip(own, self._spec.views(flat).values(), strict=True):
                parameter.grad = grad
            # Each worker clips its own gradient: there is no averaged one.
            clip_and_step(optimizer, own, self._clip)
        self._taken += 1
        self._steps += 1
        if self._arrival is not None and self._taken >= self._settings.steps_until_applied:
            self._finish(synced=False)
        if self._taken >= self._settings.every and not self.diverged:
            self._begin(counters, forced=False)

    def end_epoch(self, counters: EpochCounters, *, last: bool) -> None:
        """Exchange what the last steps of a run have changed, which belongs to its result."""
        if last and self._arrival is not None:
            self._finish(synced=False)
        if last and not self.diverged:
            if self._taken or self._called_off:
                self._begin(counters, forced=True)
            for weights in self._weights:
                weights.write(self._shared.outer.shared)
        counters.exchange_seconds = self._timer.reset()
        squares = self._shared.squares
        counters.residual_norm = 0.0 if squares is None else math.sqrt(float(squares))

    def _begin(self, counters: EpochCounters, *, forced: bool) -> None:
        with self._timer.measure():
            own = [
                weights.read(room)
                for weights, room in zip(self._weights, self._shared.room(), strict=True)
            ]
            read = [weights.read_buffers() for weights in self._weights]
            buffers = [flat for flat in read if flat is not None]
            position, beside = (self._steps, int(forced)), self._settings.overlap and not forced
            self._arrival = self._shared.exchange(own, buffers or None, position, delta=beside)
            counters.bytes += self._shared.bytes
            self._taken = 0
        if forced or not self._settings.overlap:
            self._finish(synced=forced)
        # Counted as a step that was called off, or with what all local steps have.
        if self._called_off:
            counters.skipped_steps += 1
        else:
            counters.add_sparse({"density": 1.0, "padding": 1.0})

    def _finish(self, *, synced: bool) -> None:
        arrival, self._arrival = self._arrival, None
        assert arrival is not None and arrival.ok is not None
        with self._timer.measure():
            if not arrival.ok[0]:
                self._go_on_alone()
                return
            self._called_off = 0
            beside, starts = self._settings.overlap and not synced, arrival.weights
            for weights, new in zip(self._weights, starts, strict=True):
                weights.write(new.add_(weights.read()) if beside else new)
                if arrival.buffers is not None:
                    weights.write_buffers(arrival.buffers)
            if not self._weights[0].is_wide:
                self._shared.owe_rounding(starts, [weights.read() for weights in self._weights])

    def _go_on_alone(self) -> None:
        """Put workers whose weights are not finite back to the shared ones."""
        self._called_off += 1
        self.diverged = self._called_off >= MAX_CALLED_OFF
        for weights in self._weights:
            if not weights.read().isfinite().all():
                weights.write(self._shared.outer.shared)

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """Let the first model hold the shared weights; NaN after divergence, as the record says."""
        shared = self._shared.outer.shared * (torch.nan if self.diverged else 1.0)
        with self._weights[0].replaced_by(shared):
            yield


def _sparse_workers(
    settings: Sparsify, layout: FlatSpec, count: int, **where: Any
) -> VirtualWorkers:
    parts = {"sparse": layout.sparse, "layers": layout.sparse_numels}
    workers = VirtualWorkers(settings, layout.size, count, **parts, **where)
    workers.measure_norms = False  # `end_epoch` does, once
    return workers


Shape = tuple[int, int]


def compresses(shape: Shape, rank: int) -> bool:
    """Return whether two factors are smaller than the matrix; biases never are.

    >>> compresses((64, 10), 1), compresses((10, 1), 1)
    (True, False)
    """
    return rank * sum(shape) < math.prod(shape)


def rank_for(shapes: Sequence[Shape], density: float) -> int:
    """Return the largest rank that sends no more than a share of the elements, but at least 1.

    Args:
        shapes: (m, n) of each parameter.
        density: Share of all elements.

    >>> rank_for([(64, 128), (10, 64)], 0.1)
    3
    """
    total, rank = sum(map(math.prod, shapes)), 1
    while _elements(shapes, rank + 1) <= density * total and rank < max(map(min, shapes)):
        rank += 1
    return rank


def _elements(shapes: Sequence[Shape], rank: int) -> int:
    """Return how many elements of factors and of whole parameters a worker contributes."""
    return sum(
        rank * sum(shape) if compresses(shape, rank) else math.prod(shape) for shape in shapes
    )


class LowRankWorkers:
    """R = `size` workers that exchange low-rank gradients; the counterpart of `VirtualWorkers`.

    The share of the elements that may be sent decides the rank. Parameters are in the order of the
    flat gradient; as (m, n) matrices, they have their first dimension, and all others.
    """

    bytes: int = 0  # that a worker has sent in the last step

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        density: float,
        size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = [(one[0] if one else 1, math.prod(one[1:])) for one in shapes]
        self.rank = rank_for(self._shapes, density)
        elements = sum(map(math.prod, self._shapes))
        self._residuals = torch.zeros(size, elements, device=device)
        # Equal on all ranks: from a seed, and orthogonal, as in torch.
        generator = torch.Generator().manual_seed(0)
        self._factors = {
            at: torch.linalg.qr(torch.randn(n, self.rank, generator=generator))[0].to(device)
            for at, (m, n) in enumerate(self._shapes)
            if compresses((m, n), self.rank)
        }
        sent = _elements(self._shapes, self.rank)
        self._metrics: dict[str, Any] = {
            "density": sent / elements,
            "padding": 1.0,  # all workers send as much
            "bytes": mean_bytes(sent, size),
        }
        self.metrics: dict[str, Any] = {}

    def step(self, grads: Tensor) -> Tensor:
        """Average (R, D) gradients; return the (D,) mean, NaN if anything was not finite."""
        sums = self._residuals + grads
        if not sums.isfinite().all():
            self.metrics, self.bytes = {}, 0
            return torch.full_like(grads[0], torch.nan)
        means, begin = torch.empty_like(grads[0]), 0
        for at, (m, n) in enumerate(self._shapes):
            span = slice(begin, begin + m * n)
            if at in self._factors:
                # Two all-reduces, of P (m, r) and of Q (n, r), with the Q of the step before: both
                # products are linear, so means of them are enough.
                matrices = sums[:, span].view(-1, m, n)
                p, _ = torch.linalg.qr((matrices @ self._factors[at]).mean(0))
                q = self._factors[at] = (matrices.transpose(1, 2) @ p).mean(0)
                means[span] = (p @ q.T).flatten()
                # What the mean leaves out of this worker's own sum: R means and residuals add up
                # to R sums.
                self._residuals[:, span] = sums[:, span] - means[span]
            else:
                means[span] = sums[:, span].mean(0)
            begin = span.stop
        self.metrics, self.bytes = self._metrics, self._metrics["bytes"]
        return means

    def residuals(self) -> Tensor:
        """Return the residuals of all workers: (R, D)."""
        return self._residuals.clone()
