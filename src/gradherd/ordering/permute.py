"""Turn sides into the next order.

The side of a unit is +1 (front), -1 (back) or 0 (nothing is known: it keeps its position). Backs
are reversed, as in the papers: GraB fills the next order from both ends, each unit at the next free
slot of its side. A prefix of the new order is then half an old prefix plus half a signed sum, and a
suffix half an old one minus half a signed sum, which is why short signed sums halve the herding
bound from epoch to epoch.
"""

import torch
from torch import Tensor


def reorder(order: Tensor, sides: Tensor) -> Tensor:
    """Return the next order: fronts as visited, then backs in reverse.

    This one map serves mean balance (GraB: each unit has its own side) and pair balance
    (CD-GraB: the two of a pair have opposite sides, so pair k fills slots k and n-1-k); an odd
    unit comes last among the fronts, which is the middle. Units with side 0 stay where they
    are and the others fill the slots between them.

    Args:
        order: (n,) unit ids in visiting order.
        sides: (n,) int8 by position in `order`.

    Returns:
        (n,) the same unit ids; a new tensor, since orders that were handed out must not change.

    >>> reorder(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([1, -1, -1, 1, 1]))
    tensor([4, 7, 8, 6, 5])
    >>> reorder(torch.tensor([4, 5, 6, 7, 8]), torch.tensor([-1, 1, 0, 0, 1]))
    tensor([5, 8, 6, 7, 4])
    """
    moved = torch.cat([order[sides > 0], order[sides < 0].flip(0)])
    following = order.clone()
    following[sides != 0] = moved
    return following


def reorder_all(orders: list[Tensor], sides: Tensor) -> list[Tensor]:
    """Return every worker's next order.

    Args:
        orders: (n_i,) unit ids of worker i in visiting order; n_i may differ.
        sides: (T, M) int8, T the longest n_i, by time step and worker.

    Returns:
        (n_i,) unit ids of each worker.
    """
    return [reorder(order, sides[: len(order), worker]) for worker, order in enumerate(orders)]
