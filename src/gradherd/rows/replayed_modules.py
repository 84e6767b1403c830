"""Modules without a layer of their own: run again in the backward, once per example.

Recurrent layers, and modules with parameters of their own. A `ReplayTap` behind their outputs is
given the output gradients and what was saved of the inputs, and computes the rows at once. What it
holds until then autograd has saved, as for any layer.

Shapes: B examples, N elements of the module's parameters.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gradherd.rows.batch_dims import BatchDims, call_shapes
from gradherd.rows.forward_replay import (
    ForwardContext,
    ModuleCall,
    UncopiedHook,
    map_tensors,
    replay,
    skip_on_replay,
    tensor_leaves,
)
from gradherd.rows.parameter_owners import ParameterOwner
from gradherd.rows.sink import SecondBackward, SinkPool, SketchedLayer, Wanted, at_least_float32


class ReplayTap(torch.autograd.Function):
    """Passes on a module's outputs; in the backward, hands its rows to the sink."""

    @staticmethod
    def forward(ctx: Any, sink: Tensor, use: Any, count: int, *tensors: Tensor) -> Any:
        """Return the first `count` tensors, and save the others for `use`."""
        ctx.sink, ctx.use = sink, use
        ctx.save_for_backward(*tensors[count:])
        ctx.set_materialize_grads(False)  # outputs that are not used have no gradient
        # Not views: those that a Function makes may not be changed in place, as ReLU does it.
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients as they are."""
        use: _Use = ctx.use
        saved = use.saved_tensors(ctx)
        if torch.is_grad_enabled():  # create_graph=True
            pool = use.layer.pool
            passed = tuple(None if g is None else SecondBackward.apply(g, pool) for g in grads)  # type: ignore[no-untyped-call]
        else:
            passed = grads
        handed = use.layer.hand_over(use, ctx.sink, grads, saved)
        return handed, None, None, *passed, *(None for _ in saved)


@dataclass(frozen=True)
class _Use:
    """One forward of a module, as far as it is not saved by autograd."""

    layer: "ReplayedModule"
    outputs: tuple[int, ...]
    """Positions of the outputs that are tapped."""
    call: ModuleCall
    """How to run the module again; its tensors are empty, and their values saved."""
    shapes: dict[int, torch.Size]
    """Of these outputs, by their position."""
    dims: dict[int, int | None]
    """Batch dimensions of the same; None without one."""

    @property
    def examples(self) -> int | None:
        """B; None if it is not the same everywhere."""
        sizes = {self.shapes[i][dim] for i, dim in self.dims.items() if dim is not None}
        return sizes.pop() if len(sizes) == 1 else None

    def saved_tensors(self, ctx: Any) -> tuple[Tensor, ...]:
        """Return what was saved; say whose input was changed in place since."""
        try:
            saved: tuple[Tensor, ...] = ctx.saved_tensors
        except RuntimeError as error:
            if "inplace" not in str(error):
                raise
            raise RuntimeError(
                f"an input of module '{self.layer.label}' was changed in place after its forward, "
                "so rows of single examples cannot be read: replace the in-place operation by its "
                "plain form"
            ) from error
        return saved


class ReplayedModule(SketchedLayer):
    """A module that is run again. Its parameters are one vector."""

    def __init__(self, owner: ParameterOwner, pool: SinkPool, dims: BatchDims) -> None:
        """Hook into the module.

        Args:
            owner: The module and its parameters.
            pool: The sinks.
            dims: Knows which dimensions hold the examples.
        """
        super().__init__(owner.name, pool)
        self.compiles = False
        self.label = owner.name or type(owner.module).__name__
        self.left_out: set[str] = set()
        """Local names of parameters without rows."""
        self._owner, self._dims = owner, dims
        self._context: ForwardContext | None = None
        before = UncopiedHook(self._before_forward)
        # Before all other hooks: those may change the output, and rows are about the forward.
        after = UncopiedHook(self._after_forward)
        module = owner.module
        self._handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, prepend=True, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Leave the module as it was."""
        for handle in self._handles:
            handle.remove()

    def columns(
        self, inputs: Tensor, grads: Tensor, use: Any, wanted: Wanted, *saved: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Not called: a module may have many outputs."""
        raise NotImplementedError

    @property
    def _watches(self) -> bool:
        return self.pool.is_open and torch.is_grad_enabled()

    @skip_on_replay
    def _before_forward(self, module: Any, args: Any) -> None:
        if self._watches:
            self._context = ForwardContext.save(module)

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
        leaves = tensor_leaves(outputs)
        tapped = tuple(index for index, out in enumerate(leaves) if out.requires_grad)
        if not tapped or not self._wanted():
            return None
        shapes = {index: leaves[index].shape for index in tapped}
        dims = {
            index: self._dims.find(self.name, index, shape, len(shape), pool.batch_now())
            for index, shape in shapes.items()
        }
        bare, named = map_tensors(lambda one: one.new_empty(0), (args, kwargs))
        assert self._context is not None
        call, self._context = ModuleCall(module, bare, named, self._context), None
        use = _Use(self, tapped, call, shapes, dims)
        if use.examples is not None:
            pool.see(use.examples, leaves[tapped[0]])
        # Detached: references to the graph would keep the activations of layers below alive.
        held = (one.detach() for one in tensor_leaves((args, kwargs)))
        given = (*(leaves[index] for index in tapped), *held)
        passed = iter(ReplayTap.apply(self.own[1], use, len(tapped), *given))  # type: ignore[no-untyped-call]
        return map_tensors(lambda out: next(passed) if out.requires_grad else out, outputs)

    def _wanted(self) -> dict[str, Any]:
        """Return the parameters that have rows now, by their local names."""
        return {
            local: parameter
            for local, parameter in self._owner.parameters.items()
            if parameter.requires_grad and local not in self.left_out
        }

    def hand_over(
        self, use: _Use, sink: Tensor, grads: tuple[Tensor | None, ...], saved: tuple[Tensor, ...]
    ) -> Tensor | None:
        """Compute the rows (B, N) of a use, which wait for its sink; see `SinkPool.waiting_for`."""
        came = {
            index: grad.detach()
            for index, grad in zip(use.outputs, grads, strict=True)
            if grad is not None
        }
        dims = {index: dim for index in came if (dim := use.dims[index]) is not None}
        if use.examples is None or len(dims) < len(came):
            shape = tuple(next(iter(use.shapes.values())))
            self.pool.strangers[self.name] = (
                f"its output of shape {shape} has no dimension for examples"
            )
            return None
        started = time.perf_counter()
        wanted, tensors = self._wanted(), iter(saved)
        args, kwargs = map_tensors(lambda _: next(tensors), (use.call.args, use.call.kwargs))
        call = replace(use.call, args=args, kwargs=kwargs)
        with self.pool.closed():
            found = replay(call, came, dims, list(wanted.values()), use.examples)
            rows = self.pool.like.new_zeros(use.examples, self.vector.size)
            for local, own in zip(wanted, found, strict=True):
                rows[:, self.vector.parts[local]] = at_least_float32(own)
        self.pool.seconds += time.perf_counter() - started
        waiting, handed = self.pool.waiting_for(sink)
        waiting.add(rows)
        return handed
