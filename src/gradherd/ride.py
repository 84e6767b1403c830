"""Coordination in DDP's communication hook: averaging and ordering share one trip.

Buckets are exchanged by slices as they become ready (`ordering.shards`), the mean goes back to
DDP, and the slices of all workers' gradients go to the sampler, which signs them beside the
training loop. A backward whose gradient is not what the bucket holds (under `no_sync`, or added to
gradients that were not cleared) sends its own gradient apart.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.collectives import Flight, all_reduce, all_reduce_start
from gradherd.comm.world import World
from gradherd.feeds import ParameterHooks
from gradherd.ordering.sampler import Claim, OrderedSampler
from gradherd.ordering.shards import Bucket, Layout, arrive, give_back, rows_of, send
from gradherd.ordering.sorter import Sorter


class Ride:
    """Feeds whole batches of all workers to the sampler, in slices."""

    def __init__(self, ddp: DDP, sampler: OrderedSampler, world: World) -> None:
        self._ddp = ddp
        self._sampler = sampler
        self._world = world
        self._side = world.side_channel()
        self._sorter = Sorter()
        named = [(n, p) for n, p in ddp.module.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        # DDP's buckets also hold what was frozen after it was wrapped.
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # Until the first buckets are seen, all parameters stand in one.
        self.layout = Layout((tuple((name, p.numel()) for name, p in named),))
        self._buckets: list[tuple[dist.GradBucket, Bucket, Future[Tensor]]] = []
        self._rows: Tensor | None = None  # (R, C) of a backward that came with its buckets
        self._apart: dict[str, Tensor] = {}  # gradient of a backward that did not
        self._riding = self.active = True
        self.bytes = 0
        self._hooks = ParameterHooks(ddp.module, self._arrived)
        ddp.register_comm_hook(self, exchange_hook)

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._rows is not None or bool(self._apart)

    def prepare(self) -> None:
        """Decide whether the coming backward's buckets will hold just its own gradient."""
        fresh = all(parameter.grad is None for parameter in self._parameters)
        self._riding = self.active and fresh and self._ddp.require_backward_grad_sync

    def _arrived(self, name: str, grad: Tensor) -> None:
        if self.active and not self._riding:
            flat = grad.flatten()
            before = self._apart.get(name)
            self._apart[name] = flat.clone() if before is None else before.add_(flat)

    def exchange(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Average a bucket over ranks; with the last one, keep everybody's slices."""
        flat = bucket.buffer()
        if not self._riding:
            flight = all_reduce_start(flat.div_(self._world.size), self._world)
            return _mean_of(flight)
        done: Future[Tensor] = Future()
        self._buckets.append((bucket, send(flat, self._world), done))
        if bucket.is_last():
            self._exchange_all()
        return done

    def _exchange_all(self) -> None:
        taken, self._buckets = self._buckets, []
        layout = Layout(
            tuple(
                tuple((self._names[p], p.numel()) for p in bucket.parameters())
                for bucket, _, _ in taken
            )
        )
        self._use(layout)
        buckets = [bucket for _, bucket, _ in taken]
        arrived = arrive(buckets, self._world)
        flights = give_back(buckets, arrived, self._world)
        self._rows = rows_of(arrived, self._world)
        for flight, (_, bucket, done) in zip(flights, taken, strict=True):
            flight.wait()
            done.set_result(bucket.flat)

    def _use(self, layout: Layout) -> None:
        """Go over to other buckets: DDP rebuilds them once after the first step."""
        if layout == self.layout:
            return
        self._sorter.wait()
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
            rows = rows / loss_scale

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
        arrived = arrive([send(flat, self._world) for flat in flats], self._world)
        self.bytes += arrived.bytes
        return rows_of(arrived, self._world)

    def _reduce(self, products: Tensor) -> Tensor:
        total, sent = all_reduce(products, self._side)
        self.bytes += sent
        return total

    def finish(self) -> None:
        """Wait for the sorter."""
        self._sorter.wait()

    def forget(self) -> None:
        """Drop the gradient that waits."""
        self._rows, self._apart = None, {}

    def close(self) -> None:
        """Remove what can be removed; DDP keeps its hook, which only averages from now on."""
        self._sorter.wait()
        self._sorter.close()
        self._hooks.remove()
        self._riding = self.active = False

    def take_columns(self, names: Sequence[str]) -> None:
        """Keep this rank's columns of a memory that was loaded whole, in the order of `names`."""
        counts = {self._names[p]: p.numel() for p in self._parameters}
        whole = Layout((tuple((name, counts[name]) for name in names),))

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


def _mean_of(flight: Flight) -> Future[Tensor]:
    if not flight.works:
        done: Future[Tensor] = Future()
        done.set_result(flight.value)
        return done
    return flight.works[0].get_future().then(lambda future: future.value()[0])


def exchange_hook(state: Ride, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP communication hook."""
    return state.exchange(bucket)
