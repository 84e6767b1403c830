"""One worker's side of the exchange, and all that it keeps: residual, state and counters.

Error feedback keeps what was not sent and adds it to the next gradient. Two vectors do this: one
holds the residual, the sum for the next step is written to the other. So a step can be called off
(some worker had a gradient that is not finite) without a trace. Momentum correction, from Lin et
al., "Deep Gradient Compression", ICLR 2018, arXiv:1712.01887, needs two more.

On a GPU, residuals may be stored as gradients arrive, bucket after bucket, each from the beginning
of a tile on (`Placement`): one launch adds a whole bucket. Coordinates in messages and in the state
of a method are those of the model all the same: they do not change when DDP rebuilds its buckets.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; K those
that are sent; N positions in storage; R workers.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradherd.comm.message_sizes import MAX_COORDINATES, VALUE_BITS
from gradherd.comm.script import Script
from gradherd.gpu import on_cpu
from gradherd.sparsify import kernels
from gradherd.sparsify.marks import TILE
from gradherd.sparsify.selecting import Outcome, select
from gradherd.sparsify.selector import Selection, Step, StepContext, target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.value_sums import sum_values

# --- Residuals --------------------------------------------------------------------------------


class ErrorFeedback:
    """The residual of one worker, and its velocity if there is momentum."""

    def __init__(
        self, dim: int, *, dtype: torch.dtype, device: torch.device, momentum: float = 0.0
    ) -> None:
        self.residual = torch.zeros(dim, dtype=dtype, device=device)
        self.acc = torch.zeros_like(self.residual)
        self._momentum = momentum
        self._placement: Placement | None = None
        self.velocity = torch.zeros_like(self.residual) if momentum else None
        self._next_velocity = torch.zeros_like(self.residual) if momentum else None
        self.excluded: list[tuple[int, int]] = []
        """Ranges of which nothing is sent in this step; they stay as they were."""

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

    def add(self, begin: int, grad: Tensor, scale: float, *, clear: bool = False) -> None:
        """Write residual + `scale` * flat gradient to `acc`, from coordinate `begin` on.

        If `clear`, `grad` becomes zero; on a GPU the same kernel does it.
        """
        part = slice(begin, begin + len(grad))
        if self.velocity is None or self._next_velocity is None:
            old, new = self.residual[part], self.acc[part]
            kernels.add(old, grad, scale, new, clear=clear)
            return
        # Momentum correction: velocities accumulate in the residual, instead of gradients.
        velocity = self._next_velocity[part]
        torch.mul(self.velocity[part], self._momentum, out=velocity).add_(grad, alpha=scale)
        torch.add(self.residual[part], velocity, out=self.acc[part])
        if clear:
            grad.zero_()

    def exclude(self, begin: int, end: int) -> None:
        """Send nothing of [begin, end) in this step.

        DDP drops what arrives for a parameter that no rank used, so it must not be sent.
        """
        # Zeros: sparsifiers do not select them, and what is always sent sends nothing. The residual
        # itself is in the other vector; `commit` restores it from there.
        self.acc[begin:end] = 0
        self.excluded.append((begin, end))

    def finite(self) -> bool:
        """Return whether residual + gradient is finite everywhere."""
        return is_finite(self.acc)

    def swap(self) -> None:
        """Make the sum the residual; the old residual is where the next sum is written."""
        self.residual, self.acc = self.acc, self.residual

    def commit(
        self,
        indices: Tensor | None,
        remainder: Tensor | None,
        *,
        restarted: Tensor | None = None,
    ) -> None:
        """Make what was not sent the new residual.

        Args:
            indices: (K,) coordinates that were sent; None is all.
            remainder: (K,) what this worker keeps at those coordinates; None is nothing.
            restarted: Coordinates whose velocity restarts; None is none.
        """
        if self._next_velocity is not None and restarted is not None:
            self._next_velocity.index_fill_(0, restarted, 0)
        if indices is None:
            if remainder is None:
                self.acc.zero_()
            elif remainder.data_ptr() != self.acc.data_ptr():  # Rounding may have left it there.
                self.acc.copy_(remainder)
        elif remainder is None:
            self.acc.index_fill_(0, indices, 0)
        else:
            self.acc.index_copy_(0, indices, remainder)
        for begin, end in self.excluded:
            self.acc[begin:end] = self.residual[begin:end]
            if self.velocity is not None and self._next_velocity is not None:
                self._next_velocity[begin:end] = self.velocity[begin:end]
        self.excluded = []
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
        buckets: For each bucket, (first coordinate, elements) of its parameters in their order; a
            parameter that is not exchanged has no first coordinate.
        sparse: S.
        device: Device of the tables.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[tuple[int | None, int]]],
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
                # An empty parameter begins where the next one does, so it has no piece.
                if begin is not None and count:
                    self.pieces.append(Piece(begin, at, count))
                at += count
            # Whole tiles: a kernel marks candidates tile by tile.
            position += -(-length // TILE) * TILE
        self.size = position
        """N."""
        by_begin = sorted(self.pieces)
        self._positions = {piece.begin: piece.position for piece in self.pieces}
        self._by_begin = torch.tensor(by_begin, device=device).view(-1, 3).T.contiguous()
        # As they come: buckets follow each other, and parameters in them.
        self._by_position = torch.tensor(self.pieces, device=device).view(-1, 3).T.contiguous()
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

    def write(self, flats: Sequence[Tensor], positions: Tensor, values: Tensor) -> Tensor:
        """Write (K,) values to their (K,) positions in buckets that are zero.

        Return (K,) the values as the dtypes of the buckets hold them.
        """
        buckets = torch.searchsorted(self._bucket_begins, positions, right=True) - 1
        offsets = positions - self._bucket_begins[buckets]
        written = torch.zeros_like(values)
        for number, flat in enumerate(flats):
            kernels.scatter_to_bucket(flat, buckets, number, offsets, values, written)
        return written


# --- A worker ---------------------------------------------------------------------------------


class Worker:
    """One worker's side of the exchange, and all that it keeps between steps.

    A step is `begin`, then `add` for each part of the gradient, then `script` (run by
    `comm.script`), then `commit`. Until `commit` nothing has changed, so a step can be dropped.

    Args:
        settings: The sparsifier and how it is run.
        dim: D, the number of elements of all parameters.
        rank: Which worker this is, from 0.
        size: R.
        sparse: S; None is D.
        layers: Number of elements of each sparsified parameter; None is one parameter.
        dtype: Dtype of the residual.
        device: Device of the residual.

    Raises:
        ValueError: The vector is too long for int32 indices.
    """

    def __init__(
        self,
        settings: Sparsify,
        dim: int,
        *,
        rank: int,
        size: int,
        sparse: int | None = None,
        layers: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim > MAX_COORDINATES:
            raise ValueError(f"{dim:,} coordinates are too many: indices reach {MAX_COORDINATES:,}")
        self.settings = settings
        self.sparse = dim if sparse is None else sparse
        self.rank, self.size = rank, size
        # Where the step is decided: a step that runs on a GPU counts there (`gpu_worker`).
        self.counters = torch.zeros(2, dtype=torch.int64)
        """Steps that were taken, and steps that were called off."""
        self._layers = layers or [self.sparse]
        self.state = settings.method.begin(self.sparse, size, self._layers)
        self.feedback = ErrorFeedback(
            dim, dtype=dtype, device=torch.device(device), momentum=settings.momentum
        )
        self._unit = 1.0

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return int(self.counters[0])

    @property
    def skipped(self) -> int:
        """Steps that were called off."""
        return int(self.counters[1])

    def decide_on(self, device: torch.device) -> None:
        """Keep counters and the method's state on the device where steps are decided."""
        self.counters = self.counters.to(device)
        self.state = self.state.to(device)

    def begin(self, loss_scale: float) -> None:
        """Begin a step whose gradients are multiplied by `loss_scale`."""
        self._unit = 1 / loss_scale
        self.feedback.excluded = []  # of a step that was called off, or broke off

    def add(self, begin: int, grad: Tensor, *, clear: bool = False) -> None:
        """Add a flat gradient of the coordinates from `begin` on; zero it if `clear`."""
        self.feedback.add(begin, grad, self._unit, clear=clear)

    @property
    def context(self) -> StepContext:
        """Which worker and step this is."""
        # A worker alone sends nothing: no need to round magnitudes.
        compact = self.settings.values in VALUE_BITS and self.size > 1
        return StepContext(self.step, self.rank, self.size, compact=compact)

    def script(self, known: list[Selection] | None = None) -> Script[Outcome | None]:
        """Average the selected coordinates over workers; `known` is as for `selecting.select`.

        Returns None, on all workers, if a value of any worker or a sum is not finite.
        """
        settings, context, sparse = self.settings, self.context, self.sparse
        acc, form = self.feedback.acc, settings.values
        # Of S, not of D: what is always sent does not use up the density.
        k = target_count(settings.density(self.step), sparse)
        step = Step(**vars(context), acc=acc[:sparse], k=k, state=self.state)
        selection = yield from select(step, self.feedback.finite(), settings.method, known)
        if selection is None:
            return None
        # Small parameters are sent together with the selected values, in the same rounds.
        dim, always = len(acc), len(acc) - sparse
        indices = None
        if selection.indices is not None:
            small = torch.arange(sparse, dim, device=acc.device)
            indices = torch.cat([selection.indices, small])
        if selection.sums is None:
            values = acc if indices is None else acc[indices]
            total, remainder = yield from sum_values(values, always, context, form)
        else:
            rest, error = yield from sum_values(acc[sparse:], always, context, form)
            total = torch.cat([selection.sums, rest])
            assert selection.kept is not None
            remainder = torch.cat(
                [selection.kept, torch.zeros_like(rest) if error is None else error]
            )
        # Finite values may have a sum that overflows. All workers have the same bits of it, so all
        # of them call the step off, without another round.
        if not is_finite(total):
            return None
        # Divided once, after the sum: dividing every summand would round R times. In place, unless
        # one worker's sum is the vector itself.
        mean = total / 1 if total is acc else total.div_(context.size)
        return Outcome(indices, mean, remainder, selection)

    def mean_of(self, outcome: Outcome) -> Tensor:
        """Return the (K,) mean in the unit of gradients, clamped to finite values."""
        if self._unit == 1:
            return outcome.mean
        # Times a large loss scale it may overflow; what is cut off stays in the residual (see
        # `written` in `commit`).
        limit = torch.finfo(outcome.mean.dtype).max
        return (outcome.mean / self._unit).clamp_(-limit, limit)

    def commit(self, outcome: Outcome | None, *, written: Tensor | None = None) -> None:
        """Keep what was not sent; with None the step is called off, and nothing changes.

        Args:
            outcome: What the script returned.
            written: (K,) the mean as the gradients' dtype could hold it; None is exactly.
        """
        if outcome is None:
            # `step` stays: all workers skip together, and the next step has the same leader,
            # partitions and random draw as this one.
            self.counters[1] += 1
            return
        remainder = outcome.remainder
        if written is not None:
            # All workers lost the same part of the mean, so each of them keeps it.
            lost = outcome.mean - (written if self._unit == 1 else written * self._unit)
            remainder = lost if remainder is None else remainder + lost
        self.feedback.commit(outcome.indices, remainder, restarted=self._restarted(outcome))
        self.state = outcome.selection.state
        self.counters[0] += 1

    def _restarted(self, outcome: Outcome) -> Tensor | None:
        """Return where velocities restart, so that stale momentum does not carry on.

        Momentum factor masking (section 3.3 of Deep Gradient Compression) is for coordinates that
        have waited. What is sent at every step has not: there, velocities are heavy-ball momentum.
        """
        indices = outcome.selection.indices
        if indices is None or len(indices) >= self.sparse:
            return None
        kept = outcome.selection.kept
        return indices if kept is None else indices[kept == 0]

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the residuals, as numbers, lists and tensors.

        Residuals are saved by parameter name instead (`SparseHook`), so that they do not depend
        on the order of parameters in the vector.
        """
        state = None if self.state is None else _fields(self.state)
        return self._identity() | {"step": self.step, "skipped": self.skipped, "method": state}

    def _identity(self) -> dict[str, Any]:
        method = type(self.settings.method).__name__
        return {"kind": method, "rank": self.rank, "workers": self.size, "dim": self.sparse}

    def check_state(self, state: Mapping[str, Any], part: str) -> None:
        """Raise ValueError unless `state` fits this worker, or is merged from all such workers.

        It is the `part` of a herd's state, "sparsify" or "local".
        """
        free = ("rank", "workers") if _is_merged(state) else ()
        for key, own in self._identity().items():
            if key not in free and state.get(key) != own:
                raise ValueError(f"{part} state has {key} {state.get(key)!r}, expected {own!r}")
        if self.state is None or _is_merged(state):
            return
        saved, method = state.get("method") or {}, self.settings.method
        for name, own in _fields(self.state).items():
            if name not in saved:
                raise ValueError(f"{part} state has no {name!r} of {method}")
            if isinstance(own, Tensor) and own.shape != getattr(saved[name], "shape", None):
                count = saved[name].numel() if isinstance(saved[name], Tensor) else "no"
                raise ValueError(
                    f"{part} state has {name} of {count} elements, expected {own.numel()}: was it "
                    f"saved with other settings than {method}?"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that fits (`check_state`); the method starts again from a merged one."""
        self.counters[0], self.counters[1] = state["step"], state.get("skipped", 0)
        if self.state is None:
            return
        if _is_merged(state):
            # Partitions and thresholds of the old number of workers mean nothing for this one.
            self.state = self.settings.method.begin(self.sparse, self.size, self._layers)
        else:
            # Copied: a step on a GPU overwrites its state in place.
            saved = type(self.state)(**state["method"])
            self.state = type(saved)(**_fields(saved))
        if not self.counters.is_cpu:
            self.decide_on(self.counters.device)


def is_finite(vector: Tensor) -> bool:
    """Return whether all elements are finite."""
    # A finite sum is proof, in one pass. If it is not finite, it may just have overflowed.
    return bool(vector.sum().isfinite()) or bool(vector.isfinite().all())


def _is_merged(state: Mapping[str, Any]) -> bool:
    return "rank" in state and state["rank"] is None


def _fields(state: Any) -> dict[str, Any]:
    """Return the fields of a state; tensors as copies on the CPU."""
    return {field.name: on_cpu(getattr(state, field.name)) for field in dataclasses.fields(state)}


# --- Gradients of all parameters ------------------------------------------------------


def clip_together(
    grads: Sequence[Tensor], most: float | Tensor, norm: Tensor | None = None
) -> None:
    """Scale tensors down in place until their () norm together, by default their own, is `most`.

    If one is not finite, all become NaN: the step is called off then. A GPU is not waited for.
    """
    # In double precision, and the factor is rounded: it must not matter how a gradient is divided
    # into tensors. DDP's buckets after a restart are others than before, simulated workers have
    # none.
    if norm is None:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        norm = torch.linalg.vector_norm(torch.stack(norms))
    # The small number is that of torch.nn.utils.clip_grad_norm_. Infinity times zero is NaN.
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    # To the 24 bits of a float32, but with the range of a double (Dekker's splitting).
    split = factor * (2**29 + 1)
    factor = split - (split - factor)
    for grad in grads:
        grad.mul_(factor.to(torch.float64 if grad.dtype == torch.float64 else torch.float32))
