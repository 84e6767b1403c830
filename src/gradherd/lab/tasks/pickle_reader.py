"""Pickles of plain values and arrays of bytes, read without unpickling.

A pickle is a program, and Python's unpickler runs it: even with nothing to import it can ask for
more memory than there is, or hand numpy a state that numpy trusts. Here the few instructions that
plain values need are carried out one by one, and every other one is refused.
"""

import io
import math
import pickletools
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gradherd.lab.tasks.safe_readers import DamagedData, error_line

_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "FLOAT"}
_BYTES = {"STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
# numpy 1 and 2 keep it in different modules, and files tell the one they were made with.
_REBUILD = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")


class _Mark:
    """Where a list, tuple or dict begins on the stack."""


class _Name(str):
    """What a pickle would import."""


class _Built:
    """An array or a dtype that a pickle builds: what it was made from, and its state."""

    def __init__(self, kind: str, given: tuple[Any, ...]) -> None:
        self.kind, self.given = kind, given
        self.state: tuple[Any, ...] = ()


def parse_plain_pickle(content: bytes, path: Path) -> dict[bytes, Any]:
    """Return a pickled dict of plain values and arrays of bytes; nothing of it is executed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about strings of protocol 0
            value = _interpret(content)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not a dict")
        return {key: _array(one) if isinstance(one, _Built) else one for key, one in value.items()}
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise DamagedData(
            f"{path} is no plain pickle: {error_line(error)}; fetch it again"
        ) from None


def _interpret(content: bytes) -> Any:
    """Carry out a pickle's instructions, as far as they make plain values."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for code, argument, _ in pickletools.genops(io.BytesIO(content)):
        name = code.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            (value,) = stack
            return value
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_global(argument, stack))
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "REDUCE":
            given, what = stack.pop(), stack.pop()
            stack.append(_build(what, given))
        elif name == "BUILD":
            state, made = stack.pop(), stack[-1]
            if not isinstance(made, _Built) or not isinstance(state, tuple):
                raise ValueError("it builds what is no array")
            made.state = state
        elif not _collect(name, stack):
            stack.append(_plain(name, argument))
    raise ValueError("it has no end")


def _plain(name: str, argument: Any) -> Any:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _NUMBERS:
        return argument
    if name in _BYTES:
        return argument if isinstance(argument, bytes) else argument.encode("latin1")
    if name in _TEXT:
        return argument.encode("utf-8", "surrogatepass")
    if name in ("EMPTY_LIST", "EMPTY_DICT"):
        return [] if name == "EMPTY_LIST" else {}
    raise ValueError(f"it asks for {name}, which is not allowed")


def _collect(name: str, stack: list[Any]) -> bool:
    """Put what lies on top of the stack into a list, a tuple or a dict, if this asks for it."""
    if name in _TUPLES:
        size = _TUPLES[name]
        if size > len(stack):
            raise ValueError("it takes more than it has")
        stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
    elif name in ("TUPLE", "LIST", "DICT"):
        items = _since_mark(stack)
        stack.append(
            tuple(items) if name == "TUPLE" else items if name == "LIST" else _set({}, items)
        )
    elif name in ("APPEND", "APPENDS"):
        items = _since_mark(stack) if name == "APPENDS" else [stack.pop()]
        if not isinstance(stack[-1], list):
            raise ValueError("it appends to what is no list")
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _since_mark(stack) if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
        _set(stack[-1], items)
    else:
        return False
    return True


def _since_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(top := stack.pop(), _Mark):
        items.append(top)
    return items[::-1]


def _set(found: Any, items: list[Any]) -> dict[bytes, Any]:
    if not isinstance(found, dict) or len(items) % 2:
        raise ValueError("it sets items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # No tuples: the hash of one that is nested and shared takes forever.
        if not isinstance(key, bytes | int | float | None):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        found[key if isinstance(key, bytes) else str(key).encode()] = value
    return found


def _global(argument: Any, stack: list[Any]) -> _Name:
    if argument is None:
        name, module = stack.pop(), stack.pop()
        if not isinstance(name, bytes) or not isinstance(module, bytes):
            raise ValueError("it imports what has no name")
        argument = f"{module.decode()} {name.decode()}"
    if argument not in (_ARRAY, _DTYPE, *_REBUILD):
        raise ValueError(f"it asks for {str(argument).replace(' ', '.')!r}, which is not allowed")
    return _Name(argument)


def _build(what: Any, given: Any) -> _Built:
    """Note down an array or a dtype: what makes one is never called."""
    if not isinstance(what, _Name) or what == _ARRAY or not isinstance(given, tuple):
        raise ValueError("it calls what is not allowed")
    return _Built(_DTYPE if what == _DTYPE else _ARRAY, given)


def _array(made: _Built) -> Any:
    """Return an array of bytes from the state that numpy gave it: version, shape, dtype, ..."""
    _, shape, dtype, fortran, raw = made.state
    if not isinstance(dtype, _Built) or dtype.kind != _DTYPE or dtype.given[0] not in (b"u1", b"B"):
        raise ValueError("its arrays do not hold bytes")
    if not isinstance(shape, tuple) or not isinstance(raw, bytes):
        raise ValueError("its arrays have no shape or no content")
    if not all(type(size) is int and size >= 0 for size in shape) or len(raw) != math.prod(shape):
        raise ValueError(f"it has {len(raw):,} bytes for an array of another size")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")
