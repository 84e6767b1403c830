"""Two-sided rows of a whole model, taken as its gradients arrive.

A forward hook notes the input of each layer; when the gradient of the layer's output arrives, both
are reduced to a few columns per example. So neither inputs nor gradients are held, and a batch
leaves a table of columns, which is sketched to (B, k) when its rows are popped.

Shapes: B examples, k elements of a row.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.attention_uses import hook_attention
from gradherd.rows.batch_dims import INPUT, BatchDims, Shapes, call_shapes
from gradherd.rows.call_recorder import hook_gradient, save_input
from gradherd.rows.capture import Capture, Reduction, row_scale
from gradherd.rows.column_table import ColumnTable, Slot, empty_like_rows, lay_out
from gradherd.rows.flat import FlatSpec
from gradherd.rows.forward_replay import ForwardContext, ModuleCall, UncopiedHook, repeat_forward
from gradherd.rows.layer_rules import UnbatchedError, save_statistics
from gradherd.rows.layer_sketches import LayerCall, SketchPlan
from gradherd.rows.norm_sketches import norm_statistics
from gradherd.rows.parameter_owners import ParameterOwner, unwrap_model
from gradherd.rows.row_check import RowCheck, tolerance
from gradherd.rows.settings import TwoSidedRows
from gradherd.rows.sketched_layers import HeldInputs, SketchedLayer, sketched_layers
from gradherd.rows.tensor_tree import detach_all, tensor_leaves
from gradherd.rows.terms import at_least_float32


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
        self.seconds_in_backward = 0.0
        """Seconds spent on rows inside backwards so far."""
        self._model, self._settings, self._batch_size = model, settings, batch_size
        self._dims = BatchDims(settings.batch_dim)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._like = empty_like_rows(parameters[0])
        size = settings.size_for(self.spec.size)
        plan = SketchPlan(settings.rank, size, settings.seed)
        self._size = size
        self._layers, others, self._width, self._exact = sketched_layers(model, self.spec, plan)
        self._layer_of = {
            index: (layer, local) for layer in self._layers for local, index in layer.index.items()
        }
        self._check = RowCheck(self.spec, parameters, strict=settings.strict, project=self._project)
        # Running a module again runs all that is in it, which may be the whole model.
        heavy = [owner for owner in others if _has_layers(owner)]
        others = [owner for owner in others if owner not in heavy]
        reason = "a module with layers of its own uses it directly"
        self._check.leave_out(
            {
                f"{owner.name}.{local}" if owner.name else local: reason
                for owner in heavy
                for local in owner.parameters
            }
        )
        self._capture: Capture | None = None
        if others:
            self._capture = Capture(
                model,
                batch_dim=settings.batch_dim,
                strict=settings.strict,
                sketch=(size, settings.seed),
                owners=others,
            )
        self._tables: dict[int, ColumnTable] = {}
        self._free_table = ColumnTable(self._width, self._exact, self._like)
        self._sizes: set[int] = set()  # numbers of examples that layers have seen
        self._dtypes: set[torch.dtype] = set()  # of inputs and gradients, while a check is due
        self._unbatched: dict[str, str] = {}
        self._create_graph = False
        self._failures: dict[str, str] | None = None  # of the batch that waits, once checked
        self._unknown: dict[str, list[Shapes]] = {}  # calls whose batch dimension is not known
        self._probed: list[tuple[str, Shapes]] | None = None
        self._device_type = parameters[0].device.type
        self._handles: list[Any] = [
            model.register_forward_hook(UncopiedHook(self._after_model), with_kwargs=True)
        ]
        for layer in self._layers:
            if layer.inside is not None:
                continue
            # Before all other hooks: those may change the output, and rows are about the forward.
            hook = UncopiedHook(partial(self._after_forward, layer))
            self._handles.append(
                layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True)
            )
        self._handles += hook_attention(self._layers, self._after_forward, self._watch)

    @property
    def waiting(self) -> bool:
        """Whether a backward has reached a parameter since the last pop."""
        return self._check.reached

    @property
    def left_out(self) -> dict[str, str]:
        """Names of the parameters that rows leave out, with the reason."""
        own = dict(self._check.left_out)
        return own if self._capture is None else own | self._capture.left_out

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Compute without graph and autocast."""
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            yield

    def _after_forward(
        self, layer: SketchedLayer, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if self._probed is not None:
            self._probed.append((layer.name, call_shapes(args, kwargs, output)))
            return
        if not torch.is_grad_enabled():
            return
        # Called with a keyword: layers have one argument, whatever its name.
        inputs = (args[0] if args else next(iter(kwargs.values()))).detach()
        if not self._dims.knows(layer.name, INPUT, inputs.dim()):
            self._unknown.setdefault(layer.name, []).append(call_shapes(args, kwargs, output))
        if layer.inside is not None or not output.requires_grad:
            return  # what is inside an attention module is watched by itself
        saved: tuple[Tensor, ...] = ()
        if layer.is_norm:
            saved = norm_statistics(output.grad_fn, save_statistics(module))
        self._watch(layer, inputs, output, saved)

    def _watch(
        self,
        layer: SketchedLayer,
        inputs: Tensor,
        output: Tensor,
        saved: tuple[Tensor, ...] = (),
        pad: tuple[int, int] = (0, 0),
    ) -> None:
        """Hold a layer's detached input until the gradient of its output arrives."""
        # Inside activation checkpointing a reference would keep the input alive.
        node = save_input((inputs,))
        held = HeldInputs(inputs if node is None else None, node, inputs._version, saved, pad)
        hook_gradient(output, partial(self._on_grad, layer, held))

    def _on_grad(self, layer: SketchedLayer, held: HeldInputs, grads: Tensor | None) -> None:
        """Reduce one use of a layer to its columns."""
        if grads is None:
            return
        started = time.perf_counter()
        inputs, saved = held.inputs, held.saved
        if held.node is not None:
            (inputs,) = held.node.saved_tensors
        # The hook lives as long as the graph, which the loss may keep; activations must not.
        held.inputs, held.saved = None, ()
        if inputs is None:
            raise RuntimeError(
                "a second backward ran through the same graph (retain_graph=True), whose inputs "
                "two-sided rows no longer hold: add up the losses, or use rows='sketch'"
            )
        if inputs._version != held.version and held.node is None:
            raise RuntimeError(
                f"an input of module '{layer.name}' was changed in place after its forward, before "
                "its rows were read: give the model a copy (clone()) of a buffer that is reused"
            )
        if layer.inside is not None:
            grads = F.pad(grads.detach().reshape(*inputs.shape[:2], -1), held.pad)
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device_type):
            self._create_graph = self._create_graph or torch.is_grad_enabled()
            with self._quiet():
                self._write(layer, inputs, grads.detach(), saved)
        else:  # The usual case: contexts cost more than a launch.
            self._write(layer, inputs, grads, saved)
        self.seconds_in_backward += time.perf_counter() - started

    def _write(
        self, layer: SketchedLayer, inputs: Tensor, grads: Tensor, saved: tuple[Tensor, ...]
    ) -> None:
        left_out = self._check.left_out
        names = [self.spec.names[index] for index in layer.index.values()] if left_out else []
        if names and all(name in left_out for name in names):
            return
        ndim = inputs.dim()
        dim = self._dims.dim_of(layer.name, INPUT, ndim)
        if layer.inside is not None:
            # Inside, attention is (T, B, ...), whatever its input was.
            dim = 1 if dim == layer.inside else None
        if dim is None:
            self._leave_layer_out(layer, _unbatched_reason(layer, inputs, self._dims))
            return
        examples = inputs.shape[dim]
        self._sizes.add(examples)
        if len(self._sizes) > 1:
            return  # refused when rows are popped
        if self._check.due:
            self._dtypes |= {one.dtype for one in (inputs, grads) if one.is_floating_point()}
        task = torch._C._current_graph_task_id()
        if task not in self._tables:
            # Usually there is one backward for each batch, which always has the same table.
            table, self._free_table = self._free_table, None
            self._tables[task] = table or ColumnTable(self._width, self._exact, self._like)
        batch = layer.batch(examples, dim, ndim)
        call = LayerCall(inputs, grads, batch, saved)
        try:
            layer.sketch.write(call, self._tables[task], layer.slots, layer.index)
        except UnbatchedError as error:
            self._leave_layer_out(layer, str(error))

    def _leave_layer_out(self, layer: SketchedLayer, why: str) -> None:
        names = (self.spec.names[index] for index in layer.index.values())
        self._unbatched |= dict.fromkeys(names, why)

    def _after_model(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if self._probed is not None or not self._unknown or not torch.is_grad_enabled():
            return
        leaves = [t for t in tensor_leaves((args, kwargs)) if t.dim()]
        if leaves and self._batch_size is not None:
            self._dims.expect(leaves[0].shape, self._batch_size)
        examples = self._dims.model_examples([t.shape for t in leaves])
        if examples is None:
            return
        # Before the backward, so that gradients need not be held until dimensions are known.
        args, kwargs = detach_all((args, kwargs))
        call = ModuleCall("", module, args, kwargs, ForwardContext.save(module), (), ())
        with self._quiet():
            self._dims.probe(call, examples, self._unknown, self._run_for_shapes)
        self._unknown = {}

    def _run_for_shapes(self, call: ModuleCall, args: Any, kwargs: Any) -> list[tuple[str, Shapes]]:
        probed: list[tuple[str, Shapes]] = []
        self._probed = probed
        try:
            repeat_forward(call, args, kwargs)
        finally:
            self._probed = None
        return probed

    def _project(self, index: int, grad: Tensor) -> Tensor:
        """Map a parameter's gradient to what its rows add up to; called while a check is due."""
        if index not in self._layer_of:
            return grad.new_zeros(0)
        layer, local = self._layer_of[index]
        with self._quiet():
            return layer.sketch.project(local, grad)

    def check_bitmask(self, examples: int) -> Tensor | None:
        """Check the rows that wait if a check is due; see `Capture.check_bitmask`."""
        inner = None if self._capture is None else self._capture.check_bitmask(examples)
        if not self._check.due:
            return None if inner is None else self._spread(inner)
        self._refuse_mismatch(examples)
        measured: dict[int, tuple[float, float, float]] = {}
        tolerances: dict[int, float] = {}
        has_rows: set[int] = set()
        for index in self._layer_of:
            reference = self._check.reference(index)
            uses = self._columns_of(index)
            if self.spec.names[index] in self._check.left_out or not (
                uses or reference is not None
            ):
                continue
            if uses:
                has_rows.add(index)
            error = torch.zeros(()) if reference is None else -reference
            size = float(error.norm())
            for columns in uses:
                error = columns.sum(0) + error.to(columns)
            if math.isfinite(size):  # else an overflow, which GradScaler handles
                norms = sum(float(columns.norm(dim=1).sum()) for columns in uses)
                measured[index] = float(error.norm()), size, norms
                tolerances[index] = self._tolerance()
        hint = "the loss contains gradients (create_graph=True)" if self._create_graph else ""
        self._failures = self._check.judge(measured, has_rows, tolerances, self._like.dtype, hint)
        self._failures |= self._unbatched
        mask = self._check.mask(self._failures)
        return mask if inner is None else torch.maximum(mask, self._spread(inner))

    def _tolerance(self) -> float:
        """Return the relative error that rows may have: that of the coarsest gradients."""
        return tolerance([self._like, *(self._like.to(dtype) for dtype in self._dtypes)])

    def _columns_of(self, index: int) -> list[Tensor]:
        """Return a parameter's columns (B, n), one tensor for each backward that reached it."""
        layer, local = self._layer_of[index]
        place = layer.sketch.where(local)
        columns = []
        for task in sorted(self._check.tasks[index] & self._tables.keys()):
            table = self._tables[task]
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
        if others := self._sizes - {examples}:
            self.clear()
            raise RuntimeError(
                f"the model was given {min(others)} examples, but the batch has {examples}: one "
                "batch of the loader is one forward"
            )

    def pop_sketch(
        self, examples: int, *, reduction: Reduction = "mean", loss_scale: float = 1.0
    ) -> Tensor:
        """Return a sketch of each row, (B, k), and forget what was recorded."""
        scale = row_scale(examples, reduction, loss_scale)
        settings = self._settings
        try:
            self._refuse_mismatch(examples)
            if self._failures is None and (mask := self.check_bitmask(examples)) is not None:
                self.leave_out(mask)
            # Not in step with other ranks, which follow with the next check.
            self._check.leave_out(self._unbatched)
            reached = {task for tasks in self._check.tasks for task in tasks}
            sketches = []
            parts = list(self._left_out_parts()) if self._check.left_out else []
            with self._quiet():
                for task in sorted(reached & self._tables.keys()):
                    table = self._tables[task]
                    for index in list(table.finals):
                        if self.spec.names[index] in self._check.left_out:
                            del table.finals[index]
                    sketches.append(table.sketch(self._size, settings.seed, parts))
                if self._capture is not None and self._capture.waiting:
                    sketches.append(
                        self._capture.pop_sketch(
                            examples, self._size, settings.seed, reduction="sum"
                        )
                    )
        finally:
            self._check.next_batch(self._model.training)
            self.clear()
        if not sketches:
            return self._like.new_zeros(examples, self._size)
        return sum(sketches[1:], start=sketches[0]).mul_(scale)

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
        for table in self._tables.values():
            table.clear()
            self._free_table = table
        self._tables = {}
        self._sizes, self._unbatched, self._unknown = set(), {}, {}
        self._create_graph, self._failures = False, None
        self._check.clear()
        if self._capture is not None:
            self._capture.clear()

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._check.remove_hooks()
        if self._capture is not None:
            self._capture.remove_hooks()
        self.clear()


def _has_layers(owner: ParameterOwner) -> bool:
    """Say whether a module contains parameters besides those that it uses itself."""
    own = set(owner.parameters.values())
    return any(parameter not in own for parameter in owner.module.parameters())


def _unbatched_reason(layer: SketchedLayer, inputs: Tensor, dims: BatchDims) -> str:
    if dims.knows(layer.name, INPUT, inputs.dim()):
        return f"its input of shape {tuple(inputs.shape)} has no dimension for examples"
    return "which dimension holds the examples is not known: call the model itself, not its parts"
