"""Error feedback: what was not sent is kept and added to the next gradient.

Two vectors, one that holds what is kept and one that the next step's sum is written to, so that
a step can be called off (a gradient was not finite, on any worker) without a trace. With momentum
there are two more: the correction of Lin et al., "Deep Gradient Compression", ICLR 2018.

Letters: D coordinates, K those that travel.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gradherd.sparsify import kernels
from gradherd.sparsify.histogram import Tally


@dataclass(frozen=True)
class Layout:
    """Names of parameters, and where they begin.

    >>> layout = Layout.of([("bias", 2), ("weight", 6)], dense_below=4)
    >>> layout.names, layout.begins, layout.sparse, layout.size
    (('weight', 'bias'), (0, 6), 6, 8)
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    sparse: int
    """How many numbers may stay; the rest always travels."""

    @classmethod
    def of(cls, named: Iterable[tuple[str, int]], dense_below: int) -> "Layout":
        """Lay out parameters of (name, numbers)."""
        given = list(named)
        large = [(name, count) for name, count in given if count >= dense_below]
        small = [(name, count) for name, count in given if count < dense_below]
        names, counts = zip(*large, *small, strict=True)
        return cls(names, counts, sum(count for _, count in large))

    @property
    def begins(self) -> tuple[int, ...]:
        """Where each parameter begins."""
        return tuple(accumulate((0, *self.counts)))[:-1]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(self.counts)

    @property
    def layers(self) -> list[int]:
        """Lengths of the parameters that may stay."""
        spans = zip(self.begins, self.counts, strict=True)
        return [count for begin, count in spans if begin < self.sparse]

    def slices(self) -> dict[str, slice]:
        """Return where each parameter lies."""
        spans = zip(self.names, self.begins, self.counts, strict=True)
        return {name: slice(begin, begin + count) for name, begin, count in spans}


class Feedback:
    """Residuals of one worker."""

    def __init__(
        self, dim: int, *, dtype: torch.dtype, device: torch.device, momentum: float = 0.0
    ) -> None:
        self.kept = torch.zeros(dim, dtype=dtype, device=device)
        self.acc = torch.zeros_like(self.kept)
        # On a GPU the pass that adds also counts; on a CPU that would cost a pass more.
        on_gpu = self.kept.is_cuda and dtype == torch.float32 and not momentum
        self._tally = Tally.around(self.kept.new_ones(())) if on_gpu else None
        self._momentum = momentum
        self.velocity = torch.zeros_like(self.kept) if momentum else None
        self._velocity = torch.zeros_like(self.kept) if momentum else None

    def begin(self) -> None:
        """Start a step, also after one that came to nothing."""
        if self._tally is not None:
            self._tally.counts.zero_()

    def add(self, begin: int, grad: Tensor, unit: float, *, clear: bool = False) -> None:
        """Add `unit` times a flat gradient to what is kept from coordinate `begin` on.

        Args:
            begin: The first coordinate.
            grad: Their gradient; zeros afterwards if `clear`, in the same pass on a GPU.
            unit: What it is multiplied by.
            clear: Whether to clear it.
        """
        part = slice(begin, begin + len(grad))
        if self.velocity is None or self._velocity is None:
            kernels.add(self.kept[part], grad, unit, self.acc[part], tally=self._tally, clear=clear)
            return
        # The velocity is what accumulates; masking it where it was sent keeps it from being late.
        velocity = self._velocity[part]
        torch.mul(self.velocity[part], self._momentum, out=velocity).add_(grad, alpha=unit)
        torch.add(self.kept[part], velocity, out=self.acc[part])
        if clear:
            grad.zero_()

    def leave_out(self, begin: int, end: int) -> None:
        """Let nothing of [begin, end) travel in this step."""
        self.acc[begin:end] = 0

    def finite(self) -> bool:
        """Tell whether all that was added is finite."""
        if self._tally is not None:
            return bool(self._tally.finite())
        # One pass; a sum may overflow where no term has.
        return bool(self.acc.sum().isfinite()) or bool(self.acc.isfinite().all())

    def commit(
        self,
        indices: Tensor,
        left: Tensor | None,
        *,
        sent: Tensor | None = None,
        low_pass: float = 1.0,
        left_out: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what did not travel.

        Args:
            indices: (K,) what travelled.
            left: (K,) what of it this worker keeps; None is nothing.
            sent: (K,) whether a value of this worker was in it; None is all of them.
            low_pass: Weight of the new residual against the old one.
            left_out: What `leave_out` was called for.
        """
        if self._velocity is not None:
            self._velocity.index_fill_(0, indices if sent is None else indices[sent], 0)
        if left is None:
            self.acc.index_fill_(0, indices, 0)
        else:
            self.acc.index_copy_(0, indices, left)
        for begin, end in left_out or []:
            self.acc[begin:end] = self.kept[begin:end]
            if self.velocity is not None and self._velocity is not None:
                self._velocity[begin:end] = self.velocity[begin:end]
        if low_pass != 1:
            self.acc.lerp_(self.kept, 1 - low_pass)
        self.kept, self.acc = self.acc, self.kept
        self.velocity, self._velocity = self._velocity, self.velocity


_KEPT = ("residual", "velocity")


def merged(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state that any number of workers can load, from those of all workers there were.

    Args:
        states: What `SparseHook.state_dict` returned on each rank; one after the other is enough.

    Raises:
        ValueError: They are not the states of all workers of one step.
    """
    first: Mapping[str, Any] | None = None
    sums: dict[str, dict[str, Tensor]] = {}
    ranks: list[Any] = []
    for state in states:
        first = state if first is None else first
        for key in ("kind", "workers", "dim", "step"):
            if state.get(key) != first.get(key):
                raise ValueError(
                    f"states to merge differ in {key}: {first.get(key)!r} and {state.get(key)!r}"
                )
        ranks.append(state.get("rank"))
        for key in _KEPT:
            for name, own in state.get(key, {}).items():
                sums.setdefault(key, {}).setdefault(name, torch.zeros_like(own).double()).add_(own)
    if first is None or set(ranks) != set(range(first["workers"])) or len(ranks) > len(set(ranks)):
        wanted = "" if first is None else f" of {first['workers']}"
        raise ValueError(f"states must be of all ranks{wanted}, each once, got ranks {ranks}")
    means = {
        key: {name: (total / len(ranks)).to(first[key][name]) for name, total in named.items()}
        for key, named in sums.items()
    }
    return {**first, **means, "rank": None, "method": None}
