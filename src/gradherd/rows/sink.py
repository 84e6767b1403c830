"""Rows as the gradient of a sink: autograd itself adds up what each layer knows of each example.

In a compiled model, the output of every layer passes through a `Tap`, an autograd Function that
changes nothing of it but has one more input, the sink, which it does not use. Its backward returns
the layer's rows as the "gradient" of the sink. All layers share the sink, a leaf, so after
`loss.backward()` autograd has added up the rows of all layers in it, and a compiler sees all of it.

A model that runs as it is would pay more for these Functions than for its small layers. There a
`Watch`, a hook on the node that autograd has made for the layer, takes the gradient of its output,
and rows of all layers are added up until the backward is over. Where what layers save is packed
away, for checkpoints or offloading, and where parameters are sharded, a `Tap` saves it as any layer
does.

Layers get their tap by a change of class, as `torch.nn.utils.parametrize` and `fully_shard` do it:
a compiled model notices that, while it ignores hooks that are set later.

Shapes: B examples of a full batch, N elements of a sink.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradherd.rows.open_backward import Lane, OpenBackward, Scratch
from gradherd.rows.sketch import has_kernels
from gradherd.rows.torch_names import (
    call_after_backward,
    current_backward,
    keeps_graph,
    packs_saved_tensors,
    stream_getter,
)

if TYPE_CHECKING:  # Triton is optional
    from gradherd.rows.triton_layers import KernelPlan, LayerKernels

CHANGED_IN_PLACE = (
    "an input of a layer was changed in place before its backward, so rows of single examples "
    "cannot be read: replace the in-place operation by its plain form, or order whole batches"
)
INPUT = -1
"""Stands for a module's input where outputs are numbered from 0."""
Shapes = dict[int, torch.Size]
"""Shapes of a module's input and outputs in one call."""
_MOST_KNOWN = 256
TAP = "_gradherd_tap"
"""Attribute of a tapped module that holds its layer."""


KernelPair = tuple["LayerKernels | None", "LayerKernels | None"]
"""Kernels for the rows of a layer's weight and of its vector; None where there are none."""
Wanted = tuple[bool, bool]
"""Whether rows of a layer's weight and of its vector are wanted."""
Sinks = tuple[Tensor | None, Tensor | None]
"""The sinks of a layer's weight and of its vector; None where no rows are wanted."""


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
        use: Any,
        known: "KnownUse | None",
        *saved: Tensor,
    ) -> Tensor:
        """Return the output.

        Args:
            ctx: Of autograd.
            output: The layer's output.
            inputs: Its input, detached.
            matrix_sink: Takes the rows of its weight, (B, N); None if it has none.
            vector_sink: Takes those of bias and scales.
            layer: The layer, whose `columns` are called.
            use: What is special about this use of it, for `columns`.
            known: The same, and more, where the layer is not compiled.
            saved: What else `columns` needs.
        """
        ctx.save_for_backward(inputs, *saved)
        ctx.layer, ctx.use, ctx.known = layer, use, known
        ctx.wanted = (matrix_sink is not None, vector_sink is not None)
        if known is not None:
            ctx.set_materialize_grads(False)
        # Not `view_as`: a view that was made here may not be changed in place, as ReLU does it.
        shown: Tensor = layer.shown(output.detach(), use)
        return shown

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None) -> Any:
        """Return the gradient as it is, and the rows."""
        if grads is None:  # a `LoopedModule` whose loop ends above this layer
            return (None,) * len(ctx.needs_input_grad)
        inputs, *saved = ctx.saved_tensors
        known, layer, use = ctx.known, ctx.layer, ctx.use
        passed = layer.given(grads, use)
        nothing = [None] * (3 + len(saved))
        # Before torch 2.10 a forward may be traced by itself, and its backward run without a graph.
        if torch.compiler.is_compiling() or known is None:
            matrix, vector = layer.columns(inputs, grads, use, ctx.wanted, *saved)
            if matrix is not None:
                matrix = layer.padded(layer.matrix_map(use).finish(matrix))
            if vector is not None:
                vector = layer.padded(layer.vector.finish(vector))
            return (passed, None, matrix, vector, *nothing)
        pool: SinkPool = layer.pool
        if pool.is_looping:
            return (passed, None, None, None, *nothing)
        if torch.is_grad_enabled():  # create_graph=True
            passed = SecondBackward.apply(passed, pool)  # type: ignore[no-untyped-call]
        pool.wait(known, inputs, grads, saved)
        # Zeros: they tell the sinks that gradients are accumulated in this backward.
        told = (None if sink is None else sink.detach() for sink in known.sinks)
        return (passed, None, *told, *nothing)


_MOST_LAYOUTS = 16


class ReadyUse(NamedTuple):
    """A use of a layer whose input and gradient have known strides."""

    launches: tuple[tuple["KernelPlan", int, Tensor | None, int], ...]
    """What kernels do: where they add to rows, in bytes; or the sink, and its elements."""
    sinks: Sinks
    """Those that no kernel serves."""
    examples: int
    scratch: int
    """Bytes that kernels need."""


class KnownUse:
    """How a layer is used: found when inputs of a shape come for the first time."""

    def __init__(self, layer: "SketchedLayer", use: Any, sinks: "Sinks", saves: bool) -> None:
        self.layer, self.use, self.sinks = layer, use, sinks
        """`use` is what is special about it, for `SketchedLayer.columns`."""
        self.reads_input = sinks[0] is not None or layer.reads_input
        self._kernels = layer.kernels(use, saves) if layer.pool.has_kernels else (None, None)
        self._layout: Any = None
        self._ready = ReadyUse((), sinks, 0, 0)
        self._known: dict[Any, ReadyUse] = {}  # by layout

    def ready(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> ReadyUse:
        """Return what to launch on these."""
        layout = (
            is_aligned, inputs.stride(), inputs.dtype, grads.shape, grads.stride(), grads.dtype
        )  # fmt: skip
        if layout != self._layout:
            if len(self._known) > _MOST_LAYOUTS:
                self._known.clear()
            if layout not in self._known:
                self._known[layout] = self._prepare(inputs, grads, is_aligned)
            self._layout, self._ready = layout, self._known[layout]
        return self._ready

    def _prepare(self, inputs: Tensor, grads: Tensor, is_aligned: bool) -> ReadyUse:
        pool, launches, rest = self.layer.pool, [], list(self.sinks)
        for which, (sink, kernels) in enumerate(zip(self.sinks, self._kernels, strict=True)):
            if sink is None or kernels is None:
                continue
            start, size = pool.start_of(sink), kernels.one.size
            plan = kernels.plan(inputs, grads, pool.row_size if start >= 0 else size, is_aligned)
            if plan is not None:
                at = max(0, start) * pool.like.itemsize
                launches.append((plan, at, None if start >= 0 else sink, size))
                rest[which] = None
        scratch = max((plan.scratch for plan, *_ in launches), default=0)
        return ReadyUse(tuple(launches), (rest[0], rest[1]), grads.shape[0], scratch)


class Watch:
    """Takes the gradient of a layer's output when the backward comes to the layer.

    For a model that runs as it is: what a `Tap` does, by a hook on the node that autograd has made
    for the layer anyway. A Function of Python takes as long as a small layer does.
    """

    __slots__ = ("at", "inputs", "known", "parameter", "saved", "shape", "version")

    def __init__(
        self, known: KnownUse, inputs: Tensor, saved: tuple[Tensor, ...], parameter: Tensor,
        at: int, shape: torch.Size,
    ) -> None:  # fmt: skip
        self.known, self.saved, self.parameter = known, saved, parameter
        self.at, self.shape = at, shape  # of the output, among those of its node
        self.inputs: Tensor | None = inputs
        self.version = inputs._version

    def __call__(self, every: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Add the layer's rows; autograd goes on with the gradients as they are."""
        known, inputs, grads = self.known, self.inputs, every[self.at]
        pool = known.layer.pool
        # Without inputs the graph is gone, which autograd will say.
        if inputs is None or grads is None or pool.is_looping:
            return None
        if inputs._version != self.version:
            raise RuntimeError(CHANGED_IN_PLACE)
        if not keeps_graph():  # The user's loss keeps the node alive, up to the next step.
            self.inputs = None
        shaped = grads if grads.shape == self.shape else grads.reshape(self.shape)
        pool.wait(known, inputs, shaped, self.saved, self.parameter)
        if not torch.is_grad_enabled():
            return None
        passed = list(every)  # create_graph=True
        passed[self.at] = SecondBackward.apply(grads, pool)  # type: ignore[no-untyped-call]
        return tuple(passed)


class SecondBackward(torch.autograd.Function):
    """Passes on a gradient, and notes if it is differentiated itself."""

    @staticmethod
    def forward(ctx: Any, grads: Tensor, pool: "SinkPool") -> Tensor:
        """Return the gradient."""
        ctx.pool = pool
        return grads.view_as(grads)

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Any:
        """Note it."""
        ctx.pool.differentiated = True
        return grads, None


class SinkPool:
    """The sinks of a model, shared by its layers, and what has arrived in them.

    On batches that are checked every layer has sinks of its own, so that the rows of each are known
    apart. A compiled model would have to be compiled once more for that; there, sums are compared,
    and layers get sinks of their own only if something is wrong.
    """

    def __init__(
        self, like: Tensor, examples: int | None, *, is_exact: bool = False,
        is_sharded: bool = False,
    ) -> None:  # fmt: skip
        """Begin without sinks.

        Args:
            like: A tensor of the rows' dtype and device.
            examples: B; None takes that of the largest batch.
            is_exact: Whether rows are the gradients themselves: then no two layers share a sink.
            is_sharded: Whether modules hold shards of their parameters between passes.
        """
        self.like, self.is_exact = like, is_exact
        self.seconds = 0.0
        """Spent in backwards on modules that are looped over."""
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
        """Whether every layer has sinks of its own on this batch."""
        self.compiles_apart = False
        """Whether that holds for compiled layers, too."""
        self.shares = False
        """Whether examples get copies of what they share: class tokens, positions. Tried when
        batch dimensions are looked for."""
        self.sizes: set[int] = set()
        """Numbers of examples whose rows have come in this batch; not of compiled layers."""
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
        self.on_arrival: Callable[[], None] = lambda: None
        """Called before the rows of a backward are noted."""
        self.arrived: dict[str, Tensor] = {}
        """Rows (B, N) that have arrived, by the key of the sink."""
        self._keys: dict[int, str] = {}  # of sinks, by their identity
        self.layers: list[SketchedLayer] = []
        """All layers that share the sinks."""
        self.has_kernels = not is_exact and like.dtype == torch.float32 and has_kernels(like.device)
        """Whether layers may have kernels of their own."""
        self.is_sharded = is_sharded
        self._stream = stream_getter(like.device)
        self._scratch: dict[int, Scratch] = {}  # by stream
        self.row_size = 0
        """k, elements of a row."""
        self.starts: dict[str, int | None] = {}
        """Where in a row the columns of a shared sink are added; None: they are hashed."""
        self.rows: Tensor | None = None
        """Rows (B, k) that kernels have brought."""
        self._open: dict[int, OpenBackward] = {}  # by the number of the backward

    def see(self, examples: int, output: Tensor) -> None:
        """Note what a layer has seen."""
        if self.is_apart and output.dtype.is_floating_point:
            self.dtypes |= {output.dtype}
        if examples > self.examples:
            self.make_sinks(examples)

    def make_sinks(self, examples: int) -> None:
        """Give all layers sinks for so many examples."""
        self.examples = examples
        sinks: dict[tuple[str, int | None], Tensor] = {}

        def sink(key: str, size: int, width: int | None) -> Tensor:
            if (key, width) not in sinks:
                sinks[key, width] = self._new_sink(key, size if width is None else width)
            return sinks[key, width]

        for layer in self.layers:
            layer.known.clear()
            # Where rows are long, only graphs need a sink of their length.
            alone, graph = 0 if layer.has_own_sinks else None, None if layer.compiles else 0
            for keys, name, wide in ((layer.keys, "shared", graph), (layer.own_keys, "own", alone)):
                pairs = zip(layer.maps, keys, strict=True)
                found = (None if one is None else sink(key, one.size, wide) for one, key in pairs)
                setattr(layer, name, tuple(found))

    def _new_sink(self, key: str, size: int) -> Tensor:
        if self.is_exact:  # As long as a parameter, so nothing is stored.
            sink = self.like.new_zeros(()).expand(self.examples, size).requires_grad_()
        else:
            sink = self.like.new_zeros(self.examples, size).requires_grad_()
        # Python cannot free what such a hook of a tensor holds together with the tensor.
        hook = partial(_arrive_at, WeakMethod(self._arrive), key)
        sink.register_post_accumulate_grad_hook(hook)
        self._keys[id(sink)] = key
        return sink

    def wait(
        self, known: KnownUse, inputs: Tensor, grads: Tensor, saved: Sequence[Tensor],
        parameter: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compute the rows of a layer, and keep them until its backward is over.

        Args:
            known: The layer, and how it is used.
            inputs: Its input.
            grads: The gradient of its output.
            saved: What else its rows need.
            parameter: One whose gradient tells whether this backward accumulates gradients, as
                `torch.autograd.grad` does not.
        """
        if torch.is_grad_enabled():  # create_graph=True
            with torch.no_grad():
                self.wait(known, inputs, grads.detach(), saved, parameter)
            return
        backward = self._backward_now()
        if parameter is not None and not backward.is_watched:
            backward.watch(parameter)
        matrix, vector = known.sinks
        stream = 0
        if self.has_kernels:
            stream, at, grads_at = self._stream(), inputs.data_ptr(), grads.data_ptr()
            ready = known.ready(inputs, grads, (at | grads_at) % 16 == 0)
            matrix, vector = ready.sinks
            lane = backward.lanes.get(stream) or self._open_lane(backward, stream)
            scratch = lane.scratch
            if ready.scratch > scratch.size:
                scratch.grow(ready.scratch)
            for plan, start, sink, size in ready.launches:
                if sink is not None:  # known apart, while rows are checked
                    to = backward.rows_for(sink, stream).open(ready.examples, size)
                else:
                    if ready.examples > lane.room:
                        most = max(self.examples, ready.examples)
                        lane.make_room(most, self.row_size, self.like)
                    lane.sizes.add(ready.examples)
                    to = lane.address + start
                plan.run(stream, at, grads_at, to, scratch.address)
        if matrix is None and vector is None:
            return
        if self.is_exact:
            grads = at_least_float32(grads)
            inputs = at_least_float32(inputs) if inputs.is_floating_point() else inputs
        layer, wanted = known.layer, (matrix is not None, vector is not None)
        found = layer.columns(inputs, grads, known.use, wanted, *saved)
        if matrix is not None:
            rows = layer.matrix_map(known.use).finish(found[0])
            backward.rows_for(matrix, stream).add(rows)
        if vector is not None:
            backward.rows_for(vector, stream).add(layer.vector.finish(found[1]))

    def _open_lane(self, backward: OpenBackward, stream: int) -> Lane:
        if stream not in self._scratch:
            self._scratch[stream] = Scratch(self.like.device)
        lane = backward.lanes[stream] = Lane(self._scratch[stream])
        return lane

    def start_of(self, sink: Tensor) -> int:
        """Return where in a row kernels may add the columns of a sink; -1 if it is kept apart."""
        start = self.starts.get(self._keys[id(sink)])
        return -1 if start is None else start

    def _backward_now(self) -> OpenBackward:
        task = current_backward()
        found = self._open.get(task)
        if found is None:
            found = self._open[task] = OpenBackward(self.like)
            call_after_backward(partial(self._end, task))
        return found

    def add(self, sink: Tensor, rows: Tensor) -> None:
        """Let rows (n, N) for a sink wait until the backward that runs is over."""
        stream = self._stream() if self.has_kernels else 0
        self._backward_now().rows_for(sink, stream).add(rows)

    def _end(self, task: int) -> None:
        """Take what has waited for the end of a backward."""
        backward = self._open.pop(task, None)
        if backward is None:
            return
        backward.unwatch()
        if not backward.accumulates:
            return
        self.on_arrival()  # may have the rows of an earlier backward taken
        with torch.no_grad():
            for (stream, _), (sink, waiting) in backward.rows.items():
                self.sizes |= waiting.sizes
                self._take(self._keys[id(sink)], self._here(waiting.rows(), stream))
            for stream, lane in backward.lanes.items():
                if lane.rows is not None:
                    self.sizes |= lane.sizes
                    found = self._here(lane.rows, stream)
                    self.rows = found if self.rows is None else _sum(self.rows, found)

    def _here(self, rows: Tensor, stream: int) -> Tensor:
        """Return rows of another stream, for which autograd has had this one wait."""
        if self.has_kernels and stream != self._stream():
            rows.record_stream(torch.cuda.current_stream(rows.device))
        return rows

    def _arrive(self, key: str, sink: Tensor) -> None:
        """Take what autograd has brought to a sink: rows of compiled layers, or zeros of a tap."""
        rows, sink.grad = sink.grad, None
        assert rows is not None
        backward = self._open.get(current_backward())
        if backward is not None:
            backward.accumulates = True
        if rows.data_ptr() == sink.data_ptr():
            return
        self.on_arrival()
        self._take(key, rows.clone())  # a graph of CUDA writes its next results to the same place

    def _take(self, key: str, rows: Tensor) -> None:
        before = self.arrived.get(key)
        self.arrived[key] = rows if before is None else _sum(before, rows)

    def is_apart_now(self) -> bool:
        """Say whether the layer that runs uses sinks of its own."""
        # A graph must not depend on `is_apart`, which changes.
        if torch.compiler.is_compiling():
            return self.compiles_apart and not self.is_exact
        return self.is_apart or self.is_exact

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

    def clear(self) -> None:
        """Forget what has arrived, but not what waits for the end of the backward that runs."""
        self.arrived, self.sizes, self.strangers, self.dtypes = {}, set(), {}, set()
        self.rows, self.differentiated, now = None, False, current_backward()
        for task in [task for task in self._open if task != now]:  # of a backward that has failed
            self._open.pop(task).unwatch()


def _sum(one: Tensor, other: Tensor) -> Tensor:
    """Add rows; they are of different length only in a step that will be refused."""
    most = max(len(one), len(other))
    if len(one) != len(other):
        one, other = (F.pad(each, (0, 0, 0, most - len(each))) for each in (one, other))
    return one + other


def _arrive_at(arrive: "WeakMethod[Callable[[str, Tensor], None]]", key: str, sink: Tensor) -> None:
    method = arrive()
    if method is not None:
        method(key, sink)


class SketchedLayer(ABC):
    """A module whose parameters have rows, and their places in the sinks."""

    def __init__(self, name: str, pool: SinkPool) -> None:
        self.name, self.pool = name, pool
        self.matrix: Any = None
        """Map of the weight; None without one."""
        self.vector: Any = None
        """Map of bias and scales; None without any."""
        self.single: Any = None
        """Map of the weight where examples have one position, if it is another one."""
        self.own_keys = (f"{name}/matrix", f"{name}/vector", f"{name}/single")
        """Keys of the sinks that are its own, of the three maps."""
        self.shared: tuple[Tensor | None, ...] = (None, None, None)
        """The sinks that all layers share."""
        self.own: tuple[Tensor | None, ...] = (None, None, None)
        """The sinks that are its own."""
        self.trained: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        """Local names of the parameters of both, one of which has to be trained."""
        self.casts = False
        """Whether autocast lowers the precision of the layer's input."""
        self.dim: int | None = -1
        """Batch dimension of the input, None if it has none, -1 if it is not known."""
        self.ndim = -1
        """Dimensions of the input that `dim` is about."""
        self.batch_is_first = False
        """Whether the layer itself takes its first dimension for the batch."""
        self.reads_input = False
        """Whether rows of the vector need the input."""
        self.uses_single = False
        """Whether examples have one position in the input that `dim` is about."""
        self.features = 1
        """Last dimensions of the input that cannot hold examples."""
        self.compiles = True
        """Whether the layer may be part of a graph."""
        self.is_idle = False
        """Whether rows are not read from it, except on batches on which layers are apart."""
        self._kernels: dict[Any, KernelPair] = {}
        self.known: dict[Any, KnownUse | None] = {}
        """Uses of the layer where it is not compiled; None for those without rows."""

    @property
    def maps(self) -> tuple[Any, Any, Any]:
        """The three maps."""
        return self.matrix, self.vector, self.single

    @property
    def has_own_sinks(self) -> bool:
        """Whether it shares none of its sinks with other layers."""
        return self.pool.is_exact or not self.compiles

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the sinks that it shares with others: columns of equal number are added up."""
        if self.has_own_sinks:
            return self.own_keys
        kinds = ("matrix", "vector", "spectrum" if is_spectrum(self.single) else "matrix")
        sizes = (0 if one is None else one.size for one in self.maps)
        return tuple(f"{kind} {size}" for kind, size in zip(kinds, sizes, strict=True))

    # What subclasses define.

    @abstractmethod
    def columns(
        self, inputs: Tensor, grads: Tensor, use: Any, wanted: Wanted, *saved: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the columns of weight and vector for n examples; None for what is not wanted."""

    def matrix_map(self, use: Any) -> Any:
        """Return the map that the columns of the weight belong to."""
        return self.matrix

    def kernels(self, use: Any, saves: bool) -> KernelPair:
        """Return the kernels for the rows of weight and vector; None where there are none.

        Args:
            use: As in `columns`.
            saves: Whether anything but input and gradient is needed.
        """
        key = (use, saves)
        if key not in self._kernels:
            self._kernels[key] = self.make_kernels(use, saves)
        return self._kernels[key]

    def make_kernels(self, use: Any, saves: bool) -> KernelPair:
        """Do so for the first time."""
        return None, None

    def passes(self) -> bool:
        """Say whether the layer runs as if nothing was attached."""
        return not self.pool.is_apart_now() and self.is_idle and self.pool.recorded is None

    def is_single(self, shape: torch.Size) -> bool:
        """Say whether an input of this shape has one position for each example."""
        return len(shape) == 2

    def saved(self, module: nn.Module) -> tuple[Tensor, ...]:
        """Return what `columns` needs besides input and gradient."""
        return ()

    def shown(self, output: Tensor, use: Any) -> Tensor:
        """Return the output as the model gets it."""
        return output

    def given(self, grads: Tensor, use: Any) -> Tensor:
        """Return the gradient of the output as the layer gets it."""
        return grads

    # What they share.

    def padded(self, rows: Tensor | None) -> Tensor | None:
        """Give rows of a short batch the length of the sink."""
        if rows is None or rows.shape[0] == self.pool.examples:
            return rows
        return F.pad(rows, (0, 0, 0, self.pool.examples - rows.shape[0]))

    def sinks(self, module: nn.Module, single: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return the sinks of weight and vector, None for what is frozen.

        Args:
            module: The module.
            single: Whether examples have one position.
        """
        sinks = self.own if self.pool.is_apart_now() else self.shared
        matrix, vector = sinks[2 if single else 0], sinks[1]
        if matrix is not None and not is_trained(module, self.trained[0]):
            matrix = None
        if vector is not None and not is_trained(module, self.trained[1]):
            vector = None
        return matrix, vector

    def batch_dim(self, inputs: Tensor) -> int | None:
        """Return the dimension of an input that holds the examples; None if there is none."""
        if self.ndim == inputs.dim():
            return None if self.batch_is_first and self.dim else self.dim
        # Not probed, as in a model that was compiled before its first batch: sizes decide, and
        # what they leave open has no rows.
        pool = self.pool
        batch, given = pool.batch_now(), pool.given_dim
        if inputs.dim() <= max(self.features, given or 0):
            return None
        if batch is None and given is not None:  # a part of the model is called by itself
            is_known = inputs.dim() > max(1, given) and not (given and self.batch_is_first)
            return given if is_known else None
        dim = 0 if self.batch_is_first else given or 0
        return dim if inputs.shape[dim] == batch else None

    def tap(self, module: nn.Module, inputs: Tensor, output: Tensor, use: Any = None) -> Tensor:
        """Return the output, behind a tap if rows are wanted."""
        pool = self.pool
        if pool.recorded is not None:
            pool.recorded.append((self.name, {INPUT: inputs.shape}))
            return (
                output
                if self.batch_dim(inputs) is not None
                else self.tap_shared(module, inputs, output)
            )
        if not pool.is_open or not torch.is_grad_enabled() or not output.requires_grad:
            return output
        if self.passes():
            return output
        kept = self.saved(module)
        if torch.compiler.is_compiling():
            return self.tap_traced(module, inputs, output, use, kept)
        weights, vectors = self.trained
        parameter = trained_parameter(module, weights)
        shift = trained_parameter(module, vectors)
        is_apart = pool.is_apart
        key = (inputs.shape, use, parameter is None, shift is None, is_apart, bool(kept))
        # What is not probed depends on the model's batch as well.
        if key not in self.known or is_apart or self.ndim != inputs.dim():
            dim = self.batch_dim(inputs)
            if dim is None:
                return self.tap_shared(module, inputs, output)
            pool.see(inputs.shape[dim], output)
            full, sinks = self.full_use(module, inputs, dim, use)
            if len(self.known) > _MOST_KNOWN:  # lengths that change from batch to batch
                self.known.clear()
            wanted = sinks[0] is not None or sinks[1] is not None
            self.known[key] = KnownUse(self, full, sinks, bool(kept)) if wanted else None
        known = self.known[key]
        if known is None:
            return output
        # Parametrized weights are no leaves, and shards none between passes.
        leaf = shift if parameter is None else parameter
        if pool.is_sharded or not leaf.is_leaf or packs_saved_tensors():
            return self.tap_known(known, inputs, output, kept)
        # The layer may return a view, as nn.Linear does. Changed in place, that would get another
        # node, while what it is a view of keeps its own.
        whole = output._base
        if whole is None:
            whole = output
        elif whole.numel() != output.numel() or not output.is_contiguous():
            return self.tap_known(known, inputs, output, kept)
        node: Any = whole.grad_fn
        if node is None:
            return self.tap_known(known, inputs, output, kept)
        held = inputs if known.reads_input else pool.like
        node.register_prehook(Watch(known, held, kept, leaf, whole.output_nr, output.shape))
        return output

    def tap_known(
        self, known: KnownUse, inputs: Tensor, output: Tensor, kept: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the output behind a tap that is not part of a graph."""
        # What a bias needs is the gradient alone; the input may be changed then.
        held = inputs.detach() if known.reads_input else self.pool.like
        tapped: Tensor = Tap.apply(output, held, *known.sinks, self, known.use, known, *kept)  # type: ignore[no-untyped-call]
        return tapped

    def tap_traced(
        self, module: nn.Module, inputs: Tensor, output: Tensor, use: Any, kept: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the output behind a tap that is part of a graph."""
        dim = self.batch_dim(inputs)
        if dim is None:
            return self.tap_shared(module, inputs, output)
        if inputs.shape[dim] > self.pool.examples:
            return output
        full, (matrix, vector) = self.full_use(module, inputs, dim, use)
        if matrix is None and vector is None:
            return output
        held = inputs.detach() if matrix is not None or self.reads_input else self.pool.like
        tapped: Tensor = Tap.apply(output, held, matrix, vector, self, full, None, *kept)  # type: ignore[no-untyped-call]
        return tapped

    def tap_copies(self, shared: Tensor, inputs: Tensor, sinks: Sinks, use: Any) -> Tensor:
        """Return a copy of what examples share for each of them, behind a tap."""
        known = None
        if not torch.compiler.is_compiling():
            known = KnownUse(self, use, sinks, False)
        tapped: Tensor = Tap.apply(shared, inputs.detach(), *sinks, self, use, known)  # type: ignore[no-untyped-call]
        return tapped

    def full_use(
        self, module: nn.Module, inputs: Tensor, dim: int, use: Any
    ) -> tuple[tuple[int, Any, bool], Sinks]:
        """Return what `columns` is told of a use, and the sinks.

        Args:
            module: The module.
            inputs: Its input.
            dim: The dimension that holds the examples.
            use: What the caller knows of the use.
        """
        single = self.single is not None and self.is_single(inputs.shape)
        if self.ndim == -1:  # not probed: what is seen now
            self.uses_single = single
        return (dim, use, single), self.sinks(module, single)

    def tap_shared(self, module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
        """Return the output of a use that has no batch dimension: it has no rows."""
        if not torch.compiler.is_compiling() and self.pool.recorded is None:
            shape = tuple(inputs.shape)
            self.pool.strangers[self.name] = (
                f"its input of shape {shape} has no dimension for examples"
            )
        return output


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32 or better: half precision is too coarse for sums."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def is_spectrum(one: Any) -> bool:
    """Say whether a map's columns are a spectrum."""
    return hasattr(one, "buckets")


def is_trained(module: nn.Module, names: tuple[str, ...]) -> bool:
    """Say whether any of these parameters of a module requires a gradient now."""
    return trained_parameter(module, names) is not None


def trained_parameter(module: nn.Module, names: tuple[str, ...]) -> Any:
    """Return the first of these parameters that requires a gradient now; None if none does."""
    parameters = module._parameters
    for name in names:
        # Parametrized weights are attributes only; looking up attributes of a module is slow.
        parameter = parameters[name] if name in parameters else getattr(module, name)
        if parameter is not None and parameter.requires_grad:
            return parameter
    return None


class Tapped:
    """What the class of a tapped module adds to its own; a copy of the module is a plain one."""

    plain_type: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and tap its output."""
        layer = self._gradherd_tap  # type: ignore[attr-defined]
        # The input comes first, whatever its name.
        inputs = args[0] if args else next(iter(kwargs.values()))
        if layer.passes():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        if layer.casts and torch.is_autocast_enabled(inputs.device.type):
            # What autocast would do inside, done here: the layer and its rows then hold one copy.
            dtype = torch.get_autocast_dtype(inputs.device.type)
            if inputs.dtype == torch.float32 != dtype:
                inputs = inputs.to(dtype)
                if args:
                    args = (inputs, *args[1:])
                else:
                    kwargs = {**kwargs, next(iter(kwargs)): inputs}
        output = super().forward(*args, **kwargs)  # type: ignore[misc]
        return layer.tap(self, inputs, output)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        make, args, state, *_ = self.__reduce_ex__(4)
        copy: nn.Module = make(*args)
        memo[id(self)] = copy
        copy.__setstate__(deepcopy(state, memo))
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, state, *rest = reduced
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != TAP}
        return _new_module, (self.plain_type,), state, *rest


def _new_module(kind: type[nn.Module]) -> nn.Module:
    """Return a module whose state is still to be set."""
    return kind.__new__(kind)


_tapped_types: dict[tuple[type, type, tuple[str, ...]], type] = {}


def _property(kind: Any, name: str) -> property:
    """Return a property that `kind.read` answers for."""

    def read(module: nn.Module) -> Any:
        return kind.read(module, name)

    return property(read)


def tap_module(
    module: nn.Module, layer: Any, kind: type = Tapped, properties: tuple[str, ...] = (),
) -> Callable[[], None]:  # fmt: skip
    """Give a module a tap; return a function that takes it away.

    Args:
        module: The module.
        layer: What it holds as `TAP`.
        kind: What its class is mixed with.
        properties: Names that `kind.read` answers for.
    """
    plain = type(module)
    key = (plain, kind, properties)
    if key not in _tapped_types:
        members: dict[str, Any] = {"plain_type": plain, "__module__": plain.__module__}
        for name in properties:
            members[name] = _property(kind, name)
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
