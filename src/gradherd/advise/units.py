"""Numbers with units, as people write them: 1Gb, 50us, 7B."""

import math
import re

_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def rate(text: str) -> float:
    """Read a link speed, in bits per second; with a capital B in bytes.

    >>> rate("1G") == rate("1Gb") == rate("1 Gbit/s") == rate("1Gbps") == rate("1e9")
    True
    >>> rate("125MB/s")
    1000000000.0
    """
    found = re.fullmatch(
        rf"{_NUMBER}\s*([kmgtp]?)(bits?|bps|b)?(?:/s|ps)?", text.strip(), re.IGNORECASE
    )
    if found is None:
        raise ValueError(f"{text!r} is no link speed: write 1G, 100M, 2.5e9 or 50GB/s (bytes)")
    number, prefix, unit = found.groups()
    bits = 8 if (unit or "").startswith("B") and unit.lower() in ("b", "bps") else 1
    return _positive(float(number) * _PREFIXES[prefix.lower()] * bits, text)


def seconds(text: str, *, zero: bool = True) -> float:
    """Read a time, in seconds unless it says otherwise.

    >>> seconds("50us"), seconds("80 ms"), seconds("0.1")
    (5e-05, 0.08, 0.1)
    """
    found = re.fullmatch(rf"{_NUMBER}\s*(\w*)", text.strip(), re.IGNORECASE)
    if found is None or found[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is no time: write 80ms, 50us or 0.1 (seconds)")
    value = float(f"{float(found[1]) * _SECONDS[found[2].lower()]:.12g}")
    if zero and value == 0:
        return 0.0
    return _positive(value, text)


def count(text: str) -> float:
    """Read how many there are of something.

    >>> count("7B") == count("7e9"), count("25M")
    (True, 25000000.0)
    """
    found = re.fullmatch(rf"{_NUMBER}\s*([kmbgt]?)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is no number of parameters: write 25M, 7B or 7e9")
    return _positive(float(found[1]) * _COUNTS[found[2].lower()], text)


def _positive(value: float, text: str) -> float:
    if not 0 < value < math.inf:
        raise ValueError(f"{text!r} must be more than 0 and finite")
    return value


def show_rate(bits: float) -> str:
    """Write a link speed.

    >>> show_rate(1e9), show_rate(2.4e12), show_rate(3.1416e7)
    ('1 Gb/s', '2.4 Tb/s', '31.4 Mb/s')
    """
    return f"{_scaled(bits)}b/s"


def show_bytes(size: float) -> str:
    """Write a size.

    >>> show_bytes(150e6), show_bytes(380_906), show_bytes(12)
    ('150 MB', '381 kB', '12 B')
    """
    return f"{_scaled(size)}B"


def show_seconds(value: float) -> str:
    """Write a time.

    >>> show_seconds(1.4159), show_seconds(0.02), show_seconds(0), show_seconds(7321)
    ('1.42 s', '20 ms', '0 s', '7,321 s')
    """
    if value >= 1000:
        return f"{value:,.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}" if value else "0 s"
    raise AssertionError


def _scaled(value: float) -> str:
    if not math.isfinite(value):
        return "unlimited "
    for prefix, size in reversed(_PREFIXES.items()):
        if value >= size:
            return f"{value / size:.3g} {prefix.upper() if size > 1e3 else prefix}"
    return f"{value:.3g} "
