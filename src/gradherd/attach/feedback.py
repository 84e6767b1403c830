"""What connects a model and its sampler while a training loop runs."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradherd.attach.coordinated_hook import Ride
from gradherd.attach.feeds import Feed
from gradherd.comm.collectives import all_gather
from gradherd.comm.stopwatch import Stopwatch
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.state import COLUMNS
from gradherd.rows.flat import FlatSpec
from gradherd.rows.settings import RowSettings


def inner(model: nn.Module) -> nn.Module:
    """Return the module inside DDP."""
    return model.module if isinstance(model, DDP) else model


class Link:
    """Feeds a model's gradients back to its sampler."""

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
        self._clock = Stopwatch()  # what reading and sorting cost the training loop
        self._indices: list[int] | None = None
        self._by_index = False
        self._handles = [
            model.register_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(_settling(self, model)),
        ]
        self._names = FlatSpec.of(inner(getattr(model, "_orig_mod", model))).names
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
        if self._feed.waiting:
            # A forward in autocast may be what asks; rows keep their precision.
            with self._clock, torch.autocast(self._device.type, enabled=False):
                self._hand_over()

    def _hand_over(self) -> None:
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
        if self.sampler.resting:
            self._feed.forget()
            self.sampler.pass_over()
            return
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
        with self._clock:
            self._feed.wait()

    def catch_up(self) -> None:
        """Feed back what waits, and wait until it is learned (or on its way to other ranks)."""
        self._settle()
        self.wait()

    def finish(self) -> None:
        """Feed back what waits and let the sampler learn it, on all ranks together."""
        with self._clock, torch.autocast(self._device.type, enabled=False):
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
        """Return the epoch, how much of it was fed back, and what ordering alone has cost."""
        cursor = self.sampler.state_dict()
        found = {
            "epoch": cursor["epoch"],
            "examples_fed_back": cursor["position"],
            "examples": len(self.sampler),
            "rows": repr(self.rows),
            "bytes_for_ordering": self._feed.bytes,
            "ordering_seconds": self._clock.seconds,
        }
        if isinstance(self._feed, Ride):
            found["exchange_seconds"] = self._feed.clock.seconds
            found["total_bytes"] = self._feed.exchange_bytes
        return found

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


def _settling(link: "Link", model: nn.Module) -> Callable[[Any, Any, Any], None]:
    """Return a hook for all optimizers that feeds back before this model's one steps.

    It is called for every optimizer of the process, so it does not keep the link alive.
    """
    known, mine = weakref.ref(link), {id(p) for p in model.parameters()}

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        alive = known()
        groups = optimizer.param_groups
        if alive is not None and any(id(p) in mine for group in groups for p in group["params"]):
            alive.catch_step()

    return before_step
