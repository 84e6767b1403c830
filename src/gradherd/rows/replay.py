"""The way for modules without a rule: run the forward again, then one gradient per example.

Exact and slow: the whole batch runs once more with the random numbers, modes and precision of
the first time, and each example's output gradient is sent back alone. So LSTM, attention and
modules with parameters of their own work, whatever they compute.

Shapes: B examples, N numbers in a parameter, E examples sent back at once.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from gradherd.rows.layers import Batch
from gradherd.rows.terms import Dense

_CHUNK = 1 << 22
"""Numbers in the output gradients sent back at once."""


@dataclass(frozen=True)
class Moment:
    """What the outcome of a forward hangs on besides its arguments."""

    rng: Tensor
    """State of the CPU generator before the forward."""
    cuda_rng: dict[int, Tensor]
    """States of the CUDA generators that the module's devices use."""
    training: dict[nn.Module, bool]
    """Mode of the module and those below it."""
    autocast: tuple[str, bool, torch.dtype]
    """Device type, whether autocast is on, and its dtype."""
    versions: tuple[int, ...]
    """Versions of the parameters, to see whether they have changed since."""


@dataclass
class Use:
    """One call of a module, and the output gradients that have come back for it."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    moment: Moment | None
    kept: tuple[Tensor, ...]
    versions: tuple[int, ...]
    grads: dict[int, Tensor] = field(default_factory=dict)


def moment(module: nn.Module) -> Moment:
    """Record what a later replay of the forward needs; call it before the forward."""
    parameters = list(module.parameters())
    devices = {p.device for p in parameters}
    kind = "cuda" if any(device.type == "cuda" for device in devices) else "cpu"
    return Moment(
        rng=torch.get_rng_state(),
        cuda_rng={
            device.index: torch.cuda.get_rng_state(device)
            for device in devices
            if device.type == "cuda"
        },
        training={child: child.training for child in module.modules()},
        autocast=(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        versions=tuple(p._version for p in parameters),
    )


def versions(args: Any) -> tuple[int, ...]:
    """Return the version of every tensor in `args`, to see later whether one was changed."""
    return tuple(leaf._version for leaf in tree_leaves(args) if isinstance(leaf, Tensor))


def detached(args: Any) -> Any:
    """Return `args` with every tensor cut from its graph; no numbers are copied."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, args)


def replay(use: Use, parameters: Mapping[str, nn.Parameter], batch: Batch) -> dict[str, Dense]:
    """Return the per-example gradients of a module's parameters, by their local names."""
    assert use.moment is not None
    _check_unchanged(use, use.moment)
    with _as_it_was(use.module, use.moment), torch.enable_grad():
        outputs = tree_leaves(_forward(use))
    grads = _per_example(
        [outputs[index] for index in use.grads],
        list(use.grads.values()),
        [output_dim(use.module, index, outputs[index], batch) for index in use.grads],
        list(parameters.values()),
        batch.examples,
    )
    return {name: Dense(grad) for name, grad in zip(parameters, grads, strict=True)}


def output_dim(module: nn.Module, index: int, output: Tensor, batch: Batch) -> int:
    """Return the batch dimension of one of a module's outputs.

    Layers of torch say it themselves; the states of recurrent ones are (layers, B, ...).
    """
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and output.dim() >= 3:
        recurrent = isinstance(module, nn.RNNBase)
        at_front = (index > 0) != recurrent if index > 0 else module.batch_first
        return Batch(batch.examples, batch.module, 0 if at_front else 1).find(output.shape)
    return batch.find(output.shape)


def _forward(use: Use) -> Any:
    """Repeat a forward with the arguments that hooks had made of the caller's.

    Hooks before it may prepare the module (weight normalisation), so they run; what they make
    of the arguments is in the use already.
    """
    module = use.module
    for key, hook in module._forward_pre_hooks.items():
        if key in module._forward_pre_hooks_with_kwargs:
            hook(module, use.args, use.kwargs)
        else:
            hook(module, use.args)
    return module.forward(*use.args, **use.kwargs)


def _check_unchanged(use: Use, then: Moment) -> None:
    if tuple(p._version for p in use.module.parameters()) != then.versions:
        raise RuntimeError(
            f"parameters of module '{use.name}' changed between its forward and take(): take the "
            "rows after backward() and before optimizer.step()"
        )
    if versions((use.args, use.kwargs)) != use.versions:
        raise RuntimeError(
            f"an input of module '{use.name}' was changed in place after its forward, so the "
            "forward cannot be repeated: replace the in-place operation by its plain form"
        )


@contextmanager
def _as_it_was(module: nn.Module, then: Moment) -> Iterator[None]:
    """Bring back generators, modes and precision of a moment; undo all, and buffers, at the end."""
    now = {child: child.training for child in then.training}
    buffers = [
        (owner, name, buffer, buffer._version, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    kind, enabled, dtype = then.autocast
    try:
        with (
            torch.random.fork_rng(devices=list(then.cuda_rng)),
            torch.autocast(kind, dtype, enabled=enabled),
        ):
            torch.set_rng_state(then.rng)
            for index, state in then.cuda_rng.items():
                torch.cuda.set_rng_state(state, index)
            for child, training in then.training.items():
                child.training = training
            yield
    finally:
        for child, training in now.items():
            child.training = training
        for owner, name, buffer, version, before in buffers:
            owner._buffers[name] = buffer
            if buffer._version != version:
                buffer.detach().copy_(before)


def _per_example(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    dims: Sequence[int],
    parameters: Sequence[Tensor],
    examples: int,
) -> list[Tensor]:
    """Return the gradient of each parameter from each example alone: one (B, N) each."""
    rows = [p.new_zeros(examples, p.numel()) for p in parameters]
    step = max(1, min(examples, _CHUNK // max(1, sum(grad.numel() for grad in grads))))
    batched = True
    lo = 0
    while lo < examples:
        hi = min(examples, lo + (step if batched else 1))
        seeds = [_alone(grad, dim, lo, hi) for grad, dim in zip(grads, dims, strict=True)]
        try:
            found = _send_back(outputs, parameters, seeds, batched)
        except RuntimeError:
            if not batched:
                raise
            batched = False  # Some kernels, recurrent ones above all, know no batching.
            continue
        for row, grad in zip(rows, found, strict=True):
            if grad is not None:
                dense = grad.to_dense() if grad.is_sparse else grad
                row[lo:hi] = dense.reshape(hi - lo, -1)
        lo = hi
    return rows


def _alone(grad: Tensor, dim: int, lo: int, hi: int) -> Tensor:
    """Return (E, *shape) copies of `grad`, the e-th with all examples but lo + e zeroed."""
    front = grad.movedim(dim, 0)
    alone = front.new_zeros(hi - lo, *front.shape)
    steps = torch.arange(hi - lo, device=grad.device)
    alone[steps, steps + lo] = front[lo:hi]
    return alone.movedim(1, dim + 1)


def _send_back(
    outputs: Sequence[Tensor], parameters: Sequence[Tensor], seeds: Sequence[Tensor], batched: bool
) -> tuple[Tensor | None, ...]:
    with warnings.catch_warnings():
        # vmap tells when a kernel is looped over instead of batched; slow is what we promise.
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        return torch.autograd.grad(
            outputs,
            parameters,
            seeds if batched else [seed[0] for seed in seeds],
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=batched,
        )
