"""Residuals: error feedback, and merging.

Error feedback keeps what was not sent and adds it to the next gradient. Two vectors do this: one
holds the residual, the sum for the next step is written to the other. So a step can be called off
(some worker had a gradient that is not finite) without a trace. Momentum correction, from Lin et
al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, needs two more.

On a GPU, residuals may be stored as gradients arrive, bucket after bucket, each from the beginning
of a tile on (`Placement`): one launch adds a whole bucket. Coordinates in messages and in the state
of a method are those of the model all the same: they do not change when DDP rebuilds its buckets.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; K those
that are sent; N positions in storage.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradherd.sparsify import kernels
from gradherd.sparsify.marks import TILE


class ErrorFeedback:
    """The residual of one worker, and its velocity if there is momentum.

    Args:
        shape: D, or (R, D) for the residuals of R workers that always send together.
        dtype: Dtype of the residual: float32, or float64 for a model of doubles.
        device: Device of the residual.
        momentum: Factor of the momentum correction; 0 needs no velocity.
    """

    def __init__(
        self,
        shape: int | tuple[int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        momentum: float = 0.0,
    ) -> None:
        self.residual = torch.zeros(shape, dtype=dtype, device=device)
        self.acc = torch.zeros_like(self.residual)
        # Whether something was not finite. On a GPU the kernel that adds notes it for free; on a
        # CPU it would take a pass of its own.
        fused = self.residual.is_cuda and dtype == torch.float32 and not momentum
        self._bad = torch.zeros(1, dtype=torch.int32, device=device) if fused else None
        self._momentum = momentum
        self._placement: Placement | None = None
        self.velocity = torch.zeros_like(self.residual) if momentum else None
        self._next_velocity = torch.zeros_like(self.residual) if momentum else None

    def rows(self) -> list["ErrorFeedback"]:
        """Return the feedback of each of R workers; `commit` of the whole makes new ones due."""
        pairs = [
            [None] * len(self.residual) if rows is None else list(rows)
            for rows in (self.residual, self.acc, self.velocity, self._next_velocity)
        ]
        result = []
        for residual, acc, velocity, following in zip(*pairs, strict=True):
            row = ErrorFeedback.__new__(ErrorFeedback)
            row.residual, row.acc, row._bad, row._momentum = residual, acc, None, self._momentum
            row.velocity, row._next_velocity, row._placement = velocity, following, None
            result.append(row)
        return result

    def part(self, vector: Tensor, begin: int, count: int) -> Tensor:
        """Return one parameter's part of a (D,) vector of this worker, as a view."""
        if self._placement is not None and count:
            begin = self._placement.position(begin)
        return vector[begin : begin + count]

    def lay_out(self, placement: "Placement") -> None:
        """Store the residual and the sum in another order, also in the middle of a step."""
        for name in ("residual", "acc"):
            old = getattr(self, name)
            new = old.new_zeros(placement.size)
            for begin, position, count in placement.pieces:
                new[position : position + count] = self.part(old, begin, count)
            setattr(self, name, new)
        self._placement = placement

    def begin(self) -> None:
        """Start a step; the last one may have been called off."""
        if self._bad is not None:
            self._bad.zero_()

    def add(self, begin: int, grad: Tensor, scale: float, *, clear: bool = False) -> None:
        """Write residual + `scale` * gradient to `acc`, from coordinate `begin` on.

        Args:
            begin: First coordinate of the gradient.
            grad: Flat gradient; with R workers, one in each row.
            scale: Factor of the gradient.
            clear: Whether to set `grad` to zero; on a GPU the same kernel does it.
        """
        part = slice(begin, begin + grad.shape[-1])
        if self.velocity is None or self._next_velocity is None:
            kernels.add(
                self.residual[..., part],
                grad,
                scale,
                self.acc[..., part],
                bad=self._bad,
                clear=clear,
            )
            return
        # Momentum correction: velocities accumulate in the residual, instead of gradients.
        velocity = self._next_velocity[..., part]
        torch.mul(self.velocity[..., part], self._momentum, out=velocity).add_(grad, alpha=scale)
        torch.add(self.residual[..., part], velocity, out=self.acc[..., part])
        if clear:
            grad.zero_()

    def exclude(self, begin: int, end: int) -> None:
        """Send nothing of [begin, end) in this step.

        DDP drops what arrives for a parameter that no rank used, so it must not be sent.
        """
        # Zeros: sparsifiers do not select them, and what is always sent sends nothing. The residual
        # itself is in the other vector; `commit` restores it from there.
        self.acc[begin:end] = 0

    def finite(self) -> bool:
        """Return whether residual + gradient is finite everywhere."""
        if self._bad is not None:
            return not bool(self._bad)
        # A finite sum is proof, in one pass. If it is not finite, it may just have overflowed.
        return bool(self.acc.sum().isfinite()) or bool(self.acc.isfinite().all())

    def swap(self) -> None:
        """Make the sum the residual; the old residual is where the next sum is written."""
        self.residual, self.acc = self.acc, self.residual

    def commit(
        self,
        indices: Tensor,
        remainder: Tensor | None,
        *,
        restarted: Tensor | None = None,
        low_pass: float = 1.0,
        excluded: list[tuple[int, int]] | None = None,
    ) -> None:
        """Make what was not sent the new residual.

        Args:
            indices: (K,) coordinates that were sent.
            remainder: (K,) what this worker keeps at those coordinates, with R workers (R, K);
                None is nothing.
            restarted: Coordinates whose velocity restarts; None is none.
            low_pass: Weight of the new residual against the old one.
            excluded: The ranges that `exclude` was called for; they stay as they were.
        """
        if self._next_velocity is not None and restarted is not None:
            self._next_velocity.index_fill_(-1, restarted, 0)
        if remainder is None:
            self.acc.index_fill_(-1, indices, 0)
        else:
            self.acc.index_copy_(-1, indices, remainder)
        for begin, end in excluded or []:
            self.acc[begin:end] = self.residual[begin:end]
            if self.velocity is not None and self._next_velocity is not None:
                self._next_velocity[begin:end] = self.velocity[begin:end]
        # ScaleCom's filter: (1 - beta) old + beta new. Excluded ranges equal the old residual by
        # now, so it leaves them as they are.
        if low_pass != 1:
            self.acc.lerp_(self.residual, 1 - low_pass)
        self.swap()
        self.velocity, self._next_velocity = self._next_velocity, self.velocity


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
            position += -(-length // TILE) * TILE
        self.size = position
        """N."""
        by_begin = sorted(self.pieces)
        self._positions = {piece.begin: piece.position for piece in self.pieces}
        self._by_begin = torch.tensor(by_begin, device=device).T.contiguous()
        # As they come: buckets follow each other, and parameters in them.
        self._by_position = torch.tensor(self.pieces, device=device).T.contiguous()
        self._bucket_begins = torch.tensor(self.begins, device=device)
        always = [piece for piece in by_begin if piece.begin >= sparse]
        ranges = [torch.arange(p.position, p.position + p.elements) for p in always]
        self.always = torch.cat([torch.zeros(0, dtype=torch.int64), *ranges]).to(device)
        """(D - S,) positions of the coordinates that are always sent."""

    def position(self, begin: int) -> int:
        """Return where the parameter lies whose first coordinate is `begin`."""
        return self._positions[begin]

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


MERGED_KEYS = ("residual", "velocity", "weights", "buffers", "snapshot")
"""Entries of a worker's state that hold a tensor for each parameter (or buffer) of that worker."""

COMMON_KEYS = ("shared", "outer_momentum", "arrival")
"""Large entries that are equal on all workers (local steps)."""


def clip_together(grads: Sequence[Tensor], most: float | Tensor) -> None:
    """Scale tensors down in place until their norm together is at most `most`.

    If one is not finite, all become NaN: the step is called off then. A GPU is not waited for.
    """
    # In double precision, so that it does not matter how a gradient is divided into tensors: real
    # and simulated workers then find the same factor.
    norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
    scale_by(grads, torch.linalg.vector_norm(torch.stack(norms)), most)


def scale_by(grads: Sequence[Tensor], norm: Tensor, most: float | Tensor) -> None:
    """Scale tensors down in place whose () norm together is above `most`; see `clip_together`."""
    factor = clip_factor(norm, most)
    for grad in grads:
        grad.mul_(factor.to(torch.float64 if grad.dtype == torch.float64 else torch.float32))


def clip_factor(norm: Tensor, most: float | Tensor) -> Tensor:
    """Return the factor that brings norms down to `most`, at most 1."""
    # The small number is that of torch.nn.utils.clip_grad_norm_. Infinity times zero is NaN.
    return (most / (norm + 1e-6)).clamp(max=1.0)


def merge_residuals(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the states of all workers into one that any number of workers can load.

    A step applies the mean over workers, so the mean of the residuals is what must not change:
    every new worker gets that mean. The state of the method (thresholds, partitions) belongs to
    the old number of workers and is dropped; it settles again within a few steps.

    Args:
        states: `SparseHook.state_dict()` of each rank. A generator that loads one after the other
            keeps memory small.

    Returns:
        A state for `SparseHook.load_state_dict` on every rank of a world of any size.

    Raises:
        ValueError: These are not the states of all workers after the same step.
    """
    first: Mapping[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {}
    ranks: list[Any] = []
    for state in states:
        first = state if first is None else first
        for key in ("kind", "workers", "dim", "step", "taken"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"states to merge differ in {key}: {first.get(key)!r} and {state.get(key)!r}"
                )
        ranks.append(state.get("rank"))
        for key in MERGED_KEYS:
            for name, own in state.get(key, {}).items():
                # Summed in float64, to round once and not at every rank.
                sums.setdefault(key, {}).setdefault(name, torch.zeros_like(own).double()).add_(own)
    if first is None or set(ranks) != set(range(first["workers"])) or len(ranks) > len(set(ranks)):
        of_all = "" if first is None else f" of {first['workers']}"
        raise ValueError(f"states must be of all ranks{of_all}, each once, got ranks {ranks}")
    means = {
        key: {name: (total / len(ranks)).to(first[key][name]) for name, total in named.items()}
        for key, named in sums.items()
    }
    return {**first, **means, "rank": None, "method": None}
