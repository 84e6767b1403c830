"""Text for people: names made safe to print, numbers formatted, words joined.

Every room of the lab and the command line format through here, so that a number looks the same in
a table, on a page and on the terminal, and one sanitiser guards all of them.
"""

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Collection

MINUS = "\N{MINUS SIGN}"


def printable(text: object, max_length: int | None = None) -> str:
    """Return text on one line without control characters, shortened if asked for.

    Names come from files and may hold anything: a terminal must not execute escape sequences, a
    message must stay one line, and a page must be able to hold the text. Markup is not escaped
    here: what renders the text (jinja2, SVG) does that by its own rules.

    Args:
        text: Anything; its `str` is used.
        max_length: Longest result; an ellipsis replaces what is cut off.

    >>> printable("a" + chr(27) + "[31m" + chr(10) + "b"), printable("a long name", 7)
    ('a�[31m b', 'a long…')
    """
    line = " ".join(str(text).split())
    safe = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)
    if max_length is None or len(safe) <= max_length:
        return safe
    return safe[: max_length - 1].rstrip() + "…"


def reason_of(error: BaseException) -> str:
    """Return what an error says to people, without the number of the operating system.

    >>> reason_of(OSError(28, "No space left on device", "out/record.json"))
    'No space left on device: out/record.json'
    """
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(filter(None, (error.strerror, str(error.filename or ""))))
    return str(error)


def one_line(error: BaseException) -> str:
    """Return the kind of an error and what it says, on one line."""
    return f"{type(error).__name__}: {' '.join(reason_of(error).split())}"


def decimals(value: float, digits: int = 3) -> int:
    """Return how many decimals show this many significant digits.

    Args:
        value: The number.
        digits: Significant digits to show; digits before the point are never cut off.

    >>> decimals(0.01234), decimals(97.123), decimals(0)
    (4, 1, 0)
    """
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def significant(value: float | None, digits: int = 4) -> str:
    """Return a number with this many significant digits, without trailing zeros.

    >>> significant(0.0123456), significant(97.2), significant(1234567.0), significant(1.5e-7)
    ('0.01235', '97.2', '1,234,567', '1.5e-7')
    """
    if value is None:
        return "none"
    # Beyond these bounds, counting zeros is harder than reading a power of ten.
    if value and (abs(value) < 1e-4 or abs(value) >= 1e9):
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        if "." in mantissa:
            mantissa = mantissa.rstrip("0").rstrip(".")
        # The exponent keeps its hyphen, so that 1.5e-7 can be pasted into code.
        return f"{mantissa}e{int(power)}".replace("-", MINUS, 1 if value < 0 else 0)
    text = f"{value:,.{decimals(value, digits)}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def fixed(value: float, places: int, *, sign: bool = False) -> str:
    """Return a number with this many decimals; `sign` also marks positive numbers.

    >>> fixed(0.52, 1), fixed(0.52, 1, sign=True), fixed(-0.01, 1, sign=True)
    ('0.5', '+0.5', '0.0')
    """
    if places > 8:  # Rows of zeros cannot be read.
        text = significant(value, 3)
        return text if value <= 0 or not sign else f"+{text}"
    text = f"{value:,.{places}f}"
    if float(text.replace(",", "")) == 0:  # "-0.0" and "+0.0" would claim a direction.
        return text.lstrip("-")
    return text.replace("-", MINUS) if value < 0 or not sign else f"+{text}"


def mean_and_std(mean: float | None, std: float | None, count: int) -> str:
    """Return "mean ± std", or the mean alone of a single run or of equal ones.

    >>> mean_and_std(0.01234, 0.00056, 3), mean_and_std(97.25, 0.0, 1), mean_and_std(None, None, 2)
    ('0.01234 ± 0.00056', '97.25', 'diverged')
    """
    if mean is None or std is None:
        return "diverged" if count else "none"
    # Bytes, for one, are the same with every seed.
    if count < 2 or std == 0:
        return significant(mean)
    if abs(mean) < 1e-4 or abs(mean) >= 1e9:
        return f"{significant(mean)} ± {significant(std, 2)}"
    # Two digits of the deviation, but at least three and at most six of the mean.
    places = min(max(decimals(std, 2), decimals(mean, 3)), decimals(mean, 6))
    return f"{fixed(mean, places)} ± {fixed(std, places)}"


def p_value(p: float | None) -> str:
    """Return "p = 0.004" with two significant digits, never as zero.

    >>> p_value(0.00412), p_value(1e-9), p_value(0.5), p_value(1.0)
    ('p = 0.0041', 'p < 0.001', 'p = 0.50', 'p = 1.00')
    """
    if p is None:
        return "no p"
    # A p value is never zero, and more digits would pretend that its assumptions hold exactly.
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.{min(decimals(p, 2), 4)}f}" if p < 1 else "p = 1.00"


def in_bytes(count: float | None) -> str:
    """Return a size in bytes with a decimal prefix.

    >>> in_bytes(0), in_bytes(1536), in_bytes(2.5e9)
    ('0 B', '1.54 kB', '2.5 GB')
    """
    if count is None:
        return "none"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # 999.5, not 1000: three digits would round 999.7 B to 1,000 B.
        if abs(count) < 999.5 or unit == "TB":
            return f"{significant(count, 3)} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def in_seconds(count: float | None) -> str:
    """Return a duration in seconds, minutes or hours.

    >>> in_seconds(0.01234), in_seconds(75.0), in_seconds(4000.0)
    ('0.0123 s', '75 s', '1.11 h')
    """
    if count is None:
        return "none"
    if count >= 3600:
        return f"{significant(count / 3600, 3)} h"
    return f"{significant(count / 60, 3)} min" if count >= 120 else f"{significant(count, 3)} s"


def listed(words: list[str], last: str = "and") -> str:
    """Join words with commas and "and", or another word before the last.

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"], "or")
    ('a', 'a and b', 'a, b or c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the right number.

    >>> counted(1, "seed"), counted(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def check_known(what: str, name: str, allowed: Collection[str]) -> None:
    """Raise ValueError if a name is not one of those allowed.

    >>> check_known("arm", "d-rr", ["d-rr, 4 workers", "d-rr, 8 workers"])
    Traceback (most recent call last):
        ...
    ValueError: unknown arm 'd-rr'; known are 'd-rr, 4 workers', 'd-rr, 8 workers'
    """
    if name not in allowed:
        # Names of arms contain commas; without quotes the list could not be read.
        quoted = any(", " in one for one in allowed)
        known = ", ".join(repr(one) if quoted else one for one in allowed)
        raise ValueError(f"unknown {what} {name!r}; known are {known}")


@functools.cache
def field_texts(cls: type) -> dict[str, str]:
    """Return the text below each field of a class and of those it inherits from, by field."""
    texts = {}
    for one in reversed(cls.__mro__[:-1]):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
        except OSError:  # Made at run time, or installed without its source: no text.
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(below.value).split())
    return texts
