"""Local steps on a plain module: a hook of the optimizer counts, and every H-th step exchanges.

The exchange is that of gradients (`sparsify.workers`), with the difference between shared and own
weights in the place of the gradient. Then every rank takes over the new shared weights. With
`overlap` the exchange runs in a thread, and what a rank has learned meanwhile is added to them.

Shapes: D elements of all parameters in the flat vector.
"""

import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradherd.attach.flat_weights import FlatWeights
from gradherd.attach.state import gather_states
from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.script import run
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.flat import local_shard
from gradherd.sparsify.outer_optimizer import (
    LocalOutcome,
    LocalSteps,
    OuterOptimizer,
    commit_difference,
    exchange_script,
)
from gradherd.sparsify.workers import Worker

log = logging.getLogger("gradherd")
# A rank whose optimizer holds NaN breaks every exchange: end such a run instead of going on.
MAX_CALLED_OFF = 3
"""Exchanges in a row that may be called off."""


class TrainingDiverged(RuntimeError):
    """Weights were not finite in several exchanges in a row, on all ranks alike."""


@dataclass
class _Arrival:
    """The result of an exchange that was not applied yet."""

    mean: Tensor | None
    """(D,) mean difference of all ranks; None if the exchange was called off."""
    buffers: Tensor | None
    metrics: dict[str, Any]


class LocalExchange:
    """Exchanges what the local steps of each rank have changed."""

    key = "local"
    """Name of this part in a herd's state."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, settings: LocalSteps, world: World
    ) -> None:
        """Give all ranks rank 0's weights, and hook into the optimizer.

        Args:
            model: The plain module, of the same shapes on all ranks.
            optimizer: What changes its parameters.
            settings: How often and how to exchange.
            world: The ranks that train together.
        """
        self.world, self._settings = world, settings
        device = next(p for p in model.parameters() if p.requires_grad).device
        # The loop's own group would mix up the collectives of a thread with those of the loop; the
        # thread's group is gloo's, which takes tensors on the CPU, and so may be the loop's.
        if settings.overlap or not world.exchanges(device):
            device = torch.device("cpu")
        self._weights = FlatWeights(
            model, settings.dense_below, device, with_buffers=settings.buffers == "mean"
        )
        self.layout = self._weights.layout
        self._channel = world.side_channel() if settings.overlap else world
        self._thread = BackgroundThread("gradherd-local-steps") if settings.overlap else None
        self._weights.broadcast(self._channel)
        self._worker = Worker(
            settings.sent,
            self.layout.size,
            rank=world.rank,
            size=world.size,
            sparse=self.layout.sparse,
            layers=self.layout.sparse_numels,
            dtype=self._weights.dtype,
            device=device,
        )
        self._outer = OuterOptimizer(settings, self._weights.read())
        self._taken = 0  # steps since the last exchange began
        self._steps = 0  # steps since the run began
        self._called_off = 0  # exchanges in a row
        self._snapshot: Tensor | None = None  # own weights when the running exchange began
        self._arrival: _Arrival | None = None
        self._loaded: Mapping[str, Tensor] | None = None  # weights that a state has just set
        self._metrics: dict[str, Any] = {}
        self.total_bytes = 0
        self.stopwatch = Stopwatch()
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check that nothing has overwritten the weights that a state has set for this rank."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        for name, parameter in self._weights.parameters.items():
            if not torch.equal(local_shard(parameter), loaded[name].to(parameter.device)):
                raise RuntimeError(
                    f"{name} was changed after herd.load_state_dict(), which sets the weights of "
                    "each rank: load the model first, then the herd"
                )

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken += 1
        self._steps += 1
        with self.stopwatch:
            if self._snapshot is not None and self._taken >= self._settings.steps_until_applied:
                self._apply()
            if self._taken >= self._settings.every:
                self._begin(forced=False)
                if not self._settings.overlap:
                    self._apply()

    def sync(self) -> None:
        """Exchange now, also within a phase; afterwards all ranks have equal weights."""
        with self.stopwatch:
            if self._snapshot is not None:
                self._apply()
            if self._taken or self._called_off:
                self._begin(forced=True)
                self._apply()

    def _begin(self, *, forced: bool) -> None:
        """Start to exchange what the steps since the last exchange have changed."""
        self._weights.check_trainable()
        weights = self._weights.read()
        worker, buffers = self._worker, self._weights.read_buffers()
        worker.set_unit(1.0)
        worker.add(0, self._weights.rounded(self._outer.shared) - weights)
        at = torch.tensor([self._steps, int(forced)], device=self._weights.device)
        if self._thread is None:
            self._exchange(at, buffers)
        else:
            self._thread.submit(lambda: self._exchange(at, buffers))
        self._taken, self._snapshot = 0, weights  # not if the exchange has failed

    def _exchange(self, at: Tensor, buffers: Tensor | None) -> None:
        """Run the exchange, here or in the thread, and keep its result until it is applied."""
        try:
            value, sent = run(exchange_script(self._worker, at, buffers), self._channel)
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RuntimeError(
                f"the exchange after local step {int(at[0])} failed: a rank has died, or is later "
                f"than the process group's timeout of {self.world.timeout().total_seconds():g} s "
                f"({reason})"
            ) from error
        result: LocalOutcome = value
        if result.positions is not None:
            raise RuntimeError(
                "ranks have taken different numbers of steps, or not all of them have called "
                f"sync(): [steps, sync()] of each rank are {result.positions}"
            )
        self.total_bytes += sent
        metrics: dict[str, Any] = {}
        outcome = result.outcome if self._everywhere(result.outcome is not None) else None
        if outcome is not None:
            metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}
        mean = commit_difference(self._worker, outcome, self._settings.decay)
        self._arrival = _Arrival(mean, result.buffers, metrics)

    @torch.no_grad()
    def _apply(self) -> None:
        """Wait for the exchange, move the shared weights and write them into the parameters."""
        self._wait()
        arrival, snapshot = self._arrival, self._snapshot
        self._arrival = self._snapshot = None
        assert arrival is not None and snapshot is not None
        if arrival.mean is None:
            self._go_on_alone()
            return
        self._metrics = arrival.metrics | {"exchanges": self._worker.step}
        self._called_off = 0
        self._outer.step(arrival.mean)
        new = self._weights.rounded(self._outer.shared)
        if self._settings.overlap:
            # What this rank has learned since then; nothing right after `_begin`, so that `sync`
            # leaves equal bits on all ranks.
            new += self._weights.read() - snapshot
        self._weights.write(new)
        if arrival.buffers is not None:
            self._weights.write_buffers(arrival.buffers)

    def _go_on_alone(self) -> None:
        """Leave the shared weights: some rank's difference was not finite."""
        self._called_off += 1
        if self._called_off >= MAX_CALLED_OFF:
            raise TrainingDiverged(
                f"differences were not finite in {self._called_off} exchanges in a row: training "
                "has diverged; try a lower learning rate, a warm-up or gradient clipping"
            )
        if self._everywhere(bool(self._weights.read().isfinite().all())):
            return  # What this rank has learned is sent with the next exchange.
        log.warning(
            "rank %d: weights are not finite after local step %d; it goes on from the shared "
            "weights, and its optimizer keeps its state",
            self.world.rank,
            self._steps,
        )
        self._weights.write(self._weights.rounded(self._outer.shared))

    def _everywhere(self, here: bool) -> bool:
        """Return whether something holds for the whole model: a plain one has no other shards."""
        return here

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are the shared weights."""
        return self._weights.replaced_by(self._outer.shared)

    def _wait(self) -> None:
        try:
            if self._thread is not None:
                self._thread.wait()
        except RuntimeError:
            self._snapshot = None  # Differences are taken to the shared weights: nothing is lost.
            raise

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last exchange, and totals so far."""
        self._wait()  # The thread changes the residual.
        residual = self._worker.feedback.residual
        return self._metrics | {
            "residual_norm": float(torch.linalg.vector_norm(residual)),
            "local_steps": self._steps,
            "exchanges": self._worker.step,
            "skipped_steps": self._worker.skipped,
            "always_sent": self.layout.size - self.layout.sparse,
            "total_bytes": self.total_bytes,
            "exchange_seconds": self.stopwatch.seconds,
        }

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last exchange that need no computation."""
        return self._metrics

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return shared weights, residuals, and this rank's own weights within a phase.

        Args:
            gather: Whether rank 0 also gets the states of the other ranks, in "other_ranks".
        """
        self._wait()
        state = self._worker.state_dict() | {"taken": self._taken, "local_steps": self._steps}
        state["called_off"] = self._called_off
        state["residual"] = self._weights.by_name(self._worker.feedback.residual)
        state["shared"] = self._weights.by_name(self._outer.shared)
        if self._outer.momentum is not None:
            state["outer_momentum"] = self._weights.by_name(self._outer.momentum)
        # Between two phases own and shared weights are the same.
        if self._taken or self._snapshot is not None or self._called_off:
            parameters, buffers = self._weights.parameters, self._weights.buffers()
            state["weights"] = {name: p.detach().clone() for name, p in parameters.items()}
            state["buffers"] = {name: b.detach().clone() for name, b in buffers.items()}
        if self._snapshot is not None:
            assert self._arrival is not None
            state["snapshot"] = self._weights.by_name(self._snapshot)
            # Equal on all ranks, as the shared weights are.
            state["arrival"] = vars(self._arrival).copy()
        if gather and self.world.size > 1:
            others = gather_states(state, self.world)
            if self.world.rank == 0:
                state["other_ranks"] = others[1:]
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this model and these settings, and of this rank or merged.

        Raises:
            ValueError: It is not.
        """
        for key in ("residual", "shared"):
            self._weights.check_shapes(key, state.get(key, {}))
        has, needs = "outer_momentum" in state, self._outer.momentum is not None
        if has != needs:
            raise ValueError(
                f"local state was saved {'with' if has else 'without'} outer_momentum: attach "
                f"{'with' if has else 'without'} it, too"
            )
        if "snapshot" in state and not self._settings.overlap:
            raise ValueError(
                "local state has an exchange under way: it was saved with overlap=True, so attach "
                "with overlap=True"
            )
        self._worker.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was saved, and set this rank's weights to what they were.

        Raises:
            ValueError: The state is of another model, method or rank.
        """
        self.check_state(state)  # before anything changes
        self._wait()
        self._weights.restore(self._worker.feedback.residual, state["residual"])
        self._weights.restore(self._outer.shared, state["shared"])
        if self._outer.momentum is not None:
            self._weights.restore(self._outer.momentum, state["outer_momentum"])
        self._worker.load_state_dict(dict(state))
        self._taken, self._steps = state["taken"], state["local_steps"]
        self._called_off = state["called_off"]
        self._arrival = self._snapshot = None
        if "snapshot" in state:
            empty = torch.empty_like(self._outer.shared)
            self._snapshot = self._weights.restore(empty, state["snapshot"])
            self._arrival = _Arrival(**state["arrival"])
        if "weights" in state:
            empty = torch.empty_like(self._outer.shared)
            self._set_weights(self._weights.restore(empty, state["weights"]))
            for name, buffer in self._weights.buffers().items():
                buffer.detach().copy_(state["buffers"][name])
        else:
            self._set_weights(self._weights.rounded(self._outer.shared))

    def _set_weights(self, flat: Tensor) -> None:
        """Set this rank's weights, and remember them: a model that is loaded later undoes it."""
        self._weights.write(flat)
        self._loaded = {
            name: local_shard(p).clone() for name, p in self._weights.parameters.items()
        }

    def close(self) -> None:
        """Leave the optimizer alone from now on; parameters stay as they are on each rank."""
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._thread.close()
            self._channel.close_side_channel()
