"""Modules without a layer of their own: their backward runs once for each example.

Recurrent layers, and modules with parameters of their own, whatever they compute. A tap behind each
output is given its gradient before the module's own backward runs, and sends each example's part of
it alone through the same graph, as far as the module's parameters. Exact, but slow.

Shapes: B examples, N elements of the module's parameters, E examples propagated at once.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from gradherd.rows.batch_dims import BatchDims, call_shapes, map_tensors, tensor_leaves
from gradherd.rows.module_hooks import UncopiedHook
from gradherd.rows.sink import (
    Pair,
    SinkPool,
    SketchedLayer,
    Use,
    at_least_float32,
)

_MAX_TEMPORARY = 1 << 22
"""Elements of the output gradients propagated at once."""


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
        """Hook into the module; `parameters` are those that have rows, by their local names."""
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

    def columns(self, inputs: Tensor, grads: Tensor, use: Use, *saved: Tensor) -> Pair:
        """Return the gradients (B, N) that come from one output, where a graph begins."""
        dim, edge, *_ = use
        if edge is None:
            shape = tuple(grads.shape)
            why = f"its output of shape {shape} has no dimension for examples"
            self.pool.strangers[self.name] = why
            return None, None
        trained = self._trained()
        rows = self.pool.like.new_zeros(grads.shape[dim], self.vector.size)
        with self._looping(trained.values()):
            for lo, hi, found in _single_grads(edge, grads, dim, list(trained.values())):
                for local, grad in zip(trained, found, strict=True):
                    if grad is not None:  # the output depends on it
                        part = rows[lo:hi, self.vector.parts[local]]
                        part.copy_(at_least_float32(grad).reshape(part.shape))
        return None, rows

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
        if not self._trained():
            return None
        places = count()

        def tapped(out: Tensor) -> Tensor:
            at = next(places)
            if not out.requires_grad:
                return out
            dim = self._dims.of_output(self.name, at, out.shape)
            if dim is not None:
                pool.see(out.shape[dim], out)
            edge = None if dim is None else get_gradient_edge(out)
            return self.behind_tap(out, pool.like, (dim or 0, edge, False, False, True))

        return map_tensors(tapped, outputs)

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that have rows now, by their local names."""
        return {
            local: parameter
            for local, parameter in self._parameters.items()
            if parameter.requires_grad and local not in self.left_out
        }

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
    output: GradientEdge, grads: Tensor, dim: int, parameters: Sequence[Tensor]
) -> Iterator[tuple[int, int, list[Tensor | None]]]:
    """Yield the gradients of parameters from examples lo to hi, each alone: (E, *shape)."""
    examples = grads.shape[dim]
    # As many examples at once as fit: each one is a copy of all gradients of the output.
    step = max(1, min(examples, _MAX_TEMPORARY // max(1, grads.numel())))
    lo, batched = 0, True
    while lo < examples:
        hi = min(examples, lo + step)
        masked = _mask_examples(grads, dim, lo, hi)
        try:
            with warnings.catch_warnings():
                # vmap warns when it loops over a kernel instead of batching it; that is expected.
                warnings.filterwarnings("ignore", message=".*performance drop.*")
                found = torch.autograd.grad(
                    output,
                    parameters,
                    masked if batched else masked[0],
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
