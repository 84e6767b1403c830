"""Format numbers with units: 1 Gb/s, 50 us, 150 MB."""

import math

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


def format_digits(value: float, digits: int = 3) -> str:
    """Format a number with so many digits that mean something, and no exponent.

    >>> format_digits(138.2, 2), format_digits(1999.6), format_digits(0.01234)
    ('140', '2,000', '0.0123')
    """
    return f"{float(f'{value:.{digits}g}'):,.15g}"


def format_rate(bits: float) -> str:
    """Format a link speed in bits per second.

    >>> format_rate(1e9), format_rate(2.4e12), format_rate(3.1416e7)
    ('1 Gb/s', '2.4 Tb/s', '31.4 Mb/s')
    """
    return f"{_scaled(bits)}b/s"


def format_bytes(size: float) -> str:
    """Format a size in bytes.

    >>> format_bytes(150e6), format_bytes(380_906), format_bytes(12)
    ('150 MB', '381 kB', '12 B')
    """
    return f"{_scaled(size)}B"


def format_seconds(value: float) -> str:
    """Format a time in seconds.

    >>> format_seconds(1.4159), format_seconds(0.02), format_seconds(0), format_seconds(7321)
    ('1.42 s', '20 ms', '0 s', '7,321 s')
    """
    if value >= 999.5:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if float(f"{value * scale:.3g}") >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}" if value else "0 s"
    raise AssertionError


def _scaled(value: float) -> str:
    if not math.isfinite(value):
        return "unlimited "
    value = float(f"{value:.3g}")  # before a prefix is chosen: 999.6 kB are 1 MB
    for prefix, size in reversed(_PREFIXES.items()):
        if value >= size:
            return f"{value / size:.3g} {prefix.upper() if size > 1e3 else prefix}"
    return f"{value:.3g} "
