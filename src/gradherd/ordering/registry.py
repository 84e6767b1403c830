"""All orders and sign rules by name.

To add an order: one file here, one test, one row in docs/orders.md, one line in `POLICIES`.
Everything else (help texts, error messages, colours of charts, the contract tests) reads this
registry. It imports no torch: an entry is imported when it is looked up.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from gradherd.lazy import LazyRegistry

if TYPE_CHECKING:
    from gradherd.ordering.policy import Policy
    from gradherd.ordering.sign_rules import SignRule

POLICIES: "LazyRegistry[Callable[..., Policy]]" = LazyRegistry(
    "order",
    {
        # The baseline comes first: reports and charts compare the others with it.
        "d-rr": "gradherd.ordering.shuffles:D_RR",
        "shuffle-once": "gradherd.ordering.shuffles:SHUFFLE_ONCE",
        "fixed": "gradherd.ordering.shuffles:FIXED",
        "flip-flop": "gradherd.ordering.shuffles:FLIP_FLOP",
        "grab": "gradherd.ordering.grab:GraB",
        "pair-grab": "gradherd.ordering.pair_grab:PairGraB",
        # Defined on one stream; with several workers each one has its own.
        "id-grab": "gradherd.ordering.grab:GraB",
        "id-pair-grab": "gradherd.ordering.pair_grab:PairGraB",
        "cd-grab": "gradherd.ordering.pair_grab:CDGraB",
        # A control, not a method: see `shuffles.always_plus`.
        "always-plus": "gradherd.ordering.shuffles:ALWAYS_PLUS",
    },
    moved=dict.fromkeys(
        ("cd-grab-live", "block-reshuffling", "curriculum", "stair", "saw"),
        "in studies/methods of gradherd's repository, as an order of one's own",
    ),
)
"""Orders by name; each can be built without arguments."""

SIGN_RULES: "LazyRegistry[Callable[[], SignRule]]" = LazyRegistry(
    "sign rule",
    {
        "greedy": "gradherd.ordering.sign_rules:Greedy",
        "walk": "gradherd.ordering.sign_rules:Walk",
        "kernel": "gradherd.ordering.sign_rules:Kernel",
    },
)
"""Sign rules by name, each with its default settings."""


def find_policy(policy: "str | Policy") -> "Policy":
    """Return the order of a name, or the order that is given.

    >>> from gradherd.ordering.pair_grab import CDGraB
    >>> find_policy(CDGraB)
    Traceback (most recent call last):
        ...
    ValueError: policy must be the name of an order or an order such as CDGraB(), got CDGraB
    """
    if isinstance(policy, str):
        return make_policy(policy)
    if isinstance(policy, type) or not hasattr(policy, "new_state"):
        got = policy.__name__ if isinstance(policy, type) else repr(policy)
        raise ValueError(
            f"policy must be the name of an order or an order such as CDGraB(), got {got}"
        )
    return policy


def make_policy(name: str, signs: str = "greedy") -> "Policy":
    """Build an order of `POLICIES`, with a rule of `SIGN_RULES` if it signs vectors.

    Raises:
        ValueError: One of the names is unknown.

    >>> make_policy("cd-grab", "walk")
    CDGraB(rule=Walk(c=30.0))
    """
    make, rule = POLICIES.find(name), SIGN_RULES.build(signs)
    # Read off the constructor, so that an order needs no second entry that says it has signs.
    has_signs = callable(make) and "rule" in inspect.signature(make).parameters
    policy: Policy = POLICIES.build(name, **({"rule": rule} if has_signs else {}))
    # Not an error: the order is well defined without it.
    if signs != "greedy" and not has_signs:
        warnings.warn(f"order {name!r} has no signs: {signs!r} has no effect", stacklevel=2)
    return policy
