"""Slow, obvious balancing, straight from the papers: one vector at a time, two pointers.

Nothing here knows the code under test. Rows are (time, worker, column) numpy arrays in visiting
order, orders are lists of unit ids, one per worker.
"""

import math
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Greedy:
    strict: bool = False

    def plus(self, inner, square, draw):
        return inner < 0 if self.strict else inner <= 0


@dataclass
class Walk:
    c: float = 30.0
    largest: float = 0.0

    def plus(self, inner, square, draw):
        self.largest = max(self.largest, square)
        return inner <= draw * self.c * self.largest


@dataclass
class Kernel:
    total: int
    epoch: int  # from 1
    epochs: int = 100
    delta: float = 0.5
    q: float = 0.0
    i: int = 0

    def plus(self, inner, square, draw):
        if square == 0:  # inner is 0 and a is 0: whatever a > 0 would say.
            return draw >= 0
        self.i += 1
        penalty = math.log(
            (4 / self.delta)
            * (1 + math.log(self.epochs))
            * (1 + math.log(self.total))
            * self.i
            * self.epoch
        )
        r = math.sqrt(self.q * penalty / square)
        if r <= 1:
            a = square
            self.q = 2 * square
        else:
            a = r * square
            self.q = self.q + 2 * square * max(0, penalty + 0.5 - r) / penalty
        return inner <= draw * a


def make_rule(name, total, epoch):
    total = max(1, total)
    return {"greedy": Greedy, "walk": Walk}[name]() if name != "kernel" else Kernel(total, epoch)


@dataclass
class Epoch:
    orders: list
    signs: list = field(default_factory=list)  # in visiting order
    inners: list = field(default_factory=list)
    sums: list = field(default_factory=list)  # (M, D) signed sums of each worker after each step


def known(rows, seen, step, worker):
    return bool(seen[step, worker]) and bool(np.isfinite(rows[step, worker]).all())


def pair_epoch(orders, rows, *, shared, rule="greedy", epoch=1, seen=None, draws=None):
    """CD-GraB (shared) or pair balance on every worker; `rule` a name or one rule object."""
    sizes = [len(order) for order in orders]
    steps = max(sizes)
    seen = np.ones(rows.shape[:2], bool) if seen is None else seen
    draws = np.zeros((steps // 2, len(sizes))) if draws is None else draws
    dim = rows.shape[2]
    if not isinstance(rule, str):
        rules = [rule] * len(sizes)
    elif shared:
        rules = [make_rule(rule, sum(n // 2 for n in sizes), epoch)] * len(sizes)
    else:
        rules = [make_rule(rule, steps // 2, epoch) for _ in sizes]
    running = [np.zeros(dim)] * len(sizes) if shared else [np.zeros(dim) for _ in sizes]
    signed = np.zeros((len(sizes), dim))

    # A pair takes part if both rows are known; a leftover if it was seen (no row is needed).
    pairs = {
        (k, i)
        for i, n in enumerate(sizes)
        for k in range(n // 2)
        if known(rows, seen, 2 * k, i) and known(rows, seen, 2 * k + 1, i)
    }
    left_over = {i for i, n in enumerate(sizes) if n % 2 and seen[n - 1, i]}
    slots = []
    for i, n in enumerate(sizes):
        taking_part = [p for k in range(n // 2) if (k, i) in pairs for p in (2 * k, 2 * k + 1)]
        slots.append(taking_part + ([n - 1] if i in left_over else []))
    following = [list(order) for order in orders]
    left = [0 for _ in sizes]
    right = [len(own) - 1 for own in slots]

    out = Epoch(following)
    for k in range(steps // 2):
        for i in range(len(sizes)):
            if (k, i) not in pairs:
                continue
            v = rows[2 * k, i] - rows[2 * k + 1, i]
            inner = float(running[i] @ v)
            plus = rules[i].plus(inner, float(v @ v), draws[k, i])
            first, second = orders[i][2 * k], orders[i][2 * k + 1]
            front, back = (first, second) if plus else (second, first)
            following[i][slots[i][left[i]]] = front
            following[i][slots[i][right[i]]] = back
            left[i] += 1
            right[i] -= 1
            change = v if plus else -v
            signed[i] += change
            if shared:
                running = [running[0] + change] * len(sizes)
            else:
                running[i] = running[i] + change
            out.signs.append(1 if plus else -1)
            out.inners.append(inner)
        out.sums.append(signed.copy())
    for i in left_over:
        assert left[i] == right[i]
        following[i][slots[i][left[i]]] = orders[i][sizes[i] - 1]
    return out


def mean_epoch(orders, rows, means, *, rule="greedy", epoch=1, seen=None, draws=None):
    """GraB on every worker. Returns the epoch and the means for the next one."""
    sizes = [len(order) for order in orders]
    steps = max(sizes)
    seen = np.ones(rows.shape[:2], bool) if seen is None else seen
    draws = np.zeros((steps, len(sizes))) if draws is None else draws
    out, following_means = Epoch([]), []
    sums = np.zeros((steps, len(sizes), rows.shape[2]))
    for i, n in enumerate(sizes):
        own = make_rule(rule, steps, epoch)
        slots = [p for p in range(n) if known(rows, seen, p, i)]
        following = list(orders[i])
        left, right = 0, len(slots) - 1
        running, total = np.zeros(rows.shape[2]), np.zeros(rows.shape[2])
        for p in range(n):
            if p in slots:
                total = total + rows[p, i]
                c = rows[p, i] - means[i]
                inner = float(running @ c)
                if own.plus(inner, float(c @ c), draws[p, i]):
                    following[slots[left]] = orders[i][p]
                    left += 1
                    running = running + c
                    out.signs.append(1)
                else:
                    following[slots[right]] = orders[i][p]
                    right -= 1
                    running = running - c
                    out.signs.append(-1)
                out.inners.append(inner)
            sums[p:, i] = running
        out.orders.append(following)
        # Where nothing was seen there is no new mean: the last one stands.
        following_means.append(total / len(slots) if slots else means[i])
    out.sums = list(sums)
    return out, following_means


def sign_stream(vectors, rule, draws):
    """Signs of one stream and its running sum; vectors that are not finite get 0."""
    running, signs = np.zeros(vectors.shape[1]), []
    for v, draw in zip(vectors, draws, strict=True):
        if not np.isfinite(v).all():
            signs.append(0)
        elif rule.plus(float(running @ v), float(v @ v), draw):
            running = running + v
            signs.append(1)
        else:
            running = running - v
            signs.append(-1)
    return signs, running


def herding(vectors, orders):
    """Parallel herding bound, one addition at a time."""
    every = np.concatenate([np.asarray(own) for own in vectors])
    if len(every) == 0:
        return 0.0
    mean = every.mean(axis=0)
    prefix, worst = np.zeros(every.shape[1]), 0.0
    for step in range(max(len(order) for order in orders)):
        for own, order in zip(vectors, orders, strict=True):
            if step < len(order):
                prefix = prefix + (np.asarray(own)[order[step]] - mean)
        worst = max(worst, float(np.abs(prefix).max()))
    return worst
