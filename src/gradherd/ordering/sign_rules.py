"""Sign rules: plus or minus from an inner product, as pure functions on scalars.

Every rule sees `inner`, the product of the vector with the running sum before it, `square`, the
vector's squared norm, and `draw`, a uniform number in [-1, 1). What a rule carries from vector to
vector within an epoch is its `carry`, a few numbers that `start` creates and `decide` returns
updated.

Scalars only, because ranks that hold shards of the columns can sum these and nothing else; and pure
functions, because every rank must decide the same from the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gradherd.comm.checks import check_in, check_whole

Floats = NDArray[np.float64]
Carry: TypeAlias = Sequence[float] | Floats


class SignRule(ABC):
    """Decides the signs of vectors, one after the other. Subclasses are frozen dataclasses."""

    randomized: ClassVar[bool] = False
    """Whether `draw` matters; if not, nothing is drawn."""

    def start(self, total: int, epoch: int) -> list[float]:
        """Return the carry with which an epoch of `total` vectors begins; epochs count from 0."""
        return []

    @abstractmethod
    def decide(self, inner: float, square: float, draw: float, carry: Carry) -> tuple[bool, Carry]:
        """Say whether a vector is added, and return the new carry.

        Args:
            inner: Its product with the running sum before it.
            square: Its squared norm; arbitrary unless the rule is randomized.
            draw: A uniform number in [-1, 1).
            carry: What the vectors before have left; not modified.
        """


@dataclass(frozen=True)
class Greedy(SignRule):
    """Take the sign that makes the running sum shorter; a tie goes to plus.

    The rule of all published experiments with GraB and CD-GraB. It bounds the sum only by
    the root of the summed squares in the worst case, and does far better in practice.

    >>> [Greedy().decide(inner, 1.0, 0.0, [])[0] for inner in (-2.0, 0.0, 3.0)]
    [True, True, False]
    """

    def decide(self, inner: float, square: float, draw: float, carry: Carry) -> tuple[bool, Carry]:
        """Plus iff <S, v> <= 0, which is |S + v| <= |S - v|."""
        # A tie goes to plus, as in GraB and CD-GraB. grab-sampler sends it to minus, which gives
        # the mirror image of the order.
        return inner <= 0, carry


@dataclass(frozen=True)
class Walk(SignRule):
    """Self-balancing walk: plus with probability (1 - <S, v> / a) / 2, a = c max |v|^2.

    Alweiss, Liu, Sawhney, "Discrepancy minimization via a self-balancing walk" (2021): for
    |v| <= 1 and c = 30 ln(D P / delta) every prefix stays within O(log(D P / delta)) in the
    maximum norm with probability 1 - delta. Vectors need not be scaled beforehand: the largest
    squared norm seen so far in the epoch sets the unit.
    """

    # The constant of the published samplers. They compare with it without any scaling, so how
    # random their signs are depends on the size of the gradients.
    c: float = 30.0
    """Threshold in units of the largest squared norm. Smaller is greedier."""

    randomized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_in("(0, inf)", c=self.c)

    def start(self, total: int, epoch: int) -> list[float]:
        """Carry the largest squared norm."""
        return [0.0]

    def decide(self, inner: float, square: float, draw: float, carry: Carry) -> tuple[bool, Carry]:
        """Compare with a random threshold in [-a, a)."""
        # Including this vector: the threshold must not be zero for the first one.
        largest = max(carry[0], square)
        return inner <= draw * self.c * largest, [largest]


@dataclass(frozen=True)
class Kernel(SignRule):
    """Kernel-halving signs (KH-SGD): a threshold that adapts to the vectors seen.

    "Low-Rank Thinning" (arXiv:2502.12063). For the i-th vector v of epoch e (both from 1), of
    `total` vectors and `epochs` epochs, with b = |v| and penalty
    l = ln(4/delta (1 + ln epochs) (1 + ln total) i e), and q, which starts every epoch at 0:
    r^2 = q l / b^2; if r^2 <= 1: a = b^2 and q = 2 b^2, else a = r b^2 and
    q += 2 b^2 max(0, l + 1/2 - r) / l. Plus iff <S, v> <= U a, U uniform in [-1, 1).
    """

    epochs: int = 100
    """How many epochs the run is planned for; enters by its double logarithm only."""
    # That of the authors' experiment.
    delta: float = 0.5
    """Probability with which the guarantee may fail."""

    randomized: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs, 1)
        check_in("(0, 1)", delta=self.delta)

    def start(self, total: int, epoch: int) -> list[float]:
        """Carry q, the number of vectors seen, and the constant factor of the penalty."""
        factor = 4 / self.delta * (1 + math.log(self.epochs)) * (1 + math.log(max(1, total)))
        return [0.0, 0.0, factor * (epoch + 1)]  # The formula counts epochs from 1.

    def decide(self, inner: float, square: float, draw: float, carry: Carry) -> tuple[bool, Carry]:
        """Compare with a random threshold in [-a, a)."""
        if square == 0:
            # Nothing changes, whatever the sign. The published code divides 0 by 0.
            return draw >= 0, carry
        q, seen, factor = map(float, carry)
        penalty = math.log(factor * (seen + 1))  # above 1, since the factor is above 4
        r = math.sqrt(q * penalty / square)
        if r <= 1:
            return inner <= draw * square, [2 * square, seen + 1, factor]
        grown = q + 2 * square * max(0.0, penalty + 0.5 - r) / penalty
        return inner <= draw * (r * square), [grown, seen + 1, factor]
