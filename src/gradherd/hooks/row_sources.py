"""Where rows come from: what is read off a model during a backward.

A source notices that a backward has happened (`waiting`) and returns its rows when asked (`take`).
It does not know which examples they belong to, or how they are sent. `BatchGradientSource` has the
gradient of a whole batch, `ExampleRowSource` that of every example; `RowSource` only notices.

Shapes: U units of a batch, D parameters, k columns of a row.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.flat import FlatSpec
from gradherd.hooks.fsdp import fsdp_modules
from gradherd.hooks.parameter_hooks import ParameterHooks, gradient_registrar
from gradherd.rows.capture import Capture
from gradherd.rows.layer_plan import unwrap_model
from gradherd.rows.settings import (
    BatchRows,
    ExactRows,
    RowSettings,
    SketchRows,
    TwoSidedRows,
    row_length,
)
from gradherd.rows.sketch import CountSketch
from gradherd.torch_names import call_after_backward, current_backward

# Elsewhere a copy for each parameter costs little, and adds without rounding.
AT_END_DEVICES = {"cuda"}
_MOST_COPIED = 1 << 26
"""Elements of gradients that are copied side by side to be sketched, unless one has more."""


class RowSource:
    """Notices one backward after the other; a subclass reads its rows."""

    def __init__(
        self, model: nn.Module, arrived: Callable[[str, Tensor], None] | None = None
    ) -> None:
        """Hook into the parameters; `arrived` is called with name and gradient of each."""
        self._noticed = False
        self._hooks = ParameterHooks(model, arrived or self._arrived)

    @property
    def waiting(self) -> bool:
        """Whether a backward has happened whose rows were not taken yet."""
        return self._noticed

    def _arrived(self, name: str, grad: Tensor) -> None:
        self._noticed = True

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward, if it can be observed."""
        self._hooks.before_first = began

    def next_part(self) -> None:
        """Expect another forward and backward of the batch that waits."""

    def is_complete(self, examples: int) -> bool:
        """Return whether what waits is known to be of all examples of its batch."""
        return False

    def stepped_in_backward(self) -> None:
        """Note that an optimizer steps before the backward is over."""

    def state_dict(self) -> dict[str, Any]:
        """Return what rows to come depend on, the same on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Read rows as where `state_dict` was taken."""

    def clear(self) -> None:
        """Drop the last backward."""
        self._noticed = False

    def remove_hooks(self) -> None:
        """Leave the model as it was."""
        self._hooks.remove()


class BatchGradientSource(RowSource):
    """The gradient of a whole batch, or a count sketch of it."""

    def __init__(self, model: nn.Module, sketch: CountSketch | None) -> None:
        self._spec, self._sketch = FlatSpec.of(model), sketch
        self._row: Tensor | None = None
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # On a GPU the launches for each parameter would cost more than the rest of the step.
        # Optimizers that step inside the backward leave nothing to read at its end.
        self._at_end = (
            self._parameters[0].device.type in AT_END_DEVICES
            and not fsdp_modules(model)
            and not any(p._post_accumulate_grad_hooks for p in self._parameters)
        )
        super().__init__(model)
        self._hooks.once = self._begin if self._at_end else None
        self._befores: dict[int, Tensor | None] = {}  # by backward
        self._before: Tensor | None = None
        self._spoiled = False  # whether a part of this batch's gradient is missing

    @property
    def waiting(self) -> bool:
        """Whether a gradient has arrived."""
        return self._row is not None

    def _begin(self) -> None:
        """Prepare to read all gradients at once when this backward is over."""
        task = current_backward()
        if task in self._befores:  # a backward inside it (checkpoint) has ended
            return
        before, accumulated = self._before, any(p.grad is not None for p in self._parameters)
        if self._row is None:
            # What earlier backwards have left in p.grad is subtracted at the end of this one.
            before = self._grad_row() if accumulated else None
        elif not accumulated:  # cleared within the batch, of which a part is in the row
            before = -self._row
        self._befores[task] = before
        # Queued callbacks run when the engine has accumulated every gradient, which no hook of a
        # single parameter can tell.
        call_after_backward(partial(self._end, task))

    def _end(self, task: int) -> None:
        # Of backwards inside another, the outer one ends last, and began before all of them.
        before = self._before = self._befores.get(task)
        row = self._grad_row()
        self._row = row if before is None else row - before

    def _grad_row(self) -> Tensor:
        """Return the gradients of all parameters as one row: (D,), or sketched (k,)."""
        with torch.no_grad():
            if self._sketch is None:
                flat = self._flat_grads(range(len(self._parameters)))
                # A single gradient is not copied, and the row will be changed.
                return flat.clone() if len(self._parameters) == 1 else flat
            row, start = self._parameters[0].new_zeros(self._sketch.size, dtype=torch.float32), 0
            for chunk in self._chunks():
                part = self._flat_grads(chunk)
                row += self._sketch(part, offset=start)
                start += len(part)
            return row

    def _chunks(self) -> Iterator[range]:
        """Yield which parameters are copied together, in their order."""
        begin = count = 0
        for index, numel in enumerate(self._spec.numels):
            if count and count + numel > _MOST_COPIED:
                yield range(begin, index)
                begin, count = index, 0
            count += numel
        yield range(begin, len(self._parameters))

    def _flat_grads(self, chunk: range) -> Tensor:
        """Return the gradients of some parameters as one vector; missing ones are zero."""
        parts = []
        for index in chunk:
            p = self._parameters[index]
            grad = p.new_zeros(()).expand(p.shape) if p.grad is None else p.grad
            parts.append(grad.to_dense() if grad.is_sparse else grad)
        # One call: reshaping each of them from Python takes longer than copying. It copies in the
        # logical order of elements, whatever the layout of a gradient is.
        flat: Tensor = torch._C._nn.flatten_dense_tensors(parts).float()
        if len(flat) != sum(self._spec.numels[chunk.start : chunk.stop]):
            raise RuntimeError(
                "a gradient has another shape than its parameter had when it was attached: call "
                "detach() and attach() again"
            )
        return flat

    def _arrived(self, name: str, grad: Tensor) -> None:
        dense = grad.to_dense() if grad.is_sparse else grad  # Embedding(sparse=True)
        flat, span = dense.flatten().float(), self._spec.slices[name]
        if self._row is None:
            self._row = flat.new_zeros(self._sketch.size if self._sketch else self._spec.size)
        if self._sketch is None:
            self._row[span] += flat
        else:
            # A count sketch is linear, so the sketch of the whole gradient is the sum over
            # parameters.
            self._row += self._sketch(flat, offset=span.start)

    def take(self, examples: int, loss_scale: Tensor | float) -> Tensor:
        """Return the one row of the last backward, less what the loss was multiplied by."""
        assert self._row is not None
        row = self._row
        if self._spoiled:
            # Not a number: the batch is left out, as one that has overflowed.
            row = torch.full_like(row, torch.nan)
        self.clear()
        if isinstance(loss_scale, Tensor) or loss_scale != 1:
            row /= loss_scale
        return row.unsqueeze(0)

    def stepped_in_backward(self) -> None:
        """Read gradients as they arrive from now on: at the end of a backward they are gone."""
        if self._at_end:
            self._at_end, self._hooks.once, self._spoiled = False, None, True

    def clear(self) -> None:
        """Drop the last gradient."""
        self._row = self._before = None
        self._befores.clear()
        self._spoiled = False


class ExampleRowSource(Capture, RowSource):
    """The gradient of every example, read off the layers: exact, or a sketch."""

    def __init__(
        self,
        model: nn.Module,
        settings: ExactRows | SketchRows | TwoSidedRows,
        unit: int,
        batch_size: int,
        keeps_factors: bool = False,
    ) -> None:
        bare = unwrap_model(model)
        sharded = gradient_registrar(bare) if fsdp_modules(bare) else None
        super().__init__(
            model, settings, batch_size=batch_size, sharded=sharded, keeps_factors=keeps_factors
        )
        self._unit = unit

    def take(self, examples: int, loss_scale: Tensor | float) -> Any:
        """Return the (U, k) rows of the last backward, less what the loss was multiplied by.

        A tensor, or `FactoredRows`.
        """
        single = self.pop(examples, loss_scale=loss_scale)
        if self._unit == 1:
            return single
        # A unit is ordered by the mean gradient of its examples.
        if not isinstance(single, Tensor):
            return single.means(self._unit)
        return single.view(len(single) // self._unit, self._unit, -1).mean(1)


def make_row_source(
    model: nn.Module,
    settings: RowSettings,
    unit: int,
    batch_size: int,
    *,
    keeps_factors: bool = False,
) -> BatchGradientSource | ExampleRowSource:
    """Return the source that reads rows off a bare model as the settings say.

    `keeps_factors` as of `Capture`.
    """
    # One unit per batch: its gradient is p.grad itself, and no layer need be read.
    if unit == batch_size or isinstance(settings, BatchRows):
        sketch = None
        if isinstance(settings, SketchRows | TwoSidedRows):
            sketch = CountSketch(row_length(settings, FlatSpec.of(model).size), settings.seed)
        return BatchGradientSource(model, sketch)
    return ExampleRowSource(model, settings, unit, batch_size, keeps_factors)
