"""Base class of gradient and weight exchanges.

An exchange has a flat vector for all parameters of its model. Gradients of DDP and of FSDP's
replicas (`sparse_hook`) and the weights of local steps (`local_steps`) come to it in different
ways; metrics, checks and saved states are the same for all, and written here.

Shapes: D elements of all parameters in the flat vector; of a sharded model, of this rank's shards.
"""

import logging
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from gradherd.comm.checks import BrokenBatches
from gradherd.comm.collectives import Stopwatch, all_gather, all_reduce
from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.flat import FlatSpec, wide_dtype
from gradherd.hooks.fsdp import ShardedWorlds
from gradherd.hooks.parameter_hooks import check_optimizer
from gradherd.hooks.state import gather_states
from gradherd.sparsify.basics import Dense
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import Worker

log = logging.getLogger("gradherd")

# What is kept with one setting only, and that setting.
_OPTIONAL = {
    "velocity": ("momentum", "Sparsify(momentum=...)"),
    "outer_momentum": ("outer_momentum", "LocalSteps(outer_momentum=...)"),
}


class ModelExchange:
    """What a herd exchanges beside its order. A subclass hooks into the model or its optimizer.

    `parameters` are the trainable ones by name, in the order of the model; vectors live on
    `device`.
    """

    key: ClassVar[str] = "sparsify"
    """Name of this part in a herd's state."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dense_below: int,
        world: World,
        sharded: ShardedWorlds | None,
        device: torch.device,
    ) -> None:
        self.world = world
        self.peers = world if sharded is None else sharded.replicate
        """The ranks that hold the same elements and exchange them."""
        self.sharded = sharded is not None
        """Whether the model is sharded: this rank then has its shards, as the peers do."""
        self.shards = World.single() if sharded is None else sharded.shard
        """The ranks that hold the shards of this replica."""
        self.mesh = self.peers.size, self.shards.size
        """Number of replicas, and of shards of each."""
        self.place = self.peers.rank, self.shards.rank
        """Which of them this rank holds."""
        self.parameters, self.device = parameters, device
        self.layout = FlatSpec.small_last(parameters, dense_below)
        self._metrics: dict[str, Any] = {}
        self.active = True
        """Whether it is attached."""
        self.total_bytes = 0
        """Bytes that this rank has sent so far."""
        self.stopwatch = Stopwatch()
        """Time that training has waited for exchanges."""

    def close(self) -> None:
        """Leave the model."""
        self.active = False

    # Metrics.

    def last_step(self) -> dict[str, Any]:
        """Return the metrics of the last exchange that need no computation; waits for a GPU."""
        return self._metrics

    @abstractmethod
    def _totals(self) -> dict[str, Any]:
        """Return the residual's norm and what was counted so far."""

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last exchange, and totals so far."""
        return self.last_step() | {
            **self._totals(),
            "always_sent": self.layout.whole,
            "total_bytes": self.total_bytes,
            "exchange_seconds": self.stopwatch.seconds,
        }

    # States.

    @abstractmethod
    def _vectors(self) -> dict[str, Tensor]:
        """Return the vectors that are kept between steps; they are loaded in place."""

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the parts of a (D,) vector as views in the shapes of the parameters."""
        return self.layout.views(flat)

    def by_name(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of a (D,) vector's parts by parameter, in the order of the model."""
        views = self._views(flat)
        return {name: views[name].clone() for name in self.parameters}

    def fill(self, flat: Tensor, saved: Mapping[str, Tensor]) -> Tensor:
        """Copy what `by_name` returned into a (D,) vector, and return it."""
        for name, view in self._views(flat).items():
            view.copy_(saved[name])
        return flat

    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is kept between steps, by parameter."""
        return {key: self.by_name(flat) for key, flat in self._vectors().items()}

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return what this rank keeps: vectors by parameter, and the state of the method.

        Args:
            gather: Whether rank 0 also gets the states of the other ranks, in "other_ranks"; not of
                a sharded model.
        """
        if self.sharded and gather and self.world.size > 1:
            raise RuntimeError(
                "every rank of a sharded model saves its own shards: use herd.stateful() with "
                "torch.distributed.checkpoint, or herd.state_dict(gather=False) on each rank"
            )
        state = self._own_state()
        if self.sharded:
            return state | {"mesh": list(self.mesh), "place": list(self.place)}
        if gather and self.world.size > 1:
            others = gather_states(state, self.world)
            if self.world.rank == 0:
                state["other_ranks"] = others[1:]
        return state

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """Return this rank's part of `state_dict`."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a state is of this model, settings and rank, or merged."""
        if self.sharded:
            for key, here in (("mesh", self.mesh), ("place", self.place)):
                if state.get(key) != list(here):
                    raise ValueError(
                        f"{self.key} state has {key} {state.get(key)}, expected {list(here)}: save "
                        "and load herd.stateful(saved_by=...) with torch.distributed.checkpoint, "
                        "which reshards"
                    )
        own = self._vectors()
        for key, (setting, example) in _OPTIONAL.items():
            if (key in state) != (key in own):
                way = "with" if key in state else "without"
                raise ValueError(
                    f"{self.key} state was saved {way} {setting}: attach {way} {example}, too"
                )
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        for key in own:
            saved = {name: tuple(tensor.shape) for name, tensor in state.get(key, {}).items()}
            if odd := dict(saved.items() ^ shapes.items()):
                name = min(odd)
                raise ValueError(
                    f"{self.key} state is of another model: {key} of {name!r} has shape "
                    f"{saved.get(name, 'none')}, expected {shapes.get(name, 'none')}"
                )
        if lacking := [key for key in self._needed() if key not in state]:
            raise ValueError(
                f"{self.key} state has no {lacking[0]!r}: another version of gradherd has saved it"
            )

    def _needed(self) -> tuple[str, ...]:
        """Return what every state has, besides what else is checked."""
        return ("step",)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved that fits (`check_state`)."""
        for key, flat in self._vectors().items():
            self.fill(flat, state[key])


class GradientExchange(ModelExchange):
    """An exchange of gradients at every step, with error feedback."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        settings: Sparsify,
        world: World,
        sharded: ShardedWorlds | None,
        scaler: GradScaler | None,
    ) -> None:
        """Say what the settings cost or do not do, now or when an optimizer of the model steps."""
        device = next(iter(parameters.values())).device
        super().__init__(parameters, settings.dense_below, world, sharded, device)
        self._worker = Worker(
            settings,
            self.layout.size,
            rank=self.peers.rank,
            size=self.peers.size,
            sparse=self.layout.sparse,
            layers=self.layout.sparse_numels,
            dtype=wide_dtype(parameters.values()),
            device=device,
        )
        log.info("sparsifying by %s", settings)
        if settings.momentum or not isinstance(settings.method, Dense):
            check_optimizer(model, self, settings.momentum, warns=world.rank == 0)
        if not self.layout.sparse:
            warnings.warn(
                f"every parameter has fewer than {settings.dense_below} elements and is sent "
                "whole: nothing is sparsified; lower dense_below",
                stacklevel=4,
            )
        self._scaler = scaler
        meaning = "all ranks get NaN from the exchange, and residuals stay"
        self._broken = BrokenBatches(meaning, self.world.rank)
        self._skipped_in_a_row = 0

    def _begin(self) -> float:
        """Begin the sum of residual and gradient; return the scale of the loss."""
        # Once per exchange: the loss scale may change between steps, and residuals of earlier steps
        # must stay comparable.
        loss_scale = self._scaler.get_scale() if self._scaler else 1.0
        self._worker.begin(loss_scale)
        return loss_scale

    def _average_whole(self, piece: Tensor) -> None:
        """Average (n,) elements in place: of a parameter that was frozen when this was attached."""
        mean, sent = all_reduce(piece / self.peers.size, self.peers)
        piece.copy_(mean)
        self.total_bytes += sent

    @abstractmethod
    def _write(self, indices: Tensor, mean: Tensor, used: set[str]) -> Tensor:
        """Write the (K,) mean into gradients; return (K,) what their dtypes could hold of it."""

    @abstractmethod
    def _spoil(self, used: set[str]) -> None:
        """Set the gradients of parameters to NaN."""

    def _run(self, touched: set[str] | None) -> None:
        """Exchange the gradient that was added to the worker, and write the mean.

        If some rank had a gradient that is not finite, all ranks take NaN, so that a GradScaler
        skips the step on all of them, and residuals stay what they were.

        Args:
            touched: Names of the parameters that this rank has used, where ranks may differ.
        """
        used, compared = set(self.parameters), 0
        if touched is not None:
            flags = [name in touched for name in self.parameters]
            own = torch.tensor(flags, dtype=torch.uint8, device=self._residual.device)
            # A parameter is left out on all ranks or on none. What this rank has not used then has
            # the mean of the others.
            anywhere, compared = all_gather(own, self.peers)
            pairs = zip(self.parameters, anywhere.any(0).tolist(), strict=True)
            used = {name for name, is_used in pairs if is_used}
        # The gradients of what nobody has used stay as they are: a residual that was sent for it
        # would be lost.
        for name, span in self.layout.slices.items():
            if name not in used:
                self._worker.feedback.exclude(span.start, span.stop)
        outcome, sent = run(self._worker.script(), self.peers)
        sent += compared
        self.total_bytes += sent
        if not self.all_shards_agree(outcome is not None):
            outcome = None
        if outcome is None:
            self._worker.commit(None)
            self._spoil(used)
            self._skipped_in_a_row += 1
            self._broken.note(self._skipped_in_a_row)
            return
        # A narrow dtype rounds or clamps the mean. What gradients could not hold goes back into
        # the residual, so the optimizer gets it later.
        written = self._write(outcome.coordinates(), self._worker.mean_of(outcome), used)
        self._worker.commit(outcome, written=written)
        self._skipped_in_a_row = 0
        self._metrics = outcome.metrics(self.layout.sparse) | {"bytes": sent}

    @property
    def _residual(self) -> Tensor:
        return self._worker.feedback.residual

    def all_shards_agree(self, here: bool) -> bool:
        """Return whether something holds for the whole model, of which this rank may have a part.

        A step is taken with all shards or with none, else they would drift apart.
        """
        if self.shards.size == 1:
            return here
        # One integer per step: a rank alone cannot know what has happened to another shard.
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._residual.device)
        flags, sent = all_gather(flag, self.shards)
        self.total_bytes += sent
        return bool(flags.all())

    def _totals(self) -> dict[str, Any]:
        return {
            "residual_norm": float(torch.linalg.vector_norm(self._residual)),
            "steps": self._worker.step,
            "skipped_steps": self._worker.skipped,
        }

    def _vectors(self) -> dict[str, Tensor]:
        feedback = self._worker.feedback
        velocity = {} if feedback.velocity is None else {"velocity": feedback.velocity}
        return {"residual": feedback.residual, **velocity}

    def _own_state(self) -> dict[str, Any]:
        return self._worker.state_dict() | self.vectors()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a state is of this model, settings and rank, or merged."""
        super().check_state(state)
        self._worker.check_state(state, self.key)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was saved that fits (`check_state`)."""
        super().load_state_dict(state)
        self._worker.load_state_dict(state)
