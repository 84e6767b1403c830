"""Measures rows on their way to the sampler, once somebody has asked for it."""

from typing import Any

from torch import Tensor

from gradherd.attach.row_sources import RowSource
from gradherd.ordering.herding import WatchedPolicy
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.row_stats import RowFigures


class WatchedSource:
    """A row source whose rows are measured when they are taken."""

    def __init__(self, source: RowSource, figures: RowFigures) -> None:
        """Wrap a source.

        Args:
            source: Reads the rows.
            figures: Measures them.
        """
        self._source, self._figures = source, figures

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return the (U, k) rows of the last backward."""
        rows = self._source.take(examples, loss_scale)
        self._figures.add(rows)
        return rows

    def take_implicit(self, examples: int, loss_scale: float) -> Any:
        """Return the rows without forming them, or None if the source cannot."""
        rows = self._source.take_implicit(examples, loss_scale)
        if rows is None:
            return None
        once = _GramOnce(rows)
        self._figures.add(once)
        return once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class _GramOnce:
    """Rows that are not formed and compute their Gram matrix once: norms and signs need it."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows
        self._gram: Tensor | None = None

    def gram(self) -> Tensor:
        if self._gram is None:
            self._gram = self._rows.gram()
        return self._gram

    def __len__(self) -> int:
        return len(self._rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class RowWatch:
    """What is known of an order's rows: figures of the last batch, and of the last epoch."""

    def __init__(self, sampler: OrderedSampler) -> None:
        """Watch what the sampler learns from, from its next epoch on.

        Args:
            sampler: The sampler.
        """
        self.figures = RowFigures(sampler.unit)
        self._ordering = ordering = sampler.ordering
        self._policy = WatchedPolicy(ordering.policy, ordering.length)
        if ordering.policy.needs_rows:
            ordering.policy = self._policy

    def numbers(self) -> dict[str, float]:
        """Return what can be logged so far."""
        numbers = self.figures.numbers()
        if self._policy.last is not None:
            numbers["herding_bound"] = float(self._policy.last.bound())
        return numbers

    def close(self) -> None:
        """Leave the sampler as it was."""
        self._ordering.policy = self._policy.policy
