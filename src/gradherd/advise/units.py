"""Format numbers with units, 1 Gb/s, 50 us, 150 MB, and read those of a command line: 1G, 50us."""

import math
import re

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
_SLOWEST_LINK = 1e4
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_MOST_PARAMETERS = 1e15  # a thousand times the largest model; more is a slip


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
    if not math.isfinite(bits):
        return "unlimited b/s"
    bits = float(f"{bits:.3g}")  # before a prefix is chosen: 999.6 kb/s are 1 Mb/s
    # Below one bit there is no prefix either.
    size, prefix = max((size, prefix) for prefix, size in _PREFIXES.items() if size <= max(bits, 1))
    return f"{bits / size:.3g} {prefix.upper() if size > 1e3 else prefix}b/s"


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


def parse_rate(text: str) -> float:
    """Parse a link speed in bits per second; a capital B stands for bytes.

    >>> {parse_rate(text) for text in ("1G", "1Gb", "1 Gbit/s", "1Gbps", "1e9", "125MB/s")}
    {1000000000.0}
    """
    match = re.fullmatch(
        rf"{_NUMBER}\s*([kmgtp]?)(bits?|bps|b)?(?:/s|ps)?", text.strip(), re.IGNORECASE
    )
    if match is None:
        raise ValueError(f"{text!r} is not a link speed: write 1G, 100M, 2.5e9 or 50GB/s (bytes)")
    number, prefix, unit = match.groups()
    # "b" is a bit and "B" a byte, as network vendors write them; prefixes may be in either case.
    bits = 8 if (unit or "").startswith("B") and unit.lower() in ("b", "bps") else 1
    rate = _positive(float(number) * _PREFIXES[prefix.lower()] * bits, text)
    if rate < _SLOWEST_LINK:  # Nobody trains over it: a unit was forgotten.
        raise ValueError(f"{text!r} is {rate:g} bits per second: give a unit, such as {number}G")
    return rate


def parse_seconds(text: str) -> float:
    """Parse a time; without a unit it is in seconds.

    >>> parse_seconds("50us"), parse_seconds("80 ms"), parse_seconds("0.1")
    (5e-05, 0.08, 0.1)
    """
    value = _scaled_number(text, _SECONDS, "a time: write 80ms, 50us or 0.1 (seconds)")
    return _positive(value, text) if value else 0.0


def parse_count(text: str) -> float:
    """Parse a number of parameters.

    >>> parse_count("7B") == parse_count("7e9"), parse_count("25M")
    (True, 25000000.0)
    """
    value = _scaled_number(text, _COUNTS, "a number of parameters: write 25M, 7B or 7e9")
    if _positive(value, text) > _MOST_PARAMETERS:
        raise ValueError(f"{text!r} must be at most {_MOST_PARAMETERS:g} parameters")
    return value


def _scaled_number(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*(\w*)", text.strip(), re.IGNORECASE)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {what}")
    # Rounded, so that 50us is 5e-05 and not 4.9999999999999996e-05.
    return float(f"{float(match[1]) * units[match[2].lower()]:.15g}")


def _positive(value: float, text: str) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} must be above 0 and finite")
    return value
