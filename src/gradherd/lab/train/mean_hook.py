"""What a dense run does in DDP's hook: average, and count what that costs.

Small models travel in one piece, cut into slices as in `ordering.shards`: each number is added up
by one rank in the order of ranks, so workers in one process get the same bits. Large ones go
bucket by bucket through all-reduce while the backward runs, as DDP does by itself.
"""

import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import all_reduce_start
from gradherd.comm.world import World
from gradherd.ordering.shards import arrive, give_back, mean_of_rows, send

SMALL = 2_000_000
"""Up to this many numbers a model travels in one piece."""


def padded(size: int, workers: int) -> int:
    """Return the length that divides by the number of workers."""
    return -(-size // workers) * workers


def mean_bytes(size: int, workers: int, element_size: int = 4) -> int:
    """Return what a worker sends for one mean over workers.

    >>> mean_bytes(650, 4)
    3912
    """
    length = padded(size, workers) if size <= SMALL else size
    return 2 * length * element_size * (workers - 1) // workers


class MeanHook:
    """Averages a DDP model's gradients."""

    def __init__(self, ddp: DDP, world: World) -> None:
        self._world = world
        parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        size = sum(p.numel() for p in parameters)
        alike = len({(p.dtype, p.device) for p in parameters}) == 1
        self._together = size <= SMALL and alike
        length = padded(size, world.size) if self._together else 0
        self._flat = parameters[0].detach().new_zeros(length)
        self._taken: list[tuple[dist.GradBucket, Future[Tensor]]] = []
        self.bytes = 0
        self.seconds = 0.0
        """What backward waited after its last gradient was there."""
        ddp.register_comm_hook(self, mean_hook)

    def take(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket."""
        if self._world.size == 1:
            return _done(bucket.buffer())
        if not self._together:
            return self._reduce(bucket)
        done: Future[Tensor] = Future()
        self._taken.append((bucket, done))
        if bucket.is_last():
            begin = time.perf_counter()
            taken, self._taken = self._taken, []
            self._exchange([one.buffer() for one, _ in taken])
            for one, its in taken:
                its.set_result(one.buffer())
            self.seconds += time.perf_counter() - begin
        return done

    def _exchange(self, buffers: list[Tensor]) -> None:
        flats = self._flat[: sum(map(len, buffers))].split([len(buffer) for buffer in buffers])
        for flat, buffer in zip(flats, buffers, strict=True):
            flat.copy_(buffer)
        sent = [send(self._flat, self._world)]
        arrived = arrive(sent, self._world)
        flights = give_back(sent, arrived, self._world)
        self.bytes += arrived.bytes + sum(flight.bytes for flight in flights)
        for flight in flights:
            flight.wait()
        for flat, buffer in zip(flats, buffers, strict=True):
            buffer.copy_(flat)

    def _reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        begin, last = time.perf_counter(), bucket.is_last()
        flight = all_reduce_start(bucket.buffer().div_(self._world.size), self._world)
        self.bytes += flight.bytes

        def landed(future: Future[list[Tensor]]) -> Tensor:
            if last:
                self.seconds += time.perf_counter() - begin
            return future.value()[0]

        return flight.works[0].get_future().then(landed)


def _done(value: Tensor) -> Future[Tensor]:
    done: Future[Tensor] = Future(devices=[value.device] if value.is_cuda else None)
    done.set_result(value)
    return done


def mean_hook(state: MeanHook, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook."""
    return state.take(bucket)


def mean_of(grads: Tensor) -> Tensor:
    """Return the mean of (R, D) gradients in the bits that ranks would get."""
    return mean_of_rows(grads, out=torch.empty_like(grads[0]))
