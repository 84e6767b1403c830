"""Coordination in DDP's communication hook: averaging and ordering share one exchange.

An all-to-all gives this rank its slice of every worker's gradient (`comm.sliced_mean`). Their mean
goes back to DDP, and the slices go to the sampler, which signs them. What overlaps with what:

* The all-to-all of a bucket starts when DDP hands the bucket out, and overlaps with the rest of the
  backward. The mean is computed and gathered after the last bucket; the backward waits for that.
* A small model is exchanged as one bucket after the last of DDP's. Nothing overlaps with the
  backward, but there is one message instead of one for each bucket.
* Signs are computed in a thread, from when the batch is fed back (at the optimizer's step or the
  next forward) until the next batch is: beside the step and the next forward and backward.

If a bucket does not hold the gradient of this backward alone (under `no_sync`, or if gradients were
not cleared), the gradient is exchanged separately when the batch is fed back, and training waits.

Shapes: R ranks, C columns of this rank over all buckets: its slice of each one and, on the last
rank, what is left of buckets whose length does not divide by R.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_hook import BucketHook
from gradherd.attach.layouts import BucketLayout
from gradherd.attach.parameter_hooks import ParameterHooks
from gradherd.attach.transports import StepComparison
from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS, SlicedMean
from gradherd.comm.world import World
from gradherd.flat import FlatSpec
from gradherd.ordering.batch_claims import BatchClaim
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.policy import COLUMNS
from gradherd.ordering.sampler import OrderedSampler


class SliceSigner:
    """Feeds batches of all workers to the sampler, one after the other, in a background thread."""

    def __init__(self, sampler: OrderedSampler, world: World) -> None:
        """Make the thread and its group. All ranks must do so at the same point."""
        self._sampler = sampler
        # A group of its own for the thread: ranks reach its collectives at different points of
        # their training step, so on the model's group they could be matched with the wrong ones.
        self._side = world.side_channel()
        self._thread = BackgroundThread("gradherd-signs")
        self._in_step = StepComparison(sampler)
        self.bytes = 0
        """Bytes that this rank has sent for signs."""
        self.cpu_seconds = 0.0
        """CPU time of the thread: its wall time is mostly spent waiting for the training loop."""

    def submit(self, rows: Tensor, claim: BatchClaim | None, loss_scale: float) -> None:
        """Start to sign a batch, after the one before it is done.

        Args:
            rows: (R, C) columns of every worker's gradient. They are changed, and must stay as they
                are until the next but one batch.
            claim: The units that the gradient belongs to; None if it counts for nothing.
            loss_scale: What the loss was multiplied by (GradScaler).
        """
        # Running sums outlive a change of the scale, so rows must not depend on it.
        if loss_scale != 1:
            rows.div_(loss_scale)

        def sign() -> None:
            begin = time.thread_time()
            learn()
            self.cpu_seconds += time.thread_time() - begin

        def learn() -> None:
            # Here, not in the training loop, which never waits for a message of this size. A last
            # unit without a partner is not signed, so nobody would notice that it is not finite.
            last = claim is not None and claim.step + claim.units == self._sampler.ordering.length
            finite = not last or bool(rows.sum().isfinite())
            comparison = self._in_step.compare(claim, self._side, finite=finite)
            if not comparison.same or not comparison.finite:
                self._in_step.pass_over(claim, comparison)
            elif claim is not None:
                script = observe_slices(self._sampler, rows, first=claim.step)
                self.bytes += run(script, self._side).bytes

        self._thread.submit(sign)

    def wait(self) -> None:
        """Return when the signs of all batches are computed."""
        self._thread.wait()

    def close(self) -> None:
        """Stop the thread and close its group."""
        self._thread.close()
        self._side.close_side_channel()


class CoordinatedHook(BucketHook):
    """Averages DDP's gradients, and has the sampler learn from whole batches of all workers."""

    def __init__(self, ddp: DDP, sampler: OrderedSampler, world: World) -> None:
        """Register with DDP. All ranks must do so at the same point.

        Args:
            ddp: The model.
            sampler: The sampler that learns.
            world: The ranks that train.
        """
        super().__init__(ddp, world)
        self._ddp = ddp
        self._sampler = sampler
        self._signer = SliceSigner(sampler, world)
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        # DDP's buckets also hold parameters that were frozen after it was wrapped.
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # All parameters in one bucket, in order: how small models are exchanged, and the layout
        # that larger ones start from until DDP's own buckets are known.
        spec = FlatSpec.of(ddp.module)
        self.layout = BucketLayout.one_bucket(zip(spec.names, spec.numels, strict=True), world)
        # One vector can hold the elements of one dtype and device only.
        kinds = {(p.dtype, p.device) for p in self._parameters}
        self._one_bucket = spec.size <= ONE_BUCKET_ELEMENTS and len(kinds) == 1
        length = self.layout.lengths()[0] if self._one_bucket else 0
        self._flat = self._parameters[0].detach().new_zeros(length)
        spans = (slice(at, at + n) for at, n in zip(spec.offsets, spec.numels, strict=True))
        self._spans = dict(zip(spec.names, spans, strict=True))
        # Views of one vector and DDP's gradients, by where DDP's buckets lie in memory: made once,
        # since a loop over parameters at every step would cost as much as the copy.
        self._pieces: tuple[tuple[int, ...], list[Tensor], list[Tensor]] = ((), [], [])
        self._mean = SlicedMean(world)
        self._rows: Tensor | None = None  # (R, C) of a backward that came with its buckets
        self._separate: dict[str, Tensor] = {}  # gradient of a backward that did not
        self._coordinates = True  # whether the buckets of this backward hold its gradient alone
        self._decided = False
        # Counted apart from `total_bytes`, which DDP would have sent without an order, too.
        self._separate_bytes = 0
        self._hooks = ParameterHooks(ddp.module, self._arrived)

    @property
    def bytes(self) -> int:
        """Bytes that this rank has sent for ordering alone."""
        return self._separate_bytes + self._signer.bytes

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return self._rows is not None or bool(self._separate)

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._hooks.began = began

    def prepare(self) -> None:
        """Reset before a backward, also after one that failed."""
        self._decided = False
        self.discard()
        self._mean.abandon()

    def _arrived(self, name: str, grad: Tensor) -> None:
        # At the first gradient of a backward: buckets are handed out only after it, and nothing
        # earlier would do, since gradients may be cleared anywhere before the backward.
        if not self._decided:
            fresh = all(parameter.grad is None for parameter in self._parameters)
            self._coordinates = fresh and self._ddp.require_backward_grad_sync
            self._decided = True
        if self.active and not self._coordinates:
            flat = grad.flatten()
            # A parameter may have several gradients: two backwards of one forward are one batch.
            before = self._separate.get(name)
            self._separate[name] = flat.clone() if before is None else before.add_(flat)

    def collects(self) -> bool:
        """Return whether the buckets hold the gradient of this backward alone."""
        return self.active and self._coordinates

    def add(self, bucket: dist.GradBucket) -> None:
        """Begin the all-to-all of the bucket, unless all buckets are exchanged as one."""
        # The all-to-all needs the bucket alone, so it can start while the backward goes on.
        if not self._one_bucket:
            self._mean.start(bucket.buffer())

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets and store this rank's slices of all workers' gradients."""
        # Only what this exchange adds: the mean counts over the whole run.
        before = self._mean.bytes
        if self._one_bucket:
            self._exchange_as_one(buckets)
        else:
            self._use(
                BucketLayout(
                    tuple(
                        tuple((self._names[p], p.numel()) for p in bucket.parameters())
                        for bucket in buckets
                    )
                )
            )
            self._rows = self._mean.finish(columns=True)
        self.total_bytes += self._mean.bytes - before

    def _exchange_as_one(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Copy all buckets into one vector, exchange it, and copy the mean back."""
        places = tuple(bucket.buffer().data_ptr() for bucket in buckets)
        if places != self._pieces[0]:
            # By parameter, in the order of the model: so the columns stay the same when DDP
            # rebuilds its buckets.
            grads = {
                self._names[parameter]: grad
                for bucket in buckets
                for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            }
            used = {name: grads[name] for name in self._spans if name in grads}
            flat = [self._flat[self._spans[name]].view_as(grad) for name, grad in used.items()]
            # These views keep the buckets in memory, so none can take the place of another unseen.
            self._pieces = places, flat, list(used.values())
        _, flat, own = self._pieces
        torch._foreach_copy_(flat, own)
        self._mean.start(self._flat)
        self._rows = self._mean.finish(columns=True)
        torch._foreach_copy_(own, flat)

    def _use(self, layout: BucketLayout) -> None:
        """Switch to other buckets: DDP rebuilds them once after the first step."""
        if layout == self.layout:
            return
        # The thread writes what is converted here. All ranks get here in the same step, since DDP
        # rebuilds its buckets on all ranks alike, so they can gather.
        self._signer.wait()
        old, self.layout = self.layout, layout
        self._sampler.ordering.map_columns(
            lambda row: layout.columns(old.gather(row, self.world), self.world)
        )

    def feed(self, claim: BatchClaim | None, loss_scale: float) -> None:
        """Start to sign this batch of every worker beside the training loop.

        Args:
            claim: The units that the gradient belongs to; None if it counts for nothing.
            loss_scale: What the loss was multiplied by (GradScaler).
        """
        # Released before the thread starts, so that the next backward cannot feed the same rows
        # again.
        rows, self._rows = self._rows, None
        if rows is None:
            rows = self._exchange_separately()
        self._signer.submit(rows, claim, loss_scale)

    def _exchange_separately(self) -> Tensor:
        """Return (R, C) slices of a gradient that the buckets did not hold alone.

        DDP averages what the buckets hold; these bytes are sent for ordering alone.
        """
        grads, self._separate = self._separate, {}
        device, before = self._parameters[0].device, self._mean.bytes
        for bucket in self.layout.buckets:
            self._mean.start(
                torch.cat(
                    [grads.get(name, torch.zeros(count, device=device)) for name, count in bucket]
                )
            )
        rows = self._mean.finish(write_back=False, columns=True)
        self._separate_bytes += self._mean.bytes - before
        assert rows is not None
        return rows

    def by_index(self) -> None:
        """Refuse batches that are given by their examples.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "whole batches that are exchanged in DDP's hook cannot be given by index: their order "
            "would differ between ranks; attach with rows='sketch'"
        )

    def wait(self) -> None:
        """Return when the signs of all batches are computed."""
        self._signer.wait()

    def finish(self) -> None:
        """Return when the signs of all batches are computed."""
        self._signer.wait()

    def forget(self) -> None:
        """Drop a gradient that was not fed back yet."""
        # The all-to-all has happened already; only its result is dropped. No batch follows that
        # would wait for the signs of the one before, whose buffers come next.
        if self._rows is not None:
            self._signer.wait()
        self._rows, self._separate = None, {}
        self._decided = False

    def metrics(self) -> dict[str, Any]:
        """Return what the exchange of gradients has cost."""
        return {
            "exchange_seconds": self.stopwatch.seconds,
            "signs_cpu_seconds": self._signer.cpu_seconds,
            "total_bytes": self.total_bytes,
        }

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        super().close()
        self._hooks.remove()
        self._signer.close()

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering with the columns of all ranks. All ranks must call it.

        Columns are in the order of the model's parameters, so the state depends neither on DDP's
        buckets nor on the number of ranks.
        """
        state = self._sampler.ordering.state_dict()
        names, balance = FlatSpec.of(self._ddp.module).names, state["balance"]

        def whole(row: Tensor) -> Tensor:
            by_name = self.layout.gather(row, self.world)
            return torch.cat([by_name[name] for name in names])

        for key in COLUMNS:
            if key in balance:
                balance[key] = torch.stack([whole(row) for row in balance[key]])
        return state

    def load_ordering_state(self, state: Mapping[str, Any]) -> None:
        """Load the state of the ordering and cut out this rank's columns."""
        self._sampler.ordering.load_state_dict(state)
        spec = FlatSpec.of(self._ddp.module)
        sizes = list(zip(spec.names, spec.numels, strict=True))
        # DDP's buckets may not be known yet. The first backward converts to them (`_use`).
        layout = BucketLayout.one_bucket(sizes, self.world)

        def columns(row: Tensor) -> Tensor:
            pieces = torch.split(row, list(spec.numels))
            return layout.columns(dict(zip(spec.names, pieces, strict=True)), self.world)

        self.layout = layout
        self._sampler.ordering.map_columns(columns)
