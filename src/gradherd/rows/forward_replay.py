"""Rows of modules without a rule: run the forward again, then backward once per example.

Exact but slow: the whole batch runs once more with the random state, modes and precision of the
first time, and each example's output gradient is propagated alone. So it works for LSTM,
attention and modules with parameters of their own, whatever they compute.

Shapes: B examples, N elements of a parameter, E examples propagated at once.
"""

import copy
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

P = ParamSpec("P")
R = TypeVar("R")

_MAX_TEMPORARY = 1 << 22
"""Elements of the output gradients propagated at once."""


@dataclass(frozen=True)
class ForwardContext:
    """What the result of a forward depends on besides its arguments."""

    rng: Tensor
    """State of the CPU generator before the forward."""
    cuda_rng: dict[int, Tensor]
    """States of the CUDA generators on the module's devices."""
    training: dict[nn.Module, bool]
    """Mode of the module and of every module below it."""
    autocast: tuple[str, bool, torch.dtype]
    """Device type, whether autocast is on, and its dtype."""
    buffers: dict[Tensor, Tensor]
    """Values of buffers that this forward may both change and depend on (spectral norm)."""

    @classmethod
    def save(cls, module: nn.Module) -> "ForwardContext":
        """Save the context of `module`; call it right before the forward."""
        devices = {p.device for p in module.parameters()}
        # Autocast has one state per device type; the one of the parameters matters.
        kind = "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
        return cls(
            rng=torch.get_rng_state(),
            cuda_rng={
                device.index: torch.cuda.get_rng_state(device)
                for device in devices
                if device.type == "cuda"
            },
            training={child: child.training for child in module.modules()},
            autocast=(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
            buffers=_buffers_in_use(module),
        )


def _buffers_in_use(module: nn.Module) -> dict[Tensor, Tensor]:
    """Copy the buffers of modules whose weights are computed before each forward."""
    prepared = (
        child
        for child in module.modules()
        if hasattr(child, "parametrizations")
        or any(not _skipped(hook) for hook in child._forward_pre_hooks.values())
    )
    return {
        buffer: buffer.clone() for child in prepared if child.training for buffer in child.buffers()
    }


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, which can be repeated."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: ForwardContext


def skip_on_replay(hook: Callable[P, R]) -> Callable[P, R]:
    """Mark a forward pre-hook that must see real forwards only, not repeated ones."""
    hook.__dict__["skip_on_replay"] = True
    return hook


def _call(hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return hook(*args)


@functools.cache
def _uncompiled_call() -> Callable[..., Any]:
    """Return `_call` as a function that is left out of graphs."""
    why = (
        "gradherd reads rows or notes the batch here: compile without fullgraph=True, or order "
        "whole batches and attach to the compiled model"
    )
    # Not when this file is imported: the compiler takes a second to load. torch 2.7 has no reason.
    takes_reason = "reason" in inspect.signature(torch.compiler.disable).parameters
    call: Callable[..., Any] = torch.compiler.disable(
        _call, **({"reason": why} if takes_reason else {})
    )
    return call


class UncopiedHook:
    """A module hook that copies of the module do not take along.

    A hook holds on to what it works for: a sampler with its data set, say. A module that is copied
    (`copy.deepcopy`, `AveragedModel`) or pickled (`torch.save`) gets a hook that does nothing.

    Nor does a graph take it along if the model is compiled after it was attached: a compiler would
    trace a hook with the numbers of this batch, and compile anew for the next until it gives up.
    """

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        self._hook = hook
        self._uncompiled = None if hook is None else _uncompiled_call()
        # A module holds this wrapper, so it has to carry the mark of the hook inside.
        self.skip_on_replay = hook is None or _skipped(hook)

    def __call__(self, *args: Any) -> Any:
        """Call the hook."""
        if torch.compiler.is_compiling() and self._uncompiled is not None:
            return self._uncompiled(self._hook, args)
        return None if self._hook is None else self._hook(*args)

    def __reduce__(self) -> tuple[type["UncopiedHook"], tuple[()]]:
        return UncopiedHook, ()


class ModelHook:
    """A hook of the model that is one function where it runs and another where it is compiled.

    Copies of the model do not take it along, as with `UncopiedHook`.
    """

    skip_on_replay = True

    def __init__(self, eager: Callable[..., Any], compiled: Callable[..., Any]) -> None:
        self._eager, self._compiled = eager, compiled

    def __call__(self, *args: Any) -> Any:
        """Call one of the two."""
        if torch.compiler.is_compiling():
            return self._compiled(*args)
        return self._eager(*args)

    def __reduce__(self) -> tuple[type[UncopiedHook], tuple[()]]:
        return UncopiedHook, ()


def _skipped(hook: Any) -> bool:
    # A partial does not show the attributes of its function.
    return bool(getattr(getattr(hook, "func", hook), "skip_on_replay", False))


def replay(
    call: ModuleCall,
    grads: Mapping[int, Tensor],
    dims: Mapping[int, int],
    parameters: Sequence[nn.Parameter],
    examples: int,
) -> list[Tensor]:
    """Return the gradients (B, N) of single examples of a module's parameters.

    Args:
        call: The call to repeat.
        grads: Gradients by the position of the output among the tensors of all outputs.
        dims: Batch dimensions of the same outputs.
        parameters: The parameters.
        examples: B.
    """
    with torch.enable_grad():  # the replay needs a graph of its own
        outputs = tensor_leaves(repeat_forward(call, call.args, call.kwargs))
    with _without_hooks(parameters):
        return _per_example_grads(
            [outputs[index] for index in grads],
            list(grads.values()),
            [dims[index] for index in grads],
            parameters,
            examples,
        )


def repeat_forward(call: ModuleCall, args: Any, kwargs: Any, *, hooks: bool = False) -> Any:
    """Run a module again with other arguments but the same random state, modes and precision.

    With `hooks` it is called as the user calls it: FSDP gathers parameters and frees them in hooks.
    """
    with _restored(call.module, call.context), _through_modules():
        if hooks:
            return call.module(*args, **kwargs)
        return _forward(call.module, args, kwargs)


@contextmanager
def _through_modules() -> Iterator[None]:
    """Have torch's transformers call their layers, also in evaluation without gradients."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Repeat a forward with the arguments it was given.

    Pre-hooks run again because they may prepare the module (weight normalisation), except those
    marked by `skip_on_replay`. Their changed arguments are ignored: the call holds the arguments
    after its hooks.
    """
    for key, hook in module._forward_pre_hooks.items():
        if _skipped(hook):
            continue
        if key in module._forward_pre_hooks_with_kwargs:
            hook(module, args, kwargs)
        else:
            hook(module, args)
    return module.forward(*args, **kwargs)


@contextmanager
def _without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Silence the hooks of parameters: they expect one gradient per backward, not B more."""
    # The dictionary itself is emptied, since autograd holds a reference to it.
    silenced = [
        (p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks
    ]
    for hooks, _ in silenced:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in silenced:
            hooks.update(before)


@contextmanager
def _restored(module: nn.Module, context: ForwardContext) -> Iterator[None]:
    """Restore random state, modes and precision of a forward; undo it at the end."""
    modes = {child: child.training for child in context.training}
    # A repeated forward updates running statistics once more: it works on copies. Writing the old
    # values back would invalidate what autograd has saved.
    buffers = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    copies = {buffer: context.buffers.get(buffer, buffer).clone() for _, _, buffer in buffers}
    kind, enabled, dtype = context.autocast
    try:
        with (
            torch.random.fork_rng(devices=list(context.cuda_rng)),
            torch.autocast(kind, dtype, enabled=enabled),
        ):
            torch.set_rng_state(context.rng)
            for index, state in context.cuda_rng.items():
                torch.cuda.set_rng_state(state, index)
            for child, training in context.training.items():
                child.training = training
            for owner, name, buffer in buffers:
                owner._buffers[name] = copies[buffer]
            yield
    finally:
        for child, training in modes.items():
            child.training = training
        for owner, name, buffer in buffers:
            owner._buffers[name] = buffer


def _per_example_grads(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    dims: Sequence[int],
    parameters: Sequence[Tensor],
    examples: int,
) -> list[Tensor]:
    """Return the gradient of each parameter from each example alone: one (B, N) each."""
    # Zeros: a parameter that the outputs do not depend on gets no gradient.
    rows = [p.new_zeros(examples, p.numel()) for p in parameters]
    # As many examples at once as fit: each one is a copy of all output gradients.
    step = max(1, min(examples, _MAX_TEMPORARY // max(1, sum(grad.numel() for grad in grads))))
    batched = True
    lo = 0
    while lo < examples:
        hi = min(examples, lo + (step if batched else 1))
        masked = [_mask_examples(grad, dim, lo, hi) for grad, dim in zip(grads, dims, strict=True)]
        try:
            results = _backward(outputs, parameters, masked, batched)
        except RuntimeError:
            if not batched:
                raise
            batched = False  # Some kernels, mostly recurrent ones, have no batching rule.
            continue
        for row, grad in zip(rows, results, strict=True):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                # Dense by now: Embedding(sparse=True) gives sparse gradients.
                row[lo:hi] = dense.reshape(hi - lo, -1)
        lo = hi
    return rows


def _mask_examples(grad: Tensor, dim: int, lo: int, hi: int) -> Tensor:
    """Return (E, *shape) copies of `grad`, the e-th with all examples but lo + e zeroed."""
    # Masked, not sliced: examples may interact inside the module (BatchNorm), so the forward ran
    # on the whole batch.
    front = grad.movedim(dim, 0)
    masked = front.new_zeros(hi - lo, *front.shape)
    index = torch.arange(hi - lo, device=grad.device)
    masked[index, index + lo] = front[lo:hi]
    return masked.movedim(1, dim + 1)


def _backward(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], grads: Sequence[Tensor], batched: bool
) -> tuple[Tensor | None, ...]:
    with warnings.catch_warnings():
        # vmap warns when it loops over a kernel instead of batching it; that is expected here.
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        return torch.autograd.grad(
            outputs,
            parameters,
            grads if batched else [grad[0] for grad in grads],
            retain_graph=True,  # the next examples go through the same graph
            allow_unused=True,
            is_grads_batched=batched,
        )


def tensor_leaves(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers, always in the same order.

    Other objects are not searched: what they hold (such as the cache of a decoder) is seldom part
    of a loss.
    """
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif _is_dataclass_instance(leaf):
            # Unless it is registered, torch takes a dataclass for a leaf.
            tensors += tensor_leaves([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return tensors


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return the same containers with `function` applied to each of their `tensor_leaves`."""
    # A function of this module: one defined here that calls itself would hold what it is given
    # until Python looks for cycles.
    return tree_map(functools.partial(_map_leaf, function), tree)


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if _is_dataclass_instance(leaf):
        result = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            # Not replace(), which would run __post_init__ again; not setattr(), which a frozen
            # dataclass refuses.
            value = map_tensors(function, getattr(leaf, field.name))
            object.__setattr__(result, field.name, value)
        return result
    return leaf


def _is_dataclass_instance(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def detach_all(tree: Any) -> Any:
    """Return `tree` with every tensor detached from its graph; nothing is copied."""
    return map_tensors(lambda tensor: tensor.detach(), tree)
