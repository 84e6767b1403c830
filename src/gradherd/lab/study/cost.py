"""Studies of what a step costs: the benchmarks, several times over.

A seed is one more run of the same measurement: what differs between them is the machine's noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradherd.advise.choices import Setting, predict
from gradherd.advise.link import Link
from gradherd.advise.overheads import usual
from gradherd.comm.ranks import run_ranks
from gradherd.lab.bench.coordination import bench_coordination
from gradherd.lab.bench.signs import bench_signs
from gradherd.lab.bench.step import bench_step
from gradherd.lab.bench.virtual import LEAST_STEPS, bench_virtual
from gradherd.lab.study.kind import (
    Found,
    Number,
    OneByOne,
    Piece,
    Where,
    checked,
    no_task,
    positive,
)
from gradherd.lab.study.spec import Study

CASES: Mapping[str, tuple[str, ...]] = {
    "coordination": ("workers", "dim", "repeats"),
    "step": ("workers", "dim", "batch_size", "repeats"),
    "signs": ("workers", "dim"),
    "virtual": ("workers", "batch_size", "steps", "repeats"),
    "advise": ("workers", "dim", "bandwidth", "backward"),
}
"""What is measured, or predicted, and the settings that decide it."""
_NAMES = ("seconds", "ratio", "bytes", "bytes_ratio", "peak_bytes", "steps_per_second")
_DEADLINE = 1800.0
"""Seconds, against hangs only."""
_LATENCY = 50e-6
"""Seconds of a short message, as `gradherd advise` assumes."""


@dataclass(frozen=True)
class Cost(OneByOne):
    """Measures: exchange and whole steps on real ranks, signs and virtual runs in one process.

    Whole steps of more ranks than a machine has are predicted, as `gradherd advise` does.
    """

    alone: ClassVar = True
    keys: ClassVar[Mapping[str, Any]] = {
        "case": str,
        "workers": int,
        "dim": int,
        "batch_size": int,
        "steps": int,
        "repeats": int,
        "bandwidth": Number,
        "backward": Number,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return those that decide the case, checked; what the study says of others is left out."""
        no_task(study)
        case = arm.get("case", study.settings.get("case"))
        if case not in CASES:
            raise ValueError(f"unknown case {case!r}; known are {', '.join(CASES)}")
        own = ("case", *CASES[case])
        for name in study.settings:
            if name not in self.keys:
                raise ValueError(f"unknown setting {name!r}; known are {', '.join(self.keys)}")
        shared = {name: value for name, value in study.settings.items() if name in own}
        base = {"batch_size": 1 if case == "virtual" else 64, "repeats": 9, "steps": 200}
        base = {name: value for name, value in base.items() if name in own}
        keys = {name: self.keys[name] for name in own}
        found = checked(keys, base, {**shared, **arm})
        positive(found, *(name for name in own if self.keys[name] is int))
        if case == "virtual" and found["steps"] < LEAST_STEPS:
            raise ValueError(f"steps must be at least {LEAST_STEPS}, got {found['steps']}")
        if case == "advise":
            _setting(found)
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
    case, workers = settings["case"], settings["workers"]
    repeats: int = settings.get("repeats", 1)
    if case == "virtual":
        return bench_virtual(workers, settings["batch_size"], settings["steps"], repeats, device)
    if case == "advise":
        return _predicted(_setting(settings))
    dim = settings["dim"]
    if case == "signs":
        return bench_signs([workers], [dim], device)
    if case == "coordination":
        job: tuple[Any, ...] = (bench_coordination, workers, dim, repeats)
    else:
        job = (bench_step, workers, dim, settings["batch_size"], repeats)
    rows: list[dict[str, Any]] = run_ranks(*job, timeout=_DEADLINE)[0]
    return rows


def _setting(settings: Mapping[str, Any]) -> Setting:
    """Return a step on GPUs: `backward` seconds, half as much for all else."""
    dim, backward = settings["dim"], settings["backward"]
    return Setting(
        params=dim,
        workers=settings["workers"],
        link=Link(bandwidth=settings["bandwidth"], latency=_LATENCY),
        backward=backward,
        forward=backward / 2,
        overheads=usual("cuda", dim),
    )


def _predicted(setting: Setting) -> list[dict[str, Any]]:
    """Return a step with each order on a dense exchange, against random reshuffling."""
    base = predict(setting, "dense")
    return [
        {
            "case": order,
            "seconds": one.step_seconds,
            "ratio": one.step_seconds / base.step_seconds,
            "bytes": one.bytes,
            "bytes_ratio": one.bytes / base.bytes if base.bytes else None,
        }
        for order in ("d-rr", "cd-grab")
        for one in [predict(setting, "dense", order)]
    ]
