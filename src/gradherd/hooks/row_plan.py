"""How rows are read for ordering: the settings that fit a model, a sampler and each other."""

import gc
import logging

from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.world import World
from gradherd.flat import FlatSpec
from gradherd.hooks.bucket_hook import hook_is_free, world_of
from gradherd.hooks.feedback import inner
from gradherd.hooks.fsdp_checks import WHOLE_ROWS_BELOW, ShardedWorlds
from gradherd.hooks.state import check_row_length
from gradherd.hooks.torch_names import uncompiled
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.layer_plan import describe
from gradherd.rows.settings import (
    BatchRows,
    ExactRows,
    RowSettings,
    choose_rows,
    resolve_rows,
    row_length,
)

log = logging.getLogger("gradherd")


def plan_rows(
    model: nn.Module,
    order: OrderedSampler,
    rows: str | RowSettings,
    sparsifies: bool,
    worlds: ShardedWorlds | None,
) -> RowSettings:
    """Return how to read rows, or raise if this model cannot be used with this sampler."""
    bare = uncompiled(model)
    here = World.detect()
    # A sampler made before init_process_group() detects one rank and would hand out all the data.
    if order.world.group is None and (order.world.rank, order.world.size) != (here.rank, here.size):
        raise ValueError(
            f"order was made for {order.world}, but this process is {here}: create the "
            "sampler after init_process_group()"
        )
    if isinstance(bare, DDP):
        _share_group(order, world_of(bare))
    elif worlds is not None:
        _share_group(order, worlds.all_workers(order))
    if order.attached:
        gc.collect()  # a model that was dropped without detach() lets go only then
    if order.attached:
        raise ValueError(
            "order is attached already: call detach() of the herd that attach() returned for it, "
            "or make a new OrderedSampler"
        )
    check_device(bare, order.world)
    if worlds is not None:
        free = (
            worlds.shares_reduce_scatter(order.world) and FlatSpec.of(bare).size < WHOLE_ROWS_BELOW
        )
    else:
        free = isinstance(bare, DDP) and hook_is_free(bare)
    settings, why = _choose(bare, order, rows, free and not sparsifies)
    needed = isinstance(settings, BatchRows) and order.ordering.policy.needs_rows
    if worlds is not None and needed and sparsifies:
        raise ValueError(
            "rows='batch' would exchange whole gradients beside the sparse ones: use 'sketch'"
        )
    if order.world.size == 1:  # else sums may be sharded, and the first rows are compared
        length = row_length(settings, FlatSpec.of(bare).size)
        check_row_length(order.ordering.state_dict(), order.ordering.columns, length)
    log.info("ordering %s by %s: %s", order.ordering.policy, settings, why)
    return settings


def _share_group(order: OrderedSampler, world: World) -> None:
    """Refuse a sampler of other ranks than the model's; give one that has a group the model's.

    Coordination averages gradients itself, so the sampler's ranks must be those of the model.
    """
    if order.world.ranks() != world.ranks():
        raise ValueError(
            f"order was made for ranks {order.world.ranks()}, but the model averages gradients "
            f"over ranks {world.ranks()}: create the sampler with world=gh.World(rank, size, "
            "group) of the model's process group"
        )
    if order.world.group is not None:
        order.world = world


def _choose(
    model: nn.Module, order: OrderedSampler, rows: str | RowSettings, hook_is_free: bool
) -> tuple[RowSettings, str]:
    """Return how to read rows, and the reason."""
    settings = resolve_rows(rows, order.unit, order.batch_size)
    ddp = isinstance(model, DDP) and order.world.size > 1
    if isinstance(settings, BatchRows) and ddp and not hook_is_free:
        raise ValueError(
            "rows='batch' needs the communication hook of DDP, and there is one already: use "
            "'sketch', or attach first and without a sparsifier"
        )
    if settings is not None:
        return settings, "as asked"
    settings, why = choose_rows(
        needs_rows=order.ordering.policy.needs_rows,
        whole_batches=order.unit == order.batch_size,
        free=order.world.size == 1 or hook_is_free,
        size=FlatSpec.of(inner(model)).size,
        on_gpu=next(model.parameters()).is_cuda,
        workers=order.world.size,
    )
    single = order.ordering.policy.needs_rows and order.unit < order.batch_size
    if single and isinstance(settings, ExactRows):
        why = f"{why}; {describe(inner(model))}"
    return settings, why


def check_device(model: nn.Module, world: World) -> None:
    """Refuse a process group that cannot exchange the model's gradients."""
    for device in {p.device for p in model.parameters()}:
        if not world.exchanges(device):
            raise ValueError(
                f"model is on {'a GPU' if device.type == 'cuda' else device}, but the process "
                f"group's backend for it is {world.backend(device) or 'none'!r}, which does not "
                "exchange such tensors: use nccl for a GPU, gloo for the CPU"
            )
