"""attach(model, order=..., sparsify=...): the one place where both halves meet a model."""

import contextlib
import gc
import logging
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradherd.comm.world import World, keep_group
from gradherd.flat import FlatSpec, exchangeable
from gradherd.gpu import has_triton
from gradherd.hooks.agreement import RankAgreement
from gradherd.hooks.bucket_hook import hook_is_free, row_sparse_parameters
from gradherd.hooks.coordinated_hook import CoordinatedHook, ShardedCoordination
from gradherd.hooks.exchange import ModelExchange
from gradherd.hooks.feedback import OrderFeedback, is_attached
from gradherd.hooks.flat_weights import float_buffers
from gradherd.hooks.fsdp import ShardedWorlds, check_parameters, fsdp_modules
from gradherd.hooks.herd import Herd
from gradherd.hooks.local_steps import LocalExchange
from gradherd.hooks.parameter_hooks import stepping_optimizer
from gradherd.hooks.row_sources import RowSource, make_row_source
from gradherd.hooks.sparse_hook import ShardedSparseHook, SparseHook, sparsifiable
from gradherd.hooks.state import check_row_length
from gradherd.hooks.transports import GatheringTransport, RowTransport
from gradherd.local.settings import LocalSteps
from gradherd.ordering.coordination import scatters_columns
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.layer_plan import unwrap_model
from gradherd.rows.settings import (
    SMALL_MODEL,
    BatchRows,
    RowSettings,
    choose_rows,
    resolve_rows,
    row_length,
)
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.settings import Sparsify
from gradherd.torch_names import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger("gradherd")

WHOLE_ROWS_BELOW = 2**28
"""Parameters of a sharded model up to which rows="auto" takes whole gradients: they fill three
vectors of this length on every rank, which a model that does not fit one card may not have."""


def attach(
    model: nn.Module,
    *,
    order: OrderedSampler | None = None,
    sparsify: str | Selector | Sparsify | None = None,
    local: LocalSteps | None = None,
    optimizer: Optimizer | None = None,
    rows: str | RowSettings = "auto",
    scaler: GradScaler | None = None,
    mesh: "DeviceMesh | None" = None,
) -> Herd:
    """Connect a model with an order that learns from its gradients, a sparsifier, or both.

    Args:
        model: Any module, one in DistributedDataParallel, or one that `fully_shard` was called
            on. Attach after wrapping or sharding it; before torch.compile if single examples are
            ordered.
        order: The sampler of the training loader.
        sparsify: A method such as `ExDyna(density=1e-3)`, its name, or `Sparsify` with further
            settings. It uses the communication hook of DDP; of a sharded model it exchanges
            gradients between replicas.
        local: Instead of exchanging gradients, let each rank take steps on its own and exchange
            what they have changed, as `LocalSteps` says. The model is then a plain module, one in
            DDP, which averages nothing until `detach`, or a sharded one whose replicas take steps
            on their own; all start with rank 0's weights.
        optimizer: The optimizer of the loop, whose steps are counted; for `local` only.
        rows: How gradients are read for ordering: "auto", "batch", "exact", "sketch", "two-sided",
            or `BatchRows`, `ExactRows`, `SketchRows`, `TwoSidedRows` with their settings.
        scaler: The GradScaler of the loop, if there is one: rows and residuals are divided by its
            scale.
        mesh: With `sparsify` or `local` and a sharded model: the mesh of ("replicate", "shard")
            whose "shard" dimension `fully_shard` was given. gradherd exchanges over the other one.

    Returns:
        A handle for metrics, checkpoints and detaching.

    Raises:
        ValueError: Model, order and settings do not fit together, or differ between ranks.
        RuntimeError: Another rank has failed, or has not attached within the process group's
            timeout.
    """
    if order is None and sparsify is None and local is None:
        raise ValueError("nothing to attach: give order=, sparsify= or local=")
    if not isinstance(model, nn.Module):
        # Its class or its name: no module to find a process group by, so no rank is told.
        raise ValueError(f"model must be a torch.nn.Module, got {model!r}")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise ValueError(f"scaler must be the GradScaler of the loop, got {scaler!r}")
    bare = uncompiled(model)
    agreement: RankAgreement | None = None
    try:
        if order is not None:
            _check_sampler(order)
        check_parameters(bare)
        worlds = ShardedWorlds(bare, mesh) if fsdp_modules(bare) else None
        world = _model_world(bare, order, worlds)
        if isinstance(bare, DDP):
            keep_group(bare.process_group)  # Python's tensors go through it from here on.
        agreement = RankAgreement(world)
        if is_attached(unwrap_model(bare)):
            raise ValueError(
                "model is attached already: call detach() of the herd that attach() returned for "
                "it, a part of it or what it is a part of, and give order, sparsify and local in "
                "one call"
            )
        settings, stepping = _check_exchange(bare, sparsify, local, optimizer, scaler, worlds, mesh)
        # Whole gradients are free where they are averaged anyway.
        wrapped = worlds is not None or isinstance(bare, DDP)
        sparsifies = settings is not None or (local is not None and wrapped)
        if order is not None:
            _check_order(order, world if wrapped else None)
        if order is not None or settings is not None:
            check_device(bare, world)
        plan = None if order is None else _plan_rows(bare, order, rows, sparsifies, worlds)
    except Exception as error:
        if agreement is None:
            # An order of a wrong type has no world; its peers wait in the group of the model.
            known = order if isinstance(order, OrderedSampler) else None
            agreement = RankAgreement(_model_world(bare, known, None))
        agreement.refuse(error)
        raise
    # The last point at which nothing was changed yet: no hook is registered, so an error leaves the
    # model as it was, on all ranks.
    agreement.compare(_shared_settings(bare, order, plan, settings, local, scaler))
    plain = local is None and not wrapped
    if order is not None and plain and order.world.size > 1 and order.world.rank == 0:
        log.warning(
            "model is a plain module on %d ranks, so gradherd averages no gradients: wrap it in "
            "DistributedDataParallel and attach to that, or average them yourself",
            order.world.size,
        )
    # From here on every rank does the same, so a hook that starts with a collective finds its
    # peers. If a part fails, those before it leave the model.
    with contextlib.ExitStack() as undo:
        exchange: ModelExchange | None = None
        if local is not None and stepping is not None:
            exchange = LocalExchange(bare, stepping, local, world, worlds)
        elif settings is not None and worlds is not None:
            exchange = ShardedSparseHook(bare, settings, worlds, world, scaler)
        elif settings is not None and isinstance(bare, DDP):
            exchange = SparseHook(bare, settings, scaler)
        if exchange is not None:
            undo.callback(exchange.close)
        feedback = None
        if order is not None and plan is not None:
            # After the exchange, which needs the slot of DDP's hook: coordination takes it only
            # where nothing is sparsified.
            transport = _make_transport(model, bare, order, plan)
            undo.callback(transport.close)
            feedback = OrderFeedback(model, order, transport, plan, scaler)
        herd = Herd(bare, feedback, exchange)
        undo.pop_all()
    return herd


def _check_sampler(order: Any) -> None:
    if not isinstance(order, OrderedSampler):
        # The address of an object says nothing to anyone.
        got = repr(order) if isinstance(order, str) else f"a {type(order).__name__}"
        raise ValueError(
            f"order must be the OrderedSampler of the training loader, got {got}: make one, as in "
            "OrderedSampler(dataset, 'cd-grab', batch_size=32), and give it to the DataLoader, too"
        )


def _model_world(
    model: nn.Module, order: OrderedSampler | None, worlds: ShardedWorlds | None
) -> World:
    """Return the ranks that train the model together."""
    if worlds is not None:
        return worlds.all_workers(order)
    if isinstance(model, DDP):
        return World.of(model.process_group)  # may hold fewer ranks than the default one
    if order is not None and order.world.group is not None:
        return order.world
    # Variables of torchrun without a process group do not count: such ranks cannot meet.
    return World.detect() if dist.is_available() and dist.is_initialized() else World.single()


def _shared_settings(
    model: nn.Module,
    order: OrderedSampler | None,
    rows: RowSettings | None,
    sparsify: Sparsify | None,
    local: LocalSteps | None,
    scaler: GradScaler | None,
) -> dict[str, Any]:
    """Return what must be equal on all ranks: the sizes of what they exchange depend on it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    shared: dict[str, Any] = {
        "trainable parameters": len(trained),
        "trainable elements": sum(p.numel() for p in trained),
        # Whether there is one, not its scale, which changes from step to step.
        "scaler": "none" if scaler is None else "given",
        "order": "none" if order is None else order.ordering.policy,
        "sparsify": "none" if sparsify is None else sparsify,
    }
    if sparsify is not None and trained and trained[0].is_cuda:
        # With kernels, a step runs on the GPU and sends other messages.
        shared["Triton"] = "installed" if has_triton() else "missing"
    if order is not None:
        shared |= {
            "batch_size": order.batch_size,
            "unit": order.unit,
            "rows": rows,
            "seed": order.seed,
            "length of the data set": order.sharding.examples,
            "drop_last": order.drop_last,
        }
    if local is not None:
        buffers = sum(b.numel() for b in float_buffers(model).values())
        shared |= {"local": local, "elements of buffers": buffers}
    return shared


def _check_exchange(
    model: nn.Module,
    sparsify: str | Selector | Sparsify | None,
    local: LocalSteps | None,
    optimizer: Optimizer | None,
    scaler: GradScaler | None,
    worlds: ShardedWorlds | None,
    mesh: "DeviceMesh | None",
) -> tuple[Sparsify | None, Optimizer | None]:
    """Return how gradients are sparsified and whose steps are counted, or raise if not possible."""
    if mesh is not None and (worlds is None or (sparsify is None and local is None)):
        raise ValueError(
            "mesh goes with sparsify or local, and a model that fully_shard was called on with "
            "mesh['shard']"
        )
    if local is None and optimizer is not None:
        raise ValueError("optimizer goes with local=LocalSteps(...), whose steps it takes")
    if local is None and sparsify is None:
        return None, None
    if local is not None and not isinstance(local, LocalSteps):
        raise ValueError(f"local must be gh.LocalSteps(), got {local!r}")
    if local is not None and sparsify is not None:
        raise ValueError(
            "give local or sparsify, not both: local steps send all coordinates in few bits"
        )
    if local is not None and scaler is not None:
        # GradScaler.step() leaves the optimizer's step out on the ranks that have overflowed.
        raise ValueError(
            "local steps count steps of the optimizer, which a GradScaler skips on single ranks: "
            "use autocast with bfloat16, which needs no scaler"
        )
    if worlds is not None:
        worlds.check_exchange(model, mesh, "sparsify" if local is None else "local")
        if local is not None and local.overlap:
            raise ValueError("overlap=True is not supported for sharded models: leave it out")
    elif isinstance(model, DDP) and not hook_is_free(model):
        needs = "sparsify needs" if local is None else "local steps need"
        raise ValueError(f"{needs} the communication hook of DDP, and there is one already")
    elif local is None and not isinstance(model, DDP):
        raise ValueError(
            f"sparsify works in the communication hook of DistributedDataParallel, got a "
            f"{type(model).__name__}: wrap the model in DDP first"
        )
    if local is not None:
        exchanged = exchangeable(model.named_parameters())
        return None, stepping_optimizer(optimizer, exchanged.values())
    if isinstance(model, DDP):
        sparsifiable(model)
    else:
        exchangeable(model.named_parameters())
    if isinstance(sparsify, Sparsify):
        return sparsify, None
    return Sparsify(method=sparsify), None  # type: ignore[arg-type]  # a name is taken, too


def _make_transport(
    called: nn.Module, model: nn.Module, order: OrderedSampler, settings: RowSettings
) -> RowTransport:
    """Return what takes rows to the sampler from a model; `called` may be its compiled wrapper."""
    module, world = model.module if isinstance(model, DDP) else model, order.world
    if not order.ordering.policy.needs_rows:
        # Nothing is read off the model but that a backward has happened.
        return RowTransport(order, RowSource(module))
    if isinstance(settings, BatchRows) and isinstance(model, DDP) and world.size > 1:
        return CoordinatedHook(model, order)
    if isinstance(settings, BatchRows) and world.size > 1 and fsdp_modules(model):
        return ShardedCoordination(model, order)
    # A hook on the wrapper runs before the graph, one on what it wraps is part of it.
    read = module if called is model else called
    device, size = next(module.parameters()).device, FlatSpec.of(module).size
    # Rows of a small model are formed in less time than they are spared.
    keeps = order.ordering.policy.takes_implicit and world.size == 1 and size > SMALL_MODEL
    source = make_row_source(read, settings, order.unit, order.batch_size, keeps_factors=keeps)
    scatters = scatters_columns(row_length(settings, size), size, world.size)
    return GatheringTransport(source, order, device, size if scatters else None)


def _check_order(order: OrderedSampler, averaging: World | None) -> None:
    """Raise if a sampler has other ranks than this process or the model, or is attached.

    DDP or FSDP averages gradients over the ranks `averaging`, None without either. A sampler that
    has a group gets theirs.
    """
    here = World.detect()
    # A sampler made before init_process_group() detects one rank and would hand out all the data.
    if order.world.group is None and (order.world.rank, order.world.size) != (here.rank, here.size):
        raise ValueError(
            f"order was made for {order.world}, but this process is {here}: create the "
            "sampler after init_process_group()"
        )
    if averaging is not None:
        if order.world.ranks() != averaging.ranks():
            raise ValueError(
                f"order was made for ranks {order.world.ranks()}, but the model averages gradients "
                f"over ranks {averaging.ranks()}: create the sampler with world=gh.World(rank, "
                "size, group) of the model's process group"
            )
        if order.world.group is not None:
            order.world = averaging
    if order.attached:
        gc.collect()  # a model that was dropped without detach() lets go only then
    if order.attached:
        raise ValueError(
            "order is attached already: call detach() of the herd that attach() returned for it, "
            "or make a new OrderedSampler"
        )


def _plan_rows(
    model: nn.Module,
    order: OrderedSampler,
    rows: str | RowSettings,
    sparsifies: bool,
    worlds: ShardedWorlds | None,
) -> RowSettings:
    """Return how to read rows, or raise if this model cannot be used with this sampler."""
    size, policy = FlatSpec.of(model).size, order.ordering.policy
    for name, parameter in model.named_parameters():
        if policy.needs_rows and parameter.requires_grad and parameter.is_complex():
            raise ValueError(
                f"parameter {name!r} is complex, and rows have real numbers only: hold it as real "
                "and imaginary parts (torch.view_as_real), or freeze it"
            )
    devices = {str(p.device) for p in model.parameters() if p.requires_grad}
    if policy.needs_rows and len(devices) > 1:
        raise ValueError(
            f"model is trained on {' and '.join(sorted(devices))}, and a row is on one device: use "
            "one for each process, or an order without gradients"
        )
    if worlds is not None:
        free = worlds.shares_reduce_scatter(order.world) and size < WHOLE_ROWS_BELOW
    else:
        free = isinstance(model, DDP) and hook_is_free(model)
    by_rows = isinstance(model, DDP) and order.world.size > 1 and row_sparse_parameters(model)
    free = free and not sparsifies and not by_rows
    settings, why = resolve_rows(rows, order.unit, order.batch_size), "as asked"
    if isinstance(settings, BatchRows) and not free:
        if by_rows and policy.needs_rows:
            raise ValueError(
                "rows='batch' needs whole gradients from DDP, which averages those of an embedding "
                "with sparse=True by rows: use 'sketch', or leave sparse out"
            )
        if isinstance(model, DDP) and order.world.size > 1:
            raise ValueError(
                "rows='batch' needs the communication hook of DDP, and there is one already: use "
                "'sketch', or attach first and without a sparsifier"
            )
        if worlds is not None and policy.needs_rows and sparsifies:
            raise ValueError(
                "rows='batch' would exchange whole gradients beside the sparse ones: use 'sketch'"
            )
    if settings is None:
        settings, why = choose_rows(
            needs_rows=policy.needs_rows,
            whole_batches=order.unit == order.batch_size,
            free=order.world.size == 1 or free,
            size=size,
            on_gpu=next(model.parameters()).is_cuda,
            workers=order.world.size,
        )
    if order.world.size == 1:  # else sums may be sharded, and the first rows are compared
        length = row_length(settings, size)
        check_row_length(order.ordering.state_dict(), order.ordering.columns, length)
    log.info("ordering %s by %s: %s", policy, settings, why)
    return settings


def check_device(model: nn.Module, world: World) -> None:
    """Refuse a process group that cannot exchange the model's gradients."""
    for device in {p.device for p in model.parameters()}:
        if not world.exchanges(device):
            raise ValueError(
                f"model is on {'a GPU' if device.type == 'cuda' else device}, but the process "
                f"group's backend for it is {world.backend(device) or 'none'!r}, which does not "
                "exchange such tensors: use nccl for a GPU, gloo for the CPU"
            )
