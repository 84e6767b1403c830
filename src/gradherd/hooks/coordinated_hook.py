"""Coordination of whole batches: averaging gradients and ordering share one exchange.

An all-to-all gives this rank its slice of every worker's gradient. Their mean is what averaging
wants, and the slices go to the sampler, which signs them in a thread. `SlicedTransport` is what DDP
and FSDP2 have in common; `CoordinatedHook` works in DDP's communication hook, and
`fsdp_coordination` in FSDP's reduce-scatter. Under DDP, what overlaps with what:

* The all-to-all of a bucket starts when DDP hands the bucket out, and overlaps with the rest of the
  backward. The mean is computed and gathered after the last bucket; the backward waits for that.
* A small model is exchanged as one bucket after the last of DDP's. Nothing overlaps with the
  backward, but there is one message instead of one for each bucket.
* Signs are computed in a thread, from when the batch is fed back (at the optimizer's step or the
  next forward) until the next batch is: beside the step and the next forward and backward.

If what is averaged does not hold the gradient of this backward alone (under `no_sync`, or if
gradients were not cleared), the gradient is exchanged separately when the batch is fed back, and
training waits.

Shapes: R ranks, C columns of this rank over all parameters.
"""

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS, Columns, SlicedMean
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.flat import FlatSpec
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.layouts import BucketSpan, ColumnLayout
from gradherd.hooks.parameter_hooks import ParameterHooks
from gradherd.hooks.torch_names import copy_all
from gradherd.hooks.transports import RankTransport
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.sampler import OrderedSampler

Release = Callable[[Tensor | None], None]
"""Says that slices were read, and may be overwritten, or which memory may be instead."""


class SlicedTransport(RankTransport):
    """Has the sampler learn from slices of whole batches, which averaging delivers.

    Where a backward's gradient is not averaged alone, it is collected from the hooks of parameters
    and exchanged separately, for ordering only.
    """

    layout: ColumnLayout
    total_bytes: int
    """Bytes that this rank has sent to average gradients."""
    stopwatch: Stopwatch
    """Time spent in that exchange."""

    def __init__(self, model: nn.Module, sampler: OrderedSampler, world: World) -> None:
        """Hook into the parameters. All ranks must do so at the same point.

        Args:
            model: The model, without DDP.
            sampler: The sampler that learns.
            world: The ranks that train.
        """
        super().__init__(sampler, world, FlatSpec.of(model), next(model.parameters()).device)
        self._thread = BackgroundThread("gradherd-signs")
        self._sign_bytes = 0
        # CPU time of the thread: its wall time is mostly spent waiting for the training loop.
        self._sign_seconds = 0.0
        self._separate: dict[str, Tensor] = {}  # gradient of a backward that is not averaged alone
        # Counted apart from `total_bytes`, which training would have sent without an order, too.
        self._separate_bytes = 0
        self._decided = False
        self._shares = False  # whether averaging delivers the slices of this backward
        self._hooks = ParameterHooks(model, self._arrived)

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent for ordering alone."""
        return self._separate_bytes + self._sign_bytes

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._hooks.before_first = began

    @abstractmethod
    def _comes_alone(self) -> bool:
        """Say whether what will be averaged holds the gradient of this backward alone."""

    @abstractmethod
    def _take_slices(self) -> tuple[Columns, Release]:
        """Return the slices that averaging has delivered, and what gives them back."""

    @abstractmethod
    def _exchange_separately(self, grads: dict[str, Tensor]) -> tuple[Columns, Release, int]:
        """Return the same of a gradient that was not averaged alone, and the bytes sent."""

    @abstractmethod
    def _drop_slices(self) -> None:
        """Drop slices that were not fed back."""

    def _arrived(self, name: str, grad: Tensor) -> None:
        # At the first gradient of a backward: nothing is averaged before it, and nothing earlier
        # would do, since gradients may be cleared anywhere before the backward.
        if not self._decided:
            self._shares, self._decided = self._comes_alone(), True
        if not self._shares:
            # A parameter may have several gradients: two backwards of one forward are one batch.
            before = self._separate.get(name)
            self._separate[name] = grad.clone() if before is None else before.add_(grad)

    def feed(self, claim: BatchClaim | None, loss_scale: float) -> None:
        """Start to sign this batch of every worker beside the training loop."""
        # Released before the thread starts, so that the next backward cannot feed them again.
        grads, self._separate = self._separate, {}
        if self._shares:
            rows, release = self._take_slices()
        else:
            rows, release, sent = self._exchange_separately(grads)
            self._separate_bytes += sent
        self._decided = False
        # Running sums outlive a change of the scale, so rows must not depend on it.
        if loss_scale != 1:
            for block in rows:
                block.div_(loss_scale)
        try:
            self._thread.submit(partial(self._sign, rows, claim, release))
        except BaseException:  # of the batch before
            release(None)
            raise

    def _sign(self, rows: Columns, claim: BatchClaim | None, release: Release) -> None:
        """Learn from this rank's columns of every worker's gradient, in the thread."""
        begin = time.thread_time()
        try:
            # Compared in the thread, so that training does not wait for it. A worker's last unit
            # may have no partner and is not signed then: nobody else would notice that it is not
            # finite. Workers may have different numbers of units.
            sizes = self._sampler.ordering.sizes
            last = claim is not None and claim.step + claim.units >= min(sizes)
            finite = not last or all(bool(block.sum().isfinite()) for block in rows)
            comparison = self._in_step.compare(claim, self._side, finite=finite)
            if not comparison.same or not comparison.finite:
                self._in_step.pass_over(claim, comparison)
            elif claim is not None:
                script = observe_slices(self._sampler, rows, first=claim.step, release=release)
                self._sign_bytes += run(script, self._side).bytes
        finally:
            release(None)
        self._sign_seconds += time.thread_time() - begin

    def by_index(self) -> None:
        """Refuse batches that are given by their examples.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "whole batches that are exchanged along with gradients cannot be given by index: their "
            "order would differ between ranks; attach with rows='sketch'"
        )

    def prepare(self) -> None:
        """Reset before a backward, also after one that failed."""
        self.forget()

    def forget(self) -> None:
        """Drop a gradient that was not fed back yet."""
        self._drop_slices()
        self._separate, self._decided = {}, False

    def wait(self) -> None:
        """Return when the signs of all batches are computed."""
        self._thread.wait()

    def metrics(self) -> dict[str, Any]:
        """Return what averaging gradients has cost."""
        return {
            "exchange_seconds": self.stopwatch.seconds,
            "signs_cpu_seconds": self._sign_seconds,
            "total_bytes": self.total_bytes,
        }

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        self._hooks.remove()
        self._thread.close()
        super().close()


class CoordinatedHook(SlicedTransport, BucketHook):
    """Averages DDP's gradients, and has the sampler learn from whole batches of all workers.

    C counts this rank's slice of each bucket.
    """

    def __init__(self, ddp: DDP, sampler: OrderedSampler, world: World) -> None:
        """Register with DDP. All ranks must do so at the same point.

        Args:
            ddp: The model.
            sampler: The sampler that learns.
            world: The ranks that train.
        """
        BucketHook.__init__(self, ddp, world)
        SlicedTransport.__init__(self, ddp.module, sampler, world)
        # Weak: DDP holds its hook out of the garbage collector's sight, and would never be freed.
        self._ddp = weakref.ref(ddp)
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        # DDP's buckets also hold parameters that were frozen after it was wrapped.
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # All parameters in one bucket, in order: how small models are exchanged, and the layout
        # that larger ones start from until DDP's own buckets are known.
        self.layout = self._one_bucket_layout()
        # One vector can hold the elements of one dtype and device only.
        kinds, spec = {(p.dtype, p.device) for p in self._parameters}, self._spec
        self._one_bucket = spec.size <= ONE_BUCKET_ELEMENTS and len(kinds) == 1
        length = world.size * self.layout.width(world.size) if self._one_bucket else 0
        self._flat = self._parameters[0].detach().new_zeros(length)
        self._spans = spec.slices
        self._pieces: tuple[list[Tensor], list[Tensor]] = ([], [])  # of one vector, of the buckets
        self._mean = SlicedMean(world)
        self._rows: Columns | None = None  # of a backward that came with its buckets

    def _one_bucket_layout(self) -> ColumnLayout:
        spec = self._spec
        padding = -spec.size % self.world.size
        parameters = (*zip(spec.names, spec.numels, strict=True), ("", padding))
        return ColumnLayout((BucketSpan(parameters),))

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return self._rows is not None or bool(self._separate)

    def _comes_alone(self) -> bool:
        ddp, fresh = self._ddp(), all(parameter.grad is None for parameter in self._parameters)
        return fresh and ddp is not None and ddp.require_backward_grad_sync

    def collects(self) -> bool:
        """Return whether the buckets hold the gradient of this backward alone."""
        return self.active and self._shares

    def add(self, bucket: dist.GradBucket) -> None:
        """Begin the all-to-all of the bucket, unless all buckets are exchanged as one."""
        # The all-to-all needs the bucket alone, so it can start while the backward goes on.
        if not self._one_bucket:
            self._mean.start(bucket.buffer())

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets and store this rank's slices of all workers' gradients."""
        # Only what this exchange adds: the mean counts over the whole run.
        before = self._mean.bytes
        if self.has_new(buckets):
            self._use(buckets)
        if self._one_bucket:
            # Copied into one vector, and the mean back.
            flat, own = self._pieces
            copy_all(flat, own)
            self._mean.start(self._flat)
            self._rows = self._mean.finish(columns=True)
            copy_all(own, flat)
        else:
            self._rows = self._mean.finish(columns=True)
        self.total_bytes += self._mean.bytes - before

    def _use(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Switch to other buckets: DDP rebuilds them once after the first step."""
        if self._one_bucket:
            # By parameter, in the order of the model: so the columns stay the same when DDP
            # rebuilds its buckets.
            grads = {
                self._names[parameter]: grad
                for bucket in buckets
                for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            }
            used = {name: grads[name] for name in self._spans if name in grads}
            flat = [self._flat[self._spans[name]].view_as(grad) for name, grad in used.items()]
            self._pieces = flat, list(used.values())
            return
        layout = ColumnLayout(
            tuple(
                BucketSpan(tuple((self._names[p], p.numel()) for p in bucket.parameters()))
                for bucket in buckets
            )
        )
        if layout == self.layout:
            return
        # The thread writes what is converted here. All ranks get here in the same step, since DDP
        # rebuilds its buckets on all ranks alike, so they can gather.
        self._thread.wait()
        old, self.layout = self.layout, layout
        self._sampler.ordering.map_columns(
            lambda row: layout.columns(old.gather(row, self.world), self.world)
        )

    def _take_slices(self) -> tuple[Columns, Release]:
        rows, self._rows = self._rows, None
        assert rows is not None
        return rows, self._mean.lend()

    def _exchange_separately(self, grads: dict[str, Tensor]) -> tuple[Columns, Release, int]:
        before, like = self._mean.bytes, self._parameters[0].detach()
        for bucket in self.layout.spans:
            assert isinstance(bucket, BucketSpan)
            # As DDP's buckets, these have one dtype: that of their parameters.
            same = next((grads[name] for name, _ in bucket.parameters if name in grads), like)
            flats = [
                grads[name].flatten() if name in grads else same.new_zeros(count)
                for name, count in bucket.parameters
            ]
            self._mean.start(torch.cat(flats))
        self._rows = self._mean.finish(write_back=False, columns=True)
        return *self._take_slices(), self._mean.bytes - before

    def _drop_slices(self) -> None:
        # The all-to-all has happened already; only its result is dropped.
        self._rows = None
        self.discard()
        self._mean.abandon()

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering and cut out this rank's columns."""
        # DDP's buckets may not be known yet. The next backward converts to them (`_use`).
        self.layout, self._known = self._one_bucket_layout(), []
        super().load_ordering_state(state)

    def close(self) -> None:
        """Leave DDP, remove the hooks, stop the thread and close its group."""
        BucketHook.close(self)
        SlicedTransport.close(self)
