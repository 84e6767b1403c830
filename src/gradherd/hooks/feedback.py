"""Feeds a model's gradients back to its sampler while the user's own training loop runs.

When a forward of the model begins, the sampler is asked which batch the loop has received last, and
what the backward (or backwards) of that forward gives belongs to it. A batch may have several
forwards (micro-batches). It is fed back when the optimizer steps, the first forward of the next
batch begins or the order is read, whichever comes first.
"""

import contextlib
import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from gradherd.comm.collectives import Stopwatch, all_gather
from gradherd.flat import FlatSpec
from gradherd.hooks.fsdp import fsdp_modules
from gradherd.hooks.parameter_hooks import watch_steps
from gradherd.hooks.state import check_row_length
from gradherd.hooks.transports import GatheringTransport, RowFigures, RowTransport
from gradherd.ordering.batches import BatchTicket
from gradherd.ordering.bounds import HerdingWatch
from gradherd.ordering.coordination import check_same_version
from gradherd.ordering.sampler import Feeder, OrderedSampler
from gradherd.rows.layer_plan import unwrap_model
from gradherd.rows.module_hooks import UncopiedHook, do_nothing
from gradherd.rows.settings import RowSettings, row_length
from gradherd.torch_names import current_backward, current_scale, is_joining, uncompiled

log = logging.getLogger("gradherd")


attached_models: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
"""Models (inside DDP) that a herd is attached to: a second would claim each batch once more."""


def is_attached(model: nn.Module) -> bool:
    """Return whether a herd is attached to a model, to a part of it or to what it is a part of."""
    parts = set(model.modules())
    return any(one in parts or model in one.modules() for one in attached_models)


class OrderFeedback(Feeder):
    """Feeds a model's gradients back to its sampler."""

    def __init__(
        self,
        model: nn.Module,
        sampler: OrderedSampler,
        transport: RowTransport,
        rows: RowSettings,
        scaler: GradScaler | None,
    ) -> None:
        """Hook into the model (in DDP or not), every optimizer and the sampler."""
        self.sampler = sampler
        self.rows = rows
        self._transport = transport
        self._scaler = scaler
        self._device = next(model.parameters()).device  # where the group of the ranks works
        self._row_length = row_length(rows, FlatSpec.of(unwrap_model(model)).size)
        self._checked_orders = False
        self._paused = False
        self._stopwatch = Stopwatch()  # time that reading and ordering cost the training loop
        self._ticket: BatchTicket | None = None  # the batch of the gradients that are waiting
        self._announced = False  # whether a forward of the model has announced the next backward
        self._stepped = False  # whether an optimizer has stepped inside the backward that waits
        self._cut_off: BatchTicket | None = None  # a batch that was fed back before a step
        self._loss_scale: Tensor | float = 1.0
        self._scale_version = -1  # of the scaler's tensor
        self._fed_back = 0  # examples, in all
        bare, needs_rows = unwrap_model(model), sampler.ordering.policy.needs_rows
        named = bare.named_parameters() if needs_rows else ()
        self._frozen = {name: p for name, p in named if not p.requires_grad}  # not part of rows
        self._known = {id(p) for p in bare.parameters()}
        self._model = weakref.ref(bare)
        # FSDP itself puts whole parameters into the place of shards.
        self._looks = needs_rows and not fsdp_modules(bare)
        self._indices: list[int] | None = None
        self._by_index = False
        self._figures: RowFigures | None = None
        # A graph is broken where a forward must tell that it begins.
        hook = UncopiedHook(self._before_forward, do_nothing if transport.quiet else None)
        self._handles = [
            model.register_forward_pre_hook(hook),
            # A closure (Lightning, L-BFGS) runs its backward inside the step, so also after it.
            *watch_steps(model, self, OrderFeedback.around_step, after=True),
        ]
        sampler.fed_by(self)
        transport.source.on_backward(self.before_backward)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        self._refuse_join(module)
        ticket = self._current_ticket()
        if ticket is not None and self._goes_on(ticket):
            self._transport.next_part()
        else:
            self._feed_back()
            if not self._transport.quiet:
                self._transport.forget()
        if not self._paused:
            self._expect(ticket)
            self._announced = True

    def _refuse_join(self, module: nn.Module) -> None:
        ddp = uncompiled(module)
        needs_all = self.sampler.ordering.policy.needs_rows and self.sampler.world.size > 1
        if needs_all and isinstance(ddp, DDP) and is_joining(ddp):
            raise RuntimeError(
                "join() lets a rank stop before the others, who would wait for what it has to say "
                "of the order: leave it out, since OrderedSampler gives all ranks as many batches"
            )

    def _goes_on(self, ticket: BatchTicket) -> bool:
        """Return whether a forward is of another part of the batch that waits."""
        if self._stepped or not self._adds_to(ticket):
            return False
        return not self._transport.source.is_complete(self.sampler.examples_of(ticket))

    def _current_ticket(self) -> BatchTicket | None:
        """Return the batch that the loop has received last; None if that does not matter."""
        return None if self._paused or self._by_index else self.sampler.current_batch()

    def _adds_to(self, ticket: BatchTicket | None) -> bool:
        """Return whether what waits is of the same batch.

        Not after a step that the scaler skipped: then the scale is another, too.
        """
        return ticket == self._ticket and self._transport.waiting and self._same_scale()

    def _same_scale(self) -> bool:
        scale = current_scale(self._scaler)
        if isinstance(scale, Tensor) and scale._version == self._scale_version:
            return True
        return bool(scale == self._loss_scale)

    def _expect(self, ticket: BatchTicket | None) -> None:
        """Note which batch the next gradients belong to, and the scale of their loss."""
        self._ticket, scale = ticket, current_scale(self._scaler)
        if isinstance(scale, Tensor):
            # A copy, which updates do not change. On a GPU the host does not wait for it.
            self._scale_version, scale = scale._version, scale.double()
        self._loss_scale = scale

    def before_backward(self) -> None:
        """Note the batch of a backward that no forward of the model announced.

        Loops that call parts of the model, such as `model.encode(x)`, never call its forward.
        """
        if self._announced or self._paused or self._by_index:
            return
        ticket = self._current_ticket()
        if not self._adds_to(ticket):
            self._feed_back()
        self._expect(ticket)

    def around_step(self, optimizer: Optimizer) -> None:
        """Feed back what is waiting before an optimizer steps, or from inside its step."""
        if current_backward() >= 0:
            # An optimizer for each parameter, stepped when its gradient is in: the rest of the
            # batch is yet to come. It is fed back before the next forward.
            self._transport.source.stepped_in_backward()
            self._stepped = True
            return
        self._feed_back()
        self._cut_off = None

    def before_iterating(self) -> None:
        """Feed back what is waiting before an iterator of the sampler starts."""
        self._cut_short()
        self._warn_of_new()
        self.before_reading()

    def before_reading(self) -> None:
        """Wait for what runs beside the training loop before the order is read."""
        with self._stopwatch:
            self._transport.wait()

    def _feed_back(self) -> None:
        """Feed back the batch whose backward is done."""
        if self._transport.waiting:
            self._announced = self._stepped = False
            with self._stopwatch, self._own_context():
                self._claim_and_feed()

    def _cut_short(self) -> None:
        """Feed back a batch of which more may come."""
        ends = not self._transport.waiting or self._stepped
        ticket = self._cut_off if ends else self._ticket
        self._feed_back()
        self._cut_off = ticket

    def _own_context(self) -> contextlib.ExitStack:
        """Return a context outside those of the training loop, in which rows are read."""
        # Inside the autocast of a forward, rows would lose precision; inside inference_mode, in
        # which somebody iterates over the loader, what is learned could not be changed later.
        kind, stack = self._device.type, contextlib.ExitStack()
        # Only there: the contexts take longer than all that is done in them.
        if torch.is_inference_mode_enabled() or torch.is_autocast_enabled(kind):
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.autocast(kind, enabled=False))
        return stack

    def _claim_and_feed(self) -> None:
        if self._paused:
            self._transport.forget()
            return
        indices, self._indices = self._indices, None
        ticket, self._ticket = self._ticket, None
        try:
            if self._by_index and indices is None:
                raise RuntimeError(
                    "a gradient came back of a batch that was not named: call "
                    "herd.observe(indices) once for each forward, with the examples that it takes"
                )
            if ticket is not None and ticket == self._cut_off and self.sampler.is_current(ticket):
                raise RuntimeError(
                    "the order was read or saved, or backwards were paused, between two backwards "
                    "of one batch, so its gradient was cut in two: do that after the optimizer's "
                    "step"
                )
            claim = self.sampler.claim(ticket, indices)
        except (RuntimeError, ValueError):
            self._transport.forget()  # otherwise the same error would come at every step
            raise
        # All ranks feed back as many batches, whatever each of them is: that is what keeps their
        # collectives in step. Later orders are compared along with the claims.
        if not self._checked_orders:
            self._checked_orders = True
            # A version has 64 bits without a sign, an int64 has one.
            ordering, world = self.sampler.ordering, self.sampler.world
            version = torch.tensor(int(ordering.version, 16) - 2**63, device=self._device)
            check_same_version(all_gather(version, world).value.tolist(), ordering.epoch)
        self._warn_of_unfrozen()
        self._fed_back += 0 if claim is None else claim.examples
        if claim is not None and self.sampler.finishing_rest:
            self._transport.feed(None, self._loss_scale)
            self.sampler.skip_rest()
            return
        self._transport.feed(claim, self._loss_scale)

    def _warn_of_unfrozen(self) -> None:
        """Warn once of each parameter that is trained now, but was frozen before."""
        for name in [name for name, p in self._frozen.items() if p.requires_grad]:
            del self._frozen[name]
            log.warning(
                "%s was unfrozen after attach(), so rows leave it out: attach again to include it",
                name,
            )

    def _warn_of_new(self) -> None:
        """Warn once of each parameter that was put into the model. Looks once in a pass."""
        model = self._model()
        if model is None or not self._looks:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                self._known.add(id(parameter))
                log.warning(
                    "%s was put into the model after attach(), so rows leave it out: attach again "
                    "to include it",
                    name,
                )

    def observe(self, indices: Sequence[int] | Tensor) -> None:
        """Give the examples of the current batch; see `Herd.observe`."""
        given = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        count = self.sampler.sharding.examples
        for index in given:
            # bool is an int, but a mask is no list of indices.
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
                raise ValueError(
                    f"observe() needs indices into the data set, whole numbers in [0, {count}), "
                    f"got {index!r}"
                )
        if self._indices is not None:
            self._feed_back()  # the batch before, if gradients are accumulated
        self._transport.by_index()
        self._by_index, self._indices = True, given

    def finish(self) -> None:
        """Feed back what is waiting and let the sampler learn it, on all ranks together."""
        with self._stopwatch, self._own_context():
            self._cut_short()
            self._transport.finish()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Ignore backwards inside: they do not belong to examples of the sampler."""
        self._cut_short()
        # Remembered, so that pauses can be nested.
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._transport.forget()
            self._paused = before

    def metrics(self) -> dict[str, Any]:
        """Return the epoch, how much of it was fed back, and what ordering alone has cost."""
        # Another rank may have destroyed the group, while this one alone logs how it ended: that
        # the last batches are not learned is for the next call to say which needs them.
        with self._stopwatch:
            self._transport.wait(raises=False)
        cursor = self.sampler.cursor()
        return {
            "epoch": cursor["epoch"],
            "examples_fed_back": cursor["position"],
            "examples": len(self.sampler),
            "total_examples_fed_back": self._fed_back,
            "rows": repr(self.rows),
            **self._transport.metrics(),
            # Without what rows take inside the user's backward.
            "ordering_seconds": self._stopwatch.seconds,
        }

    def row_scalars(self) -> dict[str, float]:
        """Return what is known of rows so far; the first call has them measured from then on."""
        ordering = self.sampler.ordering
        if self._figures is None:
            self.before_reading()  # a thread may be learning
            self._figures = RowFigures(self.sampler.unit)
            # An order without gradients has no prefix sums to watch.
            if ordering.policy.needs_rows:
                ordering.watch = HerdingWatch(ordering.length)
            # Slices of gradients (whole batches of several ranks) have no rows of one rank.
            if isinstance(self._transport, GatheringTransport):
                self._transport.figures = self._figures
        scalars = self._figures.scalars()
        if ordering.watch is not None and ordering.watch.last is not None:
            scalars["herding_bound"] = float(ordering.watch.last)
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """Return what determines later orders, the same on all ranks. All must call it."""
        if self._by_index and self.sampler.state_dict()["position"]:
            raise RuntimeError(
                "batches given by index are learned at the end of an epoch: save the state there, "
                "not in the middle"
            )
        self.finish()
        ordering = self._transport.ordering_state()
        rows = self._transport.source.state_dict()
        return {"ordering": ordering, "sampler": self.sampler.state_dict(), "rows": rows}

    def load_state_dict(
        self, state: Mapping[str, Any], skipped_by: Literal["sampler", "loader"] = "sampler"
    ) -> None:
        """Continue where `state_dict` was taken; see `Herd.load_state_dict`."""
        check_row_length(state["ordering"], self.sampler.ordering.columns, self._row_length)
        self._transport.forget()
        self._transport.finish()  # what was fed before must not be learned after
        self._transport.load_ordering_state(state["ordering"])
        self._transport.source.load_state_dict(state.get("rows", {}))
        self.sampler.load_state_dict(state["sampler"], skipped_by=skipped_by)
        self._checked_orders = False

    def detach(self) -> None:
        """Remove all hooks; the sampler keeps what it has learned."""
        try:
            self.finish()
        except Exception:
            if not self.sampler.world.destroyed:
                raise
            log.warning(
                "the process group is gone, so the last batches were not learned: call "
                "herd.detach() before destroy_process_group()"
            )
        finally:  # also after a rank has failed: nothing of this must stay in the model
            self._transport.close()
            self.sampler.ordering.watch = None
            for handle in self._handles:
                handle.remove()
            self.sampler.fed_by(None)
