"""Rows as the gradient of a sink: autograd itself hands over what each layer knows of each example.

In a compiled model, the output of every layer passes through a `Tap`, an autograd Function that
changes nothing of it but has one more input, the sink, which it does not use. Its backward returns
the layer's rows as the "gradient" of the sink, a leaf, so `loss.backward()` brings them there, and
a compiler sees all of it.

A model that runs as it is would pay more for these Functions than for its small layers. There a
hook on the node that autograd has made for the layer (`watch`) takes the gradient of its output.
Where what layers save is packed away, for checkpoints or offloading, and where parameters are
sharded, a `Tap` saves it as any layer does.

Either way rows are added up until the backward is over, each layer's at its place in a row.

Layers get their tap by a change of class, as `torch.nn.utils.parametrize` and `fully_shard` do it:
a compiled model notices that, while it ignores hooks that are set later.

Shapes: B examples of a full batch, N elements of a sink.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.outer_rows import OuterRows, padded
from gradherd.rows.sketch import has_kernels
from gradherd.torch_names import (
    call_after_backward,
    current_backward,
    keeps_graph,
    saved_tensor_hooks,
    stream_getter,
)

if TYPE_CHECKING:  # Triton is optional
    from gradherd.rows.triton_layers import KernelPlan

CHANGED_IN_PLACE = (
    "an input of a layer was changed in place before its backward, so rows of single examples "
    "cannot be read: replace the in-place operation by its plain form, or order whole batches"
)
INPUT = -1
"""Stands for a module's input where outputs are numbered from 0."""
MATRIX, VECTOR, SINGLE = 0, 1, 2
"""Places of the three maps of a layer."""
SHARED = True
"""What a use says of itself where examples get copies of what they share."""
ROW = ""
"""Key of rows to which all layers add; other keys are of a single map of a layer."""
Shapes = dict[int, torch.Size]
"""Shapes of a module's input and outputs in one call."""
_MOST_PLANS = 256
TAP = "_gradherd_tap"
"""Attribute of a tapped module that holds its layer."""

Use = tuple[int, Any, bool, bool, bool]
"""How a layer is used: the dimension of the examples, what its class wants to know of it, whether
the map for one position is taken, and whether rows of its weight or scale, and of its bias, are
wanted. A plain tuple: it becomes part of graphs."""
Pair = tuple[Tensor | None, Tensor | None]
"""Something of a layer's weight and of its vector; None for what is not wanted."""
KernelForm = tuple[bool, Any]
"""Whether kernels project gradients and keep inputs, or the other way round; and size, stride,
padding and dilation of a window, if there is one."""
Place = tuple[str, int, int]
"""Where rows are added: a key, and the columns of all rows of that key before and after which they
come: how many there are, and the first of them."""


class Tap(torch.autograd.Function):
    """Passes on a layer's output; in the backward, hands the layer's rows to the sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        inputs: Tensor,
        matrix_sink: Tensor | None,
        vector_sink: Tensor | None,
        layer: "SketchedLayer",
        use: Use,
        is_traced: bool,
        *saved: Tensor,
    ) -> Tensor:
        """Return the output.

        The sinks take the rows (B, N) of the weight, and those of bias and scales; outside of
        graphs the first is the pool's signal. The input is detached; `saved` is what else the rows
        need.
        """
        ctx.save_for_backward(inputs, *saved)
        ctx.layer, ctx.use, ctx.is_traced = layer, use, is_traced
        if not is_traced:
            ctx.set_materialize_grads(False)
        # Not `view_as`: a view that was made here may not be changed in place, as ReLU does it.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None) -> Any:
        """Return the gradient as it is, and the rows."""
        if grads is None:  # a `LoopedModule` whose loop ends above this layer
            return (None,) * len(ctx.needs_input_grad)
        inputs, *saved = ctx.saved_tensors
        layer, use, pool = ctx.layer, ctx.use, ctx.layer.pool
        nothing = [None] * (3 + len(saved))
        # Before torch 2.10 a forward may be traced by itself, and its backward run without a graph.
        if ctx.is_traced:
            matrix, vector = layer.rows(inputs, grads, use, saved)
            return (grads, None, layer.padded(matrix), layer.padded(vector), *nothing)
        if pool.is_looping:
            return (grads, None, None, None, *nothing)
        pool.watch_gradient(grads)
        pool.read(layer, use, inputs, grads, saved)
        return (grads, None, pool.signal.detach(), None, *nothing)


class SinkPool:
    """What the layers of a model share: the state of this batch, and the rows that have arrived.

    Rows go where they belong in a row at once. On batches that are checked, those of each layer are
    kept apart.
    """

    def __init__(
        self, like: Tensor, examples: int | None, *, is_exact: bool = False,
        keeps_factors: bool = False, is_sharded: bool = False,
    ) -> None:  # fmt: skip
        """Begin without layers.

        Rows have the dtype and device of `like`. `examples` is B; None takes that of the largest
        batch. If `is_sharded`, modules hold shards of their parameters between passes. If
        `keeps_factors`, exact rows may be `OuterRows`.
        """
        self.like, self.is_exact, self.is_sharded = like, is_exact, is_sharded
        self.keeps_factors = keeps_factors
        self.examples = examples or 0
        self.batch: Any = None
        """Examples of the forward that runs; None outside of forwards."""
        self.last_batch: int | None = None
        """Examples of the last forward."""
        self.is_open = True
        """Whether layers hand out rows at all."""
        self.is_looping = False
        """Whether the gradient that runs is one of many of a `LoopedModule`, and has no rows."""
        self.is_apart = False
        """Whether rows are checked on this batch: those of each layer are kept apart, also those of
        idle layers."""
        self.shares = False
        """Whether examples get copies of what they share: class tokens, positions. Tried when
        batch dimensions are looked for."""
        self.before = 0
        """Examples of this batch in earlier forwards (micro-batches): rows to come are behind."""
        self.sizes: set[int] = set()
        """Numbers of examples of this batch, as each layer whose rows have come has seen it."""
        self.dtypes: set[torch.dtype] = set()
        """Dtypes of inputs that layers have seen in this batch; not of compiled layers."""
        self.given_dim: int | None = None
        """The user's setting for all tensors of the model."""
        self.differentiated = False
        """Whether a backward of this batch was differentiated: the loss contains gradients."""
        self.recorded: list[tuple[str, Shapes]] | None = None
        """Shapes in the layers while the batch dimension is looked for."""
        self.strangers: dict[str, str] = {}
        """Layers whose batch dimension is not known, with the reason."""
        self.before_first: Callable[[], None] = lambda: None
        """Called before what each backward brings is noted."""
        self._begun = -1  # number of the last backward that has brought something
        self.arrived: dict[str, Any] = {}
        """Rows that have arrived: (B, k) of all layers at `ROW`, (B, N) of single maps by key."""
        self.layers: list[SketchedLayer] = []
        self.has_kernels = not is_exact and like.dtype == torch.float32 and has_kernels(like.device)
        """Whether layers may have kernels of their own."""
        self._stream = stream_getter(like.device)
        self._open: dict[int, OpenBackward] = {}  # by the number of the backward
        self.signal = like.new_zeros(()).requires_grad_()
        """Gets a gradient, of zero, where taps are passed by a backward that accumulates."""
        _call_weakly(self.signal, self._signalled)

    def see(self, examples: int, output: Tensor) -> None:
        """Note what a layer has seen."""
        if self.is_apart and output.dtype.is_floating_point:
            self.dtypes |= {output.dtype}
        if examples > self.examples:
            self.make_sinks(examples)

    def make_sinks(self, examples: int) -> None:
        """Give all layers that may be compiled sinks for so many examples."""
        self.examples = examples
        for at, layer in enumerate(self.layers):
            if layer.compiles:
                layer.sinks = tuple(
                    None if one is None else self._new_sink(at, slot, one.size)
                    for slot, one in enumerate(layer.maps)
                )

    def _new_sink(self, at: int, slot: int, size: int) -> Tensor:
        # Nothing is stored: no layer reads it.
        sink = self.like.new_zeros(()).expand(self.examples, size).requires_grad_()
        _call_weakly(sink, self._arrive, at, slot)
        return sink

    def read(
        self, layer: "SketchedLayer", use: Use, inputs: Tensor, grads: Tensor,
        saved: Sequence[Tensor], parameter: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute the rows of a layer, and keep them until its backward is over.

        They are made of its input, the gradient of its output, and what it has `saved`. The
        gradient of `parameter` tells whether this backward accumulates gradients, as
        `torch.autograd.grad` does not.
        """
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self.read(layer, use, inputs, grads.detach(), saved, parameter)
            return
        backward = self._this_backward()
        if parameter is not None and backward.handle is None:
            backward.watch(parameter)
        if use[3] and self.has_kernels and layer.compiles:
            stream, examples = self._stream(), grads.shape[0]
            at, grads_at = inputs.data_ptr(), grads.data_ptr()
            is_aligned = (at | grads_at) % 16 == 0
            plan = layer.planned(use, inputs, grads, is_aligned)
            if plan is not None:
                use = (*use[:3], False, use[4])
                first = backward.room(stream, plan.place, examples).data_ptr()
                plan.run(stream, at, grads_at, first, backward.scratch(stream, plan.scratch))
                backward.sizes.add(examples)
        if not (use[3] or use[4]):
            return
        if self.keeps_factors:
            # They outlive the backward. What the user has made may be written to until then.
            inputs = inputs.clone() if inputs.grad_fn is None else inputs.detach()
            grads = grads.detach()
        found = layer.rows(inputs, grads, use, saved)
        for slot, rows in ((SINGLE if use[2] else MATRIX, found[0]), (VECTOR, found[1])):
            if rows is not None:
                backward.sizes.add(len(rows))
                backward.add(self._stream(), layer.place(slot), rows)

    def watch_gradient(self, grads: Tensor) -> None:
        """Note if a gradient that has a graph, by create_graph=True, is differentiated itself."""

        def note(grads: Tensor) -> None:
            self.differentiated = True

        if grads.requires_grad:
            grads.register_hook(note)

    def _this_backward(self) -> "OpenBackward":
        """Return what the backward that runs has brought so far."""
        task = current_backward()
        if task not in self._open:
            self._open[task] = OpenBackward(self.examples, self.like, keeps=self.keeps_factors)
            call_after_backward(partial(self._end, task))
        return self._open[task]

    def begin(self) -> None:
        """Note that a backward has brought something."""
        if (task := current_backward()) != self._begun:
            self._begun = task
            self.before_first()

    def _end(self, task: int) -> None:
        """Take what has waited for the end of a backward."""
        backward = self._open.pop(task, None)
        if backward is None:
            return
        backward.unwatch()
        if not backward.accumulates:
            return
        self.begin()  # may have the rows of an earlier backward taken
        self.sizes |= {self.before + examples for examples in backward.sizes}
        with torch.no_grad():
            for (stream, key), rows in backward.rows.items():
                arrived = self.arrived.get(key)
                if stream != self._stream():  # for which autograd has had this one wait
                    rows.record_stream(torch.cuda.current_stream(rows.device))
                if self.before:
                    rows = rows[: max(backward.sizes, default=0)]
                    behind = max(0, self.examples - self.before - len(rows))
                    rows = padded(rows, self.before, behind)
                if arrived is not None:
                    # They are of different length only in a step that will be refused.
                    least = min(len(arrived), len(rows))
                    rows = arrived[:least] + rows[:least]
                self.arrived[key] = rows

    def _arrive(self, at: int, slot: int, sink: Tensor) -> None:
        """Take the rows of a compiled layer, which autograd has brought to its sink."""
        layer, rows, sink.grad = self.layers[at], sink.grad, None
        assert rows is not None
        backward = self._this_backward()
        backward.accumulates = True
        if self.last_batch is not None:  # the layer itself does not tell
            backward.sizes.add(self.last_batch)
        # A graph of CUDA writes its next results to the same place.
        backward.add(self._stream(), layer.place(slot), rows, may_keep=False)

    def _signalled(self, signal: Tensor) -> None:
        """Note that a backward accumulates gradients."""
        signal.grad = None
        self._this_backward().accumulates = True

    def batch_now(self) -> Any:
        """Return the examples of the forward that runs; None outside of forwards."""
        if self.batch is None and not torch.compiler.is_compiling() and current_backward() != -1:
            return self.last_batch  # a checkpoint runs a block again
        return self.batch

    def expands(self) -> Any:
        """Return how many examples get a copy of what they share; None if they do not."""
        batch = self.batch_now()
        if not self.shares or batch is None:
            return None
        return batch if self.recorded is not None or batch <= self.examples else None

    @property
    def seen(self) -> set[int]:
        """Numbers of examples of this batch, as its forwards have had them."""
        return self.sizes or ({self.before} if self.before else set())

    def next_part(self) -> None:
        """Put the rows of the next forward behind those of this batch's earlier ones."""
        if len(self.sizes) == 1:  # otherwise the batch will be refused
            (self.before,), self.sizes = self.sizes, set()
            for key, rows in self.arrived.items():  # those that are not formed have no padding yet
                self.arrived[key] = padded(rows, 0, max(0, self.examples - len(rows)))
        self._drop_failed()

    def clear(self) -> None:
        """Forget what has arrived, but not what waits for the end of the backward that runs."""
        self.arrived, self.sizes, self.strangers, self.dtypes = {}, set(), {}, set()
        self.differentiated, self.before = False, 0
        self._drop_failed()

    def _drop_failed(self) -> None:
        now = current_backward()
        for task in [task for task in self._open if task != now]:  # of a backward that has failed
            self._open.pop(task).unwatch()


class OpenBackward:
    """What a backward has brought so far: rows that wait until it is over."""

    def __init__(self, examples: int, like: Tensor, *, keeps: bool) -> None:
        self._examples, self._like, self._keeps = examples, like, keeps
        self.rows: dict[tuple[int, str], Any] = {}
        """Those that layers add to, by stream and key."""
        self._scratch: dict[int, Tensor] = {}  # by stream
        self.sizes: set[int] = set()
        """Numbers of examples of what was added; not by compiled layers."""
        self.accumulates = False
        """Whether it accumulates gradients, as `Tensor.backward` does."""
        self.handle: Any = None
        """Of the hook that tells so."""

    def room(self, stream: int, place: Place, examples: int) -> Tensor:
        """Return the rows that a place is in: B, or more in a step that will be refused."""
        key, width, _ = place
        rows = self.rows.get((stream, key))
        if rows is None or examples > len(rows):
            rows = self._like.new_zeros(max(self._examples, examples), width)
            self.rows[stream, key] = rows
        return rows

    def scratch(self, stream: int, size: int) -> int:
        """Return the address of so many bytes for what kernels of the stream leave each other."""
        memory = self._scratch.get(stream)
        if memory is None or size > len(memory):
            # Kernels before may still use the old ones: the stream is one.
            memory = self._scratch[stream] = self._like.new_empty(size, dtype=torch.uint8)
        return memory.data_ptr()

    def add(self, stream: int, place: Place, rows: Any, *, may_keep: bool = True) -> None:
        """Add rows (n, ...) at a place; they may be kept as they are, if they are all."""
        key, width, start = place
        if self._keeps:  # they may be what the layer got or gave
            before = self.rows.get((stream, key))
            if before is not None:
                least = min(len(before), len(rows))
                rows = before[:least] + rows[:least]
            self.rows[stream, key] = rows if may_keep else rows.clone()
            return
        is_all = rows.shape == (self._examples, width) and rows.dtype == self._like.dtype
        if is_all and may_keep and (stream, key) not in self.rows:
            self.rows[stream, key] = rows.contiguous()
        else:
            here = self.room(stream, place, len(rows))
            here[: len(rows), start : start + rows.shape[1]].add_(rows)

    def watch(self, parameter: Tensor) -> None:
        """Note if the gradient of a parameter is accumulated; one is enough."""

        def accumulated(parameter: Tensor) -> None:
            self.accumulates = True

        self.handle = parameter.register_post_accumulate_grad_hook(accumulated)

    def unwatch(self) -> None:
        """Leave the parameter as it was."""
        if self.handle is not None:
            self.handle.remove()


def _call_weakly(sink: Tensor, method: Callable[..., None], *given: Any) -> None:
    """Call a method when a sink has got its gradient."""
    # Python cannot free what such a hook of a tensor holds together with the tensor.
    weak = WeakMethod(method)

    def call(sink: Tensor) -> None:
        if (alive := weak()) is not None:
            alive(*given, sink)

    sink.register_post_accumulate_grad_hook(call)


class SketchedLayer(ABC):
    """A module whose parameters have rows, and their places in a row."""

    def __init__(self, name: str, pool: SinkPool) -> None:
        self.name, self.pool = name, pool
        self.matrix: Any = None
        """Map of the weight; None without one."""
        self.vector: Any = None
        """Map of bias and scales; None without any."""
        self.single: Any = None
        """Map of the weight where examples have one position, if it is another one."""
        self.own_keys = (f"{name}/matrix", f"{name}/vector", f"{name}/single")
        """Keys of the rows of the three maps."""
        self.sinks: tuple[Tensor | None, ...] = (None, None, None)
        """What they are the gradients of in a graph."""
        self.trained = ("", "")
        """Local names of weight or scale, and of bias; empty for what has no rows."""
        self.casts = False
        """Whether autocast lowers the precision of the layer's input."""
        self.dim: int | None = None
        """Batch dimension of the input, as far as the layer has rows then; None without one."""
        self.ndim = -1
        """Dimensions of the input that `dim` is about; -1 if nothing is known."""
        self.batch_is_first = False
        """Whether the layer itself takes its first dimension for the batch."""
        self.uses_single = False
        """Whether examples have one position in the input that `dim` is about."""
        self.features = 1
        """Last dimensions of the input that cannot hold examples."""
        self.compiles = True
        """Whether the layer may be part of a graph."""
        self.is_idle = False
        """Whether rows are not read from it, except on batches on which layers are apart."""
        self._plans: dict[Any, KernelPlan | None] = {}

    @property
    def maps(self) -> tuple[Any, Any, Any]:
        """The three maps."""
        return self.matrix, self.vector, self.single

    @property
    def is_whole(self) -> bool:
        """Whether rows are gradients as they are, not columns of maps."""
        return self.pool.is_exact or not self.compiles

    # What subclasses define.

    @abstractmethod
    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the columns of weight and vector for n examples; None for what is not wanted."""

    def kernel_form(self, use: Use) -> KernelForm | None:
        """Return how kernels compute the rows of the weight; None if torch does it."""
        return None

    def is_single(self, shape: torch.Size) -> bool:
        """Say whether an input of this shape has one position for each example."""
        return len(shape) == 2

    def saved(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return what `columns` needs besides input and gradient."""
        return ()

    # What they share.

    def expanded(self, output: Tensor, inputs: Tensor, has_first: bool) -> Tensor:
        """Give every example its own copy of an output that all share.

        If `has_first`, the output's first dimension stands for the examples, and is of size 1.
        """
        is_matrix = self.matrix is not None
        shape = output.shape[1:] if has_first else output.shape
        copies = output.expand(self.pool.expands(), *shape)
        if self.pool.recorded is not None:
            return copies
        return self.behind_tap(copies, inputs, (0, SHARED, False, is_matrix, not is_matrix))

    def passes(self) -> bool:
        """Say whether the layer runs as if nothing was attached."""
        if not self.is_idle or self.pool.recorded is not None:
            return False
        # A graph must not depend on `is_apart`, which changes.
        return torch.compiler.is_dynamo_compiling() or not self.pool.is_apart

    def place(self, slot: int) -> Place:
        """Return where the rows of a map are added now."""
        one = self.maps[slot]
        if self.pool.is_apart or one.place is None:
            return self.own_keys[slot], one.size, 0
        place: Place = one.place
        return place

    def rows(self, inputs: Tensor, grads: Tensor, use: Use, saved: Sequence[Tensor]) -> Pair:
        """Return the rows (n, N) of weight and vector; None for what is not wanted."""
        if self.pool.is_exact and self.compiles:
            grads = at_least_float32(grads)
            inputs = at_least_float32(inputs) if inputs.is_floating_point() else inputs
        matrix, vector = self.columns(inputs, grads, use, *saved)
        if matrix is not None:
            matrix = (self.single if use[2] else self.matrix).finish(matrix)
        if vector is not None:
            vector = self.vector.finish(vector)
        return matrix, vector

    def planned(
        self, use: Use, inputs: Tensor, grads: Tensor, is_aligned: bool
    ) -> "KernelPlan | None":
        """Return the kernels for the weight's rows from tensors like these; None without any."""
        key = (
            use, self.pool.is_apart, is_aligned, inputs.shape, inputs.stride(), inputs.dtype,
            grads.shape, grads.stride(), grads.dtype,
        )  # fmt: skip
        if key not in self._plans:
            if len(self._plans) > _MOST_PLANS:  # lengths that change from batch to batch
                self._plans.clear()
            self._plans[key] = None
            if (form := self.kernel_form(use)) is not None:
                from gradherd.rows.triton_layers import plan_product

                self._plans[key] = plan_product(
                    self.matrix, *form, inputs, grads, self.place(MATRIX), is_aligned
                )
        return self._plans[key]

    def padded(self, rows: Any) -> Tensor | None:
        """Give rows of a short batch the length of the sink."""
        formed: Tensor | None = rows.dense() if isinstance(rows, OuterRows) else rows
        if formed is None or formed.shape[0] == self.pool.examples:
            return formed
        return F.pad(formed, (0, 0, 0, self.pool.examples - formed.shape[0]))

    def guessed_dim(self, inputs: Tensor) -> int | None:
        """Return the dimension of an input that holds the examples; None if there is none.

        It was not probed, as in a model that was compiled before its first batch. So sizes decide,
        and what they leave open has no rows.
        """
        pool = self.pool
        batch, given = pool.batch_now(), pool.given_dim
        if inputs.dim() <= max(self.features, given or 0):
            return None
        if batch is None and given is not None:  # a part of the model is called by itself
            is_known = inputs.dim() > max(1, given) and not (given and self.batch_is_first)
            return given if is_known else None
        dim = 0 if self.batch_is_first else given or 0
        return dim if inputs.shape[dim] == batch else None

    def tap(self, module: nn.Module, inputs: Tensor, output: Tensor, part: Any = None) -> Tensor:
        """Return the output; if rows are wanted, behind a tap or with a watch on its node.

        `part` is what is special about this use, for `columns`.
        """
        pool = self.pool
        dim = self.dim if self.ndim == inputs.dim() else self.guessed_dim(inputs)
        if pool.recorded is not None:
            pool.recorded.append((self.name, {INPUT: inputs.shape}))
            return self.tap_shared(module, inputs, output) if dim is None else output
        if not pool.is_open or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        if self.is_idle and self.passes():
            return output
        if dim is None:
            return self.tap_shared(module, inputs, output)
        # Either may have been frozen since.
        scale, shift = self.trained
        weight = trained_parameter(module, scale) if scale else None
        bias = trained_parameter(module, shift) if shift else None
        if weight is None and bias is None:
            return output
        single = self.single is not None and self.is_single(inputs.shape)
        if self.ndim == -1:  # not probed: what is seen now
            self.uses_single = single
        use = (dim, part, single, weight is not None, bias is not None)
        saved = self.saved(module)
        # What a bias needs is the gradient alone; the input may be changed then.
        held = pool.like if weight is None else inputs
        if torch.compiler.is_dynamo_compiling():
            if inputs.shape[dim] > pool.examples:
                return output
            return self.behind_tap(output, held, use, saved)
        if pool.is_apart or inputs.shape[dim] > pool.examples:
            pool.see(inputs.shape[dim], output)
        leaf: Any = bias if weight is None else weight
        # The layer may return a view, as nn.Linear does. Changed in place, that would get another
        # node, while what it is a view of keeps its own.
        is_view = output._base is not None
        whole: Any = output._base if is_view else output
        fits = not is_view or (whole.numel() == output.numel() and output.is_contiguous())
        # Parametrized weights are no leaves, and shards none between passes.
        if (
            not fits or whole.grad_fn is None or pool.is_sharded or not leaf.is_leaf
            or saved_tensor_hooks(True) is not None
        ):  # fmt: skip
            return self.behind_tap(output, held, use, saved)
        self.watch(whole, output.shape, held, use, saved, leaf)
        return output

    def watch(
        self, whole: Tensor, shape: torch.Size, inputs: Tensor, use: Use,
        saved: tuple[Tensor, ...], parameter: Tensor,
    ) -> None:  # fmt: skip
        """Take the gradient of an output when the backward comes to the layer.

        For a model that runs as it is: what a `Tap` does, by a hook on the node that autograd has
        made for the layer anyway. A Function of Python takes as long as a small layer does.
        """
        pool, at, version = self.pool, whole.output_nr, inputs._version
        kept: Tensor | None = inputs

        def hook(every: tuple[Tensor | None, ...]) -> None:
            nonlocal kept
            inputs, grads = kept, every[at]
            # Without inputs the graph is gone, which autograd will say.
            if inputs is None or grads is None or pool.is_looping:
                return
            if inputs._version != version:
                raise RuntimeError(CHANGED_IN_PLACE)
            if not keeps_graph():  # The user's loss keeps the node alive, up to the next step.
                kept = None
            pool.watch_gradient(grads)
            shaped = grads if grads.shape == shape else grads.reshape(shape)
            pool.read(self, use, inputs, shaped, saved, parameter)

        node: Any = whole.grad_fn
        node.register_prehook(hook)

    def behind_tap(
        self, output: Tensor, inputs: Tensor, use: Use, saved: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Return an output behind a tap: in a graph, and where a watch sees too little."""
        traced = torch.compiler.is_dynamo_compiling()
        sinks: Pair = (self.pool.signal, None)
        if traced:
            # Scale and shift of a norm are one vector; it has no matrix.
            has_vector = use[4] or self.matrix is None
            matrix = self.sinks[SINGLE if use[2] else MATRIX] if use[3] else None
            sinks = (matrix, self.sinks[VECTOR] if has_vector else None)
        tapped: Tensor = Tap.apply(  # type: ignore[no-untyped-call]
            output, inputs.detach(), *sinks, self, use, traced, *saved
        )
        return tapped

    def tap_shared(self, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the output of a use that has no batch dimension: it has no rows."""
        if not torch.compiler.is_dynamo_compiling() and self.pool.recorded is None:
            shape = tuple(inputs.shape)
            self.pool.strangers[self.name] = (
                f"its input of shape {shape} has no dimension for examples"
            )
        return output


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or better: half precision is too coarse for sums."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def as_autocast(inputs: Tensor) -> Tensor:
    """Return a layer's input in the precision that autocast gives it."""
    kind = inputs.device.type
    if torch.is_autocast_enabled(kind) and inputs.dtype == torch.float32:
        return inputs.to(torch.get_autocast_dtype(kind))
    return inputs


def trained_parameter(module: nn.Module, name: str) -> Any:
    """Return a parameter if it requires a gradient now, else None."""
    parameters = module._parameters
    # Parametrized weights are attributes only; looking up attributes of a module is slow.
    parameter = parameters[name] if name in parameters else getattr(module, name)
    return parameter if parameter is not None and parameter.requires_grad else None


class Tapped:
    """What the class of a tapped module adds to its own; a copy of the module is a plain one."""

    plain_type: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != TAP}
        return _new_module, (self.plain_type,), state, *rest


class TappedLayer(Tapped):
    """A layer whose output is tapped."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and tap its output."""
        layer = self._gradherd_tap  # type: ignore[attr-defined]
        # The input comes first, whatever its name.
        inputs = args[0] if args else next(iter(kwargs.values()))
        if layer.is_idle and layer.passes():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if layer.casts and torch.is_autocast_enabled(inputs.device.type):
            # What autocast would do inside, done here: the layer and its rows then hold one copy.
            inputs = as_autocast(inputs)
            if args:
                args = (inputs, *args[1:])
            else:
                kwargs = {**kwargs, next(iter(kwargs)): inputs}
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return layer.tap(self, inputs, output)


def _new_module(kind: type[nn.Module]) -> nn.Module:
    """Return a module whose state is still to be set."""
    return kind.__new__(kind)


_tapped_types: dict[tuple[type, type, tuple[str, ...]], type] = {}


def _property(kind: Any, name: str) -> property:
    """Return a property that `kind.read` answers for."""
    return property(lambda module: kind.read(module, name))


def tap_module(
    module: nn.Module, layer: Any, kind: Any = TappedLayer, properties: tuple[str, ...] = (),
) -> Callable[[], None]:  # fmt: skip
    """Give a module a tap; return a function that takes it away.

    It holds `layer` as `TAP`. Its class is mixed with `kind`, whose `read` answers for the names in
    `properties`.
    """
    plain = type(module)
    key = (plain, kind, properties)
    if key not in _tapped_types:
        members: dict[str, Any] = {"plain_type": plain, "__module__": plain.__module__}
        members |= {name: _property(kind, name) for name in properties}
        _tapped_types[key] = type(plain.__name__, (kind, plain), members)
    tapped = _tapped_types[key]
    module.__class__ = tapped
    module.__dict__[TAP] = layer

    def remove() -> None:
        layer_now = module.__dict__.pop(TAP, None)
        if type(module) is tapped:
            module.__class__ = plain
        elif layer_now is not None:  # somebody has changed the class since: it stays, and is idle
            module.__dict__[TAP] = layer_now

    return remove
