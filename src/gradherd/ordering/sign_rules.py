"""Sign rules: plus or minus from an inner product, as pure functions on scalars.

Every rule sees `inner`, the product of the vector with the running sum before it, `square`, the
vector's squared norm, and `draw`, a uniform number in [-1, 1). All three, and the result, are
arrays over W independent streams. What a rule carries from vector to vector within an epoch is its
`carry`, a (C, W) float64 array that `start` creates and `decide` returns updated.

Scalars only, because ranks that hold shards of the columns can sum these and nothing else; and pure
functions, because every rank must decide the same from the same bits.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from gradherd.comm.checks import check_in, check_whole

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class SignRule(ABC):
    """Decides the sign of one vector per stream. Subclasses are frozen dataclasses."""

    randomized: ClassVar[bool] = False
    """Whether `draw` matters; if not, nothing is drawn."""

    def start(self, streams: int, total: int, epoch: int) -> Floats:
        """Return the carry with which an epoch begins; nothing is carried by default.

        Args:
            streams: W, the number of independent streams.
            total: Vectors of a stream in the epoch.
            epoch: Epoch, from 0.

        Returns:
            (C, W) float64; C may be 0.
        """
        return np.empty((0, streams))

    @abstractmethod
    def decide(
        self, inner: Floats, square: Floats, draw: Floats, carry: Floats
    ) -> tuple[Bools, Floats]:
        """Decide one sign per stream.

        Args:
            inner: (W,) products of the vectors with the running sums before them.
            square: (W,) squared norms; arbitrary unless the rule is randomized.
            draw: (W,) uniform numbers in [-1, 1).
            carry: (C, W); not modified.

        Returns:
            (W,) booleans, True for plus, and the new (C, W) carry.
        """


@dataclass(frozen=True)
class Greedy(SignRule):
    """Take the sign that makes the running sum shorter; a tie goes to plus.

    The rule of all published experiments with GraB and CD-GraB. It bounds the sum only by
    the root of the summed squares in the worst case, and does far better in practice.

    >>> plus, _ = Greedy().decide(np.array([-2.0, 0.0, 3.0]), np.ones(3), np.zeros(3), np.empty(0))
    >>> plus.tolist()
    [True, True, False]
    """

    def decide(
        self, inner: Floats, square: Floats, draw: Floats, carry: Floats
    ) -> tuple[Bools, Floats]:
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

    def start(self, streams: int, total: int, epoch: int) -> Floats:
        """Carry the largest squared norm."""
        return np.zeros((1, streams))

    def decide(
        self, inner: Floats, square: Floats, draw: Floats, carry: Floats
    ) -> tuple[Bools, Floats]:
        """Compare with a random threshold in [-a, a)."""
        # Including this vector: the threshold must not be zero for the first one.
        largest = np.maximum(carry[0], square)
        return inner <= draw * self.c * largest, largest[np.newaxis]


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

    def start(self, streams: int, total: int, epoch: int) -> Floats:
        """Carry q, the number of vectors seen, and the constant factor of the penalty."""
        factor = 4 / self.delta * (1 + math.log(self.epochs)) * (1 + math.log(max(1, total)))
        carry = np.zeros((3, streams))
        carry[2] = factor * (epoch + 1)  # The formula counts epochs from 1.
        return carry

    def decide(
        self, inner: Floats, square: Floats, draw: Floats, carry: Floats
    ) -> tuple[Bools, Floats]:
        """Compare with a random threshold in [-a, a)."""
        q, seen, factor = carry
        # A zero vector changes nothing whatever its sign: keep the carry, and avoid the 0/0 of the
        # published code.
        real = square > 0
        square = np.where(real, square, 1.0)
        penalty = np.log(factor * (seen + 1))  # above 1, since the factor is above 4
        r2 = q * penalty / square
        r = np.sqrt(r2)
        small = r2 <= 1
        threshold = np.where(small, square, r * square)
        grown = q + 2 * square * np.maximum(0, penalty + 0.5 - r) / penalty
        after = np.stack([np.where(small, 2 * square, grown), seen + 1, factor])
        return inner <= draw * threshold, np.where(real, after, carry)
