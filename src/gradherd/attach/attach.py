"""attach(model, order=..., sparsify=...): the one place where both halves meet a model.

The training loop stays the user's own. A batch begins with a forward of the model, and what its
backward (or backwards) gave is fed back when the optimizer steps or the next forward begins,
whichever comes first.
"""

import logging
import warnings

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.coordinated_hook import Ride
from gradherd.attach.feedback import Link, inner
from gradherd.attach.feeds import Feed, Gathered, NoRows
from gradherd.attach.herd import Herd
from gradherd.attach.row_sources import EachExample, Reader, WholeGradient
from gradherd.attach.sparse_hook import SparseHook, sparsifiable
from gradherd.comm.world import World
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.flat import FlatSpec
from gradherd.rows.parameter_owners import describe, unwrap_model
from gradherd.rows.settings import BatchRows, RowSettings, SketchRows, choose_rows, resolve_rows
from gradherd.sparsify.registry import make_sparsifier
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.settings import Sparsify

log = logging.getLogger("gradherd")


def attach(
    model: nn.Module,
    *,
    order: OrderedSampler | None = None,
    sparsify: str | Selector | Sparsify | None = None,
    rows: str | RowSettings = "auto",
    scaler: GradScaler | None = None,
) -> Herd:
    """Let `order` learn from the gradients of `model`, and `sparsify` choose what travels.

    Args:
        model: Any module, or one in DistributedDataParallel. Attach after wrapping, before
            torch.compile where single examples are ordered.
        order: The sampler of the training loader.
        sparsify: A method such as `ExDyna(density=1e-3)`, its name, or `Sparsify` with further
            settings. It takes the communication hook of DDP.
        rows: How gradients are read for ordering: "auto", "batch", "exact", "sketch", or
            `BatchRows`, `ExactRows`, `SketchRows` with their settings.
        scaler: The GradScaler of the loop, if there is one: its scale is taken out of rows and
            residuals.
    """
    if order is None and sparsify is None:
        raise ValueError("nothing to attach: give an order, a sparsifier, or both")
    bare = getattr(model, "_orig_mod", model)  # what torch.compile wrapped
    if not any(parameter.requires_grad for parameter in bare.parameters()):
        raise ValueError("model has no trainable parameter, so no gradient to learn from")
    settings = _sparsify_settings(bare, sparsify)
    plan = None if order is None else _plan(model, order, rows, taken=settings is not None)
    sparse = None
    if settings is not None and isinstance(bare, DDP):
        sparse = SparseHook(bare, settings, scaler)
        log.info("sparsifying by %s", settings)
        if not sparse.layout.sparse:
            warnings.warn(
                f"every parameter has fewer than {settings.dense_below} numbers and travels "
                "whole: nothing is sparsified; lower dense_below",
                stacklevel=2,
            )
    link = None
    if order is not None and plan is not None:
        link = Link(model, order, _feed(bare, order, plan), plan, scaler)
    return Herd(link, sparse)


def _sparsify_settings(
    model: nn.Module, sparsify: str | Selector | Sparsify | None
) -> Sparsify | None:
    """Return the settings, or raise if they cannot be used with this model."""
    if sparsify is None:
        return None
    if not isinstance(model, DDP):
        raise ValueError(
            f"sparsify works in the communication hook of DistributedDataParallel, got a "
            f"{type(model).__name__}: wrap the model in DDP first"
        )
    if not _hook_is_free(model):
        raise ValueError("sparsify needs the communication hook of DDP, and there is one already")
    sparsifiable(model)
    group = model.process_group
    check_device(model, World(dist.get_rank(group), dist.get_world_size(group), group))
    if isinstance(sparsify, Sparsify):
        return sparsify
    return Sparsify(method=make_sparsifier(sparsify) if isinstance(sparsify, str) else sparsify)


def _plan(
    model: nn.Module, order: OrderedSampler, rows: str | RowSettings, *, taken: bool
) -> RowSettings:
    """Return how to read rows, or raise if this model cannot teach this sampler."""
    bare = getattr(model, "_orig_mod", model)
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
        unwrap_model(model)  # raises for a compiled one: its modules' hooks would not be called
    free = _hook_is_free(bare) and not taken
    settings, why = _choose(bare, order, rows, free)
    log.info("ordering %s by %s: %s", order.ordering.policy, settings, why)
    return settings


def _choose(
    model: nn.Module, order: OrderedSampler, rows: str | RowSettings, hook_is_free: bool
) -> tuple[RowSettings, str]:
    """Return how to read rows, and why."""
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
    )
    single = order.ordering.policy.needs_rows and order.unit < order.batch_size
    return settings, f"{why}; {describe(inner(model))}" if single else why


def _feed(model: nn.Module, order: OrderedSampler, settings: RowSettings) -> Feed:
    bare, world = inner(model), order.world
    if not order.ordering.policy.needs_rows:
        return NoRows(bare, order)
    if isinstance(settings, BatchRows) and isinstance(model, DDP) and world.size > 1:
        return Ride(model, order, world)
    return Gathered(make_reader(bare, settings, order.unit, order.batch_size), order, world)


def make_reader(model: nn.Module, settings: RowSettings, unit: int, batch_size: int) -> Reader:
    """Return what reads rows off a bare model as the settings say."""
    if unit == batch_size or isinstance(settings, BatchRows):
        return WholeGradient(model, settings if isinstance(settings, SketchRows) else None)
    return EachExample(model, settings, unit)


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
