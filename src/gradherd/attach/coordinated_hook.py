"""Coordination in DDP's communication hook: averaging and ordering share one exchange.

Buckets are exchanged by slices as they become ready (`comm.sliced_mean`), the mean goes back to
DDP, and this rank's slices of all workers' gradients go to the sampler, which signs them in a
thread beside the training loop. A backward whose gradient is not what the bucket holds (under
`no_sync`, or added to gradients that were not cleared) is exchanged separately.

Shapes: R ranks, C columns of this rank over all buckets.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.attach.bucket_hook import BucketHook
from gradherd.attach.row_sources import ParameterHooks
from gradherd.comm.collectives import all_gather
from gradherd.comm.script import run
from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS, SlicedMean
from gradherd.comm.world import World
from gradherd.ordering.coordination import BackgroundThread, BatchClaim, observe_slices
from gradherd.ordering.policy import COLUMNS
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.flat import FlatSpec


class BucketLayout(NamedTuple):
    """Which parameters are in which bucket, in order."""

    buckets: tuple[tuple[tuple[str, int], ...], ...]
    """(name, elements) of each parameter of each bucket."""

    @classmethod
    def one_bucket(cls, parameters: Iterable[tuple[str, int]], world: World) -> "BucketLayout":
        """Return the layout of a single bucket, padded so that it divides by the ranks."""
        named = tuple(parameters)
        padding = -sum(count for _, count in named) % world.size
        return cls(((*named, ("", padding)),))

    def lengths(self) -> list[int]:
        """Return the elements of each bucket."""
        return [sum(count for _, count in bucket) for bucket in self.buckets]

    def gather(self, columns: Tensor, world: World) -> dict[str, Tensor]:
        """Gather one (C,) row, of which every rank holds its columns, by parameter."""
        lengths = self.lengths()
        shares = [length // world.size for length in lengths]
        body = sum(shares)
        tail = sum(length % world.size for length in lengths)
        padded = columns.new_zeros(body + tail)
        padded[: len(columns)] = columns
        gathered = all_gather(padded, world).value
        start, end = 0, body
        by_name: dict[str, Tensor] = {}
        for bucket, length, share in zip(self.buckets, lengths, shares, strict=True):
            rest = length - share * world.size
            flat = torch.cat(
                [gathered[:, start : start + share].flatten(), gathered[-1, end : end + rest]]
            )
            start, end = start + share, end + rest
            names = [name for name, _ in bucket]
            pieces = torch.split(flat, [count for _, count in bucket])
            by_name.update(zip(names, pieces, strict=True))
        return by_name

    def columns(self, by_name: Mapping[str, Tensor], world: World) -> Tensor:
        """Return this rank's (C,) columns of a vector by parameter; zero where one is missing."""
        body, tails = [], []
        like = next(iter(by_name.values()))
        for bucket, length in zip(self.buckets, self.lengths(), strict=True):
            flat = torch.cat([by_name.get(name, like.new_zeros(count)) for name, count in bucket])
            share = length // world.size
            body.append(flat[world.rank * share : (world.rank + 1) * share])
            tails.append(flat[share * world.size :])
        return torch.cat([*body, *(tails if world.rank == world.size - 1 else [])])


class CoordinatedHook(BucketHook):
    """Feeds whole batches of all workers to the sampler, in slices."""

    def __init__(self, ddp: DDP, sampler: OrderedSampler, world: World) -> None:
        super().__init__(ddp, world)
        self._ddp = ddp
        self._sampler = sampler
        self._side = world.side_channel()
        self._thread = BackgroundThread("gradherd-signs")
        self._parameters = [p for p in ddp.module.parameters() if p.requires_grad]
        # DDP's buckets also hold parameters that were frozen after it was wrapped.
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        # All parameters in one bucket, in order: how small models are exchanged, and the layout
        # that larger ones start from until DDP's own buckets are known.
        spec = FlatSpec.of(ddp.module)
        self.layout = BucketLayout.one_bucket(zip(spec.names, spec.numels, strict=True), world)
        kinds = {(p.dtype, p.device) for p in self._parameters}
        self._one_bucket = spec.size <= ONE_BUCKET_ELEMENTS and len(kinds) == 1
        length = self.layout.lengths()[0] if self._one_bucket else 0
        self._flat = self._parameters[0].detach().new_zeros(length)
        spans = (slice(at, at + n) for at, n in zip(spec.offsets, spec.numels, strict=True))
        self._spans = dict(zip(spec.names, spans, strict=True))
        self._mean = SlicedMean(world)
        self._rows: Tensor | None = None  # (R, C) of a backward that came with its buckets
        self._separate: dict[str, Tensor] = {}  # gradient of a backward that did not
        self._coordinates = True  # whether the buckets of this backward hold its gradient alone
        self._decided = False
        self.bytes = 0
        """Bytes that this rank has sent for ordering alone."""
        self._hooks = ParameterHooks(ddp.module, self._arrived)

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived that was not fed back yet."""
        return self._rows is not None or bool(self._separate)

    def prepare(self) -> None:
        """Get ready for a backward, also after one that broke off."""
        self._decided = False
        self.discard()
        self._mean.abandon()

    def _arrived(self, name: str, grad: Tensor) -> None:
        if not self._decided:  # the first gradient of a backward
            fresh = all(parameter.grad is None for parameter in self._parameters)
            self._coordinates = fresh and self._ddp.require_backward_grad_sync
            self._decided = True
        if self.active and not self._coordinates:
            flat = grad.flatten()
            before = self._separate.get(name)
            self._separate[name] = flat.clone() if before is None else before.add_(flat)

    def collects(self) -> bool:
        """Return whether the buckets hold the gradient of this backward alone."""
        return self.active and self._coordinates

    def add(self, bucket: dist.GradBucket) -> None:
        """Begin to exchange the bucket, unless all buckets are exchanged as one."""
        if not self._one_bucket:
            self._mean.start(bucket.buffer())

    def exchange(self, buckets: Sequence[dist.GradBucket]) -> None:
        """Average all buckets and keep this rank's slices of all workers' gradients."""
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
        pieces = [
            (self._flat[self._spans[self._names[parameter]]], grad)
            for bucket in buckets
            for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True)
            if self._names[parameter] in self._spans
        ]
        for flat, grad in pieces:
            flat.copy_(grad.flatten())
        self._mean.start(self._flat)
        self._rows = self._mean.finish(columns=True)
        for flat, grad in pieces:
            grad.copy_(flat.view_as(grad))

    def _use(self, layout: BucketLayout) -> None:
        """Switch to other buckets: DDP rebuilds them once after the first step."""
        if layout == self.layout:
            return
        self._thread.wait()
        old, self.layout = self.layout, layout
        self._sampler.ordering.map_columns(
            lambda row: layout.columns(old.gather(row, self.world), self.world)
        )

    def feed(self, claim: BatchClaim, loss_scale: float) -> None:
        """Have this batch of every worker signed beside the training loop."""
        rows, self._rows = self._rows, None
        if rows is None:
            rows = self._exchange_separately()
        if loss_scale != 1:
            rows.div_(loss_scale)
        script = observe_slices(self._sampler, rows, first=claim.step)

        def sign() -> None:
            self.bytes += run(script, self._side).bytes

        self._thread.submit(sign)

    def _exchange_separately(self) -> Tensor:
        grads, self._separate = self._separate, {}
        device, before = self._parameters[0].device, self._mean.bytes
        for bucket in self.layout.buckets:
            self._mean.start(
                torch.cat(
                    [grads.get(name, torch.zeros(count, device=device)) for name, count in bucket]
                )
            )
        rows = self._mean.finish(write_back=False, columns=True)
        self.bytes += self._mean.bytes - before
        assert rows is not None
        return rows

    def by_index(self) -> None:
        """Refuse batches that are given by their examples."""
        raise ValueError(
            "whole batches that are exchanged in DDP's hook cannot be given by index: their order "
            "would differ between ranks; attach with rows='sketch'"
        )

    def wait(self) -> None:
        """Return when the signs of all batches are there."""
        self._thread.wait()

    def finish(self) -> None:
        """Return when the signs of all batches are there."""
        self._thread.wait()

    def forget(self) -> None:
        """Drop a gradient that was not fed back yet."""
        self._rows, self._separate = None, {}
        self._decided = False

    def metrics(self) -> dict[str, Any]:
        """Return what the exchange of gradients has cost."""
        return {"exchange_seconds": self.stopwatch.seconds, "total_bytes": self.total_bytes}

    def close(self) -> None:
        """Remove the parameter hooks; DDP keeps its hook, which only averages from now on."""
        self._thread.wait()
        self._thread.close()
        self._hooks.remove()
        super().close()

    def ordering_state(self) -> dict[str, Any]:
        """Return the state of the ordering with the columns of all ranks, by parameter order."""
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
        """Load the state of the ordering and keep this rank's columns."""
        self._sampler.ordering.load_state_dict(state)
        spec = FlatSpec.of(self._ddp.module)
        sizes = list(zip(spec.names, spec.numels, strict=True))
        layout = BucketLayout.one_bucket(sizes, self.world)

        def columns(row: Tensor) -> Tensor:
            pieces = torch.split(row, list(spec.numels))
            return layout.columns(dict(zip(spec.names, pieces, strict=True)), self.world)

        self.layout = layout
        self._sampler.ordering.map_columns(columns)
