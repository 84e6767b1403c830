"""All sparsifiers by name, and what the command line and reports need to know about them.

To add a sparsifier: one file here, one test, its rows in docs/few_bytes.md, one line in
`SPARSIFIERS`. Everything else (help texts, error messages, the contract tests) reads this registry.
It imports no torch: an entry is imported when it is looked up.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gradherd.lazy import LazyRegistry

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
    """Return whether a sparsifier can have a density below 1: all but the dense baseline.

    >>> takes_density("dense"), takes_density("exdyna")
    (False, True)
    """
    return SPARSIFIERS.find(name)().density < 1


def setting_names(name: str) -> tuple[str, ...]:
    """Return the names of a sparsifier's own settings, besides its density.

    >>> setting_names("micro"), setting_names("topk")
    (('threshold', 'capacity'), ())
    """
    method: Any = SPARSIFIERS.find(name)
    return tuple(field.name for field in fields(method) if field.name != "density")


def make_sparsifier(name: str, density: float | None = None, /, **settings: Any) -> "Selector":
    """Build a sparsifier by name.

    Args:
        name: A key of `SPARSIFIERS`.
        density: Share of the coordinates to send; None is the method's default.
        **settings: The method's own settings, see `setting_names`.

    Raises:
        ValueError: The name or a setting is unknown, or a value is out of range.

    >>> make_sparsifier("exdyna", 0.01, blocks=64)
    ExDyna(density=0.01, threshold='consensus', capacity=1.05, balance='recut', blocks=64, \
memory=0.9, rotate=True)
    """
    method, known = SPARSIFIERS.find(name), setting_names(name)
    for setting in settings:
        if setting not in known:
            more = f"known are {', '.join(known)}" if known else "it has none but its density"
            raise ValueError(f"unknown setting {setting!r} of {name}; {more}")
    given = settings if density is None else {"density": density, **settings}
    try:
        return method(**given)
    except TypeError as error:  # Checks compare values, which fails for a str and a number, say.
        raise ValueError(f"{name} cannot have {given}: {error}") from None
