"""Which models can be attached to, what to do about others, and between which ranks FSDP works."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from gradherd.comm.world import World
from gradherd.hooks import fsdp_torch
from gradherd.hooks.fsdp_torch import ShardedGroup, fsdp_modules, sharded_groups
from gradherd.hooks.torch_names import PRIVATE_NAMES
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.torch_names import missing_names

WHOLE_ROWS_BELOW = 2**28
"""Parameters up to which rows="auto" takes whole gradients: they fill three vectors of this length
on every rank, which a model that does not fit one card may not have."""


def check_parameters(model: nn.Module) -> None:
    """Refuse models of which this process does not hold every gradient whole."""
    check_sharding(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ValueError("model has no trainable parameter, so no gradient to learn from")
    for name, parameter in trained.items():
        if is_lazy(parameter):
            raise ValueError(f"parameter {name!r} has no shape yet: run a forward before attach()")
    empty = sum(not parameter.numel() for parameter in trained.values())
    for name, parameter in trained.items():
        # DeepSpeed keeps parameters of stage 3 on other ranks; a model's own may well be empty.
        if not parameter.numel() and (hasattr(parameter, "ds_id") or len(trained) == empty):
            raise ValueError(
                f"parameter {name!r} has no elements, as under ZeRO stage 3, which keeps them on "
                "other ranks: use stage 0, 1 or 2, or DistributedDataParallel"
            )


def check_sharding(model: nn.Module) -> None:
    """Refuse sharded models whose gradients cannot be read, and versions of torch that lack names.

    Raises:
        ValueError: It is one; the message says what to do.
    """
    # Not imported here: that takes seconds, and a model cannot be of a class nobody has imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{f'module {path!r}' if path else 'model'} is wrapped in "
                "FullyShardedDataParallel, which reduces gradients before they can be read: use "
                "torch.distributed.fsdp.fully_shard, or DistributedDataParallel"
            )
    if missing := missing_names(PRIVATE_NAMES):
        raise ValueError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which gradherd needs: use a "
            "version that its metadata names"
        )
    if missing := fsdp_torch.missing_names(model):
        raise ValueError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which gradherd needs for "
            "fully_shard: use a version that docs/sharded.md lists, or DistributedDataParallel"
        )
    groups = sharded_groups(model)
    _check_groups(groups)
    tensor = sys.modules.get("torch.distributed.tensor")
    sharded = {parameter.name for group in groups for parameter in group.parameters}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or name in sharded:
            continue
        if tensor and isinstance(parameter, tensor.DTensor):
            raise ValueError(
                f"parameter {name!r} is a DTensor, of which this rank holds a part; gradherd does "
                "not support tensor parallelism: use whole parameters and "
                "DistributedDataParallel or fully_shard"
            )
        if sharded:
            raise ValueError(
                f"parameter {name!r} is not sharded, so FSDP does not average its gradient: call "
                "fully_shard(model) on the whole model, too"
            )


def _check_groups(groups: list[ShardedGroup]) -> None:
    ranks = None
    for group in groups:
        where = f"module {group.path!r}" if group.path else "the model"
        for parameter in group.parameters:
            if parameter.sharded.device_mesh.ndim != group.mesh_dims:
                raise ValueError(
                    f"parameter {parameter.name!r} is split by tensor parallelism as well as by "
                    "fully_shard, which gradherd does not support: use fully_shard alone"
                )
            if parameter.offloaded:
                raise ValueError(
                    f"parameters of {where} are offloaded to the CPU, which gradherd does not "
                    "support: use fully_shard without offload_policy"
                )
        if not group.parameters:
            continue
        own = group.shard_world.ranks(), group.replicate_world.ranks()
        if ranks is not None and own != ranks:
            raise ValueError(
                f"{where} is sharded over other ranks than the rest of the model ({own[0]} and "
                f"{ranks[0]}): call fully_shard with one mesh"
            )
        ranks = own


class ShardedWorlds:
    """Between which ranks a sharded model's gradients are averaged, and how."""

    def __init__(self, model: nn.Module, mesh: Any = None) -> None:
        """Find the ranks of a sharded model, and of its replicas in the mesh given to `attach`."""
        self.groups = [group for group in sharded_groups(model) if group.parameters]
        self.shard = self.groups[0].shard_world
        """The ranks that hold one copy of the model."""
        self.native = self.groups[0].replicate_world
        """The ranks that torch itself averages over after the reduce-scatter."""
        one_dim = mesh is not None and self.groups[0].mesh_dims == 1
        self.replicate = _replicas(mesh, self.shard) if one_dim else World.single()
        """The ranks that gradherd averages over."""
        self._foreign = any(group.has_all_reduce_hook() for group in self.groups)

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.shard.size * self.native.size * self.replicate.size

    def all_workers(self, order: OrderedSampler | None) -> World:
        """Return the ranks that train together.

        Raises:
            ValueError: The order was made for others, or they are not all ranks and have no group.
        """
        if order is not None and order.world.group is not None:
            world = order.world
        elif self.size == self.shard.size and not self._foreign:
            world = self.shard
        else:
            world = World.detect()
        # With an all-reduce hook of the user's, only the user knows the replicas.
        if not self._foreign and world.size != self.size:
            raise ValueError(
                f"the model is trained by {self.size} ranks, but the process group has "
                f"{world.size}: create the sampler with world=gh.World(rank, size, group) of the "
                "ranks that train it"
            )
        return world

    def shares_reduce_scatter(self, world: World) -> bool:
        """Return whether ordering whole batches costs no bytes of its own."""
        return not self._foreign and all(one.shares_reduce_scatter(world) for one in self.groups)

    def check_exchange(self, model: nn.Module, mesh: Any, what: str) -> None:
        """Raise ValueError unless replicas can exchange `what`: "sparsify" or "local"."""
        how = "call fully_shard(model, mesh=mesh['shard']) and attach(..., mesh=mesh)"
        if self.native.size > 1 or self.groups[0].mesh_dims > 1:
            raise ValueError(
                "the model is sharded over a mesh of two dimensions, so torch averages over "
                f"replicas before anything could be exchanged sparsely: {how}"
            )
        if mesh is None:
            raise ValueError(
                f"{what} exchanges what the replicas of a sharded model have computed, and needs "
                f"to know them: {how}, with a mesh of ('replicate', 'shard')"
            )
        if self._foreign:
            raise ValueError(f"{what} needs the all-reduce hook of FSDP, and there is one already")
        if fsdp_modules(model)[0][0]:
            raise ValueError(f"{what} needs fully_shard(model) on the whole model, too")


def _replicas(mesh: Any, shard: World) -> World:
    """Return the ranks of a mesh that hold the same shard as this one."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    others = [g for g in groups if dist.get_process_group_ranks(g) != shard.ranks()]
    if len(groups) == 2 and not others:  # both dimensions have this rank alone
        others = groups[:1]
    if len(groups) != 2 or len(others) != 1:
        raise ValueError(
            f"mesh must have two dimensions, one of which is the mesh that fully_shard was given "
            f"(ranks {shard.ranks()} here), got {mesh}"
        )
    return World.of(others[0])
