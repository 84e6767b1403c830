"""Orders by a value of each unit: a curriculum, the stair and saw orders, and length grouping.

Stair and saw (STR and SAW in Dai et al., "Demystifying Data Organization for Enhanced LLM
Training", arXiv:2605.30334) keep the trend of a curriculum but return to easier units around the
borders of a few sections. The paper has scores from elsewhere; so does `ScoreOrder(scores=...)`.
Without them a unit's score is the norm of its gradient in the epoch before, which is what the
feedback of a balancing order already delivers.

Length grouping is what transformers calls `group_by_length`: batches of sequences of about the same
length save padding, and it is the order that a learned one competes with where lengths differ.

Shapes: n units, b time steps of a call, M workers, D columns of a row, T time steps of an epoch.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from gradherd.comm.script import AllReduceSmall, Script
from gradherd.ordering.policy import EpochState, Policy, Rows, ShardedRows, Start
from gradherd.ordering.random import SeededRandom
from gradherd.ordering.shuffles import RowlessPolicy


class UnitValues:
    """One number for each unit of the data set, compared and printed by its contents.

    >>> UnitValues("scores", [3.0, 1.0]) == UnitValues("scores", torch.tensor([3.0, 1.0]))
    True
    """

    def __init__(self, name: str, values: Tensor | Iterable[float]) -> None:
        """Copy the values.

        Args:
            name: What they are, for messages.
            values: (n,) in the order of the data set; for units of several examples, one per unit.
        """
        given = values if isinstance(values, Tensor) else torch.tensor(list(values))
        self.name, self.values = name, given.detach().to("cpu", torch.float64).clone()
        if self.values.ndim != 1 or not self.values.isfinite().all():
            raise ValueError(
                f"{name} must be one finite number per unit, got {tuple(self.values.shape)} with "
                f"{int((~self.values.isfinite()).sum())} that are not finite"
            )

    def of(self, worker: int, sizes: tuple[int, ...]) -> Tensor:
        """Return the (n_i,) values of a worker's units: unit j of worker w is unit j M + w."""
        own = self.values[worker :: len(sizes)]
        if len(self.values) != sum(sizes) or len(own) != sizes[worker]:
            raise ValueError(
                f"{self.name} must be one number for each of the {sum(sizes)} units of the data "
                f"set, in its order, got {len(self.values)} for workers with {sizes} units"
            )
        return own

    def __repr__(self) -> str:
        # A digest: states of runs are compared by the repr of their policy, and a million numbers
        # in it would be as long as the data set.
        digest = hashlib.blake2b(self.values.numpy().tobytes(), digest_size=6).hexdigest()
        return f"<{len(self.values)} values {digest}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitValues) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


Arrange = Callable[[Tensor], Tensor]
"""(n,) units from easy to hard -> the same units in visiting order."""


def easy_to_hard(units: Tensor) -> Tensor:
    """Keep the order: a plain curriculum."""
    return units


def stair(units: Tensor, sections: int = 2, radius: float = 0.225, layers: int = 3) -> Tensor:
    """Fold the units around the borders of the sections (Stair Ordering, STR).

    Args:
        units: (n,) from easy to hard.
        sections: Sections of equal size; the defaults are those of the published configuration.
        radius: Half the width of the region around a border, as a share of n.
        layers: Times that the difficulty rises within such a region.

    >>> stair(torch.arange(8), layers=2)
    tensor([0, 1, 2, 4, 3, 5, 6, 7])
    """
    return _around_borders(units, sections, radius, layers, back_and_forth=False)


def saw(units: Tensor, sections: int = 3, radius: float = 0.1, layers: int = 3) -> Tensor:
    """Go up, down and up again around the borders of the sections (Saw Ordering, SAW).

    Arguments as in `stair`; every second layer of a region descends, so that difficulty never
    jumps.

    >>> saw(torch.arange(8), sections=2, radius=0.25, layers=2)
    tensor([0, 1, 2, 4, 5, 3, 6, 7])
    """
    return _around_borders(units, sections, radius, layers, back_and_forth=True)


def _around_borders(
    units: Tensor, sections: int, radius: float, layers: int, *, back_and_forth: bool
) -> Tensor:
    count = len(units)
    half, pieces, done = round(count * radius), [], 0
    for section in range(1, sections):
        border = round(count * section / sections)
        # Regions never overlap: with a large radius the second one begins where the first ends.
        begin, end = max(done, border - half), min(count, border + half)
        pieces.append(units[done:begin])
        for layer in range(layers):
            one = units[begin:end][layer::layers]
            pieces.append(one.flip(0) if back_and_forth and layer % 2 else one)
        done = max(done, end)
    return torch.cat([*pieces, units[done:]])


@dataclass
class ScoreState(EpochState):
    """The score of every unit visited."""

    scores: Tensor | None = None
    """(T, M) score of the unit visited at a step, NaN where unknown; None if scores are given."""

    others: ClassVar[tuple[str, ...]] = ("scores",)


@dataclass(frozen=True)
class ScoreOrder(Policy):
    """Sort each worker's units by a score, then arrange them.

    >>> ScoreOrder("curriculum", easy_to_hard)
    ScoreOrder(name='curriculum', scores=None)
    """

    name: str
    """Its name in studies and records."""
    # Not in the repr: saved states are compared by it, and it would contain an address.
    arrange: Arrange = field(repr=False)
    """Turns easy-to-hard into the order of visits."""
    scores: UnitValues | Tensor | None = None
    """(n,) difficulty of each unit of the data set (a loss, for instance); by default the norm of
    a unit's gradient in the epoch before."""

    def __post_init__(self) -> None:
        if self.scores is not None and not isinstance(self.scores, UnitValues):
            object.__setattr__(self, "scores", UnitValues("scores", self.scores))

    @property
    def needs_rows(self) -> bool:
        """Whether scores come from gradients."""
        return self.scores is None

    @property
    def start(self) -> Start | None:
        """Scores that are given order the first epoch, too."""
        return None if self.scores is None else "computed"

    def new_state(
        self, sizes: tuple[int, ...], epoch: int, previous: ScoreState | None
    ) -> ScoreState:
        """Start without scores: what an epoch does not see is not sorted."""
        state = ScoreState(sizes, epoch)
        if self.scores is None:
            shape = (state.length, len(sizes))
            state.scores = torch.full(shape, torch.nan, dtype=torch.float64)
        return state

    def observe(
        self, state: ScoreState, rows: Rows, seen: Tensor, random: SeededRandom
    ) -> Script[None]:
        """Note the norms of the (b, M, D) rows; arguments as in `Policy.observe`."""
        first = state.steps
        state.steps += len(seen)
        if state.scores is None or not len(seen):
            return
        if isinstance(rows, ShardedRows):
            squares = yield AllReduceSmall(_squares(rows.columns))  # with other ranks' columns
        else:
            squares = _squares(rows)
        # Where a gradient is not finite nothing is known, as where none came.
        known = seen & squares.cpu().isfinite()
        span = state.scores[first : state.steps]
        span.copy_(torch.where(known, squares.cpu().sqrt(), torch.nan))

    def reorder(
        self, orders: list[Tensor], state: ScoreState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Sort every worker's units; a unit without a score keeps its position."""
        if isinstance(self.scores, UnitValues):
            # By unit, not by position: equal scores must not depend on the epoch before.
            return [
                self.arrange(self.scores.of(worker, state.sizes).argsort(stable=True))
                for worker in range(len(orders))
            ]
        assert state.scores is not None
        return [
            self._sorted(order, state.scores[: len(order), worker])
            for worker, order in enumerate(orders)
        ]

    def _sorted(self, order: Tensor, scores: Tensor) -> Tensor:
        known = ~scores.isnan()
        following = order.clone()
        following[known] = self.arrange(order[known][scores[known].argsort(stable=True)])
        return following


def _squares(rows: Tensor) -> Tensor:
    """Return the (b, M) squared norms of (b, M, D) rows."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return norms.square()


@dataclass(frozen=True)
class Curriculum(ScoreOrder):
    """Easy to hard."""

    name: str = "curriculum"
    arrange: Arrange = field(default=easy_to_hard, repr=False)


@dataclass(frozen=True)
class Stair(ScoreOrder):
    """A curriculum in two sections, folded around their border."""

    name: str = "stair"
    arrange: Arrange = field(default=stair, repr=False)


@dataclass(frozen=True)
class Saw(ScoreOrder):
    """A curriculum in three sections that goes up, down and up around their borders."""

    name: str = "saw"
    arrange: Arrange = field(default=saw, repr=False)


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
class LengthGrouped(RowlessPolicy):
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
        self, orders: list[Tensor], state: EpochState, epoch: int, random: SeededRandom
    ) -> list[Tensor]:
        """Return the orders of `epoch`."""
        assert isinstance(self.lengths, UnitValues)
        return [
            group_by_length(permutation, self.lengths.of(worker, state.sizes), self.batch)
            for worker, permutation in enumerate(random.permutations(state.sizes, epoch))
        ]
