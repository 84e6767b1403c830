"""gTop-k the obvious way: entries know whose values they hold, so nothing is reported back."""

import numpy as np


def largest(entries, k):
    """The k entries of largest magnitude; of equal ones those with lower indices."""
    residual = sorted(entries, key=lambda index: (-abs(entries[index][0]), index))[:k]
    return {index: entries[index] for index in residual}


def added(mine, theirs):
    both = dict(mine)
    for index, (value, whose) in theirs.items():
        before, others = both.get(index, (0.0, frozenset()))
        both[index] = (before + value, others | whose)
    return both


def subtree(acc, rank, span, k):
    """The list of `rank` when those of the ranks [rank, rank + span) have come to it."""
    if rank >= len(acc):
        return {}
    if span == 1:
        own = {c: (value, frozenset([rank])) for c, value in enumerate(acc[rank])}
        return largest(own, k)
    half = span // 2
    return largest(added(subtree(acc, rank, half, k), subtree(acc, rank + half, half, k)), k)


def final(acc, k):
    """Index -> (sum, ranks whose values are in it)."""
    span = 1
    while span < len(acc):
        span *= 2
    return subtree(acc, 0, span, k)


def chooser(k):
    def choose(acc, step):
        sent = np.zeros_like(acc)
        for index, (_, whose) in final(acc, k).items():
            sent[list(whose), index] = acc[list(whose), index]
        return sent

    return choose
