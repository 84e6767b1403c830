"""A reader for pickles of plain values and uint8 arrays that never unpickles.

The Python edition of CIFAR-10 is pickled. A pickle is a program, and Python's unpickler runs it:
even with every import forbidden it can request more memory than there is, or hand numpy a state
that numpy trusts. Here the few opcodes that plain values need are interpreted one by one, and any
other opcode is refused.
"""

import io
import math
import pickletools
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from gradherd.lab.tasks.safe_readers import DamagedData, error_line

# Opcodes by what they put on the stack; anything else is refused.
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "BINFLOAT", "FLOAT"}
_BYTES = {"STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_TEXT = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ARRAY, _DTYPE = "numpy ndarray", "numpy dtype"
# numpy 1 and 2 keep it in different modules, and a file names the one that wrote it.
_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")


class _Mark:
    """Marks on the stack where a list, tuple or dict begins."""


class _Global(str):
    """The name of an object that the pickle would import."""


class _NumpyObject:
    """An array or dtype that the pickle describes: constructor arguments and state."""

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: tuple[Any, ...] = ()


def parse_plain_pickle(content: bytes, path: Path) -> dict[bytes, Any]:
    """Return a pickled dict of plain values and uint8 arrays; nothing in it is executed.

    Args:
        content: The pickle, of any protocol.
        path: What an error message names.

    Raises:
        DamagedData: It is damaged, or holds anything else.

    >>> import pickle
    >>> parse_plain_pickle(pickle.dumps({b"labels": [3, 1]}), Path("batch"))
    {b'labels': [3, 1]}
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings of protocol 0
            value = _interpret(content)
        if not isinstance(value, dict):
            raise ValueError(f"it holds a {type(value).__name__}, not a dict")
        return {
            key: _array(item) if isinstance(item, _NumpyObject) else item
            for key, item in value.items()
        }
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise DamagedData(
            f"{path} is not a plain pickle: {error_line(error)}; fetch it again"
        ) from None


def _interpret(content: bytes) -> Any:
    """Interpret a pickle's opcodes as far as they build plain values."""
    stack: list[Any] = []
    # A dict, not a list: a hostile pickle can name any memo index.
    memo: dict[Any, Any] = {}
    # genops only decodes: it neither imports nor calls, and checks lengths against the data.
    for opcode, argument, _ in pickletools.genops(io.BytesIO(content)):
        name = opcode.name
        # Neither changes the stack.
        if name in ("PROTO", "FRAME"):
            continue
        if name == "STOP":
            # Exactly one value: anything else is a broken program.
            (value,) = stack
            return value
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            # MEMOIZE numbers entries by itself; the older opcodes name an index.
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_global(argument, stack))
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "REDUCE":
            args, function = stack.pop(), stack.pop()
            stack.append(_numpy_object(function, args))
        elif name == "BUILD":
            state, target = stack.pop(), stack[-1]
            if not isinstance(target, _NumpyObject) or not isinstance(state, tuple):
                raise ValueError("it sets the state of something that is not an array")
            target.state = state
        elif not _collect(name, stack):
            stack.append(_plain(name, argument))
    raise ValueError("it has no end")


def _plain(name: str, argument: Any) -> Any:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _NUMBERS:
        return argument
    if name in _BYTES:
        # Python 2 wrote bytes as str, which pickletools decodes as Latin-1: encoding restores them.
        return argument if isinstance(argument, bytes) else argument.encode("latin1")
    if name in _TEXT:
        # Keys are compared as bytes, whichever Python wrote the file.
        return argument.encode("utf-8", "surrogatepass")
    if name in ("EMPTY_LIST", "EMPTY_DICT"):
        return [] if name == "EMPTY_LIST" else {}
    raise ValueError(f"it contains {name}, which is not allowed")


def _collect(name: str, stack: list[Any]) -> bool:
    """Move the top of the stack into a list, tuple or dict; return False for other opcodes."""
    if name in _TUPLES:
        size = _TUPLES[name]
        # A negative slice would wrap around to the bottom of the stack.
        if size > len(stack):
            raise ValueError("it takes more values than it has")
        stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
    elif name in ("TUPLE", "LIST", "DICT"):
        items = _pop_to_mark(stack)
        stack.append(
            tuple(items) if name == "TUPLE" else items if name == "LIST" else _set_items({}, items)
        )
    elif name in ("APPEND", "APPENDS"):
        items = _pop_to_mark(stack) if name == "APPENDS" else [stack.pop()]
        if not isinstance(stack[-1], list):
            raise ValueError("it appends to something that is not a list")
        stack[-1].extend(items)
    elif name in ("SETITEM", "SETITEMS"):
        items = _pop_to_mark(stack) if name == "SETITEMS" else [stack.pop(), stack.pop()][::-1]
        _set_items(stack[-1], items)
    else:
        return False
    return True


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    items: list[Any] = []
    while not isinstance(top := stack.pop(), _Mark):
        items.append(top)
    return items[::-1]


def _set_items(target: Any, items: list[Any]) -> dict[bytes, Any]:
    if not isinstance(target, dict) or len(items) % 2:
        raise ValueError("it sets items of something that is not a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # No tuples: hashing a nested tuple that shares its parts takes exponential time.
        if not isinstance(key, bytes | int | float | None):
            raise ValueError(f"it has a {type(key).__name__} for a key")
        target[key if isinstance(key, bytes) else str(key).encode()] = value
    return target


def _global(argument: Any, stack: list[Any]) -> _Global:
    # STACK_GLOBAL takes module and name from the stack, GLOBAL from the opcode.
    if argument is None:
        name, module = stack.pop(), stack.pop()
        if not isinstance(name, bytes) or not isinstance(module, bytes):
            raise ValueError("it imports something that has no name")
        argument = f"{module.decode()} {name.decode()}"
    if argument not in (_ARRAY, _DTYPE, *_RECONSTRUCT):
        raise ValueError(f"it imports {str(argument).replace(' ', '.')!r}, which is not allowed")
    return _Global(argument)


def _numpy_object(function: Any, args: Any) -> _NumpyObject:
    """Note the arguments of an array or dtype; the function itself is never called."""
    if not isinstance(function, _Global) or function == _ARRAY or not isinstance(args, tuple):
        raise ValueError("it calls a function that is not allowed")
    return _NumpyObject(_DTYPE if function == _DTYPE else _ARRAY, args)


def _array(array: _NumpyObject) -> Any:
    """Return a uint8 array from the state that numpy pickled: version, shape, dtype, ..."""
    # A state of another length raises ValueError, which is reported like all others.
    _, shape, dtype, fortran_order, raw = array.state
    is_dtype = isinstance(dtype, _NumpyObject) and dtype.kind == _DTYPE
    if not is_dtype or dtype.args[0] not in (b"u1", b"B"):
        raise ValueError("its arrays are not uint8")
    if not isinstance(shape, tuple) or not isinstance(raw, bytes):
        raise ValueError("its arrays have no shape or no content")
    # Exact type: True is an int, too. The product is compared with the bytes that are present.
    if not all(type(size) is int and size >= 0 for size in shape) or len(raw) != math.prod(shape):
        raise ValueError(f"it has {len(raw):,} bytes for an array of another size")
    return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran_order else "C")
