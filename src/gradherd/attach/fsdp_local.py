"""Local steps between replicas of a sharded model: each rank exchanges its own shards.

Inside a replica `fully_shard` averages gradients at every step. Between replicas nothing is sent
but, every H steps, the difference of each shard to its shared weights: by the ranks that hold the
same shard in all replicas, as ranks with plain modules do it with whole weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradherd.attach.fsdp_checks import ShardedWorlds
from gradherd.attach.fsdp_torch import ShardedParameter
from gradherd.attach.local_steps import LocalExchange
from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.sparsify.outer_optimizer import LocalSteps


class ShardedLocalExchange(LocalExchange):
    """Exchanges what the local steps of each replica have changed, shard by shard."""

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
        # Only ranks that hold the same shard exchange; inside a replica FSDP averages gradients.
        super().__init__(model, optimizer, settings, worlds.replicate)
        self.world, self._shard, self._replicate = world, worlds.shard, worlds.replicate
        named = {p.name: p for group in worlds.groups for p in group.parameters}
        self.parameters: dict[str, ShardedParameter] = {
            name: named[name] for name in self._weights.parameters
        }

    def _everywhere(self, here: bool) -> bool:
        """Return whether something holds for all shards of this replica."""
        flag = torch.tensor([int(here)], dtype=torch.int32, device=self._weights.device)
        # A replica takes a step with all its shards or with none, else they would drift apart.
        flags, sent = all_gather(flag, self._shard)
        self.total_bytes += sent
        return bool(flags.all())

    @property
    def mesh(self) -> tuple[int, int]:
        """Number of replicas, and of shards of each."""
        return self._replicate.size, self._shard.size

    @property
    def place(self) -> tuple[int, int]:
        """Which replica and which shard this rank holds."""
        return self._replicate.rank, self._shard.rank

    def vectors(self) -> dict[str, dict[str, Tensor]]:
        """Return copies of what is kept for each parameter, in the shapes of its shards."""
        kept = {"residual": self._worker.feedback.residual, "shared": self._outer.shared}
        if self._outer.momentum is not None:
            kept["outer_momentum"] = self._outer.momentum
        # In the middle of a phase each replica's weights differ from the shared ones.
        kept["weights"] = self._weights.read()
        return {key: self._weights.by_name(flat) for key, flat in kept.items()}

    def load_vectors(self, saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load what `vectors` returned, or what it would have been on this mesh."""
        restore = self._weights.restore
        restore(self._worker.feedback.residual, saved["residual"])
        restore(self._outer.shared, saved["shared"])
        if self._outer.momentum is not None:
            restore(self._outer.momentum, saved["outer_momentum"])
        self._set_weights(restore(torch.empty_like(self._outer.shared), saved["weights"]))

    def state_dict(self, gather: bool = True) -> dict[str, Any]:
        """Return shared weights, residuals and own weights of this rank's shards.

        Raises:
            RuntimeError: `gather` is set: shards of all ranks do not belong on one of them.
        """
        if gather and self.world.size > 1:
            raise RuntimeError(
                "every rank of a sharded model saves its own shards: use herd.stateful() with "
                "torch.distributed.checkpoint, or herd.state_dict(gather=False) on each rank"
            )
        worker = self._worker.state_dict()
        worker |= {"taken": self._taken, "local_steps": self._steps, "called_off": self._called_off}
        worker["buffers"] = {n: b.detach().clone() for n, b in self._weights.buffers().items()}
        return {
            "rank": self.world.rank,
            "workers": self.world.size,
            "mesh": list(self.mesh),
            "worker": worker,
            **self.vectors(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a state is of this model, method and place in the mesh."""
        if state.get("mesh") != list(self.mesh):
            raise ValueError(
                f"local state has mesh {state.get('mesh')}, expected {list(self.mesh)}: save and "
                "load herd.stateful(saved_by=...) with torch.distributed.checkpoint, which reshards"
            )
        for key, own in self.vectors().items():
            if state.get(key, {}).keys() != own.keys():
                raise ValueError(f"local state has other {key!r} than this model and settings")
            self._weights.check_shapes(key, state[key])
        self._worker.check_state(state["worker"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken, on the same place in the same mesh."""
        self.check_state(state)  # before anything changes
        self.load_worker(state["worker"], merged=False)
        self.load_vectors({key: state[key] for key in self.vectors()})

    def load_worker(self, state: Mapping[str, Any], *, merged: bool) -> None:
        """Load counts and the state of the method, or start the method again on another mesh."""
        if merged:
            # As merged states are: the method starts again, and buffers stay what they are.
            state = {**state, "rank": None, "method": None, "dim": self.layout.sparse}
        self._worker.load_state_dict(state)
        self._taken, self._steps = state["taken"], state["local_steps"]
        self._called_off = state["called_off"]
        if not merged:
            for name, buffer in self._weights.buffers().items():
                buffer.detach().copy_(state["buffers"][name])
