"""FSDP2: what can be attached to, between which ranks it works, and every private name of it.

`fully_shard` has no communication hook. It keeps its parameters in groups, one for each call, that
gather them before a forward and reduce their gradients after a backward. This file reaches into
those groups: for the gradient of every parameter before it is reduced, for the reduce-scatter, and
for the all-reduce hook. Written against torch 2.13; `missing_fsdp_names` says which of its private
names another version lacks.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradherd.comm.sliced_mean import ShardSpan
from gradherd.comm.world import World
from gradherd.ordering.sampler import OrderedSampler
from gradherd.torch_names import missing_names

# Read or replaced on torch's objects, and why.
GROUP_NAMES = {
    "fsdp_params": "the parameters that are gathered and reduced together",
    "mesh_info": "which ranks hold shards, and which replicas",
    "reduce_grads": "whether a backward reduces: set_requires_gradient_sync",
    "all_reduce_grads": "whether it averages over replicas: set_requires_all_reduce",
    "gradient_divide_factor": "what the user has set gradients to be divided by",
    "wait_for_unshard": "wrapped: whole parameters, and so their hooks, exist only after it",
    "post_backward": "wrapped: all gradients of the group are there, none is reduced",
    "_all_reduce_hook": "set: where shards are exchanged between replicas",
}
"""Of FSDPParamGroup. `_reduce_scatter_comm`, `reduce_scatter_unused_params` and
`force_sum_reduction_for_comms` are used where a version has them."""
PARAMETER_NAMES = {
    "sharded_param": "the DTensor that the optimizer sees",
    "sharded_size": "the shape of this rank's shard without padding",
    "unsharded_accumulated_grad": "a whole gradient that waits to be reduced",
    "offload_to_cpu": "whether the shard is kept in the memory of the CPU",
}
"""Of FSDPParam. `_unsharded_param` is there after the first forward only."""
STATE_NAMES = {
    "_is_root": "whether the module has turned out to be part of a larger sharded model",
    "_state_ctx": "whether a backward is announced to be the last",
}
"""Of FSDPState, which a module has by `_get_fsdp_state`."""

GradientHook = Callable[[Tensor], None]


class Handle(NamedTuple):
    """Removes a hook, like torch's RemovableHandle."""

    remove: Callable[[], Any]


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return path and module of each part of the model that `fully_shard` was called on."""
    # Importing FSDP takes seconds, and a model cannot be of a class that was not imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return []
    return [(path, m) for path, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)]


class ShardedParameter:
    """A trainable parameter of which every rank holds a shard."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle
        sharded = handle.sharded_param
        dim = next((p.dim for p in sharded.placements if p.is_shard()), 0)
        self.span = ShardSpan(name, tuple(sharded.shape), dim)
        """Its shape, and the dimension along which it is sharded."""

    @property
    def sharded(self) -> Any:
        """The parameter as the optimizer sees it: a DTensor."""
        return self._handle.sharded_param

    @property
    def offloaded(self) -> bool:
        """Whether the shard is kept in the memory of the CPU (CPUOffloadPolicy)."""
        return bool(self._handle.offload_to_cpu)

    @property
    def local_numel(self) -> int:
        """Elements of this rank's shard."""
        return int(math.prod(self._handle.sharded_size))

    @property
    def unsharded(self) -> nn.Parameter | None:
        """The whole parameter, which autograd sees; None before the first forward."""
        # Its memory comes and goes with every forward; the object stays the same.
        return getattr(self._handle, "_unsharded_param", None)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits to be reduced, from this backward or earlier ones."""
        whole = self.unsharded
        accumulated = self._handle.unsharded_accumulated_grad is not None
        return whole is not None and (accumulated or whole.grad is not None)


class ShardedGroup:
    """A group of parameters that are gathered and reduced together: one call of `fully_shard`."""

    def __init__(self, path: str, group: Any, names: dict[int, str]) -> None:
        self.path = path
        """Name of the module, for errors."""
        self._group = group
        self.parameters = [
            ShardedParameter(names[id(handle.sharded_param)], handle)
            for handle in group.fsdp_params
            if handle.sharded_param.requires_grad and id(handle.sharded_param) in names
        ]
        """Those that were trainable when this was made."""
        self.noted: list[ShardedParameter] = []
        """What the last reduce-scatter contained, if it or the all-reduce hook is replaced."""
        self._known = {id(p._handle): p for p in self.parameters}
        info = group.mesh_info
        self.shard_world = _world_of(getattr(info, "shard_process_group", None))
        """The ranks that hold the shards."""
        self.replicate_world = _world_of(getattr(info, "replicate_process_group", None))
        """The ranks that torch averages over after the reduce-scatter (native HSDP)."""
        self.mesh_dims = int(info.mesh.ndim)
        """Dimensions of the mesh that `fully_shard` was given."""

    @property
    def ranks(self) -> tuple[list[int], list[int]]:
        """Those that hold the shards, and those that torch averages over after that."""
        return self.shard_world.ranks(), self.replicate_world.ranks()

    @property
    def reduces(self) -> bool:
        """Whether this backward reduces gradients; set_requires_gradient_sync."""
        return bool(self._group.reduce_grads)

    @property
    def averages_replicas(self) -> bool:
        """Whether this backward averages over replicas: set_requires_all_reduce."""
        return bool(self._group.all_reduce_grads)

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced."""
        return any(p.has_gradient for p in self.parameters)

    def _note_present(self) -> None:
        """Note which parameters the next reduce-scatter contains; new ones have no name."""
        zeros = getattr(self._group, "reduce_scatter_unused_params", False)
        self.noted = []
        for handle in self._group.fsdp_params:
            one = self._known.get(id(handle)) or ShardedParameter("", handle)
            whole = one.unsharded
            if one.has_gradient or (zeros and whole is not None and whole.requires_grad):
                self.noted.append(one)

    def divide_factors(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return what torch divides by before it reduces, and after the all-reduce hook."""
        # Older versions lack this setting, and `reduce_scatter_unused_params`: they are then off.
        forced = getattr(self._group, "force_sum_reduction_for_comms", False)
        narrow = dtype not in (torch.float32, torch.bfloat16)
        if not narrow and not forced:
            return 1.0, 1.0  # The operation of the collective divides.
        size = self.shard_world.size * self.replicate_world.size
        factor = self._group.gradient_divide_factor or float(size)
        if not narrow:
            return 1.0, factor
        before = 1
        # About the root before and after: a sum in half precision neither over- nor underflows.
        while factor % before == 0 and factor / before > before:
            before *= 2
        return float(before), factor / before

    def share(self, op: Any) -> float:
        """Return the factor of every rank's gradient in a reduce-scatter with this operation."""
        if op == dist.ReduceOp.AVG:
            return 1 / self.shard_world.size
        if op == dist.ReduceOp.SUM:
            return 1.0
        # PREMUL_SUM holds its factor where Python cannot read it: torch made it from this one.
        return 1 / float(self._group.gradient_divide_factor)

    def shares_reduce_scatter(self, world: World) -> bool:
        """Return whether its reduce-scatter is between all these ranks and may be replaced."""
        # There may be one of the user's, or none at all (torch 2.8).
        scatter = getattr(self._group, "_reduce_scatter_comm", None)
        among_all = self.shard_world.ranks() == world.ranks() and self.replicate_world.size == 1
        return world.size > 1 and among_all and type(scatter).__name__.startswith("Default")

    def set_reduce_scatter(self, make: Callable[[Any], Any]) -> Handle:
        """Replace the reduce-scatter by `make(before)`."""
        return self._replace("_reduce_scatter_comm", make(self._group._reduce_scatter_comm))

    def has_all_reduce_hook(self) -> bool:
        """Return whether there is an all-reduce hook."""
        return self._group._all_reduce_hook is not None

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> Handle:
        """Have `hook` called with the flat result of each reduce-scatter."""
        return self._replace("_all_reduce_hook", hook)

    def _replace(self, name: str, new: Any) -> Handle:
        before = getattr(self._group, name)
        noting = _listen(self._watch().before_reduce, self._note_present)
        setattr(self._group, name, new)

        def undo() -> None:
            setattr(self._group, name, before)
            noting.remove()

        return Handle(undo)

    def on_gradient(self, parameter: ShardedParameter, hook: GradientHook) -> Handle:
        """Call `hook` with each gradient of the whole parameter, before it is accumulated."""
        return self._watch().on_gradient(parameter._handle, hook)

    def _watch(self) -> "GroupWatch":
        # Kept on torch's own object: it lives as long as the group, and a second herd finds it.
        watch = self._group.__dict__.get("_gradherd_watch")
        if watch is None:
            watch = self._group._gradherd_watch = GroupWatch(self._group)
        assert isinstance(watch, GroupWatch)
        return watch


class GroupWatch:
    """Calls back when a group's gradients arrive, and before they are reduced.

    Several parts of gradherd may watch one group, so it is wrapped once.
    """

    def __init__(self, group: Any) -> None:
        self.before_reduce: list[Callable[[], None]] = []
        """Called when all gradients of the group have arrived, before they are reduced."""
        self._hooks: dict[int, list[GradientHook]] = {}
        self._hooked: dict[int, nn.Parameter] = {}
        wait, reduce = group.wait_for_unshard, group.post_backward

        # Whole parameters exist from their first gathering on; no earlier moment would do.
        def wait_for_unshard(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            for handle in group.fsdp_params:
                self._hook_whole(handle)
            return result

        def post_backward(*args: Any, **kwargs: Any) -> Any:
            _call_all(self.before_reduce)
            return reduce(*args, **kwargs)

        group.wait_for_unshard, group.post_backward = wait_for_unshard, post_backward

    def _hook_whole(self, handle: Any) -> None:
        whole, hooks = getattr(handle, "_unsharded_param", None), self._hooks.get(id(handle))
        if hooks is None or whole is None or not whole.requires_grad:
            return
        if self._hooked.get(id(handle)) is not whole:
            self._hooked[id(handle)] = whole
            whole.register_hook(partial(_call_all, hooks))

    def on_gradient(self, handle: Any, hook: GradientHook) -> Handle:
        """Call `hook` with each gradient of a parameter, given as torch's own object."""
        listening = _listen(self._hooks.setdefault(id(handle), []), hook)
        self._hook_whole(handle)  # it may have been gathered before
        return listening


def _listen(hooks: list[Any], hook: Any) -> Handle:
    hooks.append(hook)
    return Handle(lambda: hooks.remove(hook))


def _call_all(hooks: list[Any], *args: Any) -> None:
    for hook in list(hooks):
        hook(*args)


def sharded_groups(model: nn.Module) -> list[ShardedGroup]:
    """Return all groups with trainable parameters; [] if `fully_shard` was called on no part."""
    modules = fsdp_modules(model)
    for _, module in modules:
        module.reshard()  # The model's parameters are then DTensors, whatever ran before.
    names = {id(p): name for name, p in model.named_parameters()}
    groups, seen = [], set()
    for path, module in modules:
        for group in _param_groups(module):
            if id(group) not in seen:  # fully_shard([a, b]) makes one group of two modules
                seen.add(id(group))
                groups.append(ShardedGroup(path, group, names))
    return [group for group in groups if group.parameters]


def _param_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # before 2.13


def is_last_backward(model: nn.Module) -> bool:
    """Return whether torch completes this backward, as it does unless told otherwise before."""
    _, module = fsdp_modules(model)[0]
    return bool(module._get_fsdp_state()._state_ctx.is_last_backward)


def is_inner(module: Any) -> bool:
    """Return whether a sharded module has turned out to be part of a larger sharded model."""
    return module._get_fsdp_state()._is_root is False


def missing_fsdp_names(model: nn.Module) -> list[str]:
    """Return the private names that this version of torch lacks."""
    missing: list[str] = []
    for _, module in fsdp_modules(model):
        if not hasattr(module, "_get_fsdp_state"):
            return ["FSDPModule._get_fsdp_state"]
        missing += _lacking("FSDPState", module._get_fsdp_state(), STATE_NAMES)
        for group in _param_groups(module):
            missing += _lacking("FSDPParamGroup", group, GROUP_NAMES)
            for handle in getattr(group, "fsdp_params", ()):
                missing += _lacking("FSDPParam", handle, PARAMETER_NAMES)
    return sorted(set(missing))


def _lacking(kind: str, item: Any, names: Iterable[str]) -> Iterator[str]:
    return (f"{kind}.{name}" for name in names if not hasattr(item, name))


def _world_of(group: dist.ProcessGroup | None) -> World:
    return World.single() if group is None else World.of(group)


# --- What can be attached to --------------------------------------------------------------------


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
    """Refuse sharded models whose gradients cannot be read, and a torch without their names."""
    # Not imported here: that takes seconds, and a model cannot be of a class nobody has imported.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for path, module in model.named_modules():
        if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            raise ValueError(
                f"{f'module {path!r}' if path else 'model'} is wrapped in "
                "FullyShardedDataParallel, which reduces gradients before they can be read: use "
                "torch.distributed.fsdp.fully_shard, or DistributedDataParallel"
            )
    if missing := missing_names():
        raise ValueError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which gradherd needs: use a "
            "version that its metadata names"
        )
    if missing := missing_fsdp_names(model):
        raise ValueError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which gradherd needs for "
            "fully_shard: use a version that docs/sharded.md lists, or DistributedDataParallel"
        )
    groups = sharded_groups(model)
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
        if group.ranks != groups[0].ranks:
            raise ValueError(
                f"{where} is sharded over other ranks than the rest of the model "
                f"({group.ranks[0]} and {groups[0].ranks[0]}): call fully_shard with one mesh"
            )
    tensor = sys.modules.get("torch.distributed.tensor")
    sharded = {parameter.name for group in groups for parameter in group.parameters}
    for name, whole in model.named_parameters():
        if not whole.requires_grad or name in sharded:
            continue
        if tensor and isinstance(whole, tensor.DTensor):
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


class ShardedWorlds:
    """Between which ranks a sharded model's gradients are averaged, and how."""

    def __init__(self, model: nn.Module, mesh: Any = None) -> None:
        """Find the ranks of a sharded model, and of its replicas in the mesh given to `attach`."""
        self.groups = sharded_groups(model)
        self.shard = self.groups[0].shard_world
        """The ranks that hold one copy of the model."""
        self.native = self.groups[0].replicate_world
        """The ranks that torch itself averages over after the reduce-scatter."""
        one_dim = mesh is not None and self.groups[0].mesh_dims == 1
        self.replicate = _replicas(mesh, self.shard) if one_dim else World.single()
        """The ranks that gradherd averages over."""
        self._foreign = any(group.has_all_reduce_hook() for group in self.groups)
        self.size = self.shard.size * self.native.size * self.replicate.size
        """Number of workers."""

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
