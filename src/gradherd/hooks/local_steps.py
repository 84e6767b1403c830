"""Local steps: a hook of the optimizer counts, and every H-th step exchanges.

The exchange is that of gradients (`sparsify.worker`), with the difference between shared and own
weights in the place of the gradient. Then every rank takes over the new shared weights. With
`overlap` the exchange runs in a thread, and what a rank has learned meanwhile is added to them.

Shapes: D elements of all parameters in the flat vector.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.checks import TrainingDiverged
from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.flat import local_shard
from gradherd.hooks.bucket_hook import BucketHook, world_of
from gradherd.hooks.exchange import ModelExchange, ShardedExchange
from gradherd.hooks.flat_weights import FlatWeights
from gradherd.hooks.fsdp_checks import ShardedWorlds
from gradherd.sparsify.local import (
    LocalOutcome,
    LocalSteps,
    OuterOptimizer,
    exchange_script,
)

log = logging.getLogger("gradherd")
# A rank whose optimizer holds NaN breaks every exchange: end such a run instead of going on.
MAX_CALLED_OFF = 3
"""Exchanges in a row that may be called off."""


@dataclass
class _Arrival:
    """The result of an exchange that was not applied yet."""

    mean: Tensor | None
    """(D,) mean difference of all ranks; None if the exchange was called off."""
    buffers: Tensor | None
    metrics: dict[str, Any]


class OwnGradients(BucketHook):
    """Leaves every rank of a DDP model its own gradients, and its own buffers.

    Frameworks wrap a model in DDP before anyone can ask them not to.
    """

    def __init__(self, ddp: DDP) -> None:
        """Take DDP's hook, which must be free."""
        super().__init__(ddp, world_of(ddp))
        self._ddp, self._broadcasts = ddp, ddp.broadcast_buffers
        ddp.broadcast_buffers = False  # rank 0's at every forward; LocalSteps averages them

    def collects(self) -> bool:
        """Return that no bucket is exchanged."""
        return False

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return a bucket as it is."""
        flat = bucket.buffer()
        done: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        done.set_result(flat)
        return done

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Do nothing: no bucket is collected."""

    def close(self) -> None:
        """Leave DDP, which averages by itself from now on."""
        super().close()
        self._ddp.broadcast_buffers = self._broadcasts


class LocalExchange(ModelExchange):
    """Exchanges what the local steps of each rank have changed."""

    key = "local"
    saves_optimizer: ClassVar[bool] = True
    """Whether a state holds this rank's moments, so that rank 0 can save those of all ranks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: LocalSteps,
        world: World,
        peers: World | None = None,
    ) -> None:
        """Give all ranks rank 0's weights, and hook into the optimizer.

        Args:
            model: The module, of the same shapes on all ranks; in DDP, which then averages nothing.
            optimizer: What changes its parameters.
            settings: How often and how to exchange.
            world: The ranks that train together.
            peers: Those of them that exchange; None is all.
        """
        peers = world if peers is None else peers
        ddp = model if isinstance(model, DDP) else None
        model = model if ddp is None else ddp.module
        self._optimizer = optimizer
        device = next(p for p in model.parameters() if p.requires_grad).device
        # The loop's own group would mix up the collectives of a thread with those of the loop; the
        # thread's group is gloo's, which takes tensors on the CPU, and so may be the loop's.
        if settings.overlap or not peers.exchanges(device):
            device = torch.device("cpu")
        self._settings = settings
        self._weights = FlatWeights(
            model, settings.dense_below, device, with_buffers=settings.buffers == "mean"
        )
        super().__init__(self._weights.parameters, settings.sent, world, peers, device)
        self._channel = peers.side_channel() if settings.overlap else peers
        self._thread = BackgroundThread("gradherd-local-steps") if settings.overlap else None
        self._weights.broadcast(self._channel)
        self._outer = OuterOptimizer(settings, self._weights.read())
        self._taken = 0  # steps since the last exchange began
        self._steps = 0  # steps since the run began
        self._called_off = 0  # exchanges in a row
        self._snapshot: Tensor | None = None  # own weights when the running exchange began
        self._arrival: _Arrival | None = None
        self._loaded: dict[str, Tensor] | None = None  # what a state has just set
        # Last: if something above fails, DDP still averages.
        self._ddp_hook = None if ddp is None else OwnGradients(ddp)
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check that nothing has overwritten what a state has set for this rank."""
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        now = self._own_tensors()
        for name in loaded.keys() & now.keys():  # an optimizer may have been left to begin anew
            if not torch.equal(now[name], loaded[name].to(now[name].device)):
                raise RuntimeError(
                    f"{name} was changed after herd.load_state_dict(), which sets the weights and "
                    "moments of each rank: load the model and the optimizer first, then the herd"
                )

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, and what the optimizer keeps of each."""
        own = {name: local_shard(p) for name, p in self._weights.parameters.items()}
        return own | self._moments()

    def _moments(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps of each parameter, by "parameter/name"."""
        if not self.saves_optimizer:
            return {}
        # Steps and the like are equal on all ranks, and are the framework's to save.
        return {
            f"{name}/{key}": value
            for name, p in self._weights.parameters.items()
            for key, value in self._optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.shape == p.shape
        }

    def _all_moments(self) -> dict[str, Tensor]:
        """Return `_moments` with the same names on all ranks, which may have used other layers."""
        moments = self._moments()
        keys = sorted({name.rsplit("/", 1)[1] for name in moments})
        return {
            f"{name}/{key}": moments.get(f"{name}/{key}", torch.zeros_like(p)).clone()
            for name, p in self._weights.parameters.items()
            for key in keys
        }

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
        shared = self._weights.rounded(self._outer.shared)
        # Without overlap nobody needs the weights again.
        difference = torch.sub(shared, weights, out=None if self._settings.overlap else weights)
        worker.add(0, difference)
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
            reason = getattr(error, "reason", " ".join(str(error).split()))
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
        outcome = result.outcome if self.all_shards_agree(result.outcome is not None) else None
        self._worker.commit(outcome)
        mean = None
        if outcome is not None:
            metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}
            mean = outcome.whole_mean(self.layout.size)
            # Now, not before the next sum: an exchange that is called off must not decay it twice.
            if self._settings.decay != 1:
                self._worker.feedback.residual.mul_(self._settings.decay)
        self._arrival = _Arrival(mean, result.buffers, metrics)

    @torch.no_grad()
    def _apply(self) -> None:
        """Wait for the exchange, move the shared weights and write them into the parameters."""
        self._complete()
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
            new = new + (self._weights.read() - snapshot)
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
        if self.all_shards_agree(bool(self._weights.read().isfinite().all())):
            return  # What this rank has learned is sent with the next exchange.
        log.warning(
            "rank %d: weights are not finite after local step %d; it goes on from the shared "
            "weights, and its optimizer keeps its state",
            self.world.rank,
            self._steps,
        )
        self._weights.write(self._weights.rounded(self._outer.shared))

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are the shared weights."""
        return self._weights.replaced_by(self._outer.shared)

    def _complete(self) -> None:
        """Wait for the thread, which changes the residual."""
        try:
            if self._thread is not None:
                self._thread.wait()
        except RuntimeError:
            self._snapshot = None  # Differences are taken to the shared weights: nothing is lost.
            raise

    def _counts(self) -> dict[str, int]:
        return {"local_steps": self._steps, "exchanges": self._worker.step}

    def _vectors(self) -> dict[str, Tensor]:
        momentum = self._outer.momentum
        outer = {} if momentum is None else {"outer_momentum": momentum}
        return super()._vectors() | {"shared": self._outer.shared} | outer

    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is kept by parameter; within a phase also own weights."""
        vectors = super().vectors()
        if self._has_own_weights:
            vectors["weights"] = self.by_name(self._weights.read())
        if self._snapshot is not None:
            vectors["snapshot"] = self.by_name(self._snapshot)
        return vectors

    @property
    def _has_own_weights(self) -> bool:
        """Whether this rank's weights may differ from the shared ones, as within a phase."""
        return bool(self._taken or self._snapshot is not None or self._called_off)

    def _own_state(self) -> dict[str, Any]:
        state = super()._own_state() | {
            "taken": self._taken,
            "local_steps": self._steps,
            "called_off": self._called_off,
            "optimizer": self._all_moments(),
        }
        if self._has_own_weights:
            buffers = self._weights.buffers()
            state["buffers"] = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        if self._arrival is not None:  # Equal on all ranks, as the shared weights are.
            state["arrival"] = vars(self._arrival).copy()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this model and these settings, and of this rank or merged.

        Raises:
            ValueError: It is not.
        """
        super().check_state(state)
        if "snapshot" in state and not self._settings.overlap:
            raise ValueError(
                "local state has an exchange under way: it was saved with overlap=True, so attach "
                "with overlap=True"
            )

    def _load(self, state: Mapping[str, Any]) -> None:
        """Load a state, and set this rank's weights to what they were."""
        super()._load(state)
        self._taken, self._steps = state["taken"], state["local_steps"]
        self._called_off = state["called_off"]
        self._arrival = self._snapshot = None
        if "snapshot" in state:
            self._snapshot = self.fill(torch.empty_like(self._outer.shared), state["snapshot"])
            self._arrival = _Arrival(**state["arrival"])
        weights = self._weights.rounded(self._outer.shared)
        if "weights" in state:
            weights = self.fill(weights.clone(), state["weights"])
        self._weights.write(weights)
        for name, buffer in self._weights.buffers().items():
            if name in state.get("buffers", {}):
                buffer.detach().copy_(state["buffers"][name])
        moments = self._moments()
        for name, moment in state.get("optimizer", {}).items():
            if name in moments:
                moments[name].copy_(moment)
        # A model or an optimizer that is loaded later would undo it.
        own = {name: tensor.clone() for name, tensor in self._own_tensors().items()}
        self._loaded = dict(state.get("optimizer", {})) | own

    def close(self) -> None:
        """Leave the optimizer alone from now on; parameters stay as they are on each rank."""
        super().close()
        for handle in self._handles:
            handle.remove()
        if self._ddp_hook is not None:
            self._ddp_hook.close()
        if self._thread is not None:
            self._thread.close()
            self._channel.close_side_channel()


class ShardedLocalExchange(ShardedExchange, LocalExchange):
    """Exchanges what the local steps of each replica of a sharded model have changed.

    Inside a replica `fully_shard` averages gradients at every step. Between replicas nothing is
    sent but the difference of each shard to its shared weights, by the ranks that hold the same
    shard in all replicas, as ranks with plain modules do it with whole weights.
    """

    saves_optimizer = False  # DCP saves the shards of an optimizer

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: LocalSteps,
        worlds: ShardedWorlds,
        world: World,
    ) -> None:
        """Give all replicas the weights of the first, and hook into the optimizer.

        Args:
            model: The model, on which `fully_shard` was called with the shard dimension alone.
            optimizer: What changes its shards.
            settings: How often and how to exchange.
            worlds: Which ranks hold the shards, and which the replicas.
            world: All of them.
        """
        self.shards = worlds.shard
        LocalExchange.__init__(self, model, optimizer, settings, world, worlds.replicate)

    @property
    def _has_own_weights(self) -> bool:
        return True  # DCP asks a fresh herd which entries to read.
