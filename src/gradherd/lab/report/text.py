"""Numbers and names as people read them."""

import math

MINUS = "\N{MINUS SIGN}"


def plain(text: object, most: int | None = None) -> str:
    """Return a string on one line without control characters, shortened if asked for.

    Names come from files: a terminal must not obey them, and a page must be able to hold them.

    >>> plain("a" + chr(27) + "[31m" + chr(10) + "b"), plain("a long name", 7)
    ('a�[31m b', 'a long…')
    """
    line = " ".join(str(text).split())
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )
    return shown if most is None or len(shown) <= most else shown[: most - 1].rstrip() + "…"


def decimals(value: float, digits: int = 3) -> int:
    """Return how many decimals show so many significant digits.

    >>> decimals(0.01234), decimals(97.123), decimals(0)
    (4, 1, 0)
    """
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def figure(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits.

    >>> figure(0.0123456), figure(97.2), figure(1234567.0), figure(1.5e-7)
    ('0.01235', '97.2', '1,234,567', '1.5e-7')
    """
    if value is None:
        return "none"
    if value and (abs(value) < 1e-4 or abs(value) >= 1e9):
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(power)}".replace("-", MINUS, 1 if value < 0 else 0)
    text = f"{value:,.{decimals(value, digits)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def fixed(value: float, places: int, *, sign: bool = False) -> str:
    """Return a number with so many decimals; `sign` also marks what is above zero.

    >>> fixed(0.52, 1), fixed(0.52, 1, sign=True), fixed(-0.01, 1, sign=True)
    ('0.5', '+0.5', '0.0')
    """
    if places > 8:
        return figure(value, 3) if value <= 0 or not sign else f"+{figure(value, 3)}"
    text = f"{value:,.{places}f}"
    if float(text.replace(",", "")) == 0:
        return text.lstrip("-")
    return text.replace("-", MINUS) if value < 0 or not sign else f"+{text}"


def with_std(mean: float | None, std: float | None, count: int) -> str:
    """Return mean ± std; one run has no spread to show.

    >>> with_std(0.01234, 0.00056, 3), with_std(97.25, 0.0, 1), with_std(None, None, 2)
    ('0.01234 ± 0.00056', '97.25', 'diverged')
    """
    if mean is None or std is None:
        return "diverged" if count else "none"
    if count < 2 or std == 0:
        return figure(mean) if count < 2 else f"{figure(mean)} ± 0"
    if abs(mean) < 1e-4 or abs(mean) >= 1e9:
        return f"{figure(mean)} ± {figure(std, 2)}"
    places = min(max(decimals(std, 2), decimals(mean, 3)), decimals(mean, 6))
    return f"{fixed(mean, places)} ± {fixed(std, places)}"


def p_value(p: float | None) -> str:
    """Return "p = 0.004" with two significant digits, never a zero.

    >>> p_value(0.00412), p_value(1e-9), p_value(0.5), p_value(1.0)
    ('p = 0.0041', 'p < 0.001', 'p = 0.50', 'p = 1.00')
    """
    if p is None:
        return "no p"
    return (
        "p < 0.001" if p < 0.001 else f"p = {p:.{min(decimals(p, 2), 4)}f}" if p < 1 else "p = 1.00"
    )


def in_bytes(count: float | None) -> str:
    """Return a size in bytes.

    >>> in_bytes(0), in_bytes(1536), in_bytes(2.5e9)
    ('0 B', '1.54 kB', '2.5 GB')
    """
    if count is None:
        return "none"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 999.5 or unit == "TB":
            return f"{figure(count, 3)} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def in_seconds(count: float | None) -> str:
    """Return a time.

    >>> in_seconds(0.01234), in_seconds(75.0), in_seconds(4000.0)
    ('0.0123 s', '75 s', '1.11 h')
    """
    if count is None:
        return "none"
    if count >= 3600:
        return f"{figure(count / 3600, 3)} h"
    return f"{figure(count / 60, 3)} min" if count >= 120 else f"{figure(count, 3)} s"


def listed(words: list[str]) -> str:
    """Join words as a sentence does.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def counted(count: int, noun: str) -> str:
    """Return "1 seed", "3 seeds".

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
