"""Hooks that reduce each layer to its columns when the gradient of its output arrives.

A forward hook notes the input of a layer. When the gradient of the output arrives, the layer's
sketch writes its columns to a table, and input and gradient are let go.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.attention_uses import hook_attention
from gradherd.rows.batch_dims import INPUT, BatchDims, Shapes, call_shapes
from gradherd.rows.broadcast_uses import BroadcastUses, Meeting
from gradherd.rows.column_table import ColumnTable, LayerColumns
from gradherd.rows.forward_replay import ForwardContext, ModuleCall, UncopiedHook, repeat_forward
from gradherd.rows.layer_rules import UnbatchedError
from gradherd.rows.layer_sketches import LayerCall
from gradherd.rows.layer_use import (
    AfterForward,
    LayerUse,
    WaitingUses,
    hold_input,
    no_autocast,
    note_launch,
)
from gradherd.rows.row_check import RowCheck
from gradherd.rows.sketched_layers import SketchedLayer, unbatched_reason
from gradherd.rows.tensor_tree import detach_all, tensor_leaves


class LayerWatcher:
    """Writes the columns of all layers to tables, one for each backward of a batch."""

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[SketchedLayer],
        check: RowCheck,
        make_table: Callable[[], ColumnTable],
        *,
        direct: Mapping[SketchedLayer, nn.Parameter],
        batch_dim: int | None,
        batch_size: int | None,
    ) -> None:
        """Register the hooks.

        Args:
            model: The model.
            layers: Its layers that have sketches.
            check: Knows which parameters are left out, and when a check is due.
            make_table: Returns an empty table.
            direct: Parameters that modules use directly, by the layers that stand for them.
            batch_dim: Batch dimension of the model's inputs, if it is given.
            batch_size: Examples in a full batch of the loader, to tell the batch dimension.
        """
        self.tables: dict[int, ColumnTable] = {}
        """By backward (autograd's graph task): some reach no parameter."""
        self.sizes: set[int] = set()
        """Numbers of examples that layers have seen in this batch."""
        self.dtypes: set[torch.dtype] = set()
        """Dtypes of inputs and gradients, while a check is due."""
        self.unbatched: dict[str, str] = {}
        """Parameters without gradients of single examples in this batch, with the reason."""
        self.create_graph = False
        """Whether a backward was run with create_graph=True."""
        self.began: Callable[[], None] = lambda: None
        """Called before the first gradient of each backward."""
        self.seconds = 0.0
        """Seconds spent inside backwards."""
        self._layers, self.check, self._make_table = layers, check, make_table
        self._batch_size, self._dims = batch_size, BatchDims(batch_dim)
        # One table is kept from batch to batch: it is large, and has the same shape again.
        self._free_table: ColumnTable | None = None
        self.waiting = WaitingUses(self.on_new_grad)
        self._began_task = -1
        self._left_out: dict[SketchedLayer, bool] = {}
        self._left_out_count = 0
        self._unknown: dict[str, list[Shapes]] = {}  # calls whose batch dimension is not known
        self.probed: list[tuple[str, Shapes]] | None = None
        """Shapes that layers see while the batch dimension is looked for."""
        self._device_type = next(model.parameters()).device.type
        self._handles: list[Any] = [
            model.register_forward_hook(UncopiedHook(self._after_model), with_kwargs=True)
        ]
        self._uses = BroadcastUses(
            {(layer, None): parameter for layer, parameter in direct.items()}, self._on_meeting
        )
        self.places = self._uses.places
        self._met: set[SketchedLayer] = set()  # tables that all examples of the batch share
        for layer in layers:
            if layer.inside is None and not layer.is_direct:
                # Before all other hooks: those may change the output.
                hook = AfterForward(layer, self)
                self._handles.append(
                    layer.module.register_forward_hook(hook, prepend=True, with_kwargs=True)
                )
        self._handles += hook_attention(layers, self)

    def quiet(self) -> AbstractContextManager[Any]:
        """Return a context without graph and autocast."""
        # Leaving autocast empties its cache, which takes longer than launching a few kernels.
        inside = torch.is_autocast_enabled(self._device_type)
        return no_autocast(self._device_type) if inside else torch.no_grad()

    def looks_closer(self, name: str) -> bool:
        """Say whether a forward of a layer has to be looked at more closely."""
        return self.check.due or self.probed is not None or name in self._uses.places

    def after_forward(
        self,
        layer: SketchedLayer,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        output: Tensor,
    ) -> None:
        """Watch a layer after its forward, whatever it is like."""
        if self.probed is not None:
            self.probed.append((layer.name, call_shapes(args, kwargs, output)))
            return
        # Called with a keyword: layers have one argument, whatever its name.
        given = args[0] if args else next(iter(kwargs.values()))
        if given.dim() != layer.probed_dims:
            # Also without gradients: a reentrant checkpoint runs its first forward so.
            self._note_shapes(layer, given.dim(), call_shapes(args, kwargs, output))
        if not torch.is_grad_enabled():
            return
        if self._uses.is_needed:
            self._uses.search(given, layer.name, everywhere=self.check.due)
        if layer.inside is not None or not output.requires_grad:
            return  # what is inside an attention module is watched by itself
        if layer.is_table and self._dims.dim_of(layer.name, INPUT, given.dim()) is None:
            self._uses.expect(output, (layer, given.detach()))
        hold_input(self, layer, given, output, output.grad_fn)

    def _note_shapes(self, layer: SketchedLayer, ndim: int, shapes: Shapes) -> None:
        """Note a call whose batch dimension has to be found out."""
        if self._dims.knows(layer.name, INPUT, ndim):
            layer.probed_dims = ndim
        elif shapes not in (known := self._unknown.get(layer.name, [])):
            self._unknown[layer.name] = [*known, shapes]

    def _begin(self, task: int) -> None:
        if task != self._began_task:
            self.waiting.settle()
            self._began_task = task
            self.began()  # Earlier rows may be popped here, so this backward is noted afterwards.
            self.check.note_backward(task)

    def on_new_grad(self, use: LayerUse, grads: Tensor, task: int) -> None:
        """Reduce a use of a layer to its columns, whatever it is like."""
        self._begin(task)
        self.waiting.settle()  # in the order in which they came
        if self._begins_as_before(use, task):
            use((*[None] * use.index, grads))  # as autograd has called it
            return
        layer, inputs, saved, arrived = use.layer, use.inputs, use.saved, grads
        node, shape, pad = use.details
        if node is not None:
            (inputs,) = node.saved_tensors
        # The hook lives as long as the graph, which the loss may keep; activations must not.
        use.inputs, use.saved = None, ()
        if inputs is None:
            raise RuntimeError(
                "a second backward ran through the same graph (retain_graph=True), whose inputs "
                "two-sided rows no longer hold: add up the losses, or use rows='sketch'"
            )
        if inputs._version != use.version and node is None:
            raise RuntimeError(
                f"an input of module '{layer.name}' was changed in place after its forward, before "
                "its rows were read: give the model a copy (clone()) of a buffer that is reused"
            )
        held = inputs
        if shape is not None:
            inputs = inputs.detach().view(shape)
        if layer.inside is not None:
            grads = grads.detach().reshape(*inputs.shape[:2], -1)
            grads = F.pad(grads, pad) if any(pad) else grads
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device_type):
            self.create_graph = self.create_graph or torch.is_grad_enabled()
            with self.quiet():
                self._write(layer, inputs, grads.detach(), saved)
        else:  # The usual case: contexts cost more than a launch.
            self._write(layer, inputs, grads, saved)
            table = self.tables.get(task)
            if table is not None and note_launch(layer, inputs, grads, held, arrived, table):
                if len(self.tables) == 1 and not self.check.due:
                    self.waiting.follow(task, table)
                else:
                    self.waiting.clear()

    def _begins_as_before(self, use: LayerUse, task: int) -> bool:
        """Let uses wait from the first one on, if the backward begins like the one before."""
        known, inputs, table = use.layer.known, use.inputs, self._free_table
        if known is None or inputs is None or table is None or table.group is None:
            return False
        if self.check.due or self.tables or self.sizes or inputs.shape != known.shape:
            return False
        if torch.is_grad_enabled() or torch.is_autocast_enabled(self._device_type):
            return False
        self.tables[task], self._free_table = table, None
        self.sizes.add(known.examples)
        table.start(known.examples)
        self.waiting.follow(task, table)
        return True

    def _write(
        self, layer: SketchedLayer, inputs: Tensor, grads: Tensor, saved: tuple[Tensor, ...]
    ) -> None:
        if self.check.left_out and self._is_left_out(layer):
            return
        ndim = inputs.dim()
        dim = self._dims.dim_of(layer.name, INPUT, ndim)
        if layer.inside is not None:
            # Inside, attention is (T, B, ...), whatever its input was.
            dim = 1 if dim == layer.inside else None
        if dim is None:
            if layer not in self._met:
                self._leave_layer_out(layer, unbatched_reason(layer, inputs, self._dims))
            return
        self._put(layer, LayerCall(inputs, grads, layer.batch(inputs.shape[dim], dim, ndim), saved))

    def _on_meeting(
        self,
        key: tuple[SketchedLayer, Tensor | None],
        origin: tuple[str, int],
        meeting: Meeting,
        grads: Tensor,
    ) -> None:
        """Read the gradient of a shared tensor where it meets the examples."""
        layer, tokens = key
        if tokens is not None and self._dims.dim_of(layer.name, INPUT, tokens.dim()) is not None:
            return  # a table whose tokens differ from example to example
        # The tensors of a region lie alike: the probe has told how the layer's input does.
        if self._dims.dim_of(origin[0], INPUT, origin[1]) != 0:
            self._leave_layer_out(layer, "it meets examples that are not the first dimension")
            return
        self._begin(torch._C._current_graph_task_id())
        with self.quiet():
            try:
                rows = meeting.gradients(grads)
            except UnbatchedError as error:
                self._leave_layer_out(layer, str(error))
                return
            batch = layer.batch(len(rows), 0, 2)
            call = LayerCall(rows, rows, batch, ())
            if tokens is not None:
                tokens = tokens.reshape(1, -1).expand(len(rows), -1)
                grads = rows.view(*tokens.shape, -1)
                call = LayerCall(tokens, grads, batch, ())
                self._met.add(layer)
            self._put(layer, call)

    def _put(self, layer: SketchedLayer, call: LayerCall) -> None:
        """Write the columns of one use of a layer to the table of this backward."""
        self.waiting.settle()
        examples, inputs, grads = call.batch.examples, call.inputs, call.grads
        self.sizes.add(examples)
        if len(self.sizes) > 1:
            return  # refused when rows are popped
        if self.check.due:
            self.dtypes |= {one.dtype for one in (inputs, grads) if one.is_floating_point()}
        task = self._began_task
        if task not in self.tables:
            # Usually there is one backward for each batch, which always has the same table.
            table, self._free_table = self._free_table, None
            self.tables[task] = table or self._make_table()
        try:
            layer.sketch.write(call, LayerColumns(self.tables[task], layer.slots, layer.index))
        except UnbatchedError as error:
            self._leave_layer_out(layer, str(error))

    def _is_left_out(self, layer: SketchedLayer) -> bool:
        """Say whether all parameters of a layer are left out; found once for each change."""
        self._follow_left_out()
        if layer not in self._left_out:
            self._left_out[layer] = all(map(self.check.is_left_out, layer.index.values()))
        return self._left_out[layer]

    def _follow_left_out(self) -> None:
        """Forget what depends on which parameters are left out, if more are."""
        # Parameters are only ever added to those left out, so their number tells of a change.
        if self._left_out_count != len(self.check.left_out):
            self._left_out_count, self._left_out = len(self.check.left_out), {}
            for known in self._layers:
                known.known = None

    def _leave_layer_out(self, layer: SketchedLayer, why: str) -> None:
        names = (self.check.name(index) for index in layer.index.values())
        self.unbatched |= dict.fromkeys(names, why)

    def _after_model(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if self.probed is not None or not torch.is_grad_enabled():
            return
        self._uses.next_forward()
        if not self._unknown:
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
        with self.quiet():
            self._dims.probe(call, examples, self._unknown, self._run_for_shapes)
        for layer in self._layers:
            layer.known = None  # its dimensions may be others now
        self._unknown = {}

    def _run_for_shapes(self, call: ModuleCall, args: Any, kwargs: Any) -> list[tuple[str, Shapes]]:
        probed: list[tuple[str, Shapes]] = []
        self.probed = probed
        try:
            outputs = repeat_forward(call, args, kwargs)
        finally:
            self.probed = None
        # The model itself was not called as a module, so its own hooks have not run.
        return [*probed, ("", call_shapes(args, kwargs, outputs))]

    def clear(self) -> None:
        """Forget the current batch."""
        self.waiting.clear()
        self._follow_left_out()
        for table in self.tables.values():
            table.clear()
            self._free_table = table
        self.tables, self.unbatched, self._unknown = {}, {}, {}
        self.sizes, self.dtypes, self.create_graph = set(), set(), False
        self._met = set()
        self._uses.next_forward()

    def remove_hooks(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
