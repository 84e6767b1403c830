"""DDP's communication hook, as one class that collects the buckets of a backward.

DDP hands out its gradients bucket by bucket while the backward runs. What gradherd exchanges is the
whole gradient, so every hook does the same: collect each bucket, begin early what can begin early
(`add`, which overlaps with the rest of the backward), and complete the exchange with the last
bucket (`exchange`, for which the backward waits).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import all_reduce_start
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World


def world_of(ddp: DDP) -> World:
    """Return the world that a DDP model averages over.

    Its own process group may hold fewer ranks than the default one.
    """
    group = ddp.process_group
    return World(dist.get_rank(group), dist.get_world_size(group), group)


class BucketHook(ABC):
    """Collects the buckets of each backward and exchanges them together.

    DDP has one hook for its lifetime. After `close` this one only averages, as DDP would do.
    """

    def __init__(self, ddp: DDP, world: World) -> None:
        """Register with DDP, whose one hook must still be free.

        Args:
            ddp: The model.
            world: The ranks that exchange.
        """
        self.world = world
        self.total_bytes = 0
        """Bytes that this rank has sent for gradients so far."""
        self.stopwatch = Stopwatch()
        """Time that the backward has spent in this hook."""
        self.active = True
        self._collected: list[tuple[dist.GradBucket, Future[Tensor]]] = []
        ddp.register_comm_hook(self, run_bucket_hook)

    def collects(self) -> bool:
        """Return whether the buckets of this backward are exchanged here, not just averaged."""
        return self.active

    def add(self, bucket: dist.GradBucket) -> None:  # noqa: B027 (a hook need not do anything)
        """Begin what can begin before the last bucket has arrived."""

    @abstractmethod
    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Overwrite all buckets of a backward with the gradient for the optimizer."""

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Collect a bucket.

        Args:
            bucket: A bucket of the backward that is running; its buffer is flat.

        Returns:
            A future of the bucket's buffer. It completes when the last bucket is exchanged.
        """
        with self.stopwatch:
            if not self.collects():
                return self.average(bucket)
            flat = bucket.buffer()
            # On a GPU, a future that knows the device makes DDP's stream wait for what the hook
            # has enqueued.
            done: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
            self._collected.append((bucket, done))
            self.add(bucket)
            if bucket.is_last():
                # Emptied first: if the exchange raises, the next backward starts clean.
                collected, self._collected = self._collected, []
                self.exchange([one for one, _ in collected])
                for one, future in collected:
                    future.set_result(one.buffer())
            return done

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket by all-reduce, as DDP does by itself."""
        # Divided before summing, as DDP does: a sum of half-precision gradients could overflow.
        pending = all_reduce_start(bucket.buffer().div_(self.world.size), self.world)
        self.total_bytes += pending.bytes
        if pending.works:
            return pending.works[0].get_future().then(lambda future: future.value()[0])
        flat = pending.value  # one rank: nothing to send
        done: Future[Tensor] = Future(devices=[flat.device] if flat.is_cuda else None)
        done.set_result(flat)
        return done

    def discard(self) -> None:
        """Forget the buckets of a backward that did not finish."""
        self._collected = []

    def close(self) -> None:
        """Only average from now on: DDP cannot unregister a hook."""
        self.active = False


def run_bucket_hook(state: BucketHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook. DDP inspects its signature, so it cannot be a method."""
    return state.on_bucket(bucket)
