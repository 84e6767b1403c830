"""Replay a policy on recorded vectors: which orders does it produce, and how good are they?

Letters: M workers, N units of a worker, D dimension, R rounds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gradherd.lab.text import printable
from gradherd.ordering.herding import parallel_herding_bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy, Start
from gradherd.replay.arrays import open_array

# Vectors given to a policy at once: enough to hide call overhead, few enough for the cache.
_CHUNK = 32_768
_LARGEST = 1e100  # inner products of larger values could overflow float64


@dataclass(frozen=True)
class OrderReplay:
    """The result of `replay_order`."""

    bounds: list[float]
    """R + 1 parallel herding bounds, starting with that of the first orders."""
    orders: list[list[int]]
    """Unit ids of each worker after the last round."""


def replay_order(
    vectors: Tensor,
    policy: Policy,
    *,
    rounds: int,
    start: Start = "identity",
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> OrderReplay:
    """Reorder fixed vectors with a policy for some rounds, one round standing for an epoch.

    Args:
        vectors: (M, N, D) gradients of each worker's units; the same in every round.
        policy: The policy.
        rounds: R, the number of rounds.
        start: First orders, unless the policy prescribes them.
        seed: Seed of all random choices.
        progress: Called after each round.
    """
    workers, units, _ = vectors.shape
    # The class that training uses: what is replayed is the policy itself, not a copy of it.
    ordering = Ordering(policy, [units] * workers, seed=seed, start=start)
    bounds = [parallel_herding_bound(list(vectors), ordering.orders)]
    for _ in range(rounds):
        # Shuffles ignore gradients, which saves reading all vectors once more.
        if policy.needs_rows:
            _observe_all(vectors, ordering)
        ordering.end_epoch()
        bounds.append(parallel_herding_bound(list(vectors), ordering.orders))
        progress()
    return OrderReplay(bounds, [order.tolist() for order in ordering.orders])


def _observe_all(vectors: Tensor, ordering: Ordering) -> None:
    workers, units, _ = vectors.shape
    visits = torch.stack(ordering.orders, dim=1)  # (N, M) unit visited at each step
    worker_ids = torch.arange(workers)
    chunk = max(2, _CHUNK // workers)
    for first in range(0, units, chunk):
        ordering.observe(vectors[worker_ids, visits[first : first + chunk]])


def load_vectors(path: Path) -> Tensor:
    """Read an (M, N, D) array from an .npy file, as float64.

    Raises:
        ValueError: The file is not such an array; the message says what is wrong with it.
    """
    array = open_array(path, ("workers", "units", "dim"))
    name = printable(str(path))
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # long doubles may become infinite
            copied = np.array(array, dtype=np.float64)  # the memory map is read-only
    except MemoryError:
        raise ValueError(
            f"{name}: {array.size:,} elements do not fit into memory; replay a part of them"
        ) from None
    vectors = torch.from_numpy(copied)
    if float(vectors.abs().nan_to_num(0, 0).max()) > _LARGEST:
        raise ValueError(
            f"{name}: values must be below {_LARGEST:g}: products of larger ones overflow"
        )
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

    Gaussian vectors are scaled to length one and assigned to workers round-robin; then each
    worker's mean is subtracted. The study is in arXiv:2302.00845.

    Args:
        workers: M.
        units: N, vectors of each worker.
        dim: D.
        seed: Seed of the draw; numpy's legacy generator reproduces the published one.
    """
    rows = np.random.RandomState(seed).randn(units * workers, dim)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.reshape(units, workers, dim)
    rows -= rows.mean(axis=0)
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2)))
