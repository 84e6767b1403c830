"""How many bytes messages take: formats, constants, and the sizes that follow from them.

Plain arithmetic without torch: `gradherd advise` predicts with the functions by which the exchange
decides what to send. `packing` writes the messages and explains their formats.
"""

from typing import Literal

DEFAULT_DENSITY = 0.01
"""Share of the coordinates that methods send unless they are told otherwise, everywhere."""

ValueFormat = Literal["fp32", "bf16", "int8", "int4", "int2", "int1"]
"""How values are sent (`Sparsify.values`)."""

VALUE_FORMATS: tuple[ValueFormat, ...] = ("fp32", "bf16", "int8", "int4", "int2", "int1")

VALUE_BITS: dict[ValueFormat, int] = {"int8": 8, "int4": 4, "int2": 2, "int1": 1}
"""Bits of a value in the formats that have levels."""

IndexBits = Literal[12, 16, 32]

CHUNK_BITS = 12
"""A chunk is 2**12 coordinates, so that an offset has 12 bits."""

GROUP = 256
"""Values that share their levels. One bit with a level for each 64 has less to round, yet ends far
worse where exchanges are frequent (`benchmarks/few_bytes.py`, every second step: 58.8, not 55)."""

LEVEL_BYTES = 2
"""A level of a group, as bf16."""

FLAG_BYTES = 4
"""Header of every worker and step: an int32 that says whether its values are finite."""

COUNT_BYTES = 4
"""A count in a header (of candidates, or of selected coordinates): int32."""

INDEX_BYTES = 4
"""A coordinate as int32."""

MAX_COORDINATES = 2**31 - 1
"""Elements that a model can have: more would not fit an index."""

OFFSET_BYTES = 2
"""A coordinate as its offset in a page. Cheaper than an index as long as pages are not too many:
each page also costs a count."""

PAGE_BITS = 16
"""A page is 2**16 coordinates, so that an offset has 16 bits."""

PAGE = 1 << PAGE_BITS
"""Coordinates of a page."""

MAGNITUDE_BYTES = 2
"""A magnitude in an offer (consensus): the leading 16 bits of its float32, without the sign."""

ONE_ROUND_BYTES = 1 << 10
"""Values of up to this size are all-gathered: one round with more bytes then beats two rounds
(all-to-all, all-gather) with fewer."""

ONE_ROUND_SHARE = 1.25e-3
"""They are all-gathered, too, while that adds at most this share of what a dense exchange sends."""

EXDYNA_CAPACITY = 1.05
"""ExDyna: a worker offers at most this many times its fair share of k (default of `capacity`)."""


def pages_of(span: tuple[int, int], bits: int = PAGE_BITS) -> range:
    """Return the numbers of the pages of 2**bits that the coordinates [first, end) lie in.

    An empty span has one page, so that there is always a first one to count from.

    >>> pages_of((0, 65_536)), pages_of((65_535, 65_537)), pages_of((7, 7))
    (range(0, 1), range(0, 2), range(0, 1))
    """
    first, end = span
    return range(first >> bits, (max(end - 1, first) >> bits) + 1)


def index_bytes(count: int, span: tuple[int, int], bits: IndexBits) -> int:
    """Return how many bytes `pack_indices` writes.

    >>> [index_bytes(100, (0, 65_536), bits) for bits in (12, 16, 32)]
    [182, 200, 400]
    """
    if not count or bits == 32:
        return 4 * count
    pages = len(pages_of(span, bits))
    # A chunk's count fits 16 bits; that of a page may be one more than fits, so it takes 32.
    counts = (2 if bits == CHUNK_BITS else 4) * pages if pages > 1 else 0
    return counts + -(-bits * count // 8)


def level_bytes(count: int, bits: int) -> int:
    """Return how many bytes the levels of `count` values take.

    A group has its lowest and its highest level; with one bit it has the one level of all.
    """
    return (1 if bits == 1 else 2) * LEVEL_BYTES * -(-count // GROUP)


def value_bytes(count: int, bits: int) -> int:
    """Return how many bytes `encode_values` writes for `count` values.

    >>> value_bytes(1000, 1), value_bytes(1000, 2), value_bytes(1000, 8), value_bytes(0, 2)
    (133, 266, 1016, 0)
    """
    return level_bytes(count, bits) + -(-bits * count // 8)
