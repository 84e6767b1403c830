"""Local steps: a hook of the optimizer counts, and every H-th step exchanges.

The exchange is that of gradients (`sparsify.worker`), with the difference between shared and own
weights in the place of the gradient. Then every rank goes on from the new shared weights, less what
rounding took from its own difference. Of a sharded module (FSDP2) the vectors hold this rank's
shards, which its replicas exchange. With `overlap` the exchange runs in a thread, on a GPU on a
stream of its own, and what a rank has learned meanwhile is added to the weights it goes on from.

Shapes: D elements of all trainable parameters, B of all floating-point buffers.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.checks import TrainingDiverged
from gradherd.comm.collectives import all_gather, broadcast
from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.flat import FlatSpec, exchangeable, local_shard, plain_name, wide_dtype
from gradherd.gpu import SideStream
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.exchange import ModelExchange
from gradherd.hooks.fsdp import ShardedWorlds, fsdp_modules
from gradherd.hooks.parameter_hooks import watch_steps
from gradherd.sparsify.local import LocalSteps, OuterOptimizer, average_buffers
from gradherd.sparsify.worker import on_cpu
from gradherd.torch_names import copy_all

log = logging.getLogger("gradherd")
# A rank whose optimizer holds NaN breaks every exchange: end such a run instead of going on.
MAX_CALLED_OFF = 3
"""Exchanges in a row that may be called off."""
PATIENCE = 10
"""Phases' worth of steps that other optimizers may take without an exchange before that is said."""


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
        super().__init__(ddp, World.of(ddp.process_group))
        self._ddp, self._broadcasts = ddp, ddp.broadcast_buffers
        ddp.broadcast_buffers = False  # rank 0's at every forward; LocalSteps averages them

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Leave all buckets as they are."""

    def close(self) -> None:
        """Leave DDP, which averages by itself from now on."""
        super().close()
        self._ddp.broadcast_buffers = self._broadcasts


class LocalExchange(ModelExchange):
    """Exchanges what the local steps of each rank have changed."""

    key = "local"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        settings: LocalSteps,
        world: World,
        sharded: ShardedWorlds | None,
    ) -> None:
        """Give all ranks rank 0's weights, or its shards of them, and hook into the optimizer.

        DDP, if the model is wrapped in it, averages nothing from now on.
        """
        ddp = model if isinstance(model, DDP) else None
        model = model if ddp is None else ddp.module
        self._optimizer = optimizer
        device = next(p for p in model.parameters() if p.requires_grad).device
        peers = world if sharded is None else sharded.replicate
        if settings.overlap and device.type != "cuda":
            device = torch.device("cpu")  # other devices have no `SideStream`
        # The loop's own group would mix up the collectives of a thread with those of the loop.
        self._channel = peers.side_channel(device) if settings.overlap else peers
        if not self._channel.exchanges(device):
            device = torch.device("cpu")
        self._side = SideStream(device)
        self._settings = settings
        self._weights = FlatWeights(model, settings.dense_below, device)
        super().__init__(self._weights.parameters, settings.sent, world, sharded, device)
        log.info(
            "local steps: %s; AdamW wants the learning rate of dense training times %.3g, SGD %.3g",
            settings,
            settings.lr_factor(peers.size),
            settings.lr_factor(peers.size, "sgd"),
        )
        self._thread = BackgroundThread("gradherd-local-steps") if settings.overlap else None
        self._weights.broadcast(self._channel)
        self._outer = OuterOptimizer(settings, self._weights.read())
        self._taken = 0  # steps since the last exchange began
        self._steps = 0  # steps since the run began
        self._strange_steps = 0  # of other optimizers, since the last exchange began
        self._called_off = 0  # exchanges in a row
        self._synced = True  # whether this phase began with the shared weights themselves
        self._snapshot: Tensor | None = None  # own weights when the running exchange began
        self._arrival: _Arrival | None = None
        self._set_by = "attach()"  # or by a state
        self._set: dict[str, Tensor] | None = self._copy_tensors()  # until a step may change it
        # Last: if something above fails, DDP still averages.
        self._ddp_hook = None if ddp is None else OwnGradients(ddp)
        self._handles = [
            # Of all optimizers: whichever comes first, weights must be those that were set.
            *watch_steps(model, self, LocalExchange._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def _before_step(self, optimizer: Optimizer) -> None:
        """Check that nothing has overwritten what was set for this rank, and who steps."""
        if optimizer is not self._optimizer:
            self._strange_steps += 1
            if self._strange_steps == PATIENCE * self._settings.every and self.world.rank == 0:
                log.warning(
                    "nothing was exchanged for %d steps of an optimizer that local steps do not "
                    "count: attach with the optimizer that trains the model",
                    self._strange_steps,
                )
        expected, self._set = self._set, None
        if expected is None:
            return
        now = self._own_tensors()
        for name in expected.keys() & now.keys():  # an optimizer may have been left to begin anew
            if not torch.equal(now[name], expected[name].to(now[name].device)):
                raise RuntimeError(
                    f"{name} was changed after {self._set_by}, which sets the weights and moments "
                    "of each rank: load the model and the optimizer first"
                )

    def _copy_tensors(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._own_tensors().items()}

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name, and what the optimizer keeps of each."""
        own = {name: local_shard(p) for name, p in self._weights.parameters.items()}
        return own | self._moments()

    def _moments(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps of each parameter in its shape, by "parameter/name"."""
        if self.sharded:
            return {}  # DCP saves the shards of an optimizer
        return {
            f"{name}/{key}": value
            for name, p in self._weights.parameters.items()
            for key, value in self._optimizer.state.get(p, {}).items()
            if isinstance(value, Tensor) and value.shape == p.shape
        }

    def _used(self) -> dict[str, dict[str, Any]]:
        """Return, of each parameter that this rank has stepped, what else its optimizer keeps.

        That is small: the step, sums of rows and columns. None stands for a moment.
        """
        moments, state = self._moments(), self._optimizer.state
        return {
            name: {
                key: None if f"{name}/{key}" in moments else on_cpu(value)
                for key, value in state[p].items()
                if isinstance(value, Tensor | int | float)
            }
            for name, p in self._weights.parameters.items()
            if p in state
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

    def sync(self) -> None:
        """Exchange now, also within a phase; afterwards all ranks have equal weights."""
        with self.stopwatch:
            if self._snapshot is not None:
                self._apply()
            if self._taken or self._called_off or self._strange_steps:
                self._begin(forced=True)
            elif not self._synced:  # what this rank owes stays in its residual
                self._synced = True
                self._weights.write(self._start())

    def _start(self) -> Tensor:
        """Return (D,) the weights with which this phase began."""
        shared = self._outer.shared
        return self._weights.rounded(shared if self._synced else shared - self._residual)

    @torch.no_grad()
    def _begin(self, *, forced: bool) -> None:
        """Exchange what the steps since the last exchange have changed, and take over the result.

        With `overlap` the exchange goes on in the thread, and later steps take over its result. If
        `forced`, `sync` asks for it, which it must on all ranks.
        """
        self._weights.check_trainable()
        own = self._weights.read()
        self._worker.begin(1.0)
        # Without overlap nobody needs the weights again.
        self._worker.add(0, torch.sub(self._start(), own, out=None if self._thread else own))
        at, buffers = (self._steps, int(forced)), self._weights.read_buffers()
        if self._thread is None:
            del own  # The exchange is where memory is highest.
            self._exchange(at, buffers)
        else:
            self._thread.submit(self._beside(at, buffers))
            self._snapshot = own
        self._taken = self._strange_steps = 0  # not if the exchange has failed
        if self._thread is None or forced:
            self._apply(synced=forced)

    def _beside(self, at: tuple[int, int], buffers: Tensor | None) -> Callable[[], None]:
        """Return `_exchange` as a job of the thread."""
        on_side, worker = self._side.after_this(), self._worker

        def job() -> None:
            # The exchange replaces both, which this loop may have allocated: their memory must not
            # return to the loop's stream while the side stream still reads it.
            replaced = worker.owner_error, worker.state
            with on_side:
                self._exchange(at, buffers)
            del replaced

        return job

    def _exchange(self, at: tuple[int, int], buffers: Tensor | None) -> None:
        """Run the exchange, here or in the thread, and keep its result until it is applied.

        Args:
            at: Steps of this rank, and whether `sync` asks: the same on all ranks.
            buffers: This rank's (B,) buffers; None without any.
        """
        averaged, more = None, 0
        try:
            own = torch.tensor(at, device=self._weights.device)
            positions, compared = all_gather(own, self._channel)
            # Ranks that have lost count of their steps would take one message for another.
            together = bool((positions == positions[0]).all())
            outcome, sent = run(self._worker.script(), self._channel) if together else (None, 0)
            if outcome is not None and buffers is not None:
                averaged, more = run(average_buffers(buffers, self._channel.size), self._channel)
        except RuntimeError as error:
            reason = getattr(error, "reason", " ".join(str(error).split()))
            raise RuntimeError(
                f"the exchange after local step {at[0]} failed: a rank has died, or is later "
                f"than the process group's timeout of {self.world.timeout().total_seconds():g} s "
                f"({reason})"
            ) from error
        if not together:
            raise RuntimeError(
                "ranks have taken different numbers of steps, or not all of them have called "
                f"sync(): [steps, sync()] of each rank are {positions.tolist()}"
            )
        sent += compared + more
        self.total_bytes += sent
        outcome = outcome if self.all_shards_agree(outcome is not None) else None
        self._worker.commit(outcome)
        if outcome is None:
            self._arrival = _Arrival(None, None, {})
            return
        # Now, not before the next sum: an exchange that is called off must not decay it twice.
        if self._settings.decay != 1:
            self._worker.decay(self._settings.decay)
        metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}
        self._arrival = _Arrival(outcome.whole_mean(self.layout.size), averaged, metrics)

    @torch.no_grad()
    def _apply(self, *, synced: bool = False) -> None:
        """Wait for the exchange, move the shared weights and go on from them.

        Args:
            synced: Whether all ranks go on with equal weights.
        """
        self._complete()
        arrival, snapshot = self._arrival, self._snapshot
        self._arrival = self._snapshot = None
        assert arrival is not None
        if arrival.mean is None:
            self._go_on_alone()
            return
        for arrived in (arrival.mean, arrival.buffers):
            if arrived is not None and arrived.is_cuda:
                # The side stream has allocated it, and would have it back before this one has read
                # it.
                arrived.record_stream(torch.cuda.current_stream(arrived.device))
        self._metrics = arrival.metrics | {"exchanges": self._worker.step}
        self._called_off = 0
        self._outer.step(arrival.mean)
        self._synced = synced or not self._settings.keep_residual
        new = self._start()
        if snapshot is not None:
            # What this rank has learned since then; nothing right after `_begin`, so that `sync`
            # leaves equal bits on all ranks.
            new = new + (self._weights.read() - snapshot)
        self._weights.write(new)
        if arrival.buffers is not None:
            self._weights.write_buffers(arrival.buffers)

    def _complete(self) -> None:
        """Wait for the thread, which changes the worker."""
        try:
            if self._thread is not None:
                self._thread.wait()
        except RuntimeError:
            self._snapshot = None  # Differences are taken to the shared weights: nothing is lost.
            raise

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
            "rank %d: weights are not finite after local step %d; it goes on from where this phase "
            "began, and its optimizer keeps its state",
            self.world.rank,
            self._steps,
        )
        self._weights.write(self._start())

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are the shared weights."""
        return self._weights.replaced_by(self._outer.shared)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last exchange, and totals so far."""
        if self._thread is not None:
            # Its error is for the next step: this rank may log alone, after its peers have gone.
            self._thread.wait(raises=False)
        return super().metrics()

    def _counts(self) -> dict[str, int]:
        return {"local_steps": self._steps, "exchanges": self._worker.step}

    def _vectors(self) -> dict[str, Tensor]:
        momentum = self._outer.momentum
        outer = {} if momentum is None else {"outer_momentum": momentum}
        return super()._vectors() | {"shared": self._outer.shared} | outer

    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is kept by parameter; within a phase also own weights."""
        self._complete()
        vectors = super().vectors()
        if self._has_own_weights:
            vectors["weights"] = self.by_name(self._weights.read())
        if self._snapshot is not None:
            vectors["snapshot"] = self.by_name(self._snapshot)
        return vectors

    @property
    def _has_own_weights(self) -> bool:
        """Whether this rank's weights may differ from the shared ones."""
        # DCP asks a fresh herd with a sharded model which entries to read.
        steps = self._taken or self._strange_steps or self._called_off
        return bool(self.sharded or steps or self._snapshot is not None or not self._synced)

    def _own_state(self) -> dict[str, Any]:
        self._complete()
        state = super()._own_state() | {
            "taken": self._taken,
            "local_steps": self._steps,
            "called_off": self._called_off,
            "synced": self._synced,
            "optimizer": self._all_moments(),
        }
        if not self.sharded:
            state["used"] = self._used()
        if self._has_own_weights:
            buffers = self._weights.buffers()
            state["buffers"] = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        if self._arrival is not None:  # Equal on all ranks, as the shared weights are.
            state["arrival"] = vars(self._arrival).copy()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this model and these settings, and of this rank or merged."""
        super().check_state(state)
        if "snapshot" in state and not self._settings.overlap:
            raise ValueError(
                "local state has an exchange under way: it was saved with overlap=True, so attach "
                "with overlap=True"
            )

    def _needed(self) -> tuple[str, ...]:
        """Those of the base, and where this rank was."""
        keys = (*super()._needed(), "taken", "local_steps", "called_off", "synced")
        return keys if self.sharded else (*keys, "used")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and set this rank's weights to what they were."""
        self._complete()
        super().load_state_dict(state)
        self._taken, self._steps = state["taken"], state["local_steps"]
        self._called_off, self._strange_steps = state["called_off"], 0
        self._synced = state["synced"]
        self._arrival = self._snapshot = None
        if "snapshot" in state:
            self._snapshot = self.fill(torch.empty_like(self._outer.shared), state["snapshot"])
            arrived: dict[str, Any] = {
                key: one.to(self._weights.device) if isinstance(one, Tensor) else one
                for key, one in state["arrival"].items()
            }
            self._arrival = _Arrival(**arrived)
        weights = self._start()
        if "weights" in state:
            weights = self.fill(weights.clone(), state["weights"])
            if not self._synced and self._snapshot is None:
                # Errors of owners that are none any more went into the residual, so into the start
                # of this phase, too; what a rank has learned since then must not change.
                saved = self.fill(torch.empty_like(weights), state["residual"])
                weights += saved - self._residual
        self._weights.write(weights)
        for name, buffer in self._weights.buffers().items():
            if name in state.get("buffers", {}):
                buffer.detach().copy_(state["buffers"][name])
        # Empty before the optimizer's first step: gathered states leave that out.
        moments = state.get("optimizer", {})
        if not self.sharded:
            self._load_optimizer(moments, state["used"])
        # A model or an optimizer that is loaded later would undo it.
        self._set_by = "herd.load_state_dict()"
        self._set = dict(moments) | self._copy_tensors()

    @torch.no_grad()
    def _load_optimizer(
        self, moments: Mapping[str, Tensor], used: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Let the optimizer go on with what this rank has kept: it may be another rank's.

        `moments` and `used` are what `_all_moments` and `_used` returned.
        """
        state = self._optimizer.state
        likes = {key: value for kept in state.values() for key, value in kept.items()}
        if not likes:
            return  # It was left to begin anew.
        for name, p in self._weights.parameters.items():
            if not (kept := used.get(name)):
                state.pop(p, None)
                continue
            for key, value in kept.items():
                value = moments.get(f"{name}/{key}", value)
                if isinstance(value, Tensor):
                    like = p if value.shape == p.shape else likes.get(key, p)
                    value = value.to(state[p].get(key, like), copy=True)
                state[p][key] = value

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


class FlatWeights:
    """Reads and writes the weights of a module as vectors on the device of an exchange.

    Parameters with fewer than `dense_below` elements come last in the vector.
    """

    def __init__(self, model: nn.Module, dense_below: int, device: torch.device) -> None:
        self._model = model
        self.parameters = exchangeable(model.named_parameters())
        self.layout = FlatSpec.small_last(self.parameters, dense_below)
        self._shardings = [module for _, module in fsdp_modules(model)]
        self.device, self.dtype = device, wide_dtype(self.parameters.values())

    @torch.no_grad()
    def broadcast(self, world: World) -> None:
        """Give all ranks the parameters and buffers of rank 0, as DDP does when it is made."""
        for tensor in map(local_shard, [*self._model.parameters(), *self._model.buffers()]):
            if world.size == 1 or not tensor.numel():
                continue
            # As bytes: every dtype can be sent, and nothing is rounded.
            flat = tensor.detach().to(self.device, copy=True).reshape(-1).contiguous()
            received = broadcast(flat.view(torch.uint8), world).value.view(flat.dtype)
            tensor.copy_(received.view(tensor.shape))

    def check_trainable(self) -> None:
        """Refuse parameters that were frozen when the layout was made: nobody would send them."""
        for module in self._shardings:
            module.reshard()
        known = {id(p) for p in self.parameters.values()}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise RuntimeError(
                    f"{name} was frozen or missing when local steps were attached and is trained "
                    "now: detach and attach again"
                )

    def read(self) -> Tensor:
        """Return (D,) the parameters."""
        flat = torch.empty(self.layout.size, dtype=self.dtype, device=self.device)
        copy_all(*self._pairs(flat))
        return flat

    def _pairs(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts of a (D,) vector, and what this rank holds of each parameter."""
        views = self.layout.views(flat)
        return list(views.values()), [local_shard(self.parameters[name]) for name in views]

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Set the parameters to those of a (D,) vector."""
        for module in self._shardings:
            module.reshard()  # Whole parameters that an evaluation has left would be stale.
        parts, shards = self._pairs(flat)
        copy_all(shards, parts)

    def rounded(self, flat: Tensor) -> Tensor:
        """Return a (D,) vector as the parameters' dtypes can hold it: itself, or a copy."""
        if all(p.dtype == self.dtype for p in self.parameters.values()):
            return flat
        flat = flat.clone()
        for part, shard in zip(*self._pairs(flat), strict=True):
            if shard.dtype != self.dtype:
                part.copy_(part.to(shard.dtype))
        return flat

    @contextlib.contextmanager
    def replaced_by(self, flat: Tensor) -> Iterator[None]:
        """Let the parameters be those of a (D,) vector inside; restore them and all buffers."""
        before_write = self.read()
        # All of them, also integer ones such as num_batches_tracked.
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._model.buffers()]
        try:
            self.write(flat)
            yield
        finally:
            self.write(before_write)
            # What runs inside may have changed them: statistics, or a broadcast for evaluation.
            for buffer, before in buffers:
                buffer.detach().copy_(before)

    def buffers(self) -> dict[str, Tensor]:
        """Return the floating-point buffers by name."""
        # Asked again each time: modules may replace their buffers.
        return float_buffers(self._model)

    def read_buffers(self) -> Tensor | None:
        """Return (B,) the buffers; None without any."""
        # Running statistics are averaged like weights, in at least float32.
        flat = [b.detach().to(self.device, self.dtype).reshape(-1) for b in self.buffers().values()]
        return torch.cat(flat) if flat else None

    @torch.no_grad()
    def write_buffers(self, flat: Tensor) -> None:
        """Set the buffers to those of a (B,) vector."""
        buffers = list(self.buffers().values())
        for buffer, piece in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
            buffer.copy_(piece.view(buffer.shape))


def float_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers by name."""
    return {
        plain_name(name): buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and buffer.numel()
    }
