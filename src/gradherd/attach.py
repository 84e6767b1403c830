"""attach(model, order=...): the one place where ordering meets a model.

The training loop stays the user's own. A batch begins with a forward of the model, and what its
backward (or backwards) gave is fed back when the optimizer steps or the next forward begins,
whichever comes first.
"""

import logging

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.world import World
from gradherd.feeds import Examples, Feed, NoRows, WholeBatches
from gradherd.herd import Herd, inner
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ride import Ride
from gradherd.rows.flat import FlatSpec
from gradherd.rows.owners import bare as bare_module
from gradherd.rows.owners import describe
from gradherd.rows.settings import BatchRows, ExactRows, RowSettings, SketchRows

log = logging.getLogger("gradherd")

_NAMED: dict[str, RowSettings] = {
    "batch": BatchRows(),
    "exact": ExactRows(),
    "sketch": SketchRows(),
}
# Below this many parameters exact rows cost no more than a sketch of them.
_SMALL = 20_000


def attach(
    model: nn.Module,
    *,
    order: OrderedSampler | None = None,
    sparsify: object | None = None,
    rows: str | RowSettings = "auto",
    scaler: GradScaler | None = None,
) -> Herd:
    """Let `order` learn from the gradients of `model`, in the loop as it is.

    Args:
        model: Any module, or one in DistributedDataParallel. Attach after wrapping, before
            torch.compile where single examples are ordered.
        order: The sampler of the training loader.
        sparsify: Not available yet.
        rows: How gradients are read: "auto", "batch", "exact", "sketch", or `BatchRows`,
            `ExactRows`, `SketchRows` with their settings.
        scaler: The GradScaler of the loop, if there is one: its scale is taken out of the rows.
    """
    if sparsify is not None:
        raise ValueError(f"sparsify is not available yet, got {sparsify!r}; leave it out")
    if order is None:
        raise ValueError("order must be an OrderedSampler: without it there is nothing to attach")
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    if not any(parameter.requires_grad for parameter in bare.parameters()):
        raise ValueError("model has no trainable parameter, so no gradient to learn from")
    here = World.detect()
    if order.world.group is None and (order.world.rank, order.world.size) != (here.rank, here.size):
        raise ValueError(
            f"order was made for {order.world}, this process is {here}: make the "
            "sampler after init_process_group()"
        )
    if order.feedback is not None:
        raise ValueError("order is attached already: call its herd's detach() first")
    check_device(bare, order.world)
    if order.ordering.policy.needs_rows and order.unit < order.batch_size:
        bare_module(model)  # raises for a compiled one: its modules' hooks would not be called
    settings, why = _choose(bare, order, rows)
    log.info("ordering %s by %s: %s", order.ordering.policy, settings, why)
    return Herd(model, order, _feed(bare, order, settings), settings, scaler)


def _choose(
    model: nn.Module, order: OrderedSampler, rows: str | RowSettings
) -> tuple[RowSettings, str]:
    """Return how to read rows, and why."""
    settings = _NAMED.get(rows) if isinstance(rows, str) else rows
    if not isinstance(settings, BatchRows | ExactRows | SketchRows) and rows != "auto":
        raise ValueError(f"rows must be one of auto, {', '.join(_NAMED)}, got {rows!r}")
    batches = order.unit == order.batch_size
    if isinstance(settings, BatchRows) and not batches:
        raise ValueError(
            f"rows='batch' has one row for a batch of {order.batch_size}, but units have "
            f"{order.unit}: use OrderedSampler(..., unit={order.batch_size}), or exact or sketch"
        )
    ddp = isinstance(model, DDP) and order.world.size > 1
    if isinstance(settings, BatchRows) and ddp and not _hook_is_free(model):
        raise ValueError(
            "rows='batch' needs the communication hook of DDP, and there is one already: use "
            "'sketch', or attach first"
        )
    if settings is not None:
        return settings, "as asked"
    size = FlatSpec.of(inner(model)).size
    if not order.ordering.policy.needs_rows:
        return BatchRows(), "this order needs no gradients"
    if batches and (order.world.size == 1 or _hook_is_free(model)):
        return BatchRows(), f"units are whole batches, {size:,} parameters"
    if batches:
        return SketchRows(), "units are whole batches, and there is no DDP hook to ride on"
    if size <= _SMALL:
        return ExactRows(), f"{size:,} parameters are few; {describe(inner(model))}"
    return SketchRows(), f"{size:,} parameters are many; {describe(inner(model))}"


def _feed(model: nn.Module, order: OrderedSampler, settings: RowSettings) -> Feed:
    bare, world = inner(model), order.world
    if not order.ordering.policy.needs_rows:
        return NoRows(bare, order)
    if isinstance(settings, BatchRows):
        if isinstance(model, DDP) and world.size > 1:
            return Ride(model, order, world)
        return WholeBatches(bare, order, world, None)
    if order.unit == order.batch_size:
        sketch = settings if isinstance(settings, SketchRows) else None
        return WholeBatches(bare, order, world, sketch)
    return Examples(bare, order, world, settings)


def _hook_is_free(model: nn.Module) -> bool:
    return isinstance(model, DDP) and not model._comm_hooks


def check_device(model: nn.Module, world: World) -> None:
    """Refuse a process group that cannot carry the model's gradients."""
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    if world.size > 1 and on_gpu and "nccl" not in dist.get_backend(world.group):
        raise ValueError(
            f"model is on a GPU, but the process group's backend is "
            f"{dist.get_backend(world.group)!r}, which exchanges CPU tensors only: use nccl"
        )
