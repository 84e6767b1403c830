"""Where rows come from: what is read off a model during a backward.

A source notices that a backward has happened (`waiting`) and returns its rows when asked (`take`).
It does not know which examples they belong to, or how they are sent.

Shapes: U units of a batch, D parameters, k columns of a row.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradherd.attach.batch_gradient import BatchGradientSource
from gradherd.attach.fsdp_torch import fsdp_modules
from gradherd.attach.parameter_hooks import gradient_registrar
from gradherd.attach.row_stats import RowFigures
from gradherd.flat import FlatSpec
from gradherd.ordering.bounds import WatchedPolicy
from gradherd.ordering.sampler import OrderedSampler
from gradherd.rows.capture import Capture
from gradherd.rows.exact_rows import GroupedRows
from gradherd.rows.parameter_owners import unwrap_model
from gradherd.rows.settings import BatchRows, ExactRows, RowSettings, SketchRows, TwoSidedRows
from gradherd.rows.sink_capture import SinkCapture

CHECK_FAILED = 2
"""Stands for every parameter in the mask of a rank whose check raised an error."""


class RowSource(Protocol):
    """Reads the rows of one backward after the other."""

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened whose rows were not taken yet."""
        ...

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return the (U, k) rows of the last backward.

        Args:
            examples: Number of examples in the batch.
            loss_scale: What the loss was multiplied by (GradScaler).
        """
        ...

    def take_implicit(self, examples: int, loss_scale: float) -> GroupedRows | None:
        """Return the rows without forming them, or None if the source cannot."""
        ...

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward, if it can be observed."""
        ...

    def check(self, examples: int) -> Tensor | None:
        """Check the rows that wait, if a check is due.

        Returns:
            A byte for each parameter, 1 if it has to be left out; None if no check is due.
        """
        ...

    def failed_check(self) -> Tensor:
        """Return the mask of a rank whose check raised an error."""
        ...

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters that any rank has to leave out, from the rows that wait on."""
        ...

    def left_out(self) -> list[str]:
        """Return the names of parameters that rows leave out."""
        ...

    @property
    def seconds_in_backward(self) -> float:
        """Seconds spent on rows inside backwards."""
        ...

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first."""
        ...

    def forget(self) -> None:
        """Drop the last backward."""
        ...

    def close(self) -> None:
        """Remove the hooks."""
        ...


class ExampleRowSource:
    """The gradient of every example, read off the layers: exact, or a sketch."""

    def __init__(
        self,
        model: nn.Module,
        settings: ExactRows | SketchRows | TwoSidedRows,
        unit: int,
        batch_size: int,
    ) -> None:
        self._settings = settings
        self._unit = unit
        bare = unwrap_model(model)
        sharded = gradient_registrar(bare) if fsdp_modules(bare) else None
        self._capture: Capture | SinkCapture
        if isinstance(settings, ExactRows):
            self._capture = Capture(
                model,
                batch_dim=settings.batch_dim,
                strict=settings.strict,
                batch_size=batch_size,
                sharded=sharded,
            )
        else:
            self._capture = SinkCapture(model, settings, batch_size=batch_size, sharded=sharded)

    @property
    def waiting(self) -> bool:
        """Whether gradients have arrived."""
        return self._capture.waiting

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return a row for each unit of the batch."""
        if isinstance(self._capture, Capture):
            return self._exact(examples, loss_scale).dense()
        reduction = self._settings.reduction
        return self._units(
            self._capture.pop_sketch(examples, reduction=reduction, loss_scale=loss_scale)
        )

    def _units(self, single: Tensor) -> Tensor:
        """Average the rows of single examples over units."""
        if self._unit == 1:
            return single
        # A unit is ordered by the mean gradient of its examples.
        return single.view(len(single) // self._unit, self._unit, -1).mean(1)

    def take_implicit(self, examples: int, loss_scale: float) -> GroupedRows | None:
        """Return the rows of all units without forming them, if they are exact."""
        if isinstance(self._settings, ExactRows):
            return self._exact(examples, loss_scale)
        return None

    def _exact(self, examples: int, loss_scale: float) -> GroupedRows:
        assert isinstance(self._capture, Capture)
        rows = self._capture.pop_rows(
            examples, reduction=self._settings.reduction, loss_scale=loss_scale
        )
        return GroupedRows(rows, self._unit)

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._capture.on_backward(began)

    def check(self, examples: int) -> Tensor | None:
        """Compare the rows that wait with the gradient of the batch, if a check is due."""
        return self._capture.check_bitmask(examples)

    def failed_check(self) -> Tensor:
        """Return the mask of a rank whose check raised an error."""
        return torch.full((len(self._capture.spec.names),), CHECK_FAILED, dtype=torch.uint8)

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte is not 0."""
        self._capture.leave_out(mask)

    def left_out(self) -> list[str]:
        """Return the names of parameters that rows leave out."""
        return list(self._capture.left_out)

    @property
    def seconds_in_backward(self) -> float:
        """Seconds spent on rows inside backwards."""
        return self._capture.seconds_in_backward

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first."""
        self._capture.restart_checks()

    def forget(self) -> None:
        """Drop the gradients of the last backward."""
        self._capture.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self._capture.remove_hooks()


def make_row_source(
    model: nn.Module, settings: RowSettings, unit: int, batch_size: int
) -> RowSource:
    """Return the source that reads rows off a bare model as the settings say."""
    # One unit per batch: its gradient is p.grad itself, and no layer need be read.
    if unit == batch_size or isinstance(settings, BatchRows):
        if isinstance(settings, TwoSidedRows):
            size = settings.size_for(FlatSpec.of(model).size)
            settings = SketchRows(size=size, seed=settings.seed)
        sketch = settings if isinstance(settings, SketchRows) else None
        return BatchGradientSource(model, sketch)
    return ExampleRowSource(model, settings, unit, batch_size)


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
        # Figures and signs both need the Gram matrix, which costs as much as a backward.
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
        # An order without gradients has no prefix sums to watch.
        if ordering.policy.needs_rows:
            ordering.policy = self._policy

    def scalars(self) -> dict[str, float]:
        """Return what can be logged so far."""
        scalars = self.figures.scalars()
        if self._policy.last is not None:
            scalars["herding_bound"] = float(self._policy.last.bound())
        return scalars

    def close(self) -> None:
        """Leave the sampler as it was."""
        self._ordering.policy = self._policy.policy
