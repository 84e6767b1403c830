"""All sparsifiers by name, and what the command line and reports need to know about them.

To add a sparsifier: one file here, one test, its rows in docs/few_bytes.md, one line in
`SPARSIFIERS`. Everything else (help texts, error messages, the contract tests) reads this registry.
It imports no torch: an entry is imported when it is looked up.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from gradherd.lazy import BadMethod, LazyRegistry

if TYPE_CHECKING:
    from gradherd.sparsify.selector import Selector

SPARSIFIERS: "LazyRegistry[Callable[..., Selector]]" = LazyRegistry(
    "sparsifier",
    {
        "dense": "gradherd.sparsify.basics:Dense",
        "exdyna": "gradherd.sparsify.partitioned:ExDyna",
        "micro": "gradherd.sparsify.partitioned:Micro",
        "topk": "gradherd.sparsify.basics:TopK",
    },
    moved=dict.fromkeys(
        ("cltk", "deft", "threshold", "sidco", "gtopk", "randomk", "sage", "demo"),
        "in studies/methods of gradherd's repository, as a method of one's own",
    ),
)
"""Sparsifiers by name; each is a frozen dataclass that can be built without arguments."""


def takes_density(name: str) -> bool:
    """Return whether a sparsifier can have a density below 1: all but the dense baseline."""
    return bool(_with_defaults(name).density < 1)


def setting_names(name: str) -> tuple[str, ...]:
    """Return the names of a sparsifier's own settings, besides its density."""
    return tuple(one.name for one in fields(_with_defaults(name)) if one.name != "density")


def _with_defaults(name: str) -> Any:
    method = SPARSIFIERS.build(name)
    if not is_dataclass(method) or not hasattr(method, "density"):
        got = repr(SPARSIFIERS[name])
        raise BadMethod(f"sparsifier {name!r} must be a dataclass with a field density, got {got}")
    return method
