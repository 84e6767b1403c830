"""Hooks that record the calls of modules and the gradients of their outputs.

The model computes exactly what it computed before: the hooks only hold references to tensors that
autograd holds anyway. A call counts from the moment its output gradient arrives, so forwards
without backward leave nothing behind.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from gradherd.rows.batch_dims import Shapes, call_shapes
from gradherd.rows.forward_replay import (
    ForwardContext,
    ModuleCall,
    UncopiedHook,
    detach_all,
    map_tensors,
    repeat_forward,
    skip_on_replay,
    tensor_leaves,
    tensor_versions,
)
from gradherd.rows.layer_rules import save_statistics
from gradherd.rows.parameter_owners import ParameterOwner
from gradherd.rows.torch_names import (
    call_after_backward,
    current_backward,
    top_saving_hooks,
)


class CallRecorder:
    """Records the calls of the modules that own parameters, and of the model itself."""

    def __init__(
        self,
        model: nn.Module,
        owners: Iterable[ParameterOwner],
        backward_done: Callable[[], None],
        consume: Callable[[ModuleCall, Tensor], bool],
        model_ran: Callable[[ModuleCall], None],
        *,
        sharded: bool = False,
    ) -> None:
        """Register the hooks.

        Args:
            model: The model.
            owners: Modules to record.
            backward_done: Is called at the end of every backward that has recorded a call of a
                module without a rule.
            consume: Is called with each output gradient of a module with a rule. If it returns
                True, nothing of the call is held.
            model_ran: Is called after each forward of the model while `records_model`.
            sharded: Whether modules hold shards of their parameters between passes.
        """
        self.calls: list[ModuleCall] = []
        """Calls whose output gradients have arrived."""
        self.model_calls: list[ModuleCall] = []
        """Calls of the model itself; only while `records_model`."""
        self.part_calls: list[ModuleCall] = []
        """Calls of the model's parts since its last own call, likewise: a loop may call them
        instead of the model."""
        self.forward_shapes: dict[str, list[Shapes]] = {}
        """Shapes in the modules' calls since the model's last forward, likewise."""
        self.records_model = True
        self.began: Callable[[], None] = lambda: None
        """Called before the first gradient of each backward."""
        self.last_shapes: tuple[torch.Size, ...] = ()
        """Shapes of the tensors given to the last call of the model."""
        self.create_graph = False
        """Whether a backward was run with create_graph=True."""
        self._backward_done = backward_done
        self._consume = consume
        self._model_ran = model_ran
        self._sharded = sharded
        # Half precision is for the model; rows keep theirs, also in a backward under autocast.
        self._device_type = next((p.device.type for p in model.parameters()), "cpu")
        # No backward has this number.
        self._queued_task = self._last_task = -1
        self._silent = False
        self._shapes: list[tuple[str, Shapes]] | None = None
        self._contexts: dict[str, ForwardContext] = {}
        self._handles: list[Any] = [
            model.register_forward_hook(UncopiedHook(self._after_model), with_kwargs=True)
        ]
        for name, part in _parts(model):
            hook = UncopiedHook(partial(self._after_part, name))
            self._handles.append(part.register_forward_hook(hook, with_kwargs=True))
        for owner in owners:
            self._register(owner)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record nothing inside: modules run again to compute rows."""
        before, self._silent = self._silent, True
        try:
            with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
                yield
        finally:
            self._silent = before

    def shapes_of(self, call: ModuleCall, args: Any, kwargs: Any) -> list[tuple[str, Shapes]]:
        """Run the model again with other arguments; return the shapes in recorded modules."""
        shapes: list[tuple[str, Shapes]] = []
        self._shapes = shapes
        try:
            # Sharded modules gather their parameters in hooks of their own, so those must run.
            outputs = repeat_forward(call, args, kwargs, hooks=self._sharded)
        finally:
            self._shapes = None
        # The module itself was not called as one, so its own hooks have not run.
        return [*shapes, (call.name, call_shapes(args, kwargs, outputs))]

    def clear(self) -> None:
        """Forget everything recorded."""
        for call in self.calls:
            # A retained graph may run backward again; its gradients then start a new record.
            call.grads.clear()
            call.replayed = None
            if call.checkpointed:
                call.args, call.kwargs = (), {}
        self.calls.clear()
        self.model_calls.clear()
        self.part_calls.clear()
        self.forward_shapes.clear()
        self.create_graph = False

    def remove_hooks(self) -> None:
        """Remove the hooks and forget everything."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._contexts.clear()
        self.clear()

    def _register(self, owner: ParameterOwner) -> None:
        if owner.rule is None:
            self._handles.append(
                owner.module.register_forward_pre_hook(
                    UncopiedHook(partial(self._before_forward, owner)), prepend=True
                )
            )
        # Before all other hooks: those may change the output, and rows are about the forward.
        self._handles.append(
            owner.module.register_forward_hook(
                UncopiedHook(partial(self._after_forward, owner)), prepend=True, with_kwargs=True
            )
        )

    def _after_model(
        self, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        # Not before the forward: the rows of the batch before may be popped then.
        if torch.is_grad_enabled() and not self._silent:
            self.last_shapes = tuple(t.shape for t in tensor_leaves((args, kwargs)))
            self.part_calls.clear()  # They were calls by the model.
            if self.records_model:
                self.model_calls.append(_whole_call("", module, args, kwargs))
                self._model_ran(self.model_calls[-1])
        self.forward_shapes.clear()  # Also after an evaluation, whose sizes are others.

    def _after_part(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if self.records_model and torch.is_grad_enabled() and not self._silent:
            self.part_calls.append(_whole_call(name, module, args, kwargs))

    @skip_on_replay
    def _before_forward(self, owner: ParameterOwner, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not self._silent:
            self._contexts[owner.name] = ForwardContext.save(module)

    def _after_forward(
        self,
        owner: ParameterOwner,
        module: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
        outputs: Any,
    ) -> Any:
        if self._shapes is not None:
            self._shapes.append((owner.name, call_shapes(args, kwargs, outputs)))
            return None
        if self.records_model and not self._silent:
            self.forward_shapes.setdefault(owner.name, []).append(
                call_shapes(args, kwargs, outputs)
            )
        # No backward follows: evaluation, or the first forward of a reentrant checkpoint, which
        # runs again with gradients enabled.
        if not torch.is_grad_enabled() or self._silent:
            return None
        if isinstance(outputs, tuple) and any(isinstance(out, PackedSequence) for out in outputs):
            raise ValueError(
                f"module '{owner.name}' got a PackedSequence, in which examples are interleaved: "
                "pad the sequences instead, or order whole batches"
            )
        # Detached: a reference to the graph would keep the activations of all layers below alive.
        args, kwargs = detach_all((args, kwargs))
        saved = save_input(args) if owner.rule is not None and not kwargs else None
        if saved is not None:
            args = ()
        call = ModuleCall(
            owner.name,
            module,
            args,
            kwargs,
            context=self._contexts.pop(owner.name, None),
            statistics=save_statistics(module),
            versions=tensor_versions((args, kwargs)),
            saved=saved,
            # A reentrant checkpoint runs this forward inside the backward.
            checkpointed=saved is not None or current_backward() != -1,
        )
        # Modules with a rule have one output; only others can return several.
        tensors = [out for out in tensor_leaves(outputs) if out.requires_grad]
        if owner.rule is None and len(tensors) > 1:
            return self._hook_aliases(call, outputs)
        # Hooks on tensors, because a module's full backward hook forbids in-place operations on
        # its outputs, such as ReLU(inplace=True).
        for index, output in enumerate(tensor_leaves(outputs)):
            if output.requires_grad:
                hook_gradient(output, partial(self._on_grad, call, index))
        return None

    def _hook_aliases(self, call: ModuleCall, outputs: Any) -> Any:
        """Return aliases of a module's outputs that report their gradients.

        One output may be computed from another inside the module (LSTMCell), or appear twice. An
        alias gets what comes from outside only; a replay adds the rest.
        """
        count = 0

        def alias(output: Tensor) -> Tensor:
            nonlocal count
            index, count = count, count + 1
            if not output.requires_grad:
                return output
            inner = output.view_as(output)
            hook_gradient(inner, partial(self._on_grad, call, index))
            # The user gets another one, whose hooks run before ours.
            return inner.view_as(inner)

        return map_tensors(alias, outputs)

    def _on_grad(self, call: ModuleCall, index: int, grad: Tensor | None) -> None:
        if grad is None:  # fused recurrent kernels report outputs that nothing uses
            return
        task = current_backward()
        if task != self._last_task:
            self._last_task = task
            self.began()
        if torch.is_grad_enabled():
            self.create_graph = True
        if not call.grads:
            if call.saved is not None:
                call.args = call.saved.saved_tensors
                call.versions = tensor_versions((call.args, call.kwargs))
            elif call.checkpointed and not call.args and not call.kwargs:
                raise RuntimeError(
                    f"a second backward ran through module '{call.name}' inside a checkpoint, "
                    "whose input is not held: run one backward for each forward"
                )
            # At the first gradient only: a rule knows all of its call then. A module that is
            # replayed waits for all its outputs.
            consumed = call.context is None and self._consume(call, grad.detach())
            if consumed:
                # This hook lives as long as the graph; what is recomputed must not.
                if call.checkpointed:
                    call.args, call.kwargs = (), {}
                return
            self.calls.append(call)
        # A retained graph may run backward several times before the rows are read: add up.
        if call.context is not None and task != self._queued_task:
            self._queued_task = task
            call_after_backward(self._backward_done)
        key = (task, index)
        before = call.grads.get(key)
        call.grads[key] = grad.detach() if before is None else before + grad.detach()


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a loop may call instead of the model, with their names."""
    for name, child in model.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # These cannot be called.
            yield from ((f"{name}.{inner}", part) for inner, part in _parts(child))
        else:
            yield name, child


def _whole_call(name: str, module: nn.Module, args: Any, kwargs: Any) -> ModuleCall:
    """Return a call that can be repeated to see which dimensions hold examples."""
    args, kwargs = detach_all((args, kwargs))
    return ModuleCall(name, module, args, kwargs, ForwardContext.save(module), (), ())


def hook_gradient(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call `hook` with the gradient of a tensor, after all hooks of the user's on it."""
    node, index = tensor.grad_fn, tensor.output_nr
    if node is None:
        tensor.register_hook(hook)
    else:
        # Hooks of a tensor run in the order in which they are set, but before those of its node.
        node.register_prehook(lambda grads: hook(grads[index]))


class _SaveInput(torch.autograd.Function):
    """Saves a tensor as a layer does that needs its input in the backward."""

    @staticmethod
    def forward(ctx: Any, scalar: Tensor, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        # A new tensor: autograd treats an argument that is returned as it is as passed through.
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("only saves a tensor")


def save_input(args: tuple[Any, ...]) -> Any:
    """Let autograd save a layer's input where it recomputes or offloads what it saves.

    Inside activation checkpointing, a reference of ours would keep the input alive until the
    backward. The repeated forward saves it here once more, and autograd finds it.

    Returns:
        A node of autograd with `saved_tensors`; None where autograd just holds what it saves.
    """
    # torch 2.7 cannot tell whether there are such hooks: there, a reference is held in any case.
    if top_saving_hooks is None or top_saving_hooks(False) is None:
        return None
    if len(args) != 1 or not isinstance(args[0], Tensor):
        return None
    # Anything that requires a gradient: without it autograd would make no node and save nothing.
    scalar = torch.zeros((), requires_grad=True)
    return _SaveInput.apply(scalar, args[0]).grad_fn  # type: ignore[no-untyped-call]
