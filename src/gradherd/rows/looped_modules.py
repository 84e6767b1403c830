"""Modules without a layer of their own: their backward runs once for each example.

Recurrent layers, and modules with parameters of their own, whatever they compute. A `LoopTap`
behind their outputs is given the output gradients before the module's own backward runs. It sends
each example's gradient alone through the same graph, as far as the module's parameters. Exact, but
slow.

Shapes: B examples, N elements of the module's parameters, E examples propagated at once.
"""

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from gradherd.rows.batch_dims import BatchDims, call_shapes, map_tensors, tensor_leaves
from gradherd.rows.module_hooks import UncopiedHook
from gradherd.rows.sink import (
    VECTOR,
    Pair,
    SecondBackward,
    SinkPool,
    SketchedLayer,
    Use,
    Wanted,
    at_least_float32,
)

_MAX_TEMPORARY = 1 << 22
"""Elements of the output gradients propagated at once."""


class LoopTap(torch.autograd.Function):
    """Passes on a module's outputs; in the backward, computes its rows."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, use: Any, *outputs: Tensor) -> Any:
        """Return the outputs; the pool's signal gets a gradient, too."""
        ctx.use = use
        ctx.set_materialize_grads(False)  # outputs that are not used have no gradient
        # Not views: those that a Function makes may not be changed in place, as ReLU does it.
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients as they are."""
        use: _Call = ctx.use
        pool = use.layer.pool
        if pool.is_looping:  # over the examples of a module around this one
            return None, None, *grads
        passed = grads
        if torch.is_grad_enabled():  # create_graph=True
            passed = tuple(None if g is None else SecondBackward.apply(g, pool) for g in grads)  # type: ignore[no-untyped-call]
        use.layer.hand_over(use, grads)
        return pool.signal.detach(), None, *passed


@dataclass(frozen=True)
class _Call:
    """One forward of a module: of each output that has a graph, in this order."""

    layer: "LoopedModule"
    edges: list[GradientEdge]
    """Where its graph begins."""
    shapes: list[torch.Size]
    dims: list[int | None]
    """Batch dimensions; None without one."""

    @property
    def examples(self) -> int | None:
        """B; None if it is not the same everywhere."""
        pairs = zip(self.shapes, self.dims, strict=True)
        sizes = {shape[dim] for shape, dim in pairs if dim is not None}
        return sizes.pop() if len(sizes) == 1 else None


class LoopedModule(SketchedLayer):
    """A module whose backward runs once for each example. Its parameters are one vector."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        parameters: dict[str, nn.Parameter],
        pool: SinkPool,
        dims: BatchDims,
    ) -> None:
        """Hook into the module.

        Args:
            name: Of the module.
            module: The module.
            parameters: Those that have rows, by their local names.
            pool: The sinks.
            dims: Knows which dimensions hold the examples.
        """
        super().__init__(name, pool)
        self.compiles = False
        self.left_out: set[str] = set()
        """Local names of parameters without rows."""
        self._parameters, self._dims = parameters, dims
        self._loops = False
        self._handles = [
            module.register_forward_pre_hook(UncopiedHook(self._before_forward), with_kwargs=True),
            # Before all other hooks: those may change the output, and rows are about the forward.
            module.register_forward_hook(
                UncopiedHook(self._after_forward), prepend=True, with_kwargs=True
            ),
        ]

    def remove(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()

    def columns(
        self, inputs: Tensor, grads: Tensor, use: Use, wanted: Wanted, *saved: Tensor
    ) -> Pair:
        """Not called: a module may have many outputs."""
        raise NotImplementedError

    @property
    def _watches(self) -> bool:
        return self.pool.is_open and torch.is_grad_enabled()

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._watches:
            # Its parameters may have uses before this one, in an earlier call or another module.
            for one in tensor_leaves((args, kwargs)):
                if one.grad_fn is not None:
                    one.grad_fn.register_prehook(self._stop_loop)

    def _stop_loop(self, grads: tuple[Tensor | None, ...]) -> tuple[None, ...] | None:
        return tuple(None for _ in grads) if self._loops else None

    def _after_forward(self, module: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        pool = self.pool
        if pool.recorded is not None:
            pool.recorded.append((self.name, call_shapes(args, kwargs, outputs)))
            return None
        # No backward follows: evaluation, or the first forward of a reentrant checkpoint, which
        # runs again with gradients enabled.
        if not self._watches:
            return None
        if isinstance(outputs, tuple) and any(isinstance(out, PackedSequence) for out in outputs):
            raise ValueError(
                f"module '{self.name}' got a PackedSequence, in which examples are interleaved: "
                "pad the sequences instead, or order whole batches"
            )
        tapped = {i: out for i, out in enumerate(tensor_leaves(outputs)) if out.requires_grad}
        if not tapped or not self._wanted():
            return None
        shapes = [out.shape for out in tapped.values()]
        dims = [self._dims.of_output(self.name, i, out.shape) for i, out in tapped.items()]
        use = _Call(self, [get_gradient_edge(out) for out in tapped.values()], shapes, dims)
        if use.examples is not None:
            pool.see(use.examples, next(iter(tapped.values())))
        passed = iter(LoopTap.apply(pool.signal, use, *tapped.values()))  # type: ignore[no-untyped-call]
        return map_tensors(lambda out: next(passed) if out.requires_grad else out, outputs)

    def _wanted(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have rows now, by their local names."""
        return {
            local: parameter
            for local, parameter in self._parameters.items()
            if parameter.requires_grad and local not in self.left_out
        }

    def hand_over(self, use: _Call, grads: Sequence[Tensor | None]) -> None:
        """Compute the rows (B, N) of a call."""
        came = [at for at, grad in enumerate(grads) if grad is not None]
        if not came:
            return
        dims = [dim for at in came if (dim := use.dims[at]) is not None]
        if use.examples is None or len(dims) < len(came):
            self.pool.strangers[self.name] = (
                f"its output of shape {tuple(use.shapes[0])} has no dimension for examples"
            )
            return
        started, wanted = time.perf_counter(), self._wanted()
        rows = self.pool.like.new_zeros(use.examples, self.vector.size)
        edges, each = [use.edges[at] for at in came], [g.detach() for g in grads if g is not None]
        with self._looping(wanted.values()):
            pieces = _single_grads(edges, each, dims, list(wanted.values()), use.examples)
            for lo, hi, found in pieces:
                for local, grad in zip(wanted, found, strict=True):
                    if grad is not None:  # the outputs depend on it
                        part = rows[lo:hi, self.vector.parts[local]]
                        part.copy_(at_least_float32(grad).reshape(part.shape))
        self.pool.seconds += time.perf_counter() - started
        self.pool.add(self, VECTOR, rows)

    @contextmanager
    def _looping(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Silence taps and the hooks of parameters: they expect one gradient, not B more."""
        # The dictionary itself is emptied, since autograd holds a reference to it.
        silenced = [(hooks, dict(hooks)) for p in parameters if (hooks := p._backward_hooks)]
        for hooks, _ in silenced:
            hooks.clear()
        self._loops = self.pool.is_looping = True
        try:
            yield
        finally:
            self._loops = self.pool.is_looping = False
            for hooks, before in silenced:
                hooks.update(before)


def _single_grads(
    outputs: Sequence[GradientEdge],
    grads: Sequence[Tensor],
    dims: Sequence[int],
    parameters: Sequence[Tensor],
    examples: int,
) -> Iterator[tuple[int, int, list[Tensor | None]]]:
    """Yield the gradients of parameters from examples lo to hi, each alone: (E, *shape)."""
    # As many examples at once as fit: each one is a copy of all output gradients.
    step = max(1, min(examples, _MAX_TEMPORARY // max(1, sum(grad.numel() for grad in grads))))
    lo, batched = 0, True
    while lo < examples:
        hi = min(examples, lo + step)
        masked = [_mask_examples(grad, dim, lo, hi) for grad, dim in zip(grads, dims, strict=True)]
        try:
            with warnings.catch_warnings():
                # vmap warns when it loops over a kernel instead of batching it; that is expected.
                warnings.filterwarnings("ignore", message=".*performance drop.*")
                found = torch.autograd.grad(
                    outputs,
                    parameters,
                    masked if batched else [grad[0] for grad in masked],
                    retain_graph=True,  # more examples follow, and then the module's own backward
                    allow_unused=True,
                    is_grads_batched=batched,
                )
        except RuntimeError:
            if not batched:
                raise
            batched, step = False, 1  # Some kernels, mostly recurrent ones, have no batching rule.
            continue
        # Embedding(sparse=True) gives sparse gradients.
        yield lo, hi, [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        lo = hi


def _mask_examples(grad: Tensor, dim: int, lo: int, hi: int) -> Tensor:
    """Return (E, *shape) copies of `grad`, the e-th with all examples but lo + e zeroed."""
    # Masked, not sliced: examples may interact inside the module (BatchNorm), so the forward ran
    # on the whole batch.
    front = grad.movedim(dim, 0)
    masked = front.new_zeros(hi - lo, *front.shape)
    index = torch.arange(hi - lo, device=grad.device)
    masked[index, index + lo] = front[lo:hi]
    return masked.movedim(1, dim + 1)
