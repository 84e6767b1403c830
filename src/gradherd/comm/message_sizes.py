"""How many bytes messages take: formats, constants, and the sizes that follow from them.

Plain arithmetic without torch: `gradherd advise` predicts with the functions by which the exchange
decides what to send. `packing` writes the messages and explains their formats.
"""

from typing import Literal

DEFAULT_DENSITY = 0.01
"""Share of the coordinates that methods send unless they are told otherwise, everywhere."""

ValueFormat = Literal["fp32", "bf16", "int4", "int2", "int1"]
"""How values are sent (`Sparsify.values`)."""

VALUE_FORMATS: tuple[ValueFormat, ...] = ("fp32", "bf16", "int4", "int2", "int1")

VALUE_BITS: dict[ValueFormat, int] = {"int4": 4, "int2": 2, "int1": 1}
"""Bits of a value in the formats that have levels."""

GROUP = 256
"""Values that share their levels. One bit with a level for each 64 has less to round, yet ends far
worse where exchanges are frequent (`benchmarks/few_bytes.py`, every second step: 58.8, not 55)."""

LEVEL_BYTES = 2
"""A level of a group, as bf16."""

FLAG_BYTES = 4
"""Header of every worker and step: an int32 that says whether its values are finite."""

COUNT_BYTES = 4
"""A count in a header (of candidates, or of selected coordinates): int32."""

MAX_COORDINATES = 2**31 - 1
"""Elements that a model can have: more would not fit an index."""

ONE_ROUND_BYTES = 1 << 10
"""Values of up to this size are all-gathered: they fit into a packet for each other worker, and the
latency of a second round takes longer than the rest of it. A larger border would have fewer bits
send more bytes, where those of few bits take one round and those of more bits take two."""

EXDYNA_CAPACITY = 1.05
"""ExDyna: a worker offers at most this many times its fair share of k (default of `capacity`)."""


def low_bits(count: int, length: int) -> int:
    """Return how many low bits of `count` indices below `length` are written as they are.

    >>> low_bits(100, 6400), low_bits(100, 6399), low_bits(100, 100)
    (6, 5, 0)
    """
    return max(0, (length // count).bit_length() - 1)


def index_bytes(count: int, length: int) -> int:
    """Return how many bytes `pack_indices` writes for `count` indices below `length`.

    >>> [index_bytes(count, 65_536) for count in (0, 1, 100, 1000, 10_000, 65_536)]
    [0, 17, 146, 1003, 5798, 16384]
    """
    if not count:
        return 0
    low = low_bits(count, length)
    return low * -(-count // 8) - (-(count + (length - 1 >> low)) // 8)


def magnitude_bytes(count: int, compact: bool) -> int:
    """Return how many bytes the magnitudes of `count` offers take (`consensus.pack`).

    >>> magnitude_bytes(100, compact=False), magnitude_bytes(100, compact=True)
    (200, 104)
    """
    return 4 + count if compact else 2 * count


def level_bytes(count: int, bits: int) -> int:
    """Return how many bytes the levels of `count` values take.

    A group has its lowest and its highest level; with one bit it has the one level of all.
    """
    return (1 if bits == 1 else 2) * LEVEL_BYTES * -(-count // GROUP)


def value_bytes(count: int, bits: int) -> int:
    """Return how many bytes `encode_values` writes for `count` values.

    >>> value_bytes(1000, 1), value_bytes(1000, 2), value_bytes(1000, 4), value_bytes(0, 2)
    (133, 266, 516, 0)
    """
    return level_bytes(count, bits) + -(-bits * count // 8)


def slice_bytes(count: int, workers: int) -> int:
    """Return the bytes of a message of local steps: a header, and one bit for a slice of `count`.

    >>> slice_bytes(10_000_000, 4)
    332064
    """
    slice_length = -(-count // (workers * GROUP)) * GROUP
    return 16 + -(-value_bytes(slice_length, 1) // 8) * 8


def fits_one_round(size: float, ranks: int) -> bool:
    """Return whether messages of `size` bytes are all-gathered, and not summed in slices.

    >>> fits_one_round(1e6, ranks=2), fits_one_round(1024, ranks=8), fits_one_round(1025, ranks=8)
    (True, True, False)
    """
    # Every worker sends (and receives) (R - 1) times `size` in one round, (R - 1) / R times twice
    # `size` in two: with two workers one round costs nothing.
    return size <= ONE_ROUND_BYTES or ranks <= 2
