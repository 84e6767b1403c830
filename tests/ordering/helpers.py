"""Shared by the tests of orderings: integer-valued rows, showing epochs, comparing states."""

import io
from typing import NamedTuple

import numpy as np
import torch

from gradherd.comm.script import run
from gradherd.comm.world import World
from gradherd.ordering.balance import Unsigned
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy

BALANCING = ("grab", "pair-grab", "id-grab", "id-pair-grab", "cd-grab")
RULES = ("greedy", "walk", "kernel")
# Divisible by every count up to 12: means of at most 12 such rows are whole numbers, so every
# sum and product below is exact in float64 and equality may be asked for to the bit.
WHOLE = 27_720


def whole_vectors(seed, sizes, dim=3, scale=WHOLE):
    draw = np.random.RandomState(seed)
    return [torch.from_numpy(scale * draw.randint(-3, 4, (n, dim)).astype(float)) for n in sizes]


def visited(vectors, orders):
    """(T, M, D) rows in visiting order; NaN beyond a worker's own units."""
    steps = max(len(order) for order in orders)
    rows = torch.full((steps, len(orders), vectors[0].shape[1]), float("nan"), dtype=torch.float64)
    for worker, (own, order) in enumerate(zip(vectors, orders, strict=True)):
        rows[: len(order), worker] = own[torch.as_tensor(order, dtype=torch.int64)]
    return rows


def show(ordering, vectors, seen=None, chunks=None):
    """Observe a whole epoch, in one call or in calls of the given lengths."""
    rows = visited(vectors, ordering.orders)
    first = 0
    for length in chunks or [len(rows)]:
        part = slice(first, first + length)
        ordering.observe(rows[part], None if seen is None else seen[part])
        first += length
    assert first == len(rows)


def make(name, sizes, rule="greedy", seed=0, start="identity"):
    return Ordering(make_policy(name, rule), sizes, seed=seed, start=start)


class Signed(NamedTuple):
    """Signs, and the sums and what the rule carries after them."""

    signs: torch.Tensor
    running: torch.Tensor
    carry: np.ndarray


def signed(form, given):
    """What a form makes of vectors; `given`, the fields of an `Unsigned`, stays as it is."""
    own = Unsigned(*given)
    own = own._replace(running=own.running.clone(), carry=own.carry.copy())
    signs = form(own)
    if not isinstance(signs, torch.Tensor):  # a script
        signs = run(signs, World.single()).value
    return Signed(signs, own.running, own.carry)


def begun(rule, streams, total, epoch):
    """(C, W) what a rule carries at the start of an epoch."""
    return np.array([rule.start(total, epoch)] * streams, dtype=np.float64).T


def lists(orders):
    return [order.tolist() for order in orders]


def same(a, b):
    """Equality of nested states, tensors to the bit (and NaN equal to NaN)."""
    if isinstance(a, torch.Tensor):
        bits = a.numpy().tobytes() == b.numpy().tobytes()
        return bits and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def is_permutation(order, size):
    return sorted(order.tolist()) == list(range(size))
