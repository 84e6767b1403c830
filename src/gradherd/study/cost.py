"""Studies of what a step costs: the benchmarks, several times over.

A seed is one more run of the same measurement: what differs between them is the machine's noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradherd.bench.coordination import bench_coordination
from gradherd.bench.signs import bench_signs
from gradherd.bench.step import bench_step
from gradherd.bench.virtual import LEAST_STEPS, bench_virtual
from gradherd.comm.ranks import run_ranks
from gradherd.study.file import Study
from gradherd.study.kind import Found, OneByOne, Piece, Where, checked, no_task, positive

CASES = ("coordination", "step", "signs", "virtual")
_NAMES = ("seconds", "ratio", "bytes", "bytes_ratio", "peak_bytes", "steps_per_second")
_DEADLINE = 1800.0
"""Seconds, against hangs only."""


@dataclass(frozen=True)
class Cost(OneByOne):
    """Measures: exchange and whole steps on real ranks, signs and virtual runs in one process."""

    alone: ClassVar = True
    keys: ClassVar[Mapping[str, Any]] = {
        "case": str,
        "workers": int,
        "dim": int,
        "batch_size": int,
        "steps": int,
        "repeats": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return them, checked; `batch_size` is of whole steps alone.

        Virtual runs are of a model of their own, so there is no `dim`; they alone have `steps`.
        """
        no_task(study)
        given = {**study.settings, **arm}
        virtual = given.get("case") == "virtual"
        other = "dim" if virtual else "steps"
        keys = {name: kind for name, kind in self.keys.items() if name != other}
        base = {"batch_size": 1, "steps": 200} if virtual else {"batch_size": 64}
        found = checked(keys, {**base, "repeats": 9}, given)
        positive(found, *(name for name in keys if name != "case"))
        if found["case"] not in CASES:
            raise ValueError(f"unknown case {found['case']!r}; known are {', '.join(CASES)}")
        if virtual and found["steps"] < LEAST_STEPS:
            raise ValueError(f"steps must be at least {LEAST_STEPS}, got {found['steps']}")
        return found

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Measure."""
        found = []
        for piece in pieces:
            where.told.begin(1, 1)
            rows = _measured(piece.settings, torch.device(where.device))
            where.told.step()
            summary = {f"{row['case']}.{name}": row.get(name) for row in rows for name in _NAMES}
            found.append(Found(figures={"summary": summary}))
        return found


def _measured(settings: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    workers, repeats = settings["workers"], settings["repeats"]
    if settings["case"] == "virtual":
        return bench_virtual(workers, settings["batch_size"], settings["steps"], repeats, device)
    dim = settings["dim"]
    if settings["case"] == "signs":
        return bench_signs([workers], [dim], device)
    if settings["case"] == "coordination":
        job: tuple[Any, ...] = (bench_coordination, workers, dim, repeats)
    else:
        job = (bench_step, workers, dim, settings["batch_size"], repeats)
    rows: list[dict[str, Any]] = run_ranks(*job, timeout=_DEADLINE)[0]
    return rows
