"""Local steps: a hook of the optimizer counts, and every H-th step exchanges.

After its last step of a phase every rank sends what differs from the shared weights, and goes on
from the new shared weights, less what rounding took from its own difference (`local.exchange`). Of
a sharded module (FSDP2) the vectors hold this rank's shards, which its replicas exchange. With
`overlap` the exchange runs in a thread, on a GPU on a stream of its own, and what a rank has
learned meanwhile is kept.
"""

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.checks import TrainingDiverged
from gradherd.comm.world import World
from gradherd.flat import local_shard
from gradherd.gpu import SideStream, on_cpu
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.exchange import ModelExchange
from gradherd.hooks.flat_weights import FlatWeights
from gradherd.hooks.fsdp import ShardedWorlds
from gradherd.hooks.parameter_hooks import check_stepped, watch_steps
from gradherd.local.exchange import Arrival, OutOfStep, SharedWeights
from gradherd.local.settings import LocalSteps
from gradherd.torch_names import not_compiled

log = logging.getLogger("gradherd")
# A rank whose optimizer holds NaN breaks every exchange: end such a run instead of going on.
MAX_CALLED_OFF = 3
"""Exchanges in a row that may be called off."""
PATIENCE = 10
"""Warn after this many phases of steps by untracked optimizers."""


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
        self._optimizer, self._settings = optimizer, settings
        device = next(p for p in model.parameters() if p.requires_grad).device
        peers = world if sharded is None else sharded.replicate
        if settings.overlap and device.type != "cuda":
            device = torch.device("cpu")  # other devices have no `SideStream`
        # The loop's own group would mix up the collectives of a thread with those of the loop.
        self._channel = peers.side_channel(device) if settings.overlap else peers
        if not self._channel.exchanges(device):
            device = torch.device("cpu")
        self._side = SideStream(device)
        self._weights = weights = FlatWeights(model, settings.dense_below, device)
        super().__init__(weights.parameters, settings.dense_below, world, sharded, device)
        log.info(
            "local steps: %s; AdamW wants the learning rate of dense training times %.3g, SGD %.3g",
            settings,
            settings.lr_factor(peers.size),
            settings.lr_factor(peers.size, "sgd"),
        )
        self._thread = BackgroundThread("gradherd-local-steps") if settings.overlap else None
        weights.broadcast(self._channel)
        self._shared = SharedWeights(
            settings,
            self.layout.sparse,
            self.layout.whole,
            weights.buffer_elements,
            self._channel,
            dtype=weights.dtype,
            device=device,
            shards=self.shards,
        )
        weights.gap = self._shared.length - self.layout.sparse
        self._shared.start(weights.read())
        self._steps = 0  # since the run began
        self._taken = 0  # since the last exchange began
        self._untracked = 0  # steps of other optimizers, since the last exchange began
        self._exchanges = self._skipped = 0
        self._called_off = 0  # exchanges in a row
        self._synced = True  # start == shared (nothing kept locally)
        self._arrival: Arrival | None = None  # of an exchange that runs beside the steps
        self._deferred: Arrival | None = None  # was applied; the host does not know if it counted
        self._set_by = "attach()"  # or by a state
        self._set: dict[str, Tensor] | None = self._fingerprints()  # until a step may change it
        # Last: if something above fails, DDP still averages.
        self._ddp_hook = None if ddp is None else OwnGradients(ddp)
        self._handles = [
            # Of all optimizers: whichever comes first, weights must be those that were set.
            *watch_steps(model, self, LocalExchange._before_step),
            optimizer.register_step_post_hook(not_compiled(self._after_step)),
        ]

    # Steps.

    def _before_step(self, optimizer: Optimizer) -> None:
        """Check that nothing has overwritten what was set for this rank, and who steps."""
        if optimizer is not self._optimizer:
            self._untracked += 1
            if self._untracked == PATIENCE * self._settings.every and self.world.rank == 0:
                log.warning(
                    "nothing was exchanged for %d steps of an optimizer that local steps do not "
                    "count: attach with the optimizer that trains the model",
                    self._untracked,
                )
        else:
            check_stepped(optimizer, self.parameters.values())
        expected, self._set = self._set, None
        if expected is None:
            return
        now = self._fingerprints()
        for name in expected.keys() & now.keys():  # an optimizer may have been left to begin anew
            if not torch.equal(now[name], expected[name]):
                raise RuntimeError(
                    f"{name} was changed after {self._set_by}, which sets the weights and moments "
                    "of each rank: load the model and the optimizer first"
                )

    def _fingerprints(self) -> dict[str, Tensor]:
        """Return a few numbers of each parameter, and of what the optimizer keeps of it."""
        own = {name: local_shard(p) for name, p in self.parameters.items()} | self._moments()
        return {name: _fingerprint(tensor.detach()) for name, tensor in own.items()}

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._taken += 1
        self._steps += 1
        with self.stopwatch:
            if self._arrival is not None and self._taken >= self._settings.steps_until_applied:
                self._finish()
            if self._taken >= self._settings.every:
                self._begin(forced=False)

    def sync(self) -> None:
        """Exchange now, also within a phase; afterwards all ranks have equal weights."""
        with self.stopwatch:
            if self._arrival is not None:
                self._finish()
            self._settle()
            if self._taken or self._called_off or self._untracked:
                self._begin(forced=True)
            elif not self._synced:  # what this rank owes waits beside its weights
                shared, own = self._shared.outer.shared, self._weights.read()
                unsent = torch.sub(shared, own, out=own)
                self._shared.owed = [sum(self._shared.owed or [], start=unsent)]
                self._write(shared)
                self._synced = True

    # An exchange.

    @torch.no_grad()
    def _begin(self, *, forced: bool) -> None:
        """Exchange what the steps since the last exchange have changed, and take over the result.

        With `overlap` the exchange goes on in the thread, and later steps take over its result. If
        `forced`, `sync` asks for it, which it must on all ranks.
        """
        if self._deferred is not None:
            self._settle()
        self._weights.check_trainable()
        own, buffers = self._shared.room(), self._weights.read_buffers()
        self._weights.read(own[0])
        position, steps = (self._steps, int(forced)), self._taken
        self._taken = 0
        # The next steps have not moved the weights that `sync` makes equal.
        beside = self._thread is not None and not forced
        if self._thread is None:
            try:
                self._arrival = self._exchange(own, buffers, position)
            except BaseException:
                self._taken = steps
                raise
        else:
            self._arrival = Arrival(own)
            on_side = self._side.after_this()

            def job() -> None:
                with on_side:
                    self._arrival = self._exchange(own, buffers, position)

            self._thread.submit(job)
        self._untracked = 0
        if not beside:
            self._finish(synced=forced)

    def _exchange(
        self, own: list[Tensor], buffers: Tensor | None, position: tuple[int, int]
    ) -> Arrival:
        """Run the exchange, here or in the thread."""
        rows, beside = None if buffers is None else [buffers], self._thread is not None
        try:
            return self._shared.exchange(
                own, rows, position, delta=beside and not position[1], defers=not beside
            )
        except OutOfStep as error:
            raise _out_of_step(error) from None
        except RuntimeError as error:
            reason = getattr(error, "reason", " ".join(str(error).split()))
            raise RuntimeError(
                f"the exchange after local step {position[0]} failed: a rank has died, or is later "
                f"than the process group's timeout of {self.world.timeout().total_seconds():g} s "
                f"({reason})"
            ) from error
        finally:
            self.total_bytes += self._shared.bytes

    @torch.no_grad()
    def _finish(self, *, synced: bool = False) -> None:
        """Wait for the exchange and go on from the new shared weights.

        Args:
            synced: Whether all ranks go on with equal weights.
        """
        if self._thread is not None:
            self._complete()
        arrival, self._arrival = self._arrival, None
        assert arrival is not None
        if arrival.ready is None and not self._counts(arrival):
            return
        (new,) = arrival.weights
        adds = self._thread is not None and not synced
        self._write(new, adds=adds)
        if arrival.buffers is not None:
            self._weights.write_buffers(arrival.buffers)
        # A sum is rounded: ranks whose weights should be the shared ones may differ in a last bit.
        self._synced = synced or not (self._settings.keep_residual or adds)
        self._deferred = None if arrival.ready is None else arrival

    def _settle(self) -> None:
        """Learn whether the last exchange has counted, where only the GPU knew."""
        arrival, self._deferred = self._deferred, None
        if arrival is not None:
            self._counts(arrival)

    def _counts(self, arrival: Arrival) -> bool:
        """Return whether an exchange counts; if it does not, see that this rank can go on."""
        try:
            if arrival.ready is not None:
                self._shared.verdict(arrival)
        except OutOfStep as error:
            raise _out_of_step(error) from None
        assert arrival.ok is not None
        if arrival.ok[0]:
            self._called_off = 0
            self._exchanges += 1
            self._metrics = {
                "density": 1.0,
                "padding": 1.0,
                "bytes": self._shared.bytes,
                "exchanges": self._exchanges,
            }
            return True
        self._skipped += 1
        self._called_off += 1
        if self._called_off >= MAX_CALLED_OFF:
            raise TrainingDiverged(
                f"differences were not finite in {self._called_off} exchanges in a row: training "
                "has diverged; try a lower learning rate, a warm-up or gradient clipping"
            )
        finite = self._weights.read().isfinite().all().to(torch.int32)
        if not self._shared.all_shards(finite.cpu().view(1)):
            log.warning(
                "rank %d: weights are not finite after local step %d; it goes on from the shared "
                "weights, and its optimizer keeps its state",
                self.world.rank,
                self._steps,
            )
            self._write(self._shared.outer.shared)
        return False

    def _complete(self) -> None:
        """Wait for the thread, which changes what is kept between exchanges."""
        try:
            if self._thread is not None:
                self._thread.wait()
        except RuntimeError:
            self._arrival = None  # Differences are taken to the shared weights: nothing is lost.
            raise

    def _write(self, flat: Tensor, *, adds: bool = False) -> None:
        """Set this rank's weights, or add to them; what their dtypes cannot hold is owed."""
        if adds and self._weights.is_wide:
            self._weights.add(flat)
            return
        if adds:
            flat = self._weights.read().add_(flat)
        self._weights.write(flat)
        if not self._weights.is_wide:
            self._shared.owe_rounding([flat], [self._weights.read()])

    def shared_weights(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which parameters are the shared weights."""
        self._complete()
        return self._weights.replaced_by(self._shared.outer.shared)

    # Metrics.

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last exchange."""
        if self._thread is not None:
            # Its error is for the next step: this rank may log alone, after its peers have gone.
            self._thread.wait(raises=False)
        self._settle()
        return super().last_step()

    def _totals(self) -> dict[str, Any]:
        squares = self._shared.squares
        return {
            "residual_norm": 0.0 if squares is None else math.sqrt(float(squares)),
            "local_steps": self._steps,
            "exchanges": self._exchanges,
            "skipped_steps": self._skipped,
        }

    # States.

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        return self._weights.views(flat)

    def _vectors(self) -> dict[str, Tensor]:
        outer = self._shared.outer
        momentum = {} if outer.momentum is None else {"outer_momentum": outer.momentum}
        return {"shared": outer.shared, **momentum}

    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is kept by parameter."""
        self._complete()
        (residual,) = self._shared.residuals()
        vectors = super().vectors() | {"residual": self.by_name(residual)}
        if (error := self._shared.means[0].spread_error()) is not None:
            whole = torch.zeros_like(self._shared.outer.shared)
            whole[: len(error)] = error
            vectors["owner_error"] = self.by_name(whole)
        # DCP asks a fresh herd with a sharded model which entries to read.
        at_start = self._synced and not (self._taken or self._untracked or self._called_off)
        if self.sharded or not at_start or self._arrival is not None:
            vectors["weights"] = self.by_name(self._weights.read())
        if self._arrival is not None:
            vectors["arrival"] = self.by_name(self._arrival.weights[0])
        return vectors

    def _identity(self) -> dict[str, Any]:
        world = {"rank": self.peers.rank, "workers": self.peers.size}
        return {"kind": self._settings.values, **world, "dim": self.layout.sparse}

    def _own_state(self) -> dict[str, Any]:
        self._complete()
        self._settle()
        state = self._identity() | {
            "step": self._exchanges,
            "skipped": self._skipped,
            "taken": self._taken,
            "local_steps": self._steps,
            "called_off": self._called_off,
            "synced": self._synced,
            "optimizer": self._all_moments(),
            **self.vectors(),
        }
        if not self.sharded:
            state["used"] = self._used()
        if "weights" in state:
            buffers = self._weights.buffers()
            state["buffers"] = {name: buffer.detach().clone() for name, buffer in buffers.items()}
        if (arrival := self._arrival) is not None:
            assert arrival.ok is not None
            state["arrived"] = {"counts": bool(arrival.ok[0]), "buffers": arrival.buffers}
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Check that a state is of this model and these settings, and of this rank or merged."""
        super().check_state(state)
        merged = state.get("rank", 0) is None
        for key, own in self._identity().items():
            if not (merged and key in ("rank", "workers")) and state.get(key) != own:
                raise ValueError(f"{self.key} state has {key} {state.get(key)!r}, expected {own!r}")
        if "arrived" in state and not self._settings.overlap:
            raise ValueError(
                "local state has an exchange under way: it was saved with overlap=True, so attach "
                "with overlap=True"
            )

    def _needed(self) -> tuple[str, ...]:
        """Those of the base, and where this rank was."""
        keys = ("step", "taken", "local_steps", "called_off", "synced", "residual")
        return keys if self.sharded else (*keys, "used")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state, and set this rank's weights to what they were."""
        self._complete()
        super().load_state_dict(state)
        self._taken, self._steps = state["taken"], state["local_steps"]
        self._called_off, self._untracked = state["called_off"], 0
        self._exchanges, self._skipped = state["step"], state["skipped"]
        self._synced = state["synced"]
        self._arrival = self._deferred = None
        shared, few = self._shared.outer.shared, self._shared.means[0]
        owed = self.fill(torch.zeros_like(shared), state["residual"])
        if few.error is not None and "owner_error" in state:
            lost = self.fill(torch.zeros_like(shared), state["owner_error"])
            own = slice(few.rank * few.slice, (few.rank + 1) * few.slice)
            few.error.copy_(lost[: few.length][own])
            if state["rank"] is None:
                # Slices are other ones now: what their owners have lost is sent by all workers.
                few.error.zero_()
                owed += lost
        elif "owner_error" in state:  # one worker alone owns nothing
            owed += self.fill(torch.zeros_like(shared), state["owner_error"])
        self._shared.owed = [owed] if owed.any() else None
        if "arrived" in state:
            counts, arrived = state["arrived"]["counts"], state["arrived"]["buffers"]
            self._arrival = Arrival(
                [self.fill(torch.zeros_like(shared), state["arrival"])],
                torch.full((2,), int(counts), dtype=torch.int32),
                None if arrived is None else arrived.to(self.device),
            )
        if "weights" in state:
            self._weights.write(self.fill(torch.zeros_like(shared), state["weights"]))
        else:
            self._weights.write(shared)
        for name, buffer in self._weights.buffers().items():
            if name in state.get("buffers", {}):
                buffer.detach().copy_(state["buffers"][name])
        # Empty before the optimizer's first step: gathered states leave that out.
        if not self.sharded:
            self._load_optimizer(state.get("optimizer", {}), state["used"])
        # A model or an optimizer that is loaded later would undo it.
        self._set_by, self._set = "herd.load_state_dict()", self._fingerprints()

    # The optimizer's own state.

    def _moments(self) -> dict[str, Tensor]:
        """Return what the optimizer keeps of each parameter in its shape, by "parameter/name"."""
        if self.sharded:
            return {}  # DCP saves the shards of an optimizer
        return {
            f"{name}/{key}": value
            for name, p in self.parameters.items()
            for key, value in self._optimizer.state.get(p, {}).items()
            # A parameter without dimensions has the shape of the count of its steps.
            if isinstance(value, Tensor) and value.shape == p.shape and key != "step"
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
            for name, p in self.parameters.items()
            if p in state
        }

    def _all_moments(self) -> dict[str, Tensor]:
        """Return `_moments` with the same names on all ranks, which may have used other layers."""
        moments = self._moments()
        keys = sorted({name.rsplit("/", 1)[1] for name in moments})
        return {
            f"{name}/{key}": moments.get(f"{name}/{key}", torch.zeros_like(p)).clone()
            for name, p in self.parameters.items()
            for key in keys
        }

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
        for name, p in self.parameters.items():
            if not (kept := used.get(name)):
                state.pop(p, None)
                continue
            for key, value in kept.items():
                value = moments.get(f"{name}/{key}", value)
                if isinstance(value, Tensor):
                    like = p if value.shape == p.shape and key != "step" else likes.get(key, p)
                    value = value.to(state[p].get(key, like), copy=True)
                state[p][key] = value

    def close(self) -> None:
        """Leave the optimizer alone from now on; parameters stay as they are on each rank.

        Raises:
            RuntimeError: The last exchange, which ran beside the steps, has failed.
        """
        super().close()
        for handle in self._handles:
            handle.remove()
        if self._ddp_hook is not None:
            self._ddp_hook.close()
        if self._thread is not None:
            try:
                self._thread.wait()
            finally:
                self._thread.close()
                self._channel.close_side_channel()
        self._settle()


def _out_of_step(error: OutOfStep) -> RuntimeError:
    return RuntimeError(
        "ranks have taken different numbers of steps, or not all of them have called "
        f"sync(): [steps, sync()] of each rank are {error}"
    )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Return a few numbers, on the CPU, that differ if any element of a tensor was changed."""
    flat = tensor.reshape(-1)
    ends = [flat[:2], flat[-2:]]
    numbers = [flat.sum(dtype=torch.float64), torch.linalg.vector_norm(flat, dtype=torch.float64)]
    whole = torch.cat([torch.stack(numbers), *(end.double() for end in ends)])
    return whole.view(torch.int64).cpu()  # as bits: NaN equals itself
