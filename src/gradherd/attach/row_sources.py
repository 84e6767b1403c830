"""How gradients are read off a model during a backward.

A reader notices that a backward has happened (`waiting`) and gives its rows when asked (`take`).
Who they are for, and how they travel, is not its business.

Letters: U units of a batch, D parameters, k numbers of a row.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from gradherd.rows.capture import Capture
from gradherd.rows.exact_rows import GroupedRows
from gradherd.rows.flat import FlatSpec
from gradherd.rows.settings import ExactRows, SketchRows
from gradherd.rows.sketch import count_sketch


class Reader(Protocol):
    """Reads the rows of one backward after the other."""

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened whose rows were not taken yet."""
        ...

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return the (U, k) rows of the batch that was just walked back."""
        ...

    def forget(self) -> None:
        """Drop the backward that waits."""
        ...

    def close(self) -> None:
        """Leave the model as it was."""
        ...


class ParameterHooks:
    """Calls back with each parameter's gradient, in every backward, before it is accumulated."""

    def __init__(self, model: nn.Module, arrived: Callable[[str, Tensor], None]) -> None:
        def hook(name: str) -> Callable[[Tensor], None]:
            return lambda grad: arrived(name, grad.detach())

        self._handles = [
            parameter.register_hook(hook(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class WholeGradient:
    """The gradient of a whole batch: as it is, or a count sketch of it."""

    def __init__(self, model: nn.Module, sketch: SketchRows | None) -> None:
        self._spec = FlatSpec.of(model)
        self._offsets = dict(zip(self._spec.names, self._spec.offsets, strict=True))
        self._sketch = sketch
        self._row: Tensor | None = None
        self._hooks = ParameterHooks(model, self._arrived)

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._row is not None

    def _arrived(self, name: str, grad: Tensor) -> None:
        flat, offset = grad.flatten().float(), self._offsets[name]
        if self._row is None:
            self._row = flat.new_zeros(self._sketch.size if self._sketch else self._spec.size)
        if self._sketch is None:
            self._row[offset : offset + len(flat)] += flat
        else:
            self._row += count_sketch(flat, self._sketch.size, self._sketch.seed, offset=offset)

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return the batch's one row."""
        assert self._row is not None
        row, self._row = self._row.div_(loss_scale), None
        return row.unsqueeze(0)

    def forget(self) -> None:
        """Drop the gradient that waits."""
        self._row = None

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.remove()


class EachExample:
    """The gradient of every example, read off the layers: exact, or a sketch."""

    def __init__(self, model: nn.Module, settings: ExactRows | SketchRows, unit: int) -> None:
        self._settings = settings
        self._unit = unit
        self._capture = Capture(model, batch_dim=settings.batch_dim)

    @property
    def waiting(self) -> bool:
        """Whether gradients have arrived."""
        return self._capture.num_calls > 0

    @property
    def exact(self) -> bool:
        """Whether rows can be had without forming them."""
        return isinstance(self._settings, ExactRows)

    def take(self, examples: int, loss_scale: float) -> Tensor:
        """Return a row for each unit of the batch."""
        settings = self._settings
        if isinstance(settings, ExactRows):
            return self.unformed(examples, loss_scale).dense()
        single = self._capture.pop_sketch(
            examples,
            settings.size,
            settings.seed,
            reduction=settings.reduction,
            loss_scale=loss_scale,
        )
        return single.view(examples // self._unit, self._unit, -1).mean(1)

    def unformed(self, examples: int, loss_scale: float) -> GroupedRows:
        """Return the rows of all units without forming them."""
        taken = self._capture.pop_rows(
            examples, reduction=self._settings.reduction, loss_scale=loss_scale
        )
        return GroupedRows(taken, self._unit)

    def forget(self) -> None:
        """Drop the gradients that wait."""
        self._capture.clear()

    def close(self) -> None:
        """Remove the hooks."""
        self._capture.remove_hooks()
