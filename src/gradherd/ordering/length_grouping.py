"""Length grouping: batches of sequences of about the same length, in an otherwise random order.

What transformers calls `group_by_length`: it saves padding, and it is the order that a learned one
competes with where lengths differ. Every epoch draws a new permutation, cuts it into large groups
and sorts each of these by length, so that batches cut from it one after the other hold sequences
of about the same length.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradherd.ordering.policy import BalanceState, Start
from gradherd.ordering.scored import UnitValues
from gradherd.ordering.seeded_random import SeededRandom
from gradherd.ordering.shuffles import WithoutGradients

# As in transformers: groups of 50 batches, but at least four groups, or little would be random.
_BATCHES_OF_A_GROUP, _GROUPS = 50, 4


def group_by_length(permutation: Tensor, lengths: Tensor, batch: int) -> Tensor:
    """Sort groups of a permutation by length, the longest first.

    Args:
        permutation: (n,) unit ids in a random order.
        lengths: (n,) length of each unit, by id.
        batch: Units of a batch.

    Returns:
        (n,) the same unit ids, a longest one first: if memory does not suffice, this shows at once.

    >>> group_by_length(torch.arange(4), torch.tensor([1.0, 5.0, 9.0, 7.0]), batch=2)
    tensor([2, 0, 1, 3])
    """
    if not len(permutation):
        return permutation
    group = max(1, min(len(permutation) // (batch * _GROUPS), _BATCHES_OF_A_GROUP)) * batch
    groups = [
        ids[lengths[ids].argsort(descending=True, stable=True)] for ids in permutation.split(group)
    ]
    order = torch.cat(groups)
    # The longest of all is the first of its group: it trades places with the first of the order.
    longest = int(torch.stack([lengths[ids[0]] for ids in groups]).argmax()) * group
    order[[0, longest]] = order[[longest, 0]]
    return order


@dataclass(frozen=True)
class LengthGrouped(WithoutGradients):
    """Give batches sequences of about the same length.

    >>> LengthGrouped([5, 9, 7], batch=2)
    LengthGrouped(lengths=<3 values ...>, batch=2)
    """

    lengths: UnitValues | Tensor | list[int]
    """(n,) length of each unit, in the order of the data set; for units of several examples, that
    of the longest."""
    batch: int
    """Units in a rank's batch: batch_size / unit."""

    start: ClassVar[Start | None] = "computed"

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch must be at least 1, got {self.batch}")
        if not isinstance(self.lengths, UnitValues):
            object.__setattr__(self, "lengths", UnitValues("lengths", self.lengths))

    def reorder(
        self, orders: list[Tensor], state: BalanceState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`."""
        assert isinstance(self.lengths, UnitValues)
        return [
            group_by_length(permutation, self.lengths.of(worker, state.sizes), self.batch)
            for worker, permutation in enumerate(random.permutations(state.sizes, epoch))
        ]
