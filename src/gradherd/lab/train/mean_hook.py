"""How a dense run averages gradients in DDP's hook, and what that costs.

Small models are averaged as one vector by slices (`comm.sliced_mean`): each element is summed by
one rank in the order of ranks, so workers in one process get the same bits. Large ones are
averaged bucket by bucket with all-reduce while the backward runs, as DDP does by itself.
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_hook import BucketHook
from gradherd.comm.sliced_mean import (
    ONE_BUCKET_ELEMENTS,
    SlicedMean,
    mean_of_rows,
    padded_length,
)
from gradherd.comm.world import World


class MeanHook(BucketHook):
    """Averages a DDP model's gradients."""

    def __init__(self, ddp: DDP, world: World) -> None:
        super().__init__(ddp, world)
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() for p in parameters)
        alike = len({(p.dtype, p.device) for p in parameters}) == 1
        self._one_bucket = size <= ONE_BUCKET_ELEMENTS and alike and world.size > 1
        length = padded_length(size, world.size) if self._one_bucket else 0
        self._flat = parameters[0].detach().new_zeros(length)
        self._mean = SlicedMean(world)

    def collects(self) -> bool:
        """Return whether the model is averaged as one vector."""
        return self.active and self._one_bucket

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket by all-reduce; count the wait after the last one."""
        begin, future = time.perf_counter(), super().average(bucket)
        if not bucket.is_last() or self.world.size == 1:
            return future

        def arrived(done: Future[Tensor]) -> Tensor:
            self.stopwatch.seconds += time.perf_counter() - begin
            return done.value()

        return future.then(arrived)

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets as one vector."""
        buffers = [bucket.buffer() for bucket in buckets]
        flats = self._flat[: sum(map(len, buffers))].split([len(buffer) for buffer in buffers])
        for flat, buffer in zip(flats, buffers, strict=True):
            flat.copy_(buffer)
        before = self._mean.bytes
        self._mean.start(self._flat)
        self._mean.finish()
        self.total_bytes += self._mean.bytes - before
        for flat, buffer in zip(flats, buffers, strict=True):
            buffer.copy_(flat)


def mean_of(grads: Tensor) -> Tensor:
    """Return the mean of (R, D) gradients in the bits that ranks would get."""
    return mean_of_rows(grads, out=torch.empty_like(grads[0]))
