"""Pair balance: balance the difference of two gradients visited one after the other.

The mean cancels in the difference, so no mean of the epoch before is needed, and the two of
pair k always go to slots k and n-1-k, so workers stay aligned in time. Lu et al.,
"Coordinating Distributed Example Orders for Provably Accelerated Training"
(arXiv:2302.00845), Algorithms 2 and 3. Here every worker has its own running sum
(ID-GraB with pair balance); `cd_grab` shares one.

Letters: b time steps of a call, M workers, K pairs, D dimension.
"""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from gradherd.ordering.implicit_rows import ImplicitRows, LinearCombination, balance_implicit
from gradherd.ordering.permute import reorder_all
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.sign_rules import Greedy, SignRule
from gradherd.ordering.signed import Reduce
from gradherd.ordering.signs import balance, draws_for
from gradherd.ordering.state import BalanceState, Start


class Pairs(NamedTuple):
    """Pairs completed by a call."""

    first: int
    """Number of the first one, counted from the epoch's start."""
    diffs: Tensor
    """(K, M, D) first minus second row; zero where one of the two is missing."""
    seen: Tensor
    """(K, M) both were seen."""


def take_pairs(memory: BalanceState, rows: Tensor, seen: Tensor) -> Pairs:
    """Move the memory on by (b, M, D) rows and return the pairs they complete.

    A pair is what is visited at time steps 2k and 2k+1. A row at an even step whose partner is
    yet to come is copied into `memory.pending`: the caller may reuse its buffer (unless it
    said that it will not: `memory.copies`).
    """
    if len(rows) and memory.steps % 2 and memory.pending is None:
        # The partner of the first row was skipped: no pair.
        rows, seen = rows[1:], seen[1:]
        memory.steps += 1
    first = memory.steps // 2
    _place_odd_ones(memory, seen)
    parts, masks = [], []
    memory.steps += len(rows)
    if memory.pending is not None and len(rows):
        assert memory.pending_seen is not None
        parts.append(memory.pending.sub_(rows[0]).unsqueeze(0))  # our copy: no new memory
        masks.append((memory.pending_seen & seen[0]).unsqueeze(0))
        rows, seen = rows[1:], seen[1:]
        memory.pending = memory.pending_seen = None
    if len(rows) % 2:
        memory.pending = rows[-1].clone() if memory.copies else rows[-1]
        memory.pending_seen = seen[-1].clone()
        rows, seen = rows[:-1], seen[:-1]
    if len(rows) or not parts:
        parts.append(rows[0::2] - rows[1::2])
        masks.append(seen[0::2] & seen[1::2])
    diffs = parts[0] if len(parts) == 1 else torch.cat(parts)
    both = torch.cat(masks)
    if not both.all():
        diffs = torch.where(both.to(diffs.device).unsqueeze(-1), diffs, 0)
    return Pairs(first, diffs, both)


def _place_odd_ones(memory: BalanceState, seen: Tensor) -> None:
    """Send the last of an odd number of units, which has no partner, to the middle.

    Its row does not matter: the middle is the only slot left.
    """
    for worker, size in enumerate(memory.sizes):
        step = size - 1 - memory.steps
        if size % 2 and 0 <= step < len(seen) and seen[step, worker]:
            memory.sides[size - 1, worker] = 1


def place_pairs(memory: BalanceState, pairs: Pairs, signs: Tensor) -> None:
    """Write the (K, M) signs of the pairs as sides: + sends the first of two to the front."""
    signs = signs * pairs.seen
    begin, end = 2 * pairs.first, 2 * (pairs.first + len(signs))
    # Where a pair is not complete the sides stay: 0, or that of an odd one out.
    firsts, seconds = memory.sides[begin:end:2], memory.sides[begin + 1 : end : 2]
    firsts.copy_(torch.where(pairs.seen, signs, firsts))
    seconds.copy_(torch.where(pairs.seen, -signs, seconds))


def sign_linear_pairs(
    memory: BalanceState, rows: ImplicitRows, rule: SignRule, chance: SeededRandom
) -> None:
    """Sign the pairs that B rows of one worker complete, without forming the rows."""
    count, lone = len(rows), memory.steps % 2 == 1 and memory.pending is None
    if count == 0:
        return
    if memory.running is None:
        memory.running = torch.zeros_like(rows.combine(torch.zeros(1, count)))
    like, first = memory.running, (memory.steps + int(lone)) // 2
    begin = int(lone) if memory.pending is None else -1  # -1: the pending row
    heads = torch.arange(begin, max(begin, count - 1), 2)
    a, c = like.new_zeros(len(heads), count), like.new_zeros(len(heads), 1)
    a[torch.arange(len(heads)), heads + 1] = -1
    a[torch.arange(len(heads))[heads >= 0], heads[heads >= 0]] = 1
    extra = like.new_zeros(0, like.shape[1])
    if memory.pending is not None:
        c[0], extra = 1, memory.pending
    vectors = LinearCombination(rows, a, extra, c[:, : len(extra)])
    memory.steps += count
    finite = True
    if len(heads):
        span = slice(first, first + len(heads))
        draws = draws_for(rule, chance, memory.epoch, len(memory.sides) // 2, 1)[span]
        signed = balance_implicit(vectors, memory.running, rule, draws.T, memory.carry)
        memory.running, memory.carry = signed.running, signed.carry
        signs = signed.signs.T
        place_pairs(memory, Pairs(first, like, signs != 0), signs)
        finite = bool(signs.all())  # all or none are taken
    memory.pending = memory.pending_seen = None
    if (count - begin) % 2 and finite:
        last = rows.combine(torch.eye(count)[-1:])
        if last.isfinite().all():
            memory.pending, memory.pending_seen = last, torch.ones(1, dtype=torch.bool)
            if memory.steps == memory.sizes[0]:
                memory.sides[-1] = 1


def sign_pairs(
    memory: BalanceState,
    rows: Tensor | ImplicitRows,
    seen: Tensor,
    rule: SignRule,
    chance: SeededRandom,
    *,
    shared: bool,
    reduce: Reduce | None = None,
) -> None:
    """Sign the pairs that the (b, M, D) rows complete.

    With `shared`, one running sum serves all workers: pair after pair, and within a pair worker
    after worker. Otherwise each worker is a stream of its own.
    """
    if not isinstance(rows, Tensor):
        sign_linear_pairs(memory, rows, rule, chance)
        return
    workers, dim = rows.shape[1:]
    if memory.running is None:
        memory.running = rows.new_zeros((1 if shared else workers, dim))
    pairs = take_pairs(memory, rows, seen)
    span = slice(pairs.first, pairs.first + len(pairs.diffs))
    draws = draws_for(rule, chance, memory.epoch, len(memory.sides) // 2, workers)[span]
    vectors = pairs.diffs.flatten(0, 1).unsqueeze(0) if shared else pairs.diffs.transpose(0, 1)
    signed = balance(
        vectors,
        memory.running,
        rule,
        draws.reshape(1, -1) if shared else draws.T,
        memory.carry,
        reduce=reduce,
        step=workers if shared else 1,
    )
    memory.running, memory.carry = signed.running, signed.carry
    place_pairs(memory, pairs, signed.signs.view(-1, workers) if shared else signed.signs.T)


@dataclass(frozen=True)
class PairGraB:
    """Pair balance, each worker on its own."""

    rule: SignRule = field(default_factory=Greedy)
    """How signs are taken."""

    needs_rows: ClassVar[bool] = True
    start: ClassVar[Start | None] = None

    def begin(self, memory: BalanceState, before: BalanceState | None) -> None:
        """Forget the epoch before."""
        memory.carry = self.rule.start(len(memory.sizes), len(memory.sides) // 2, memory.epoch)

    def observe(
        self,
        memory: BalanceState,
        rows: Tensor | ImplicitRows,
        seen: Tensor,
        chance: SeededRandom,
        reduce: Reduce | None = None,
    ) -> None:
        """Sign the pairs that the rows complete."""
        sign_pairs(memory, rows, seen, self.rule, chance, shared=False, reduce=reduce)

    def reorder(
        self, orders: list[Tensor], memory: BalanceState, epoch: int, chance: SeededRandom
    ) -> list[Tensor]:
        """Send each unit to its side."""
        return reorder_all(orders, memory.sides)
