"""DDP's communication hook, as one class that collects the buckets of a backward.

DDP hands out its gradients bucket by bucket while the backward runs. What gradherd exchanges is the
whole gradient, so every hook does the same: collect each bucket, begin early what can begin early
(`add`, which overlaps with the rest of the backward), and complete the exchange with the last
bucket (`exchange`, for which the backward waits).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import CollectiveError, Stopwatch, all_reduce_start
from gradherd.comm.world import World, keep_group
from gradherd.torch_names import comm_hook_states

_FIRST_LOOKS = 4
"""Backwards in which buckets are known by their parameters, not by their memory alone."""


class HookSlot:
    """What DDP holds of a hook.

    DDP has one hook for its lifetime, and its C++ part keeps the hook's state out of the garbage
    collector's sight. So DDP gets this small object; the hook proper can leave it, and be freed,
    and another one can take its place. An empty slot averages, as DDP would do by itself.
    """

    def __init__(self, world: World | None = None) -> None:
        self.world = world
        """The ranks of the model; None in a copy, which no DDP has registered."""
        self.hook: BucketHook | None = None

    # Copies of a DDP model (deepcopy, AveragedModel, torch.save) carry no hook, and no data set.
    def __reduce__(self) -> tuple[type["HookSlot"], tuple[()]]:
        return HookSlot, ()


def hook_is_free(ddp: DDP) -> bool:
    """Return whether a `BucketHook` can be registered with a DDP model."""
    states = comm_hook_states(ddp)
    return all(isinstance(state, HookSlot) and state.hook is None for state in states)


def row_sparse_parameters(ddp: DDP) -> set[nn.Parameter]:
    """Return the parameters whose gradients DDP expects as a few rows (`sparse=True`)."""
    # As DDP finds them: by the module that holds the parameter.
    return {
        parameter
        for module in ddp.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        for parameter in module.parameters(recurse=False)
    }


class BucketHook(ABC):
    """Collects the buckets of each backward and exchanges them together, until it is closed."""

    passes_sparse: ClassVar[bool] = False
    """Whether buckets of row-sparse gradients (`nn.Embedding(sparse=True)`) are averaged as DDP
    does it by itself, beside the others."""

    def __init__(self, ddp: DDP, world: World) -> None:
        """Register with DDP, whose one hook must still be free; `world` are its ranks."""
        self.world = world
        self.total_bytes = 0
        """Bytes that this rank has sent for gradients so far."""
        self.stopwatch = Stopwatch()
        """Time that the backward has spent in this hook."""
        self.active = True
        # DDP waits for all futures at the end of a backward, so none has to complete before the
        # last bucket has arrived.
        self._collected: list[dist.GradBucket] = []
        self._futures: list[Future[Tensor]] = []
        # Where the buckets of the last backward are, and which parameters they hold.
        self._known: list[tuple[int, int, list[int]]] = []
        self._looks = _FIRST_LOOKS
        slots = [one for one in comm_hook_states(ddp) if isinstance(one, HookSlot) and one.world]
        slot = slots[0] if slots else HookSlot(world)
        if not slots:
            # Once per DDP model: register_comm_hook raises the second time.
            keep_group(ddp.process_group)
            ddp.register_comm_hook(slot, run_bucket_hook)
        slot.hook, self._slot = self, slot

    def collects(self) -> bool:
        """Return whether the buckets of this backward are exchanged here, not just averaged."""
        return self.active

    def add(self, bucket: dist.GradBucket) -> Future[Tensor] | None:
        """Begin what can begin before the last bucket has arrived.

        Return a future of the buffer if the hook has one; otherwise a new one is made.
        """
        return None

    @abstractmethod
    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Overwrite all buckets of a backward with the gradient for the optimizer."""

    def on_bucket(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Collect a bucket; the future of its buffer completes when the last one is exchanged."""
        done: Future[Tensor]
        with self.stopwatch:
            if not self.collects():
                return self.average(bucket)
            # A backward that raised may have left some.
            if bucket.index() == 0:
                self.discard()
            if bucket.buffer().is_sparse and self.passes_sparse:
                done = self.average(bucket)
            else:
                self._collected.append(bucket)
                done = self.add(bucket) or _pending(bucket.buffer())
                self._futures.append(done)
            if bucket.is_last() and self._collected:
                self._finish()
            return done

    def _finish(self) -> None:
        """Exchange what was collected."""
        # Emptied first: if the exchange raises, the next backward starts clean.
        collected, self._collected = self._collected, []
        futures, self._futures = self._futures, []
        try:
            self.exchange(collected)
        except CollectiveError as error:
            raise RuntimeError(_cause(error, self.world)) from error
        for one, future in zip(collected, futures, strict=True):
            if not future.done():
                future.set_result(one.buffer())

    def is_known(self, number: int, bucket: dist.GradBucket) -> bool:
        """Return whether bucket `number` is the one that the last `learn` was given."""
        if number >= len(self._known):
            return False
        flat, (address, count, parameters) = bucket.buffer(), self._known[number]
        if (flat.data_ptr(), flat.numel()) != (address, count):
            return False
        # New buckets may have the memory of old ones. They come in one of the first backwards;
        # later, looking at every parameter would take longer than all that is made of them.
        return not self._looks or [id(p) for p in bucket.parameters()] == parameters

    def learn(self, buckets: Sequence[dist.GradBucket]) -> bool:
        """Return whether DDP hands out other buckets than at the last call: it rebuilds them once.

        What follows from the buckets is made when they are new, not at every step.
        """
        known = [self.is_known(number, bucket) for number, bucket in enumerate(buckets)]
        self._looks = max(0, self._looks - 1)
        if all(known) and len(known) == len(self._known):
            return False
        flats = [bucket.buffer() for bucket in buckets]
        self._looks = _FIRST_LOOKS
        self._known = [
            (flat.data_ptr(), flat.numel(), [id(p) for p in bucket.parameters()])
            for flat, bucket in zip(flats, buckets, strict=True)
        ]
        return True

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket by all-reduce, as DDP does by itself."""
        future, sent = average_bucket(bucket, self.world)
        self.total_bytes += sent
        return future

    def discard(self) -> None:
        """Forget the buckets of a backward that did not finish."""
        self._collected, self._futures = [], []

    def close(self) -> None:
        """Leave DDP, which averages by itself from now on."""
        self.active = False
        if self._slot.hook is self:
            self._slot.hook = None


def average_bucket(bucket: dist.GradBucket, world: World) -> tuple[Future[Tensor], int]:
    """Start to average a bucket by all-reduce; return its future, and the bytes this rank sends."""
    # Divided before summing, as DDP does: a sum of half-precision gradients could overflow.
    pending = all_reduce_start(bucket.buffer().div_(world.size), world)
    if pending.works:
        return pending.works[0].get_future().then(partial(_averaged, world)), pending.bytes
    done = _pending(pending.value)  # one rank: nothing to send
    done.set_result(pending.value)
    return done, pending.bytes


def _averaged(world: World, future: Future[list[Tensor]]) -> Tensor:
    """Return what an all-reduce of one tensor has computed."""
    try:
        return future.value()[0]
    except RuntimeError as error:
        raise RuntimeError(_cause(error, world)) from error


def _cause(error: RuntimeError, world: World) -> str:
    """Say what may have made a collective of a backward fail."""
    return (
        "ranks did not meet to exchange their gradients: a rank has died or is later than the "
        f"process group's timeout of {world.timeout().total_seconds():g} s, or some ranks but not "
        "all kept the gradients of an earlier backward: call zero_grad() on all ranks or on none "
        f"({getattr(error, 'reason', ' '.join(str(error).split()))})"
    )


def _pending(flat: Tensor) -> Future[Tensor]:
    """Return a future of a buffer that is not exchanged yet."""
    # On a GPU, a future that knows the device makes DDP's stream wait for what the hook has
    # enqueued.
    return Future(devices=[flat.device] if flat.is_cuda else None)


def run_bucket_hook(state: HookSlot, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook. DDP inspects its signature, so it cannot be a method."""
    if state.hook is not None:
        # Looked up at every call: detach() empties the slot while DDP keeps calling.
        return state.hook.on_bucket(bucket)
    assert state.world is not None
    future, _ = average_bucket(bucket, state.world)
    return future
