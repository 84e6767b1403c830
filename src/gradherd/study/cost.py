"""Studies of what coordination costs a step: the benchmarks, several times over.

A seed is one more run of the same measurement: what differs between them is the machine's noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradherd.bench.coordination import bench_coordination
from gradherd.bench.signs import bench_signs
from gradherd.bench.step import bench_step
from gradherd.comm.ranks import run_ranks
from gradherd.study.file import Study
from gradherd.study.kind import Found, OneByOne, Piece, Where, checked, no_task, positive

CASES = ("coordination", "step", "signs")
_DEADLINE = 1800.0
"""Seconds, against hangs only."""


@dataclass(frozen=True)
class Cost(OneByOne):
    """Measures: exchange and whole steps on real ranks, signs in one process."""

    keys: ClassVar[Mapping[str, Any]] = {
        "case": str,
        "workers": int,
        "dim": int,
        "batch_size": int,
        "repeats": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return them, checked; `batch_size` is of a whole step alone."""
        no_task(study)
        base = {"batch_size": 64, "repeats": 9}
        found = checked(self.keys, base, {**study.settings, **arm})
        positive(found, "workers", "dim", "batch_size", "repeats")
        if found["case"] not in CASES:
            raise ValueError(f"unknown case {found['case']!r}; known are {', '.join(CASES)}")
        return found

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Measure."""
        found = []
        for piece in pieces:
            where.told.begin(1, 1)
            rows = _measured(piece.settings, torch.device(where.device))
            where.told.step()
            names = ("seconds", "ratio", "bytes", "bytes_ratio", "peak_bytes")
            summary = {f"{row['case']}.{name}": row.get(name) for row in rows for name in names}
            found.append(Found(figures={"summary": summary}))
        return found


def _measured(settings: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    workers, dim, repeats = settings["workers"], settings["dim"], settings["repeats"]
    if settings["case"] == "signs":
        return bench_signs([workers], [dim], device)
    if settings["case"] == "coordination":
        job: tuple[Any, ...] = (bench_coordination, workers, dim, repeats)
    else:
        job = (bench_step, workers, dim, settings["batch_size"], repeats)
    rows: list[dict[str, Any]] = run_ranks(*job, timeout=_DEADLINE)[0]
    return rows
