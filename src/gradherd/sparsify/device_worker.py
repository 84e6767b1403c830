"""A worker whose whole step stays on its device: the host launches kernels and never waits.

It takes the place of `Worker` in a DDP hook on a GPU, for methods that agree by consensus. Every
shape is known beforehand (`device_consensus`). Whether a step is called off is a number on the
device, too: the residual is then restored, and the gradients become NaN, by kernels that do nothing
otherwise. Counts and thresholds are copied to the host when somebody asks for metrics.

Residuals are stored as the gradients arrive, bucket after bucket, each from the beginning of a tile
on: one launch adds a whole bucket. Coordinates in messages and in the method's state are those of
the model all the same (`Placement`), so they do not change when DDP rebuilds its buckets.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; N
positions in storage, R workers, K coordinates that are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script
from gradherd.sparsify import consensus, kernels
from gradherd.sparsify.device_consensus import (
    DeviceRule,
    DeviceState,
    Offers,
    accept_largest,
    make_offers,
    next_state,
    reserve_of,
    search_start,
    worker_spans,
)
from gradherd.sparsify.exchange import padding
from gradherd.sparsify.message_sizes import VALUE_BITS, ValueFormat
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.value_sums import sum_values

# Room for candidates, in multiples of k: more than the search is steered to (MAX_CANDIDATES).
_ROOM = 6
# Values that the first step looks at for a threshold.
_SAMPLES = 1 << 16


class Piece(NamedTuple):
    """Where one parameter lies."""

    begin: int
    """Its first coordinate."""
    position: int
    """Its first position in storage."""
    elements: int


class Placement:
    """Where coordinates lie in storage, and which bucket positions belong to.

    Args:
        buckets: For each bucket, (first coordinate, elements) of its parameters in their order.
        sparse: S.
        device: Device of the tables.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[tuple[int, int]]],
        sparse: int,
        device: torch.device,
    ) -> None:
        self.pieces: list[Piece] = []
        self.begins: list[int] = []
        """Position at which each bucket begins."""
        self.lengths = [sum(count for _, count in bucket) for bucket in buckets]
        position = 0
        for bucket, length in zip(buckets, self.lengths, strict=True):
            self.begins.append(position)
            at = position
            for begin, count in bucket:
                # An empty parameter begins where the next one does; none could tell them apart.
                if count:
                    self.pieces.append(Piece(begin, at, count))
                at += count
            # Whole tiles: a kernel marks candidates tile by tile.
            position += -(-length // kernels.TILE) * kernels.TILE
        self.size = position
        """N."""
        by_begin = sorted(self.pieces)
        self._by_begin = torch.tensor(by_begin, device=device).T.contiguous()
        # As they come: buckets follow each other, and parameters in them.
        self._by_position = torch.tensor(self.pieces, device=device).T.contiguous()
        self._bucket_begins = torch.tensor(self.begins, device=device)
        always = [piece for piece in by_begin if piece.begin >= sparse]
        ranges = [torch.arange(p.position, p.position + p.elements) for p in always]
        self.always = torch.cat([torch.zeros(0, dtype=torch.int64), *ranges]).to(device)
        """(D - S,) positions of the coordinates that are always sent."""

    def positions(self, indices: Tensor) -> Tensor:
        """Return where coordinates lie: (n,) -> (n,) int64."""
        begins, positions, _ = self._by_begin
        row = torch.searchsorted(begins, indices, right=True) - 1
        shifts: Tensor = positions - begins
        return indices + shifts[row]

    def coordinates(self, positions: Tensor) -> Tensor:
        """Return the coordinates at (n,) positions, -1 between buckets: (n,) int64."""
        begins, starts, counts = self._by_position
        row = torch.searchsorted(starts, positions, right=True) - 1
        inside = positions < (starts + counts)[row]
        return torch.where(inside, positions + (begins - starts)[row], -1)

    def in_buckets(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bucket of each position, and the offset in it."""
        number = torch.searchsorted(self._bucket_begins, positions, right=True) - 1
        return number, positions - self._bucket_begins[number]


@dataclass(frozen=True)
class StepTensors:
    """Tensors that tell of a step; they are read when somebody asks."""

    counts: Tensor
    threshold: Tensor
    ok: Tensor
    k: int


class DeviceWorker:
    """One worker's step in fixed shapes, and all that it keeps between steps.

    A step is `add` for each bucket, then `script`, then `commit`. The vectors are in storage order.

    Args:
        rule: The method's settings and state.
        placement: Where coordinates lie.
        residual: (N,) float32 residual in storage order; it belongs to the worker from now on.
        rank: Which worker this is.
        size: R.
        sparse: S.
        values: How values are sent.
        step: Steps so far.
        skipped: Steps that were called off so far.
    """

    def __init__(
        self,
        rule: DeviceRule,
        placement: Placement,
        residual: Tensor,
        *,
        rank: int,
        size: int,
        sparse: int,
        values: ValueFormat = "fp32",
        step: int = 0,
        skipped: int = 0,
    ) -> None:
        self.rule, self.placement, self.residual = rule, placement, residual
        self.acc = torch.zeros_like(residual)
        self.state = DeviceState.of(rule, size, step, skipped, residual.device)
        self._rank, self._size, self._sparse, self._values = rank, size, sparse, values
        self._marks = kernels.Marks.of(residual)
        self._bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
        self._threshold = torch.zeros((), device=residual.device)
        self._unit = torch.ones((), device=residual.device)
        self.unit_is_one = True
        self.outcome: StepTensors | None = None
        """Of the last step."""
        self.outcomes: dict[Any, StepTensors] = {}
        """Of steps that were captured as CUDA graphs; a replay overwrites the tensors."""
        self._remark = False
        # Views of each bucket, made once: making them takes longer than launching a kernel.
        spans = list(zip(placement.begins, placement.lengths, strict=True))
        # By coordinates, not by positions: a resumed run must find the same threshold although its
        # buckets are not rebuilt yet.
        count = min(sparse, _SAMPLES)
        spaced = torch.arange(count, device=residual.device) * sparse // count
        self._sample = placement.positions(spaced)
        self.turn = 0
        """Which of the two vectors is the residual."""
        self._parts = [(residual[b : b + n], self.acc[b : b + n]) for b, n in spans]
        self._mark_parts = [self._marks.part(b, n) for b, n in spans]
        self.clear()

    def take(self, flat: Tensor, begins: Mapping[int, int]) -> None:
        """Copy a residual from where `begins` says that each coordinate's parameter lies."""
        for begin, position, elements in self.placement.pieces:
            at = begins[begin]
            self.residual[position : position + elements] = flat[at : at + elements]

    def take_over(self, old: "DeviceWorker") -> None:
        """Continue where another worker has stopped, with another placement, also in mid-step."""
        begins = {piece.begin: piece.position for piece in old.placement.pieces}
        self.take(old.residual, begins)
        for begin, position, elements in self.placement.pieces:
            at = begins[begin]
            self.acc[position : position + elements] = old.acc[at : at + elements]
        self.state, self.outcome = old.state, old.outcome
        # Buckets that were added before have no marks here.
        self._remark = True
        self._bad.copy_(old._bad)
        self._threshold.copy_(self.state.start[0])

    def clear(self) -> None:
        """Forget what was noted of a step; the end of every step does so for the next."""
        self._bad.zero_()
        self._threshold.copy_(self.state.start[0])

    def begin(self, unit: float | Tensor) -> None:
        """Start a step whose gradients are multiplied by `unit`, a number or a () tensor."""
        one = not isinstance(unit, Tensor) and unit == 1
        if isinstance(unit, Tensor):
            self._unit.copy_(unit)
        elif not (one and self.unit_is_one):
            self._unit.fill_(unit)
        self.unit_is_one = one

    def add(self, bucket: int, grad: Tensor) -> None:
        """Add the flat gradients of a bucket to the residual, and set them to zero."""
        parts = self._parts[bucket]
        # Residual and sum change places after each step.
        residual, acc = parts[self.turn], parts[1 - self.turn]
        kernels.add_marked(
            residual,
            grad,
            self._unit,
            acc,
            threshold=self._threshold,
            bad=self._bad,
            marks=self._mark_parts[bucket],
        )

    def script(self, k: int, flats: Sequence[Tensor]) -> Script[None]:
        """Exchange, and write the mean into the buckets.

        Args:
            k: Number of coordinates to send.
            flats: The flat gradients of all buckets, which are zero.
        """
        context = StepContext(0, self._rank, self._size, compact=self._values in VALUE_BITS)
        offers = self._offers(k)
        span = (0, self._sparse)
        if self._size == 1:
            finite = self._bad[0] == 0
            indices, bits = offers.indices[None], consensus.leading_bits(offers.magnitudes)[None]
            candidates = offers.candidates[None]
        else:
            length = consensus.message_length(len(offers.indices), span, context.compact)
            message = consensus.pack(
                offers.indices, offers.magnitudes, span, length, context.compact
            )
            own = torch.stack([self._bad[0], offers.candidates])
            headers: Tensor = yield AllGather(torch.cat([own, message]))
            finite = (headers[:, 0] == 0).all()
            candidates = headers[:, 1]
            indices, bits = consensus.unpack_rows(
                headers[:, 2:], len(offers.indices), span, context.compact
            )
        accepted = accept_largest(indices, bits, k)
        state = next_state(self.rule, self.state, accepted, candidates, k)
        at = torch.cat([self.placement.positions(accepted.indices), self.placement.always])
        total, error = yield from sum_values(
            self.acc[at], len(self.placement.always), context, self._values, len(self.residual)
        )
        ok = finite & total.isfinite().all()
        self._finish(at, total / self._size, error, ok, flats)
        self.state.update(ok, state)
        self.outcome = StepTensors(accepted.counts, accepted.threshold, ok, k)
        self.clear()

    def _offers(self, k: int) -> Offers:
        """Return this worker's offers."""
        room = min(len(self.acc), _ROOM * k + 64)
        # If a sudden change has made the start useless, search again from a better one. The kernel
        # that does this returns at once otherwise.
        start = self.state.start[0].float()
        found = kernels.count_marks(self.acc, start, self._marks)
        lost = (start <= (torch.inf if self._remark else 0)) | (found > room) | (4 * found < 7 * k)
        start = torch.where(lost, search_start(self.acc[self._sample], k / self._sparse), start)
        kernels.mark_if(lost, self.acc, start, self._marks)
        positions, total = kernels.marked(self.acc, start, self._marks, room)
        coordinates = self.placement.coordinates(positions)
        firsts, ends = worker_spans(self.rule, self.state, self._size)
        own = firsts[self._rank], ends[self._rank]
        spare = reserve_of(own, self.rule.offers(k, self._size))
        return make_offers(
            (coordinates, self.acc[positions].abs()),
            total,
            start,
            (spare, self.acc[self.placement.positions(spare)].abs()),
            own,
            self.state.start[0].float(),
        )

    def _finish(
        self, at: Tensor, mean: Tensor, error: Tensor | None, ok: Tensor, flats: Sequence[Tensor]
    ) -> None:
        """Write the mean into the buckets, and make what was not sent the residual."""
        limit = torch.finfo(flats[0].dtype).max
        exact = self.unit_is_one and flats[0].dtype == mean.dtype
        grads = mean if self.unit_is_one else (mean / self._unit).clamp(-limit, limit)
        numbers, offsets = self.placement.in_buckets(at)
        written = torch.zeros_like(mean)
        for number, flat in enumerate(flats):
            kernels.scatter_to_bucket(flat, numbers, number, offsets, grads, written)
            kernels.fill_unless(ok, flat, torch.nan)
        left = error
        if not exact:
            # What the bucket's dtype could not hold; all workers keep the same part of the mean.
            lost = mean - (written if self.unit_is_one else written * self._unit)
            left = lost if left is None else left + lost
        if left is None:
            self.acc.index_fill_(0, at, 0)
        else:
            self.acc.index_copy_(0, at, left)
        kernels.copy_unless(ok, self.residual, self.acc)

    def commit(self) -> None:
        """Make the sum of this step the residual of the next."""
        # Swapped, not copied: the old residual is where the next sum is written.
        self.residual, self.acc = self.acc, self.residual
        self.turn = 1 - self.turn
        self._remark = False

    def rescale(self, factor: float) -> None:
        """Multiply where the search starts by `factor`: all values were."""
        self.state.start[0] *= factor
        self.clear()

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; waits for the device."""
        outcome = self.outcome
        if outcome is None or not bool(outcome.ok):
            return {}
        counts = outcome.counts.tolist()
        return {
            "selected": outcome.k,
            "per_rank": counts,
            "threshold": float(outcome.threshold),
            "density": outcome.k / self._sparse,
            "padding": padding(counts),
        }
