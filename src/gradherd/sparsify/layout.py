"""Where each parameter's numbers lie in the flat vector that is sparsified.

Large parameters first, those too small to be worth it last, each in the order of the model: a
layout that does not depend on DDP's buckets, which change, nor on the world.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Layout:
    """Names of parameters, and where they begin.

    >>> layout = Layout.of([("bias", 2), ("weight", 6)], dense_below=4)
    >>> layout.names, layout.begins, layout.sparse, layout.size
    (('weight', 'bias'), (0, 6), 6, 8)
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    sparse: int
    """How many numbers may stay; the rest always travels."""

    @classmethod
    def of(cls, named: Iterable[tuple[str, int]], dense_below: int) -> "Layout":
        """Lay out parameters of (name, numbers)."""
        given = list(named)
        large = [(name, count) for name, count in given if count >= dense_below]
        small = [(name, count) for name, count in given if count < dense_below]
        names, counts = zip(*large, *small, strict=True)
        return cls(names, counts, sum(count for _, count in large))

    @property
    def begins(self) -> tuple[int, ...]:
        """Where each parameter begins."""
        return tuple(accumulate((0, *self.counts)))[:-1]

    @property
    def size(self) -> int:
        """Numbers in all."""
        return sum(self.counts)

    @property
    def layers(self) -> list[int]:
        """Lengths of the parameters that may stay."""
        spans = zip(self.begins, self.counts, strict=True)
        return [count for begin, count in spans if begin < self.sparse]

    def slices(self) -> dict[str, slice]:
        """Return where each parameter lies."""
        spans = zip(self.names, self.begins, self.counts, strict=True)
        return {name: slice(begin, begin + count) for name, begin, count in spans}
