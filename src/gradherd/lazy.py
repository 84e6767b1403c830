"""Names whose modules are imported when they are first used.

Importing torch takes seconds. The command line shows the names of all orders and sparsifiers in its
help, and should not wait for the code behind them.
"""

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class BadMethod(ValueError):
    """A registered method cannot be built; one sentence says why."""


class LazyRegistry(UserDict[str, T]):
    """A dictionary whose values are imported when they are looked up.

    Keys, their order and their number import nothing. Values can be set as in any dictionary.

    >>> numbers = LazyRegistry("number", {"join": "os.path:join"})
    >>> numbers["two"] = 2
    >>> list(numbers), numbers["join"]("a", "b"), numbers["two"]
    (['join', 'two'], 'a/b', 2)
    >>> numbers.find("three")
    Traceback (most recent call last):
        ...
    ValueError: unknown number 'three'; known are join, two
    """

    def __init__(
        self, kind: str, homes: Mapping[str, str], moved: Mapping[str, str] | None = None
    ) -> None:
        """Register names.

        Args:
            kind: What the values are, in a word, for messages.
            homes: Key -> "module:name".
            moved: Former keys -> where their values are now, in words.
        """
        self._kind, self._moved = kind, dict(moved or {})
        values: Any = {key: _Home(home) for key, home in homes.items()}
        super().__init__(values)

    def __getitem__(self, key: str) -> T:
        home = self.data[key]
        if isinstance(home, _Home):
            module, _, name = home.partition(":")
            self.data[key] = getattr(import_module(module), name)
        return self.data[key]

    def find(self, key: str) -> T:
        """Return the value of a key; raise ValueError, with all keys, if it is unknown."""
        if key not in self:
            known = ", ".join(self)
            raise ValueError(f"unknown {self._kind} {key!r}; known are {known}{self.hint(key)}")
        return self[key]

    def build(self, key: str, **given: Any) -> Any:
        """Call the value of a key; raise BadMethod if it needs more than it is given."""
        try:
            made: Any = self.find(key)
            return made(**given)
        except TypeError as error:
            raise BadMethod(
                f"{self._kind} {key!r} must be a class whose fields all have defaults: {error}"
            ) from None

    def hint(self, key: str) -> str:
        """Return where a former key is now, to be added to an error; "" of all others."""
        return f"; {key} is now {self._moved[key]}" if key in self._moved else ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self)})"


class _Home(str):
    """Where a value is that was not looked up yet."""


def lazy_names(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package whose names are imported when first used.

    `package` is its `__name__`; `homes` are the modules that hold its names.
    """
    module = sys.modules[package]
    names = LazyRegistry[Any](
        "name", {name: f"{home}:{name}" for home, own in homes.items() for name in own}
    )

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = vars(module)[name] = names[name]  # the next use finds it without a call
        return value

    return find, list(names)
