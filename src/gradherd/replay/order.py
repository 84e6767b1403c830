"""Replay a policy on recorded vectors: what orders would it have found, and how good are they?

Letters: M workers, N units of a worker, D dimension, R rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradherd.ordering.herding import parallel_herding_bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import Policy
from gradherd.ordering.state import Start
from gradherd.replay.arrays import open_array, printable

# Vectors handed to a policy at once: enough to hide call overhead, few enough for the cache.
_CHUNK = 32_768
_LARGEST = 1e100


@dataclass(frozen=True)
class Replay:
    """What a policy made of the vectors."""

    bounds: list[float]
    """R + 1 parallel herding bounds, that of the first order included."""
    orders: list[list[int]]
    """Unit ids per worker, as the last round left them."""


def replay_order(
    vectors: Tensor,
    policy: Policy,
    *,
    rounds: int,
    start: Start = "identity",
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """Let `policy` reorder fixed vectors for some rounds.

    Args:
        vectors: (M, N, D) gradient of each worker's units; the same in every round.
        policy: The policy.
        rounds: How often it reorders.
        start: First orders, unless the policy prescribes them.
        seed: Of all random choices.
        progress: Called after each round.
    """
    workers, units, _ = vectors.shape
    ordering = Ordering(policy, [units] * workers, seed=seed, start=start)
    bounds = [parallel_herding_bound(list(vectors), ordering.orders)]
    for _ in range(rounds):
        if policy.needs_rows:
            _show(vectors, ordering)
        ordering.end_epoch()
        bounds.append(parallel_herding_bound(list(vectors), ordering.orders))
        progress()
    return Replay(bounds, [order.tolist() for order in ordering.orders])


def _show(vectors: Tensor, ordering: Ordering) -> None:
    workers, units, _ = vectors.shape
    visits = torch.stack(ordering.orders, dim=1)  # (N, M) unit visited at each step
    who = torch.arange(workers)
    chunk = max(2, _CHUNK // workers)
    for first in range(0, units, chunk):
        ordering.observe(vectors[who, visits[first : first + chunk]])


def load_vectors(path: Path) -> Tensor:
    """Read (workers, units, dim) numbers from an .npy file, as float64.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    array = open_array(path, ("workers", "units", "dim"))
    name = printable(str(path))
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # longer numbers become infinite
            copied = np.array(array, dtype=np.float64)  # the map is read-only
    except MemoryError:
        raise ValueError(
            f"{name}: {array.size:,} numbers are more than memory holds; replay a part of them"
        ) from None
    vectors = torch.from_numpy(copied)
    if float(vectors.abs().nan_to_num(0, 0).max()) > _LARGEST:
        raise ValueError(f"{name}: values must be below {_LARGEST:g}: their products overflow")
    bad = (~vectors.isfinite()).nonzero()
    if len(bad):
        worker, unit, column = bad[0].tolist()
        raise ValueError(
            f"{name}: {len(bad)} values are NaN or infinite, the first at worker {worker}, "
            f"unit {unit}, column {column}"
        )
    return vectors


def random_vectors(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """Draw the vectors of the CD-GraB paper's herding study: (M, N, D), float64.

    Gaussian rows scaled to length one, dealt to workers in turn, each worker's own mean taken
    away. numpy's legacy generator keeps the published draws.
    """
    rows = np.random.RandomState(seed).randn(units * workers, dim)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.reshape(units, workers, dim)
    rows -= rows.mean(axis=0)
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2)))
