"""Coordination of whole batches: averaging gradients and ordering share one exchange.

An all-to-all gives this rank its slice of every worker's gradient. Their mean is what averaging
wants, and the slices go to the sampler, which signs them in a thread. `SlicedTransport` is what DDP
and FSDP2 have in common; `CoordinatedHook` works in DDP's communication hook, and
`ShardedCoordination` in FSDP's reduce-scatter. Under DDP, what overlaps with what:

* The all-to-all of a bucket starts when DDP hands the bucket out, and overlaps with the rest of the
  backward. The mean is computed and gathered after the last bucket; the backward waits for that.
* A small model is exchanged as one bucket after the last of DDP's. Nothing overlaps with the
  backward, but there is one message instead of one for each bucket.
* Signs are computed in a thread, from when the batch is fed back (at the optimizer's step or the
  next forward) until the next batch is: beside the step and the next forward and backward.

FSDP reduces gradients by a reduce-scatter. Here it is an all-to-all, for the bytes of a ring
reduce-scatter: the mean of the slices is the shard of the gradient that FSDP wants.

If what is averaged does not hold the gradient of this backward alone (under `no_sync` or
`set_requires_gradient_sync(False)`, if gradients were not cleared, or with replicas, where a
reduce-scatter sees some workers only), the gradient is exchanged separately when the batch is fed
back, and training waits.

Shapes: R ranks, C columns of this rank over all parameters.
"""

import logging
import math
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.collectives import Stopwatch, all_to_all
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import (
    ONE_BUCKET_ELEMENTS,
    BucketSpan,
    ColumnLayout,
    ShardSpan,
    SlicedMean,
    Slices,
    mean_of_rows,
)
from gradherd.comm.world import World
from gradherd.flat import FlatSpec
from gradherd.gpu import this_stream
from gradherd.hooks.bucket_hook import BucketHook
from gradherd.hooks.fsdp import ShardedGroup, ShardedParameter, sharded_groups
from gradherd.hooks.row_sources import RowSource
from gradherd.hooks.transports import RankTransport
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.coordination import observe_slices
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.module_hooks import do_nothing
from gradherd.torch_names import copy_all

log = logging.getLogger("gradherd")

# Averaged backwards in a row that find old gradients, before the loop is told if these are zero.
_STALE_BACKWARDS = 8
Release = Callable[[Tensor | None], None]
"""Says that slices were read, and may be overwritten, or which memory may be instead."""


class SlicedTransport(RankTransport):
    """Has the sampler learn from slices of whole batches, which averaging delivers.

    Where a backward's gradient is not averaged alone, it is collected from the hooks of parameters
    and exchanged separately, for ordering only.
    """

    quiet = False  # the exchange has to know of every forward
    layout: ColumnLayout
    total_bytes: int
    """Bytes that this rank has sent to average gradients."""
    stopwatch: Stopwatch
    """Time spent in that exchange."""

    def __init__(
        self, model: nn.Module, sampler: OrderedSampler, ignored: Iterable[str] = ()
    ) -> None:
        """Hook into a model, without DDP. All ranks must do so at the same point.

        Parameters that are `ignored` are not averaged, and no part of rows.
        """
        self._ignored = set(ignored)
        source, device = RowSource(model, self._arrived), next(model.parameters()).device
        super().__init__(sampler, source, FlatSpec.of(model), device)
        self._thread = BackgroundThread("gradherd-signs")
        self._sign_bytes = 0
        # CPU time of the thread: its wall time is mostly spent waiting for the training loop.
        self._sign_seconds = 0.0
        self._separate: dict[str, Tensor] = {}  # gradient of a backward that is not averaged alone
        # Counted apart from `total_bytes`, which training would have sent without an order, too.
        self._separate_bytes = 0
        self._mixed = len({p.dtype for p in model.parameters() if p.requires_grad}) > 1
        self._decided = False
        self._shares = False  # whether averaging delivers the slices of this backward
        self._separates = False  # whether any backward of the batch goes without

    @abstractmethod
    def _comes_alone(self) -> bool:
        """Say whether what will be averaged holds the gradient of this backward alone."""

    @property
    @abstractmethod
    def _has_slices(self) -> bool:
        """Whether averaging has delivered slices of the batch that waits."""

    @abstractmethod
    def _take_slices(self) -> tuple[Slices, Release]:
        """Return the slices that averaging has delivered, and what gives them back."""

    @abstractmethod
    def _drop_slices(self) -> None:
        """Drop slices that were not fed back."""

    def _arrived(self, name: str, grad: Tensor) -> None:
        if name in self._ignored:
            return
        # At the first gradient of a backward: nothing is averaged before it, and nothing earlier
        # would do, since gradients may be cleared anywhere before the backward.
        if not self._decided:
            self._shares, self._decided = self._comes_alone(), True
            self._separates |= not self._shares
        if not self._shares:
            # A parameter may have several gradients: two backwards of one forward are one batch.
            before = self._separate.get(name)
            self._separate[name] = grad.clone() if before is None else before.add_(grad)

    def feed(self, claim: BatchClaim | None, loss_scale: Tensor | float) -> None:
        """Start to sign this batch of every worker beside the training loop."""
        # Released before the thread starts, so that the next backward cannot feed them again.
        grads, self._separate = self._separate, {}
        separates, self._separates, self._decided = self._separates, False, False
        slices: Slices = ()
        release: Release = do_nothing  # what is exchanged separately has memory of its own
        if self._has_slices:
            slices, release = self._take_slices()
        if separates:
            slices = self._add_separate(slices, grads)
        # Running sums outlive a change of the scale, so slices must not depend on it.
        if isinstance(loss_scale, Tensor) or loss_scale != 1:
            for block in slices:
                block.div_(loss_scale)
        on_stream = this_stream(self._device)  # The slices were written there.

        def sign() -> None:
            with on_stream():
                self._sign(slices, claim, release)

        try:
            self._thread.submit(sign)
        except BaseException:  # of the batch before
            release(None)
            raise

    def _add_separate(self, slices: Slices, grads: Mapping[str, Tensor]) -> Slices:
        """Exchange whole gradients, and add their slices to those of the same batch, if any.

        Nothing has averaged these gradients, or only together with earlier ones.
        """
        cut = self.layout.cut(grads, self.world.size)
        # Ranks may have used parameters of different dtypes.
        block, sent = all_to_all(cut.float() if self._mixed else cut, self.world)
        self._separate_bytes += sent
        if not slices:
            return (block.to(torch.promote_types(block.dtype, torch.float32)),)
        for one, part in zip(slices, block.split([s.shape[1] for s in slices], 1), strict=True):
            one.add_(part)
        return slices

    def _sign(self, slices: Slices, claim: BatchClaim | None, release: Release) -> None:
        """Learn from this rank's slices of every worker's gradient, in the thread."""
        begin = time.thread_time()
        try:
            # Compared in the thread, so that training does not wait for it. A worker's last unit
            # may have no partner and is not signed then: nobody else would notice that it is not
            # finite. Workers may have different numbers of units.
            sizes = self._sampler.ordering.sizes
            last = claim is not None and claim.step + claim.units >= min(sizes)
            finite = not last or all(bool(block.sum().isfinite()) for block in slices)
            comparison = self._in_step.compare(claim, self._side, finite=finite)
            if not comparison.same or not comparison.finite:
                self._in_step.pass_over(claim, comparison)
            elif claim is not None:
                script = observe_slices(self._sampler, slices, claim, release=release)
                self._sign_bytes += run(script, self._side).bytes
        finally:
            release(None)
        self._sign_seconds += time.thread_time() - begin

    def by_index(self) -> None:
        """Refuse batches that are given by their examples."""
        raise ValueError(
            "whole batches that are exchanged along with gradients cannot be given by index: their "
            "order would differ between ranks; attach with rows='sketch'"
        )

    def forget(self) -> None:
        """Drop a gradient that was not fed back yet."""
        self._drop_slices()
        self._separate, self._separates, self._decided = {}, False, False

    def next_part(self) -> None:
        """Expect another forward and backward of the batch that waits."""
        self._decided = False

    def wait(self, *, raises: bool = True) -> None:
        """Return when the signs of all batches are computed."""
        self._thread.wait(raises=raises)

    def metrics(self) -> dict[str, Any]:
        """Return also what averaging gradients has cost."""
        return super().metrics() | {
            "bytes_for_ordering": self._separate_bytes + self._sign_bytes,
            "exchange_seconds": self.stopwatch.seconds,
            "signs_cpu_seconds": self._sign_seconds,
            "total_bytes": self.total_bytes,
        }

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        self._thread.close()
        super().close()


class CoordinatedHook(SlicedTransport, BucketHook):
    """Averages DDP's gradients, and has the sampler learn from whole batches of all workers.

    C counts this rank's slice of each bucket.
    """

    def __init__(self, ddp: DDP, sampler: OrderedSampler) -> None:
        """Register with DDP. All ranks must do so at the same point."""
        SlicedTransport.__init__(self, ddp.module, sampler, ddp.parameters_to_ignore)
        world = self.world
        # Weak: DDP holds its hook out of the garbage collector's sight, and would never be freed.
        self._ddp = weakref.ref(ddp)
        self._parameters = [
            parameter
            for name, parameter in ddp.module.named_parameters()
            if parameter.requires_grad and name not in self._ignored
        ]
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
        self._slices: Slices | None = None  # of a backward that came with its buckets
        self._stale, self._warned = 0, False  # averaged backwards in a row with old gradients
        BucketHook.__init__(self, ddp, world)  # last: if something above fails, DDP is as it was

    def _one_bucket_layout(self) -> ColumnLayout:
        spec = self._spec
        padding = -spec.size % self.world.size
        parameters = (*zip(spec.names, spec.numels, strict=True), ("", padding))
        return ColumnLayout((BucketSpan(parameters),))

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return self._has_slices or bool(self._separate)

    @property
    def _has_slices(self) -> bool:
        return self._slices is not None

    def _comes_alone(self) -> bool:
        ddp, fresh = self._ddp(), all(parameter.grad is None for parameter in self._parameters)
        if ddp is None or not ddp.require_backward_grad_sync:
            return False
        self._stale = 0 if fresh else self._stale + 1
        if self._stale == _STALE_BACKWARDS and self.world.rank == 0 and not self._warned:
            self._warn_of_zeros()
        # The next exchange would overwrite slices of the same batch.
        return fresh and not self._has_slices

    def _warn_of_zeros(self) -> None:
        """Say what keeps averaging from delivering the slices, if it is zeros. Looks once."""
        self._warned = True
        if not any(p.grad is not None and bool(p.grad.any()) for p in self._parameters):
            log.warning(
                "zero_grad(set_to_none=False) leaves zeros where no gradient should be, so every "
                "batch is exchanged once more for its order, for half as many bytes again: leave "
                "set_to_none out"
            )

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
        if self.learn(buckets):
            self._use(buckets)
        if self._one_bucket:
            # Copied into one vector, and the mean back.
            flat, own = self._pieces
            copy_all(flat, own)
            self._mean.start(self._flat)
            self._slices = self._mean.finish()
            copy_all(own, flat)
        else:
            self._slices = self._mean.finish()
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

    def _take_slices(self) -> tuple[Slices, Release]:
        slices, self._slices = self._slices, None
        assert slices is not None
        return slices, self._mean.lend()

    def _drop_slices(self) -> None:
        # The all-to-all has happened already; only its result is dropped.
        self._slices = None
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


class SlicingReduceScatter:
    """A reduce-scatter for FSDP that keeps this rank's slice of every rank's gradient."""

    def __init__(self, owner: "ShardedCoordination", group: ShardedGroup, before: Any) -> None:
        self._owner, self._group, self._before = owner, group, before

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        """Allocate memory as torch does."""
        memory: Tensor = self._before.allocate(*args, **kwargs)
        return memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the reduced (N,) input to the (N / R,) output."""
        world = World.of(group)
        with self._owner.stopwatch:
            # FSDP lays out its input rank by rank, so row r is what rank r is to receive.
            block, sent = all_to_all(input_tensor.view(world.size, -1), world)
            # Rows are added in float32 or better, whatever the dtype of the reduction.
            mean_of_rows(block, output_tensor, share=self._group.share(op))
        self._owner.total_bytes += sent
        self._owner.keep(self._group, block)


class ShardedCoordination(SlicedTransport):
    """Lets FSDP average its gradients, and the sampler learn from whole batches of all workers."""

    def __init__(self, model: nn.Module, sampler: OrderedSampler) -> None:
        """Hook into a sharded model's groups. All ranks must do so at the same point."""
        super().__init__(model, sampler)
        self._groups = sharded_groups(model)
        self._replaces = all(one.shares_reduce_scatter(self.world) for one in self._groups)
        spans = tuple(
            # Without the reduce-scatter any cut would do; a flat one pads least.
            p.span if self._replaces else ShardSpan(p.name, (math.prod(p.span.shape),), 0)
            for group in self._groups
            for p in group.parameters
        )
        self.layout, self._names = ColumnLayout(spans), [span.name for span in spans]
        self.total_bytes, self.stopwatch = 0, Stopwatch()
        self._blocks: list[tuple[Sequence[ShardedParameter], Tensor, float]] = []
        self._slices: Tensor | None = None  # (R, C) of the batch that is being signed
        self._handles = [
            group.set_reduce_scatter(partial(SlicingReduceScatter, self, group))
            for group in self._groups
            if self._replaces
        ]

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return bool(self._blocks or self._separate)

    @property
    def _has_slices(self) -> bool:
        return bool(self._blocks)

    def _comes_alone(self) -> bool:
        # What waits at the first gradient of a backward is of earlier ones.
        alone = all(group.reduces and not group.accumulates for group in self._groups)
        return self._replaces and alone

    def keep(self, group: ShardedGroup, block: Tensor) -> None:
        """Keep the (R, n) slices of one reduce-scatter until the batch is fed back."""
        if self._decided and self._shares:
            # What FSDP has divided by before the reduction (half precision) is multiplied back:
            # slices are of plain gradients.
            factor, _ = group.divide_factors(block.dtype)
            self._blocks.append((group.noted, block, factor))

    def _take_slices(self) -> tuple[Slices, Release]:
        """Return the (R, C) slices of all groups; zero where a parameter had no gradient."""
        size, (blocks, self._blocks) = self.world.size, (self._blocks, [])
        assert blocks, "every backward that coordinates ends with a reduce-scatter"
        wide = torch.promote_types(blocks[0][1].dtype, torch.float32)
        self._thread.wait()  # for the batch before, which is in the same memory
        slices = self._slices
        if slices is None or slices.dtype != wide:
            device = blocks[0][1].device
            slices = torch.empty(size, self.layout.width(size), dtype=wide, device=device)
        self._slices = slices
        # Parameters without a gradient in this batch are in no block.
        slices.zero_()
        own = dict(zip(self._names, self.layout.split(slices), strict=True))
        for present, block, factor in blocks:
            parts = ColumnLayout(tuple(parameter.span for parameter in present)).split(block)
            for parameter, part in zip(present, parts, strict=True):
                if parameter.name in own:  # else it was frozen when this was attached
                    own[parameter.name].add_(part, alpha=factor)
        return (slices,), self._refill

    def _refill(self, instead: Tensor | None) -> None:
        # The memory of the slices is filled again when the batch was signed, if it is not kept.
        self._slices = self._slices if instead is None else instead

    def _drop_slices(self) -> None:
        self._blocks = []

    def metrics(self) -> dict[str, Any]:
        """Return what reducing gradients has cost only where ordering shares that exchange."""
        found = super().metrics()
        if self._replaces:
            return found
        return {key: count for key, count in found.items() if key.startswith("bytes_for_")}

    def close(self) -> None:
        """Remove the hooks, stop the thread and close its group."""
        for handle in self._handles:
            handle.remove()
        super().close()
