"""Names whose modules are imported when they are first used.

Importing torch takes seconds. The command line shows the names of all orders and sparsifiers in its
help, and should not wait for the code behind them.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


class LazyRegistry(MutableMapping[str, T]):
    """A dictionary whose values are imported when they are looked up.

    Keys, their order and their number import nothing. Values can be set as in any dictionary.

    >>> numbers = LazyRegistry("os", {"join": "path:join"})
    >>> numbers["two"] = 2
    >>> list(numbers), numbers["join"]("a", "b"), numbers["two"]
    (['join', 'two'], 'a/b', 2)
    """

    def __init__(self, package: str, homes: Mapping[str, str]) -> None:
        """Register names.

        Args:
            package: Package of the modules.
            homes: Key -> "module:name".
        """
        self._package = package
        self._homes = dict(homes)
        self._values: dict[str, T] = {}

    def __getitem__(self, key: str) -> T:
        if key not in self._values:
            module, _, name = self._homes[key].partition(":")
            self._values[key] = getattr(import_module(f"{self._package}.{module}"), name)
        return self._values[key]

    def __setitem__(self, key: str, value: T) -> None:
        self._homes.setdefault(key, "")  # which keeps the order of keys
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._homes[key]
        self._values.pop(key, None)

    def __contains__(self, key: object) -> bool:
        return key in self._homes  # the inherited one would look up the value

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._homes)})"


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its names from their modules.

    Args:
        package: The package's `__name__`.
        homes: Name -> the module of the package that defines it.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return find
