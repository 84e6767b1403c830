"""Means over many examples, computed in chunks, that leave the model unchanged."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode without gradients, then restore the mode of every module."""
    # Module by module: some may have been frozen in evaluation mode on purpose.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def mean_over_examples(
    model: nn.Module, score: Callable[..., Tensor], *tensors: Tensor, chunk: int = 1000
) -> float:
    """Return the mean of a score over all examples; the model stays unchanged.

    Args:
        model: The model; it runs in evaluation mode.
        score: Called as `score(model, *chunk)`; returns (b,) one value per example of the chunk.
        *tensors: n examples each, along the first dimension.
        chunk: Examples per call: large enough for speed, small enough for memory.

    >>> mean_over_examples(nn.Identity(), lambda model, x: model(x) > 1, torch.arange(5), chunk=2)
    0.6
    """
    # Summed on the device: no host sync between chunks.
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    with eval_mode(model):
        for parts in zip(*(tensor.split(chunk) for tensor in tensors), strict=True):
            # In double precision: a float32 sum stops growing at 16 million.
            total = total + score(model, *parts).double().sum()
    return float(total) / len(tensors[0])


def accuracy(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs,
    chunk: int = 1000,
) -> float:
    """Return the percentage of examples where `model(prepare(inputs))` scores the label highest.

    Args:
        model: Returns (b, classes) scores.
        inputs: (n, ...) inputs.
        labels: (n,) the index of the right class.
        prepare: Turns stored inputs into those of the model, chunk by chunk.
        chunk: Examples per call of the model.

    >>> accuracy(nn.Identity(), torch.eye(4), torch.tensor([0, 1, 2, 2]))
    75.0
    """

    def correct(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
        scores: Tensor = model(prepare(inputs))
        return scores.argmax(1) == labels

    return 100 * mean_over_examples(model, correct, inputs, labels, chunk=chunk)
