"""One exchange of local steps: differences to the shared weights go out, new weights come back.

With kept residuals a worker's own weights say what it has not sent: they are the shared weights
less that, so nothing is stored for it. Where they cannot say it (after `sync`, with
`keep_residual=False`, or in parameters of half precision), it waits in a vector, `owed`.

The same class exchanges for one rank of a process group, and for R simulated workers in this
process, which share one copy of the shared weights.

Letters: N = length of a vector; the first D of its `FewBitMean.length` coordinates are sent in few
bits, small parameters behind them exactly; B elements of buffers; R workers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.collectives import (
    all_gather,
    all_gather_bytes,
    all_gather_start,
    all_to_all_bytes,
    all_to_all_start,
)
from gradherd.comm.world import World
from gradherd.local.mean import FewBitMean
from gradherd.local.outer import OuterOptimizer
from gradherd.local.settings import LocalSteps


class OutOfStep(RuntimeError):
    """Workers have taken different numbers of steps, or not all of them have called `sync`."""


@dataclass
class Arrival:
    """The result of an exchange."""

    weights: list[Tensor]
    """(N,) with which each worker goes on, or what it is to add to its own weights of then."""
    ok: Tensor | None = None
    """(2,) int32: whether the exchange counts, and whether this worker's difference was finite; on
    the host."""
    buffers: Tensor | None = None
    """(B,) mean of the buffers."""
    headers: Tensor | None = None
    """(R, 4) steps, whether `sync` asks, whether finite, and D of all workers, on the host."""
    ready: Any = None
    """CUDA event after which `headers` and `ok` are there, if the host was not to wait for them."""


class SharedWeights:
    """The weights that workers share, and what it takes to exchange the difference to them."""

    def __init__(
        self,
        settings: LocalSteps,
        dim: int,
        small: int,
        buffers: int,
        world: World,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        shards: World | None = None,
        simulated: bool = False,
    ) -> None:
        """Make room for everything but the weights; `start` gives them.

        Args:
            settings: What to send, and the outer step.
            dim: D.
            small: Elements of small parameters.
            buffers: B.
            world: The ranks that exchange.
            dtype: Dtype of vectors.
            device: Device of vectors.
            shards: The ranks that hold the shards of this replica of a model; None is this one.
            simulated: Whether all workers of `world` are in this process.
        """
        ranks = range(world.size) if simulated else [world.rank]
        self._world, self._simulated = world, simulated
        self._shards = World.single() if shards is None else shards
        self._settings = settings
        where: dict[str, Any] = {"values": settings.values, "dtype": dtype, "device": device}
        self.means = [
            FewBitMean(dim, exact=small + buffers, rank=rank, size=world.size, **where)
            for rank in ranks
        ]
        self.length, self._small = self.means[0].length, small
        self._device = torch.device(device)
        self._room: list[Tensor] | None = None
        self.owed: list[Tensor] | None = None
        """(N,) what each worker has not sent, where its own weights do not say it."""
        self.bytes = 0
        """Bytes that a worker has sent in the last exchange."""
        self.squares: Tensor | None = None
        """() sum of squares of what the first worker did not send in the last exchange."""

    @property
    def numel(self) -> int:
        """N, the length of a vector."""
        return self.length + self._small

    def room(self) -> list[Tensor]:
        """Return (N,) memory for the own weights of each worker, until the next call."""
        if self._device.type != "cpu":
            return [torch.empty_like(self.outer.shared) for _ in self.means]
        if self._room is None:  # Allocating it takes a CPU as long as a pass over it.
            self._room = [torch.zeros_like(self.outer.shared) for _ in self.means]
        return self._room

    @classmethod
    def simulate(
        cls, settings: LocalSteps, dim: int, small: int, buffers: int, workers: int, **where: Any
    ) -> "SharedWeights":
        """Return the exchange of all workers in this process; arguments are those of a rank."""
        world = World(0, workers)
        return cls(settings, dim, small, buffers, world, simulated=True, **where)

    def start(self, shared: Tensor) -> None:
        """Begin with (N,) shared weights."""
        self.outer = OuterOptimizer(self._settings, shared)

    # The exchange.

    @torch.no_grad()
    def exchange(
        self,
        own: list[Tensor],
        buffers: Sequence[Tensor] | None = None,
        position: tuple[int, int] = (0, 0),
        *,
        delta: bool = False,
        defers: bool = False,
    ) -> Arrival:
        """Send what differs from the shared weights, and move them by the mean that arrives.

        Args:
            own: (N,) weights of each worker; they become the `weights` of the result.
            buffers: (B,) of each worker, which are averaged exactly.
            position: Steps of this worker, and whether all go on with equal weights (`sync`): the
                same everywhere.
            delta: Return what to add to the own weights of later, which have moved on.
            defers: Whether the host need not learn now if it counts, where that is possible.

        Raises:
            OutOfStep: `position` is not the same everywhere.
        """
        arrival, shared, length = Arrival(own), self.outer.shared, self.length
        synced, few = bool(position[1]), self.means[0]
        self.bytes = 0
        for at, (one, weights) in enumerate(zip(self.means, own, strict=True)):
            owed = None if self.owed is None else self.owed[at]
            small = shared[length:] - weights[length:]
            if owed is not None:
                small += owed[length:]
            exact = small if buffers is None else torch.cat([small, buffers[at]])
            one.send(weights, shared, owed, exact, position)
        self._send_to_owners()
        headers = few.received.header
        keeps = self._settings.keep_residual and not synced
        deferred = defers and few.kernels is not None and keeps and self.owed is None
        if deferred:
            ok = self._verdict_on_device(headers, few.rank)
            arrival.headers, arrival.ok = _to_host(headers), _to_host(ok)
            arrival.ready = torch.cuda.current_stream(headers.device).record_event()
        else:
            arrival.headers = headers.cpu()
            arrival.ok = torch.tensor(self.verdict(arrival), dtype=torch.int32)
            if self._shards.size > 1:
                arrival.ok = self.all_shards(arrival.ok)
            if not arrival.ok[0]:
                return arrival
            ok = arrival.ok.to(self._device)
        for one in self.means:
            one.own(ok if deferred else None)
        try:
            self._send_to_all()
        except RuntimeError:
            for one in self.means:
                one.take_back()
            raise
        exact = few.gathered.exact.reshape(-1)
        if buffers is not None:
            # Those of a worker whose weights are not finite may not be, either.
            mean = exact[self._small : few.exact]
            arrival.buffers = torch.where(ok[0] == 1, mean, buffers[0])
        owes, rest = self.owed, None
        if few.error is not None and not keeps:
            rest = [torch.zeros_like(one) for one in own] if owes is None else owes
        if few.kernels:
            both = rest if owes is None else owes
            for i, one in enumerate(self.means):
                squares = few.kernels.apply(
                    one, few.gathered, self.outer, own[i], None if both is None else both[i], ok,
                    owes=owes is not None, keeps=keeps, delta=delta, last=one is self.means[-1],
                )  # fmt: skip
                self.squares = squares if i == 0 else self.squares
        else:
            self._apply(own, owes, rest, delta)
        if self._small:
            self._apply_small(own, exact[: self._small].clone(), ok, delta)
        for vector in rest or []:
            vector[length:] = 0
        self.owed = rest
        return arrival

    def _send_to_owners(self) -> None:
        first = self.means[0]
        if not self._simulated:
            sent = all_to_all_start(first.sent.raw, self._world, out=first.received.raw)
            sent.wait()
            self.bytes += sent.bytes
            return
        for owner in self.means:
            for one in self.means:
                owner.received.raw[one.rank] = one.sent.raw[owner.rank]
        self.bytes += all_to_all_bytes(first.sent.raw, len(self.means))

    def _send_to_all(self) -> None:
        first = self.means[0]
        if not self._simulated:
            sent = all_gather_start(first.sum.raw[0], self._world, out=first.gathered.raw)
            sent.wait()
            self.bytes += sent.bytes
            return
        for owner in self.means:  # all know the same: one copy of it serves them
            first.gathered.raw[owner.rank] = owner.sum.raw[0]
        self.bytes += all_gather_bytes(first.sum.raw[0], len(self.means))

    def verdict(self, arrival: Arrival) -> list[int]:
        """Return whether an exchange counts, and whether the first worker's difference was finite.

        Raises:
            OutOfStep: Workers were not at the same position.
        """
        if arrival.ready is not None:
            arrival.ready.synchronize()
        assert arrival.headers is not None
        headers = arrival.headers.tolist()
        if any(header[:2] != headers[0][:2] or header[3] != headers[0][3] for header in headers):
            raise OutOfStep(f"{[header[:2] for header in headers]}")
        return [int(all(header[2] for header in headers)), headers[self.means[0].rank][2]]

    def _verdict_on_device(self, headers: Tensor, rank: int) -> Tensor:
        same = (headers[:, [0, 1, 3]] == headers[0, [0, 1, 3]]).all()
        return self.all_shards(torch.stack([headers[:, 2].min() * same, headers[rank, 2]]))

    def all_shards(self, ok: Tensor) -> Tensor:
        """Return int32 flags that hold for the whole model, of which this rank may have a shard."""
        if self._shards.size == 1:
            return ok
        flags, sent = all_gather(ok.to(self._device), self._shards)
        self.bytes += sent
        return flags.amin(0).to(ok.device)

    # The outer step.

    def _apply(
        self, own: list[Tensor], owes: list[Tensor] | None, rest: list[Tensor] | None, delta: bool
    ) -> None:
        """Move the shared weights block by block, so that what is read of one stays cached.

        `owes` is what was owed before; `rest` receives what is owed now.
        """
        shared, first = self.outer.shared, self.means[0]
        self.squares = torch.zeros((), dtype=torch.float64)
        for owner, part, at in first.blocks():
            unsent = [
                few.unsent(weights, shared, None if owes is None else owes[i], owner, part, at)
                for i, (few, weights) in enumerate(zip(self.means, own, strict=True))
            ]
            self.squares += torch.dot(unsent[0], unsent[0]).cpu()
            self.outer.step(first.mean(owner, part), at)
            for i, (weights, left) in enumerate(zip(own, unsent, strict=True)):
                if rest is not None:
                    rest[i][at] = left
                    left.zero_()
                if delta:
                    left.add_(weights[at])
                torch.sub(shared[at], left, out=weights[at])

    def _apply_small(self, own: list[Tensor], mean: Tensor, ok: Tensor, delta: bool) -> None:
        """Apply to the parameters that were sent exactly; nothing of them is left."""
        at, counts, finite = slice(self.length, None), ok[0] == 1, ok[1] == 1
        shared, momentum = self.outer.shared[at], self.outer.momentum
        before = shared.clone(), None if momentum is None else momentum[at].clone()
        self.outer.step(mean, at)
        shared.copy_(torch.where(counts, shared, before[0]))
        if momentum is not None and before[1] is not None:
            momentum[at] = torch.where(counts, momentum[at], before[1])
        for weights in own:
            if delta:
                weights[at] = torch.where(counts, shared - weights[at], 0)
            else:
                stays = torch.where(finite, weights[at], shared)
                weights[at] = torch.where(counts, shared, stays)

    def owe_rounding(self, exact: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Keep what parameters could `held` not hold of (N,) `exact` weights: half precision."""
        lost = [after - before for before, after in zip(exact, held, strict=True)]
        if self.owed is None:
            self.owed = lost
        else:
            self.owed = [one.add_(more) for one, more in zip(self.owed, lost, strict=True)]

    def residuals(self) -> list[Tensor]:
        """Return (N,) what each worker owes beside its own weights; zeros if nothing."""
        if self.owed is not None:
            return self.owed
        return [torch.zeros_like(self.outer.shared) for _ in self.means]


def _to_host(tensor: Tensor) -> Tensor:
    """Start to copy a tensor to the host, which does not wait for it."""
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
