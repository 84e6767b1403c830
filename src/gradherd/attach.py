"""attach(model, order=...): the one place where ordering meets a model.

The training loop stays the user's own. A batch begins with a forward of the model, and what its
backward (or backwards) gave is fed back when the optimizer steps or the next forward begins,
whichever comes first.
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradherd.comm.collectives import all_gather
from gradherd.comm.world import World
from gradherd.feeds import Examples, Feed, NoRows, WholeBatches
from gradherd.ordering.memory import COLUMNS
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ride import Ride
from gradherd.rows.flat import FlatSpec
from gradherd.rows.owners import bare as bare_module
from gradherd.rows.owners import describe
from gradherd.rows.settings import BatchRows, ExactRows, SketchRows

log = logging.getLogger("gradherd")

RowSettings = BatchRows | ExactRows | SketchRows
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
) -> "Herd":
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
    size = FlatSpec.of(_module(model)).size
    if not order.ordering.policy.needs_rows:
        return BatchRows(), "this order needs no gradients"
    if batches and (order.world.size == 1 or _hook_is_free(model)):
        return BatchRows(), f"units are whole batches, {size:,} parameters"
    if batches:
        return SketchRows(), "units are whole batches, and there is no DDP hook to ride on"
    if size <= _SMALL:
        return ExactRows(), f"{size:,} parameters are few; {describe(_module(model))}"
    return SketchRows(), f"{size:,} parameters are many; {describe(_module(model))}"


def _feed(model: nn.Module, order: OrderedSampler, settings: RowSettings) -> Feed:
    bare, world = _module(model), order.world
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


def _module(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DDP) else model


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


def _settling(herd: "Herd", model: nn.Module) -> Callable[[Any, Any, Any], None]:
    """Return a hook for all optimizers that feeds back before this model's one steps.

    It is called for every optimizer of the process, so it does not keep the herd alive.
    """
    known, mine = weakref.ref(herd), {id(p) for p in model.parameters()}

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        alive = known()
        groups = optimizer.param_groups
        if alive is not None and any(id(p) in mine for group in groups for p in group["params"]):
            alive.catch_step()

    return before_step


class Herd:
    """What connects a model and a sampler. Made by `attach`."""

    def __init__(
        self,
        model: nn.Module,
        sampler: OrderedSampler,
        feed: Feed,
        rows: RowSettings,
        scaler: GradScaler | None,
    ) -> None:
        self.sampler = sampler
        self.rows = rows
        self._model = model
        self._feed = feed
        self._scaler = scaler
        self._device = next(model.parameters()).device  # where the ranks' group works
        self._checked_epoch = -1
        self._paused = False
        self._indices: list[int] | None = None
        self._by_index = False
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(_settling(self, model)),
        ]
        self._names = FlatSpec.of(_module(getattr(model, "_orig_mod", model))).names
        sampler.feedback = self

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._settle()
            self._feed.prepare()

    def catch_step(self) -> None:
        """Feed back before the optimizer changes what rows are read from."""
        self._settle()

    def _settle(self) -> None:
        """Feed back the batch whose backward is done."""
        if not self._feed.waiting:
            return
        if self._paused:
            self._feed.forget()
            return
        indices, self._indices = self._indices, None
        try:
            claim = self.sampler.claim(indices)
        except (RuntimeError, ValueError):
            self._feed.forget()  # or the same complaint would come back at every step
            raise
        if claim.epoch != self._checked_epoch:
            self._checked_epoch = claim.epoch
            check_same_orders(self.sampler, self._device)
        self._feed.feed(claim, self._scaler.get_scale() if self._scaler else 1.0)

    def observe(self, indices: Sequence[int] | Tensor) -> None:
        """Tell the examples of the batch at hand, for loaders that deliver out of order.

        Call it once for each batch, between its arrival and the optimizer's step. Rows then
        wait for the end of the epoch and are learned in the order of the sampler.
        """
        if isinstance(self._feed, Ride):
            raise ValueError(
                "whole batches that ride on DDP's exchange cannot be told by index: their order "
                "would differ between ranks; attach with rows='sketch'"
            )
        self._feed.by_index()
        self._by_index = True
        listed = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        self._indices = listed

    def wait(self) -> None:
        """Return when the sampler has learned what was handed over to it."""
        self._feed.wait()

    def catch_up(self) -> None:
        """Feed back what waits, and wait until it is learned (or on its way to other ranks)."""
        self._settle()
        self._feed.wait()

    def finish(self) -> None:
        """Feed back what waits and let the sampler learn it, on all ranks together."""
        self._settle()
        self._feed.finish()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore backwards inside: they are not for examples of the sampler."""
        self._settle()
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._feed.forget()
            self._paused = before

    def metrics(self) -> dict[str, Any]:
        """Return the epoch, how much of it was fed back, and what was sent for ordering alone."""
        cursor = self.sampler.state_dict()
        return {
            "epoch": cursor["epoch"],
            "examples_fed_back": cursor["position"],
            "examples": len(self.sampler),
            "rows": repr(self.rows),
            "bytes_for_ordering": self._feed.bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides future orders, free of ranks. All ranks must call it."""
        if self._by_index and self.sampler.state_dict()["position"]:
            raise RuntimeError(
                "batches told by index are learned at the end of an epoch: save the state there, "
                "not in its middle"
            )
        self.finish()
        state = self.sampler.ordering.state_dict()
        if isinstance(self._feed, Ride):
            memory = state["memory"]
            shards = {key: memory[key] for key in COLUMNS if key in memory}
            memory.update(self._feed.whole_state(shards, self._names))
        return {"ordering": state, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken. Call it before iterating, on all ranks."""
        self._feed.forget()
        self._feed.finish()  # what was fed before must not come after
        self.sampler.ordering.load_state_dict(state["ordering"])
        if isinstance(self._feed, Ride):
            self._feed.take_columns(self._names)
        self.sampler.load_state_dict(state["sampler"])
        self._checked_epoch = -1

    def detach(self) -> None:
        """Leave model and sampler as they were; what was learned stays in the sampler."""
        self.finish()
        self._feed.close()
        for handle in self._handles:
            handle.remove()
        self.sampler.feedback = None


def check_same_orders(sampler: OrderedSampler, device: torch.device) -> None:
    """Raise if ranks hold different orders; once an epoch, eight bytes from `device`."""
    version = torch.tensor(int(sampler.ordering.version, 16) - 2**63, device=device)
    versions = all_gather(version, sampler.world).value.tolist()
    if len(set(versions)) > 1:
        common = max(set(versions), key=versions.count)
        others = [rank for rank, held in enumerate(versions) if held != common]
        raise RuntimeError(
            f"ranks {others} hold another order of epoch {sampler.ordering.epoch} than the other "
            f"{len(versions) - len(others)}: are dataset length, seed, policy and loaded state "
            "equal on all ranks?"
        )
