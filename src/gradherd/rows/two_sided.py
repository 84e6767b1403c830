"""Two-sided rows of a whole model, taken as its gradients arrive.

A forward hook notes the input of each layer; when the gradient of the layer's output arrives, both
are reduced to a few columns per example. So neither inputs nor gradients are held, and a batch
leaves a table of columns, which is sketched to (B, k) when its rows are popped.

Shapes: B examples, k elements of a row.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from gradherd.rows.capture import Capture, Reduction, row_scale
from gradherd.rows.column_table import ColumnTable, Slot, empty_like_rows
from gradherd.rows.flat import FlatSpec
from gradherd.rows.launch_group import launch_group
from gradherd.rows.layer_watcher import LayerWatcher
from gradherd.rows.parameter_owners import unwrap_model
from gradherd.rows.projected_weight import SketchPlan
from gradherd.rows.row_check import RowCheck, measure_errors
from gradherd.rows.row_sums import tolerance
from gradherd.rows.settings import TwoSidedRows
from gradherd.rows.sketch import count_sketch
from gradherd.rows.sketched_layers import sketched_layers
from gradherd.rows.terms import at_least_float32

# Gradients that `matrix` maps at a time.
_MATRIX_ROWS = 1024


class TwoSidedCapture:
    """Read two-sided sketches of per-example gradients off a model's ordinary backward.

    Has the methods of `Capture` that sources of rows need. Parameters of modules that no sketch
    knows are read by a `Capture` of their own.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> capture = TwoSidedCapture(model, TwoSidedRows(size=64))
    >>> model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean().backward()
    >>> rows = capture.pop_sketch(2)
    >>> [round(float(row @ row)) for row in rows]
    [5, 25]
    """

    def __init__(
        self, model: nn.Module, settings: TwoSidedRows, *, batch_size: int | None = None
    ) -> None:
        """Register the hooks.

        Args:
            model: Any module, or one wrapped in DDP.
            settings: Sizes, seed and reduction.
            batch_size: Examples in a full batch of the loader, to tell the batch dimension.
        """
        model = unwrap_model(model)
        self.spec = FlatSpec.of(model)
        self._model, self._settings = model, settings
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._like = empty_like_rows(parameters[0])
        size = settings.size_for(self.spec.size)
        tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
        plan = SketchPlan(settings.rank_for(looks_up_tokens=tokens), size, settings.seed)
        self._size = size
        layers, others, width, exact = sketched_layers(model, self.spec, plan)
        self._layer_of = {
            index: (layer, local) for layer in layers for local, index in layer.index.items()
        }
        # Layers tell of gradients of their own parameters, but not of those used elsewhere.
        always = {
            index
            for index in range(len(parameters))
            if index not in self._layer_of or self._layer_of[index][0].is_direct
        }
        self._check = RowCheck(
            self.spec, parameters, strict=settings.strict, project=self._project, always=always
        )
        self._capture: Capture | None = None
        # Modules without a sketch (recurrent layers, custom ones) are replayed by a `Capture`.
        if others:
            self._capture = Capture(
                model,
                batch_dim=settings.batch_dim,
                strict=settings.strict,
                sketch=(size, settings.seed),
                owners=others,
            )
        self._failures: dict[str, str] | None = None  # of the batch that waits, once checked
        self._watcher = LayerWatcher(
            model,
            layers,
            self._check,
            partial(ColumnTable, width, exact, self._like, launch_group(self._like)),
            direct={
                layer: parameters[index]
                for index, (layer, _) in self._layer_of.items()
                if layer.is_direct
            },
            batch_dim=settings.batch_dim,
            batch_size=batch_size,
        )

    def on_backward(self, began: Callable[[], None]) -> None:
        """Call `began` before the first gradient of each backward."""
        self._watcher.began = began

    @property
    def seconds_in_backward(self) -> float:
        """Seconds spent on rows inside backwards so far."""
        return self._watcher.seconds

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return self._check.reached

    @property
    def left_out(self) -> dict[str, str]:
        """Names of the parameters that rows leave out, with the reason."""
        own = dict(self._check.left_out)
        return own if self._capture is None else own | self._capture.left_out

    def _project(self, index: int, grad: Tensor) -> Tensor:
        """Map a parameter's gradient to what its rows add up to; called while a check is due."""
        if index not in self._layer_of:
            return grad.new_zeros(0)
        layer, local = self._layer_of[index]
        with self._watcher.quiet():
            return layer.sketch.project(local, grad)

    def check_bitmask(self, examples: int) -> Tensor | None:
        """Check the rows that wait if a check is due; see `Capture.check_bitmask`."""
        inner = None if self._capture is None else self._capture.check_bitmask(examples)
        if not self._check.due:
            return None if inner is None else self._spread(inner)
        self._refuse_mismatch(examples)
        columns = {index: self._columns_of(index) for index in self._layer_of}
        measured = measure_errors(columns, self._check)
        allowed = tolerance([self._like, *(self._like.to(dtype) for dtype in self._watcher.dtypes)])
        hint = (
            "the loss contains gradients (create_graph=True)" if self._watcher.create_graph else ""
        )
        self._failures = self._check.judge(
            measured,
            {index for index, uses in columns.items() if uses},
            dict.fromkeys(measured, allowed),
            self._like.dtype,
            hint,
        )
        self._failures |= self._watcher.unbatched
        mask = self._check.mask(self._failures)
        return mask if inner is None else torch.maximum(mask, self._spread(inner))

    def _columns_of(self, index: int) -> list[Tensor]:
        """Return a parameter's columns (B, n), one tensor for each backward that reached it."""
        layer, local = self._layer_of[index]
        place = layer.sketch.where(local)
        columns = []
        for task in sorted(self._check.tasks[index] & self._watcher.tables.keys()):
            table = self._watcher.tables[task]
            own = table.finals.get(index)
            if place.slot:
                own = table.columns(layer.slots[place.slot], place.lo, place.hi)
            if own is not None:
                columns.append(at_least_float32(own))
        return columns

    def _spread(self, mask: Tensor) -> Tensor:
        """Return the mask of the inner capture's parameters among all parameters."""
        assert self._capture is not None
        own = dict(zip(self._capture.spec.names, mask.tolist(), strict=True))
        return torch.tensor([own.get(name, 0) for name in self.spec.names], dtype=torch.uint8)

    def leave_out(self, mask: Tensor) -> None:
        """Leave out the parameters whose byte in `mask` is not 0; see `Capture.leave_out`."""
        chosen = [name for name, byte in zip(self.spec.names, mask.tolist(), strict=True) if byte]
        inner = () if self._capture is None else self._capture.spec.names
        failures = self._failures or {}
        own = {name: failures.get(name, "on another rank") for name in chosen if name not in inner}
        try:
            self._check.leave_out(own)
            if self._capture is not None and any(name in inner for name in chosen):
                flags = [name in chosen for name in inner]
                self._capture.leave_out(torch.tensor(flags, dtype=torch.uint8))
        except RuntimeError:
            self.clear()
            raise

    def _refuse_mismatch(self, examples: int) -> None:
        sizes = self._watcher.sizes
        if len(sizes) > 1 or (sizes and examples not in sizes):
            self.clear()
            other = min(sizes - {examples})
            raise RuntimeError(
                f"the model was given {other} examples, but the batch has {examples}: one "
                "batch of the loader is one forward"
            )

    def pop_sketch(
        self, examples: int, *, reduction: Reduction = "mean", loss_scale: float = 1.0
    ) -> Tensor:
        """Return a sketch of each row, (B, k), and forget what was recorded."""
        scale = row_scale(examples, reduction, loss_scale)
        settings = self._settings
        try:
            self._watcher.waiting.settle()
            self._refuse_mismatch(examples)
            if self._failures is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            # Not in step with other ranks, which follow with the next check.
            if self._watcher.unbatched:
                self._check.leave_out(self._watcher.unbatched)
            sketches = []
            left_out = self._check.left_out
            parts = list(self._left_out_parts()) if left_out else ()
            with self._watcher.quiet():
                for task in sorted(self._check.all_tasks & self._watcher.tables.keys()):
                    table = self._watcher.tables[task]
                    for index in list(table.finals) if left_out else ():
                        if self.spec.names[index] in left_out:
                            del table.finals[index]
                    # Tables of several backwards add up, as their gradients do in p.grad.
                    sketches.append(table.sketch(self._size, settings.seed, parts, scale=scale))
                if self._capture is not None and self._capture.waiting:
                    sketches.append(
                        self._capture.pop_sketch(
                            examples,
                            self._size,
                            settings.seed,
                            reduction=reduction,
                            loss_scale=loss_scale,
                        )
                    )
        finally:
            self._check.next_batch(self._model.training)
            self.clear()
        if not sketches:
            return self._like.new_zeros(examples, self._size)
        return sketches[0] if len(sketches) == 1 else sum(sketches[1:], start=sketches[0])

    def matrix(self) -> Tensor:
        """Return (D, k), which takes a gradient to its row; the model must have taken a batch.

        For callers that have the gradients of single examples anyway.
        """
        if self._capture is not None or self._check.left_out:
            raise ValueError("rows of this model are not a product of its gradients and a matrix")
        blocks = []
        for index, (count, shape) in enumerate(
            zip(self.spec.numels, self.spec.shapes, strict=True)
        ):
            layer, local = self._layer_of[index]
            place = layer.sketch.where(local)
            for lo in range(0, count, _MATRIX_ROWS):
                basis = self._like.new_zeros(min(_MATRIX_ROWS, count - lo), count)
                basis.diagonal(lo).fill_(1)
                with self._watcher.quiet():
                    columns = torch.vmap(partial(layer.sketch.project, local))(
                        basis.view(-1, *shape)
                    )
                if place.slot:
                    begin = layer.slots[place.slot].begin + place.lo
                    seed = self._settings.seed
                    columns = count_sketch(columns, self._size, seed, name="columns", offset=begin)
                blocks.append(columns)
        return torch.cat(blocks)

    def _left_out_parts(self) -> Iterator[tuple[Slot, int, int]]:
        """Yield the columns of parameters that are left out."""
        for index, (layer, local) in self._layer_of.items():
            place = layer.sketch.where(local)
            if place.slot and self.spec.names[index] in self._check.left_out:
                yield layer.slots[place.slot], place.lo, place.hi

    def restart_checks(self) -> None:
        """Check the next batches as if they were the first."""
        self._check.restart()
        if self._capture is not None:
            self._capture.restart_checks()

    def clear(self) -> None:
        """Forget everything recorded."""
        self._watcher.clear()
        self._failures = None
        self._check.clear()
        if self._capture is not None:
            self._capture.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        self._watcher.remove_hooks()
        self._check.remove_hooks()
        if self._capture is not None:
            self._capture.remove_hooks()
        self.clear()
