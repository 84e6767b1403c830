"""Herding bounds: how far an order's prefix sums stray from the mean.

The quantity that balancing makes small (arXiv:2205.10733; for several workers arXiv:2302.00845).
The theory bounds the convergence of SGD by it.

Shapes: M workers, N units of a worker, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradherd.ordering.implicit import ImplicitRows
from gradherd.ordering.policy import Rows, ShardedRows, masked

# What is kept of an epoch: so many prefix sums of so many columns, at most 16 MB in float64.
_PREFIXES, _COLUMNS = 512, 4096


def parallel_herding_bound(vectors: Sequence[Tensor], orders: Sequence[Tensor]) -> float:
    """Return the herding bound of all workers together.

    Prefixes are counted in time steps: what all workers visit at one step is added at once.
    With vectors centred by the mean over all units of all workers, the bound is the maximum
    over time steps of the maximum norm of the sum so far. A worker that has run out of units
    adds nothing.

    Args:
        vectors: One (N_i, D) per worker, by unit id; a (M, N, D) tensor will do.
        orders: One (N_i,) per worker, unit ids in visiting order.

    >>> vectors, same = torch.tensor([[[1.0], [-1.0]], [[1.0], [-1.0]]]), torch.tensor([0, 1])
    >>> parallel_herding_bound(vectors, [same, same])
    2.0
    >>> parallel_herding_bound(vectors, [same, same.flip(0)])
    0.0
    """
    count = sum(len(own) for own in vectors)
    if count == 0:
        return 0.0
    # float64: a bound of 2 may be the sum of a million terms.
    mean = torch.stack([own.double().sum(0) for own in vectors]).sum(0) / count
    # (T, D): what one time step adds, all workers together. Within a step there is no order.
    steps = mean.new_zeros((max(len(own) for own in vectors), len(mean)))
    for own, order in zip(vectors, orders, strict=True):
        steps[: len(order)] += own[order].double() - mean
    return float(steps.cumsum(0).abs().max())


class HerdingWatch:
    """Measures the orders of an `Ordering` while it learns: the herding bound of each epoch.

    The bound needs the mean, which is known at the end only. A sum of n centred rows is the sum of
    the rows minus n means, so sums of rows are enough: they are noted at steps of equal distance.

    Shapes: b time steps of a call, c columns that are kept.
    """

    def __init__(self, length: int) -> None:
        """Watch from the next epoch on; epochs have `length` time steps."""
        self._stride = max(1, -(-length // _PREFIXES))
        self._begun = False  # not in an epoch that was begun before
        self.last: Tensor | None = None
        """() bound of the last epoch that was watched from its first step."""

    def add(self, step: int, rows: Rows | ImplicitRows, seen: Tensor) -> None:
        """Add the (b, M, D) rows from `step` on; (b, M) `seen` is on the host."""
        if step == 0:
            self._begun, self._count = True, 0
            self._sums: list[Tensor] = []  # (p, c) each
            self._counts: list[Tensor] = []  # (p,) rows behind each sum, on the host
            self._total: Tensor | None = None  # (c,)
        if not self._begun:
            return
        # A slice, not indices: those would have to go to the GPU, which waits for it.
        kept = slice(self._stride - 1 - step % self._stride, None, self._stride)
        if isinstance(rows, ShardedRows):
            rows = rows.columns  # the bound over this rank's columns
        # An even selection.
        some = torch.arange(min(size := rows.shape[-1], _COLUMNS), device=rows.device)
        if size > _COLUMNS:
            some = some * size // _COLUMNS
        if not isinstance(rows, Tensor):
            rows = rows.columns(some).unsqueeze(1)
        elif size > _COLUMNS:
            rows = rows[..., some]
        values = masked(rows.detach().double(), seen)
        by_step, counts = values.sum(1), seen.sum(1)  # (b, c), (b,)
        sums = by_step.cumsum(0) if self._total is None else by_step.cumsum(0) + self._total
        counts = counts.cumsum(0) + self._count
        self._total, self._count = sums[-1].clone(), int(counts[-1])
        if len(counts[kept]):
            # A copy, because a view would keep the sums of all steps alive.
            self._sums.append(sums[kept].clone())
            self._counts.append(counts[kept])

    def end(self, *, complete: bool) -> None:
        """Begin another epoch, or the same one anew, whose sums are then dropped.

        The bound is exact where all steps and all columns are kept, and otherwise a lower bound.
        """
        if complete and self._begun and self._sums:
            sums = torch.cat(self._sums)
            share = torch.cat(self._counts).double() / max(self._count, 1)
            if sums.is_cuda:  # else the copy waits for the GPU
                share = share.pin_memory().to(sums.device, non_blocking=True)
            assert self._total is not None
            self.last = (sums - share.unsqueeze(1) * self._total).abs().amax()
        self._begun = False
