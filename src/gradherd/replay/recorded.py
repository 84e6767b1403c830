"""Run a policy or a sparsifier on recorded gradients, without training.

`replay_order` shows which orders a policy produces and how good they are, `replay_sparsify` what a
sparsifier sends and what stays in the residuals.

Letters: M or R workers, N units of a worker, D elements, T steps.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradherd.ordering.bounds import parallel_herding_bound
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import Policy, Start
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers

# Vectors given to a policy at once: enough to hide call overhead, few enough for the cache.
_CHUNK = 32_768


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

    The (M, N, D) gradients of each worker's units are the same in every round. First orders are
    `start`, unless the policy prescribes them; `progress` is called after each round.
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


def random_vectors(workers: int, units: int, dim: int, seed: int) -> Tensor:
    """Draw the vectors of the CD-GraB paper's herding study: (M, N, D), float64.

    Gaussian vectors are scaled to length one and assigned to workers round-robin; then each
    worker's mean is subtracted. The study is in arXiv:2302.00845; numpy's legacy generator
    reproduces its draw.
    """
    rows = np.random.RandomState(seed).randn(units * workers, dim)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows.reshape(units, workers, dim)
    rows -= rows.mean(axis=0)
    return torch.from_numpy(np.ascontiguousarray(rows.transpose(1, 0, 2)))


def replay_sparsify(
    gradients: NDArray[np.number],
    settings: Sparsify,
    *,
    out: Path | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Exchange recorded gradients (T, R, D) step by step, all workers in this process.

    They are read one step at a time, so they may be a memory map. `progress` is called after each
    step. The folder `out` gets mean.npy (T, D) and residual.npy (R, D).

    Returns:
        The metrics of each step; residual_norm and bytes are means over workers.

    Raises:
        ValueError: A gradient or a sum over workers is not finite, or `out` is no folder.
    """
    steps, workers, dim = gradients.shape
    # Half precision is widened, as residuals are float32 in training; float64 stays exact.
    dtype = torch.float64 if gradients.dtype.itemsize > 4 else torch.float32
    virtual = VirtualWorkers(settings, dim, workers, dtype=dtype)
    metrics = []
    with _drafts(out) as folder:
        means = None
        if folder is not None:  # mapped: it may be larger than memory
            means = np.lib.format.open_memmap(
                folder / "mean.npy",
                mode="w+",
                dtype=str(dtype).removeprefix("torch."),
                shape=(steps, dim),
            )
        for step in range(steps):
            mean = virtual.step(_step(gradients, step, dtype))
            if not bool(mean.isfinite().all()):
                raise ValueError(
                    f"step {step}: the sum over workers overflows; scale the values down"
                )
            if means is not None:
                means[step] = mean.numpy()
            metrics.append(virtual.metrics)
            progress()
        if folder is not None:
            np.save(folder / "residual.npy", virtual.residuals().numpy())
    return metrics


def _step(gradients: NDArray[np.number], step: int, dtype: torch.dtype) -> Tensor:
    with np.errstate(over="ignore", invalid="ignore"):  # long doubles may become infinite
        values = np.array(gradients[step], dtype=str(dtype).removeprefix("torch."))
    grads = torch.from_numpy(values)
    if not bool(grads.isfinite().all()):
        worker, column = (~grads.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"step {step} is not finite, first at worker {worker}, element {column}; training "
            "would skip this step, so leave it out"
        )
    return grads


@contextlib.contextmanager
def _drafts(out: Path | None) -> Iterator[Path | None]:
    """Yield a folder whose files move to `out` once all are written, and are gone otherwise."""
    if out is None:
        yield None
        return
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{out} cannot be used as a folder for results: {error.strerror}"
        ) from None
    try:
        with tempfile.TemporaryDirectory(dir=out) as folder:
            yield Path(folder)
            for draft in Path(folder).iterdir():
                draft.replace(out / draft.name)
    except BaseException:
        if created:
            shutil.rmtree(out)
        raise
