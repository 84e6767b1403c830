"""All orders by name.

To add an order: one file here, one test, one row in docs/orders.md, one line in `POLICIES`.
Everything else (help texts, error messages, colours of charts, the contract tests) reads this
registry.
"""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from gradherd.ordering.cd_grab import CDGraB
from gradherd.ordering.grab import GraB
from gradherd.ordering.pair_grab import PairGraB
from gradherd.ordering.policy import Policy
from gradherd.ordering.scored import ScoreOrder, easy_to_hard, saw, stair
from gradherd.ordering.shuffles import (
    Shuffle,
    always_plus,
    block_reshuffling,
    flip_flop,
    random_reshuffling,
    unchanged,
)
from gradherd.ordering.sign_rules import SIGN_RULES, Greedy

POLICIES: dict[str, Callable[..., Policy]] = {
    # The baseline comes first: reports and charts compare the others with it.
    "d-rr": partial(Shuffle, "d-rr", random_reshuffling),
    "shuffle-once": partial(Shuffle, "shuffle-once", unchanged, start="random"),
    "fixed": partial(Shuffle, "fixed", unchanged, start="identity"),
    "flip-flop": partial(Shuffle, "flip-flop", flip_flop),
    "grab": GraB,
    "pair-grab": PairGraB,
    # GraB and pair balance are defined on one stream; with several workers each one has its own.
    "id-grab": GraB,
    "id-pair-grab": PairGraB,
    "cd-grab": CDGraB,
    # A control, not a method: see `shuffles.always_plus`.
    "always-plus": partial(Shuffle, "always-plus", always_plus),
    "block-reshuffling": partial(Shuffle, "block-reshuffling", block_reshuffling, start="random"),
    # Scores are gradient norms unless `scores` are given.
    "curriculum": partial(ScoreOrder, "curriculum", easy_to_hard),
    "stair": partial(ScoreOrder, "stair", stair),
    "saw": partial(ScoreOrder, "saw", saw),
}
"""Orders by name; each can be built without arguments."""


def order_names() -> tuple[str, ...]:
    """Return the names of all orders, the baseline d-rr first."""
    return tuple(POLICIES)


def find_policy(policy: str | Policy) -> Policy:
    """Return the order of a name, or the order that is given.

    >>> find_policy(CDGraB)
    Traceback (most recent call last):
        ...
    ValueError: policy must be the name of an order or an order such as CDGraB(), got CDGraB
    """
    if isinstance(policy, str):
        return make_policy(policy)
    if isinstance(policy, type) or not hasattr(policy, "begin"):
        got = policy.__name__ if isinstance(policy, type) else repr(policy)
        raise ValueError(
            f"policy must be the name of an order or an order such as CDGraB(), got {got}"
        )
    if not hasattr(rule := getattr(policy, "rule", Greedy()), "decide"):
        raise ValueError(f"rule must be a sign rule such as Greedy(), got {rule!r}")
    return policy


def make_policy(name: str, signs: str = "greedy", **settings: Any) -> Policy:
    """Build an order by name.

    Args:
        name: A key of `POLICIES`.
        signs: A key of `SIGN_RULES`, for orders that sign vectors.
        settings: Fields of the order, such as `scores` of a score order.

    Raises:
        ValueError: One of the names is unknown.

    >>> make_policy("cd-grab", "walk")
    CDGraB(rule=Walk(c=30.0))
    """
    if name not in POLICIES:
        raise ValueError(f"unknown order {name!r}; known are {', '.join(POLICIES)}")
    if signs not in SIGN_RULES:
        raise ValueError(f"unknown sign rule {signs!r}; known are {', '.join(SIGN_RULES)}")
    make = POLICIES[name]
    # Read off the constructor, so that an order needs no second entry that says it has signs.
    fields = inspect.signature(make).parameters
    if unknown := settings.keys() - fields.keys():
        raise ValueError(f"order {name!r} has no setting {', '.join(sorted(unknown))}")
    if "rule" in fields:
        return make(rule=SIGN_RULES[signs](), **settings)
    # Not an error: the order is well defined without it.
    if signs != "greedy":
        warnings.warn(f"order {name!r} has no signs: {signs!r} has no effect", stacklevel=2)
    return make(**settings)
