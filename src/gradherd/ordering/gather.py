"""Gather every worker's rows, many steps at once, and show them to the sampler.

An order is needed at the end of an epoch only. So rows wait until a few dozen batches are
together, travel in one all-gather that nobody waits for, and are signed when they have arrived:
the same signs as step by step.

Letters: b units of a batch, R workers, k numbers of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradherd.comm.collectives import PendingCollective, all_gather, all_gather_start
from gradherd.comm.world import World
from gradherd.ordering.sampler import OrderedSampler
from gradherd.ordering.walks import Claim

# Rows that wait for company take memory, on arrival R times as much: no more than this.
_MOST_NUMBERS = 4_000_000
EVERY = 32
"""Batches that travel together."""


class Gather:
    """Rows of this worker on their way to all others."""

    def __init__(self, sampler: OrderedSampler, world: World, *, every: int = EVERY) -> None:
        """Start with nothing.

        Args:
            sampler: Who learns.
            world: Whose rows are gathered.
            every: Batches that travel together.
        """
        self._sampler = sampler
        self._world = world
        self._every = every
        self._waiting: list[tuple[Claim, Tensor]] = []
        self._flying: tuple[list[Claim], PendingCollective] | None = None
        self.bytes = 0
        self.sort = False
        """Whether batches come in any order: they wait for the epoch's end and are sorted."""

    def add(self, claim: Claim, rows: Tensor) -> None:
        """Take the (b, k) rows of a batch; the last batch of an epoch waits for its signs."""
        if self.sort:
            self._waiting.append((claim, rows))
            if sum(waiting.units for waiting, _ in self._waiting) >= self._sampler.ordering.length:
                self.flush()
            return
        if self._waiting and _after(self._waiting[-1][0]) != (claim.epoch, claim.step):
            self.flush()  # The walk was broken off or batches were missed: what follows is apart.
        self._waiting.append((claim, rows))
        left = self._sampler.ordering.length - claim.step - claim.units
        if left * self._sampler.unit < self._sampler.batch_size:
            self.flush()
        elif enough([rows for _, rows in self._waiting], self._every):
            self._send()

    def flush(self) -> None:
        """Show everything to the sampler. All ranks must call it at the same point."""
        if self.sort:
            self._flush_sorted()
            return
        self._send()
        self._land()

    def _flush_sorted(self) -> None:
        """Show an epoch's rows in its order, with gaps where batches were missed.

        Ranks may have missed different ones, so all send a whole epoch.
        """
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        steps, (_, like) = self._sampler.ordering.length, waiting[0]
        rows = like.new_zeros(steps, like.shape[1])
        seen = torch.zeros(steps, dtype=torch.int64, device=like.device)
        for claim, own in waiting:
            span = slice(claim.step, claim.step + claim.units)
            rows[span] = own
            seen[span] = int(own.sum().isfinite())
        all_rows, row_bytes = all_gather(rows, self._world)
        all_seen, seen_bytes = all_gather(seen, self._world)
        self.bytes += row_bytes + seen_bytes
        self._sampler.observe(all_rows.transpose(0, 1), all_seen.T > 0, first=0)

    def _send(self) -> None:
        self._land()
        if not self._waiting:
            return
        claims = [claim for claim, _ in self._waiting]
        rows = torch.cat([rows for _, rows in self._waiting])
        self._waiting.clear()
        flight = all_gather_start(rows, self._world)
        self._flying = claims, flight
        self.bytes += flight.bytes

    def _land(self) -> None:
        if self._flying is None:
            return
        claims, flight = self._flying
        self._flying = None
        rows = flight.wait().transpose(0, 1)  # (steps, R, k)
        if claims[0].epoch == self._sampler.ordering.epoch:
            seen = seen_batches(rows, [claim.units for claim in claims])
            self._sampler.observe(rows, seen, first=claims[0].step)


def _after(claim: Claim) -> tuple[int, int]:
    return claim.epoch, claim.step + claim.units


def enough(waiting: Sequence[Tensor], every: int = EVERY) -> bool:
    """Return whether one worker's (b, k) rows of some batches are enough to travel."""
    return len(waiting) >= every or sum(rows.numel() for rows in waiting) >= _MOST_NUMBERS


def seen_batches(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return (steps, R) which rows count: a batch that is not finite is left out by all.

    Its mean gradient is not finite either, so the optimizer skips it on all ranks.

    Args:
        rows: (steps, R, k) of some batches, one after the other.
        sizes: Units of each batch.
    """
    broken = ~rows.sum(dim=(1, 2)).isfinite().cpu()
    batches = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    count = torch.zeros(len(sizes), dtype=torch.int64).index_add_(0, batches, broken.long())
    return (count[batches] == 0).unsqueeze(1).expand(-1, rows.shape[1])
