"""Herding bounds: how far an order's prefix sums stray from the mean.

The quantity that balancing makes small (arXiv:2205.10733; for several workers arXiv:2302.00845).
The theory bounds the convergence of SGD by it.

Shapes: M workers, N units of a worker, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def herding_bound(vectors: Tensor, order: Tensor) -> float:
    """Return the largest |sum of (vector - mean)|, in the maximum norm, over all prefixes.

    Args:
        vectors: (N, D) by unit id.
        order: (N,) unit ids in visiting order.

    Returns:
        The bound; 0 without vectors.

    >>> herding_bound(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.tensor([0, 1, 2, 3]))
    2.0
    >>> herding_bound(torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.tensor([0, 2, 1, 3]))
    1.0
    """
    return parallel_herding_bound([vectors], [order])


def parallel_herding_bound(vectors: Sequence[Tensor], orders: Sequence[Tensor]) -> float:
    """Return the herding bound of all workers together.

    Prefixes are counted in time steps: what all workers visit at one step is added at once.
    With vectors centred by the mean over all units of all workers, the bound is the maximum
    over time steps of the maximum norm of the sum so far. A worker that has run out of units
    adds nothing.

    Args:
        vectors: One (N_i, D) per worker, by unit id; a (M, N, D) tensor will do.
        orders: One (N_i,) per worker, unit ids in visiting order.

    Returns:
        The bound; 0 without vectors.

    >>> vectors, same = torch.tensor([[[1.0], [-1.0]], [[1.0], [-1.0]]]), torch.tensor([0, 1])
    >>> parallel_herding_bound(vectors, [same, same])
    2.0
    >>> parallel_herding_bound(vectors, [same, same.flip(0)])
    0.0
    """
    count = sum(len(own) for own in vectors)
    if count == 0:
        return 0.0
    # float64: a bound of 2 may be the sum of a million terms.
    mean = torch.stack([own.double().sum(0) for own in vectors]).sum(0) / count
    # (T, D): what one time step adds, all workers together. Within a step there is no order.
    steps = mean.new_zeros((max(len(own) for own in vectors), len(mean)))
    for own, order in zip(vectors, orders, strict=True):
        steps[: len(order)] += own[order].double() - mean
    return float(steps.cumsum(0).abs().max())
