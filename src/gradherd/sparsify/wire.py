"""Constants of what is sent, read by the exchange itself and by `gradherd advise`.

Sizes are in bytes. Nothing in here needs a tensor.
"""

FLAG_BYTES = 4
"""Header of every worker and step: an int32 that says whether its values are finite."""

COUNT_BYTES = 4
"""A count in a header (of candidates, or of selected coordinates): int32."""

INDEX_BYTES = 4
"""A coordinate as int32."""

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


def pages_of(span: tuple[int, int]) -> range:
    """Return the numbers of the pages that the coordinates [first, end) lie in.

    >>> pages_of((0, 65_536)), pages_of((65_535, 65_537)), pages_of((7, 7))
    (range(0, 1), range(0, 2), range(0, 1))
    """
    first, end = span
    return range(first >> PAGE_BITS, (max(end - 1, first) >> PAGE_BITS) + 1)
