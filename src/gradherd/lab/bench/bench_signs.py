"""Time the signs of one step: a Gram block against a loop.

Cases: `sequential` is the loop of the published CD-GraB code (one inner product, one host sync and
one update per vector), `block-gram` takes all signs from one Gram matrix, `balance` is the form
that gradherd chooses for this device and size. The ceiling is one read of all vectors (their sum).

Letters: P vectors, D dimension.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradherd.lab.bench.timing import PeakMemory, ceiling_keys, median_seconds
from gradherd.ordering.balance import balance, block_gram
from gradherd.ordering.sign_rules import Greedy


def published_loop(vectors: Tensor, running: Tensor) -> list[bool]:
    """Sign vectors one by one, deciding each on the host, as the published code does.

    Args:
        vectors: (P, D) pair differences.
        running: (D,) signed sum of the vectors before these.

    Returns:
        P booleans, True for "+".
    """
    signs = []
    for vector in vectors:
        # bool() copies to the host: on a GPU this wait is what the loop costs.
        plus = bool(torch.inner(running, vector) <= 0)
        running = running + vector if plus else running - vector
        signs.append(plus)
    return signs


def bench_signs(
    workers: Sequence[int],
    dims: Sequence[int],
    device: torch.device,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure every case at every size; each worker contributes one pair difference.

    Args:
        workers: Numbers of vectors, P.
        dims: Sizes of a vector, D.
        device: Where to compute.
        progress: Called after each size.

    Returns:
        A row for each size and case.
    """
    rows: list[dict[str, Any]] = []
    for dim in dims:
        for count in workers:
            generator = torch.Generator(device).manual_seed(0)
            vectors = torch.randn(1, count, dim, generator=generator, device=device)
            rows += _compare(vectors, device)
            progress()
    return rows


def _compare(vectors: Tensor, device: torch.device) -> list[dict[str, Any]]:
    _, count, dim = vectors.shape
    # The time of a sign does not depend on values, so the sum may start at zero.
    running = torch.zeros_like(vectors[:, 0])
    rest = (Greedy(), np.zeros((1, count)), np.empty((0, 1)))
    cases: dict[str, Callable[[], object]] = {
        "sequential": lambda: published_loop(vectors[0], running[0]),
        "block-gram": lambda: block_gram(vectors, running, *rest, block=count),
        "balance": lambda: balance(vectors, running, *rest),
    }
    seconds: dict[str, float] = {}
    peaks: dict[str, int | None] = {}
    for case, fn in cases.items():
        with PeakMemory(device) as peak:
            fn()
        peaks[case], seconds[case] = peak.bytes, median_seconds(fn, device)
    # No method can sign vectors without reading them once.
    ceiling = median_seconds(vectors.sum, device)
    return [
        {
            "case": case,
            "workers": count,
            "dim": dim,
            "seconds": seconds[case],
            "bytes": 0,  # Nothing is sent: all vectors are on one device.
            "peak_bytes": peaks[case],
            "ratio": seconds[case] / seconds["sequential"],
            "signs_per_second": count / seconds[case],
            **ceiling_keys(ceiling, seconds[case]),
        }
        for case in cases
    ]
