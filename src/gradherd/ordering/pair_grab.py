"""Pair balance: sign the difference of two gradients visited one after the other.

The mean cancels in the difference, so no mean of the previous epoch is needed, and the two units of
pair k always go to slots k and n-1-k, so workers stay aligned in time. Cooper et al.,
"Coordinating Distributed Example Orders for Provably Accelerated Training" (arXiv:2302.00845),
Algorithms 2 and 3. `PairGraB` has a running sum for every worker (ID-GraB with pair balance).
`CDGraB` has one for all: at each pair of time steps the workers' differences are signed one after
the other against the same sum, so that the gradients of all workers together stay balanced. The
bound on the prefix sums then does not grow with the number of workers; with independent balancing
it grows like its root.

The paper needs an even number of units and the same number on all workers, and published code drops
the rest of the data. Odd and unequal numbers and missed units are additions.

The paper's order server collects gradients, decides signs and sends out orders. Here, as in the
published code, every rank plays that server and computes the orders of all workers. Unlike there,
no rank needs all gradients for it: inner products of shards are summed (see `balance`).

Shapes: b time steps of a call, M workers, K pairs, D columns.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from gradherd.comm.script import Script
from gradherd.ordering.balance import stacked
from gradherd.ordering.implicit import Combined, ImplicitRows
from gradherd.ordering.policy import Rows, ShardedRows, SignPolicy, SignState, all_seen
from gradherd.ordering.random import SeededRandom


@dataclass
class PairState(SignState):
    """Signs of pairs, and the first half of a pair whose second half is yet to come."""

    # The first half must be a copy. Published CD-GraB code stores a reference to the gather buffer,
    # which the next step overwrites: every difference is then zero, every sign is plus, and the
    # order no longer depends on gradients (the `always-plus` order).
    pending: Tensor | None = None
    """(M, D) rows of the first half of a pair."""
    pending_seen: Tensor | None = None
    """(M,) workers that have such a row."""
    room: Tensor | None = None
    """(M, D) memory for rows, reused from pair to pair; not part of the saved state. If rows are
    sharded, `running` lies right above it: the products with both are then one."""

    columns: ClassVar[tuple[str, ...]] = ("running", "pending")
    others: ClassVar[tuple[str, ...]] = (*SignState.others, "pending_seen")

    def skip_to(self, step: int) -> None:
        """Skip time steps. Half a pair loses its partner: the next begins at an even step."""
        super().skip_to(step)
        self.pending = self.pending_seen = None


Blocks: TypeAlias = tuple[Tensor, ...]
"""(b, M, c) rows in blocks of columns, side by side."""


def take_pairs(
    state: PairState, rows: Blocks, seen: Tensor, *, keep: bool = False
) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Advance the state by b rows of each worker and return the pairs they complete.

    A pair is what a worker visits at time steps 2k and 2k+1. A row at an even step whose partner
    is yet to come is copied into `state.room`, so the caller may reuse its buffer. One whose
    partner was skipped is not paired with the next row instead: pairs are tied to time steps, so
    that pair k has the slots k and n-1-k on all workers.

    Rows are arbitrary where (b, M) `seen` is false. With `keep`, the caller gives them away, one
    step in one block, so they need not be copied.

    Returns:
        (K, M, D) first minus second row, arbitrary where one of the two is missing, and (K, M)
        whether both were seen, or None if K = 0; and the memory that the caller gets for rows that
        were kept.
    """
    _place_odd_units(state, seen)
    begin, state.steps = state.steps, state.steps + len(seen)
    parts, masks, spare = [], [], None
    # The caller got our memory for the first half, and the second half has arrived in it.
    in_room = keep and state.room is not None and state.room.data_ptr() == rows[0].data_ptr()
    if begin % 2 and len(seen):
        if state.pending is not None:
            assert state.pending_seen is not None
            # In place, since both halves are our own, or a copy. First minus second; published
            # code also has second minus first, which only changes the sign of the running sum.
            widths = [block.shape[-1] for block in rows]
            for own, block in zip(state.pending.split(widths, -1), rows, strict=True):
                torch.sub(own, block[0], out=block[0] if in_room else own)
            spare = state.pending if in_room else None
            parts.append(rows[0] if in_room else state.pending.unsqueeze(0))
            masks.append((state.pending_seen & seen[0]).unsqueeze(0))
        rows, seen = _steps(rows, slice(1, None)), seen[1:]
        state.pending = state.pending_seen = None
    if len(seen) % 2:
        if keep and not in_room:
            state.pending, spare = rows[0][-1], state.room
        else:
            # A difference that this call completes may be in the room already.
            state.pending = _copied(state, _steps(rows, -1), fresh=in_room or bool(parts))
        state.pending_seen = seen[-1].clone()
        rows, seen = _steps(rows, slice(None, -1)), seen[:-1]
    if len(seen):
        parts.append(_differences(rows))
        masks.append(seen[0::2] & seen[1::2])
    if not parts:
        return None, spare
    several = len(parts) > 1
    return (torch.cat(parts), torch.cat(masks)) if several else (parts[0], masks[0]), spare


def _steps(rows: Blocks, span: slice | int) -> Blocks:
    return tuple(block[span] for block in rows)


def _differences(rows: Blocks) -> Tensor:
    """Return (b / 2, M, D) rows at even steps minus those at odd ones."""
    diffs = [block[0::2] - block[1::2] for block in rows]
    return diffs[0] if len(diffs) == 1 else torch.cat(diffs, -1)


def _copied(state: PairState, row: Blocks, *, fresh: bool) -> Tensor:
    """Return a copy of an (M, D) row, in the room of the pair before unless `fresh`.

    New memory of the size of a gradient would cost as much as the copy itself.
    """
    out, one = state.room, row[0]
    shape = (len(one), sum(block.shape[-1] for block in row))
    alike = (shape, one.dtype, one.device)
    if fresh or out is None or (out.shape, out.dtype, out.device) != alike:
        out = one.new_empty(shape)
        state.room = state.room if fresh else out
    return torch.cat(row, -1, out=out)


def _place_odd_units(state: PairState, seen: Tensor) -> None:
    """Send the last of an odd number of units, which has no partner, to the middle.

    Its row does not matter: the middle is the only slot left, whatever its sign would be. Without
    a partner it has no difference, so it leaves the running sum alone, too.
    """
    for worker, size in enumerate(state.sizes):
        step = size - 1 - state.steps
        if size % 2 and 0 <= step < len(seen) and seen[step, worker]:
            # +1: last among the fronts, which is the middle (see `balance.reorder`).
            state.sides[size - 1, worker] = 1


@lru_cache(maxsize=8)
def _both_sides(device: torch.device) -> Tensor:
    return torch.tensor([[1], [-1]], dtype=torch.int8, device=device)


@dataclass(frozen=True)
class PairGraB(SignPolicy):
    """Pair balance, each worker on its own (with several workers ID-GraB with pair balance).

    >>> PairGraB()
    PairGraB(rule=Greedy())
    """

    state: ClassVar[type[SignState]] = PairState
    steps_per_vector: ClassVar[int] = 2
    takes_implicit: ClassVar[bool] = True

    def observe(
        self, state: Any, rows: Rows | ImplicitRows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Sign the pairs that the rows complete; arguments as in `Policy.observe`."""
        if not isinstance(rows, Tensor | ShardedRows):
            self._observe_implicit(state, rows, seen, random)
            return
        blocks = (rows,) if isinstance(rows, Tensor) else rows.blocks
        release = rows.release if isinstance(rows, ShardedRows) else None
        if isinstance(rows, ShardedRows):
            self._make_room(state, rows)
        keep = release is not None and len(seen) == len(blocks) == 1
        pairs, spare = take_pairs(state, blocks, seen, keep=keep)
        if release is not None:
            release(spare)
        if pairs is None:  # the first halves of pairs: every second step of training
            return
        diffs, both = pairs
        sharded, first = isinstance(rows, ShardedRows), state.steps // 2 - len(diffs)
        signs, late = yield from self._sign(state, diffs, both, first, random, sharded=sharded)
        # + sends the first of a pair to the front. In one launch, as at every step.
        sides = signs.unsqueeze(1) * _both_sides(signs.device)
        if late:
            state.late.append((2 * first, sides.flatten(0, 1)))
        else:
            state.place(2 * first, sides, both.unsqueeze(1))

    def _observe_implicit(
        self, state: PairState, rows: ImplicitRows, seen: Tensor, random: SeededRandom
    ) -> None:
        """Do the same with rows that are not formed, all of them seen."""
        _place_odd_units(state, seen)
        pending, odd, like = state.pending, state.steps % 2, rows.gram
        formed = like.new_zeros(0, rows.shape[-1])
        if odd and pending is not None:
            assert state.pending_seen is not None
            formed = pending[state.pending_seen.to(pending.device)]
        lone = odd - len(formed)  # a row whose partner was skipped
        first = (state.steps + lone) // 2
        state.steps += len(rows)
        state.pending = state.pending_seen = None
        units = torch.eye(len(formed) + len(rows), dtype=like.dtype, device=like.device)[lone:]
        if len(units) % 2:
            # What rows are made of does not outlive the step.
            state.pending = rows.combine(units[-1:, -len(rows) :])
            state.pending_seen = seen[-1].clone()
        pairs = units[: len(units) // 2 * 2]
        if len(pairs):
            vectors = Combined(pairs[0::2] - pairs[1::2], formed, rows)
            signs = self._sign_implicit(state, vectors, first, random)
            sides = signs.unsqueeze(1) * _both_sides(signs.device)
            state.place(2 * first, sides, all_seen(1, 1))

    def _make_room(self, state: PairState, rows: ShardedRows) -> None:
        """Let the state have room for rows, with the running sum right above it."""
        running, (_, workers, columns) = state.running, rows.shape
        if running is not None and state.room is not None:
            if stacked(running, state.room) is not None:
                return
        streams = 1 if self.shared else workers
        both = rows.blocks[0].new_zeros(streams + workers, columns)
        if running is not None:
            both[:streams] = running
        state.running, state.room = both[:streams], both[streams:]


@dataclass(frozen=True)
class CDGraB(PairGraB):
    """Pair balance, all workers together (CD-GraB). With one worker it is plain pair balance.

    >>> CDGraB()
    CDGraB(rule=Greedy())
    """

    shared: ClassVar[bool] = True
