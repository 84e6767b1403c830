"""Coordination in DDP's communication hook: averaging and ordering share one trip.

Buckets are exchanged by slices as they become ready (`ordering.shards`), the mean goes back to
DDP, and the slices of all workers' gradients go to the sampler, which signs them beside the
training loop. A backward whose gradient is not what the bucket holds (under `no_sync`, or added to
gradients that were not cleared) sends its own gradient apart.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.row_sources import ParameterHooks
from gradherd.comm.collectives import PendingCollective, all_reduce_small, all_reduce_start
from gradherd.comm.stopwatch import Stopwatch
from gradherd.comm.world import World
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.shards import (
    Bucket,
    Layout,
    Pool,
    arrive,
    give_back,
    rows_of,
    send,
    take_back,
)
from gradherd.ordering.sorter import Sorter
from gradherd.ordering.walks import Claim
from gradherd.rows.flat import FlatSpec

# Up to this many numbers, one exchange of a copy is cheaper than one of each bucket.
_TOGETHER = 2_000_000


class Ride:
    """Feeds whole batches of all workers to the sampler, in slices."""

    def __init__(self, ddp: DDP, sampler: OrderedSampler, world: World) -> None:
        self._ddp = ddp
        self._sampler = sampler
        self._world = world
        self._side = world.side_channel()
        self._sorter = Sorter()
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        # DDP's buckets also hold what was frozen after it was wrapped.
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # All parameters in one bucket, in order, padded: how small models travel, and where
        # larger ones start from until DDP's own buckets are seen.
        spec = FlatSpec.of(ddp.module)
        self.layout = _padded(zip(spec.names, spec.numels, strict=True), world)
        kinds = {(p.dtype, p.device) for p in self._parameters}
        self._together = spec.size <= _TOGETHER and len(kinds) == 1
        length = self.layout.lengths()[0] if self._together else 0
        self._flat = self._parameters[0].detach().new_zeros(length)
        spans = (slice(at, at + n) for at, n in zip(spec.offsets, spec.numels, strict=True))
        self._places = dict(zip(spec.names, spans, strict=True))
        self._pool, self._lent = Pool(), list[Tensor]()
        self._taken: list[tuple[dist.GradBucket, Future[Tensor]]] = []
        self._sent: list[Bucket] = []
        self._rows: Tensor | None = None  # (R, C) of a backward that came with its buckets
        self._apart: dict[str, Tensor] = {}  # gradient of a backward that did not
        self._riding = self.active = True
        self._decided = False
        self.bytes = self.exchange_bytes = 0
        self.clock = Stopwatch()  # what the exchange of gradients cost the backward
        sampler.ordering.borrow_rows(True)
        self._hooks = ParameterHooks(ddp.module, self._arrived)
        ddp.register_comm_hook(self, exchange_hook)

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._rows is not None or bool(self._apart)

    def prepare(self) -> None:
        """Be ready for a backward, also after one that broke off."""
        self._decided = False
        self._taken, self._sent = [], []

    def _decide(self) -> None:
        """Find out whether this backward's buckets will hold just its own gradient."""
        fresh = all(parameter.grad is None for parameter in self._parameters)
        self._riding = self.active and fresh and self._ddp.require_backward_grad_sync
        self._decided = True

    def _arrived(self, name: str, grad: Tensor) -> None:
        if not self._decided:  # the first gradient of a backward
            self._decide()
        if self.active and not self._riding:
            flat = grad.flatten()
            before = self._apart.get(name)
            self._apart[name] = flat.clone() if before is None else before.add_(flat)

    def exchange(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket over ranks; with the last one, keep everybody's slices."""
        with self.clock:
            return self._exchange(bucket)

    def _exchange(self, bucket: dist.GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        if not self._riding:
            flight = all_reduce_start(flat.div_(self._world.size), self._world)
            self.exchange_bytes += flight.bytes
            return _mean_of(flight)
        done: Future[Tensor] = Future()
        self._taken.append((bucket, done))
        if not self._together:
            self._sent.append(self._send(flat))
        if bucket.is_last():
            taken, self._taken = self._taken, []
            if self._together:
                self._exchange_together([bucket for bucket, _ in taken])
            else:
                self._exchange_buckets([bucket for bucket, _ in taken])
            for one, done_one in taken:
                done_one.set_result(one.buffer())
        return done

    def _send(self, flat: Tensor) -> Bucket:
        share = len(flat) // self._world.size
        return send(flat, self._world, out=self._pool.take(flat, self._world.size, share))

    def _exchange_buckets(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Finish what was sent bucket by bucket."""
        self._use(
            Layout(
                tuple(
                    tuple((self._names[p], p.numel()) for p in bucket.parameters())
                    for bucket in buckets
                )
            )
        )
        sent, self._sent = self._sent, []
        self._finish(sent)

    def _exchange_together(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Send all buckets in one."""
        pieces = [
            (self._flat[self._places[self._names[parameter]]], grad)
            for bucket in buckets
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if self._names[parameter] in self._places
        ]
        for flat, grad in pieces:
            flat.copy_(grad.flatten())
        self._finish([self._send(self._flat)])
        for flat, grad in pieces:
            grad.copy_(flat.view_as(grad))

    def _finish(self, sent: Sequence[Bucket]) -> None:
        arrived = arrive(sent, self._world)
        flights = give_back(sent, arrived, self._world)
        self.exchange_bytes += arrived.bytes + sum(flight.bytes for flight in flights)
        self._rows = rows_of(arrived, self._world, self._pool)
        for flight in flights:
            flight.wait()

    def _use(self, layout: Layout) -> None:
        """Go over to other buckets: DDP rebuilds them once after the first step."""
        if layout == self.layout:
            return
        self._sorter.wait()
        self._pool, self._lent = Pool(), []  # pieces of the old sizes are of no use
        old, self.layout = self.layout, layout
        self._sampler.ordering.map_columns(
            lambda row: layout.columns(old.whole(row, self._world), self._world)
        )

    def feed(self, claim: Claim, loss_scale: float) -> None:
        """Let the sampler sign this batch of every worker, beside the training loop."""
        rows, self._rows = self._rows, None
        if rows is None:
            rows = self._send_apart()
        if loss_scale != 1:
            rows.div_(loss_scale)

        self._sorter.wait()
        self._lent = take_back(self._lent, self._sampler.ordering, self._pool)
        self._lent.append(rows)

        def observe() -> None:
            self._sampler.observe(rows.unsqueeze(0), first=claim.step, reduce=self._reduce)

        self._sorter.submit(observe)

    def _send_apart(self) -> Tensor:
        grads, self._apart = self._apart, {}
        device = self._parameters[0].device
        flats = [
            torch.cat(
                [grads.get(name, torch.zeros(count, device=device)) for name, count in bucket]
            )
            for bucket in self.layout.buckets
        ]
        arrived = arrive([self._send(flat) for flat in flats], self._world)
        self.bytes += arrived.bytes
        return rows_of(arrived, self._world, self._pool)

    def _reduce(self, products: Tensor) -> Tensor:
        total, sent = all_reduce_small(products, self._side)
        self.bytes += sent
        return total

    def by_index(self) -> None:
        """Not possible here: `Herd.observe` says so."""
        raise ValueError("slices of several workers' batches cannot be told by index")

    def wait(self) -> None:
        """Wait for the sorter."""
        self._sorter.wait()

    def finish(self) -> None:
        """Wait for the sorter."""
        self._sorter.wait()

    def forget(self) -> None:
        """Drop the gradient that waits."""
        self._rows, self._apart = None, {}
        self._decided = False

    def close(self) -> None:
        """Remove what can be removed; DDP keeps its hook, which only averages from now on."""
        self._sorter.wait()
        self._sorter.close()
        self._hooks.remove()
        self._sampler.ordering.borrow_rows(False)
        self._riding = self.active = False

    def take_columns(self, names: Sequence[str]) -> None:
        """Keep this rank's columns of a memory that was loaded whole, in the order of `names`."""
        counts = {self._names[p]: p.numel() for p in self._parameters}
        whole = _padded([(name, counts[name]) for name in names], self._world)

        def columns(row: Tensor) -> Tensor:
            pieces = torch.split(row, [counts[name] for name in names])
            return whole.columns(dict(zip(names, pieces, strict=True)), self._world)

        self.layout = whole
        self._sampler.ordering.map_columns(columns)

    def whole_state(self, state: dict[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """Return sharded memory tensors with all columns, parameters in the order of `names`."""

        def whole(row: Tensor) -> Tensor:
            found = self.layout.whole(row, self._world)
            return torch.cat([found[name] for name in names])

        return {key: torch.stack([whole(row) for row in kept]) for key, kept in state.items()}


def _padded(parameters: Iterable[tuple[str, int]], world: World) -> Layout:
    """Return the layout of one bucket that divides by the number of ranks."""
    named = tuple(parameters)
    return Layout(((*named, ("", -sum(count for _, count in named) % world.size)),))


def _mean_of(flight: PendingCollective) -> Future[Tensor]:
    if not flight.works:
        done: Future[Tensor] = Future()
        done.set_result(flight.value)
        return done
    return flight.works[0].get_future().then(lambda future: future.value()[0])


def exchange_hook(state: Ride, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook."""
    return state.exchange(bucket)
