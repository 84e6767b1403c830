"""Studies of what a step costs: the benchmarks, repeated.

A seed is one more repetition of the same measurement: seeds differ by the machine's noise alone.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from gradherd.advise.choices import NetworkLink, Setting, predict, typical_overheads
from gradherd.comm import script
from gradherd.comm.world import World
from gradherd.lab.bench.bench_coordination import bench_coordination, published_loop
from gradherd.lab.bench.bench_step import bench_step
from gradherd.lab.bench.timing import ceiling_keys, measure_cases, median_seconds
from gradherd.lab.ranks import run_ranks
from gradherd.lab.study.file import Study
from gradherd.lab.study.kinds import (
    PlannedRun,
    RunContext,
    RunOutcome,
    StudyKind,
    check_settings,
)
from gradherd.lab.tasks.registry import import_file
from gradherd.lab.text import check_known
from gradherd.ordering.balance import Unsigned, balance, blocks
from gradherd.ordering.sign_rules import Greedy

# By its path: a study file, and so this one, may be used from any folder.
virtual = import_file(Path(__file__).parents[2] / "benchmarks" / "virtual_steps.py", "benchmark")

CASES: Mapping[str, tuple[str, ...]] = {
    "coordination": ("workers", "dim", "repeats"),
    "step": ("workers", "dim", "batch_size", "repeats"),
    "signs": ("workers", "dim"),
    "virtual": ("workers", "batch_size", "steps", "repeats"),
    "advise": ("workers", "dim", "bandwidth", "backward"),
}
"""Cases that can be measured or predicted, with the settings that determine each."""
_COLUMNS = ("seconds", "ratio", "bytes", "bytes_ratio", "peak_bytes", "steps_per_second")
_TIMEOUT = 1800.0
"""Seconds; only guards against hangs."""
_LATENCY = 50e-6
"""Seconds per message, as `gradherd advise` assumes."""


class CostStudy(StudyKind):
    """Measures exchanges and whole steps on real ranks, signs and virtual runs in one process.

    Steps of more ranks than a machine has are predicted, as `gradherd advise` does.
    """

    alone: ClassVar = True
    keys: ClassVar[Mapping[str, Any]] = {
        "case": str,
        "workers": int,
        "dim": int,
        "batch_size": int,
        "steps": int,
        "repeats": int,
        "bandwidth": float,
        "backward": float,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that the case uses; the study's settings of other cases drop."""
        if study.task is not None:
            raise ValueError(f"a study of kind {study.kind} has no task, got {study.task!r}")
        case = arm.get("case", study.settings.get("case"))
        check_known("case", case, tuple(CASES))
        used = ("case", *CASES[case])
        for name in study.settings:
            check_known("setting", name, tuple(self.keys))
        # A study may measure several cases, whose settings stand side by side in its file. Without
        # the unused ones, a result stays valid when only another case's settings change.
        shared = {name: value for name, value in study.settings.items() if name in used}
        defaults = {"batch_size": 1 if case == "virtual" else 64, "repeats": 9, "steps": 200}
        defaults = {name: value for name, value in defaults.items() if name in used}
        keys = {name: self.keys[name] for name in used}
        settings = check_settings(keys, {**shared, **arm}, defaults)
        if case == "virtual" and settings["steps"] < virtual.LEAST_STEPS:
            raise ValueError(
                f"steps must be at least {virtual.LEAST_STEPS}, got {settings['steps']}"
            )
        # Built once to check it, before any run.
        if case == "advise":
            _setting(settings)
        return settings

    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Measure."""
        outcomes = []
        for run in runs:
            context.progress.begin(1, 1)
            rows = _measure(run.settings, torch.device(context.device))
            context.progress.step()
            # A flat summary, so that claims can name a figure: `cd-grab.ratio`.
            summary = {f"{row['case']}.{name}": row.get(name) for row in rows for name in _COLUMNS}
            outcomes.append(RunOutcome(figures={"summary": summary}))
        return outcomes


def _measure(settings: Mapping[str, Any], device: torch.device) -> list[dict[str, Any]]:
    case, workers = settings["case"], settings["workers"]
    repeats: int = settings.get("repeats", 1)
    if case == "virtual":
        batch, steps = settings["batch_size"], settings["steps"]
        return virtual.bench_virtual(workers, batch, steps, repeats, device)  # type: ignore[no-any-return]
    if case == "advise":
        return _predict(_setting(settings))
    dim = settings["dim"]
    if case == "signs":
        return bench_signs(workers, dim, device)
    if case == "coordination":
        call: tuple[Any, ...] = (bench_coordination, workers, dim, repeats)
    else:
        call = (bench_step, workers, dim, settings["batch_size"], repeats)
    rows: list[dict[str, Any]] = run_ranks(*call, timeout=_TIMEOUT)[0]
    return rows


def bench_signs(count: int, dim: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure the signs of a step; each of `count` workers contributes one pair difference.

    `sequential` is the loop of the published CD-GraB code (one inner product, one host sync and one
    update per vector), `block-gram` takes all signs from one Gram matrix, `balance` is the form
    that gradherd chooses for this device and size. The ceiling is one read of all vectors.
    """
    generator = torch.Generator(device).manual_seed(0)
    vectors = torch.randn(1, count, dim, generator=generator, device=device)
    # The time of a sign does not depend on values, so the sum may start at zero.
    running = torch.zeros_like(vectors[:, 0])
    given = Unsigned(vectors, running, Greedy(), np.zeros((1, count)), np.empty((0, 1)))
    cases: dict[str, Callable[[], object]] = {
        "sequential": lambda: published_loop(vectors[0], running[0]),
        "block-gram": lambda: script.run(blocks(given, block=count), World.single()),
        "balance": lambda: script.run(balance(given), World.single()),
    }
    rows = measure_cases(cases, device, workers=count, dim=dim)
    # No method can sign vectors without reading them once.
    ceiling = median_seconds(vectors.sum, device)
    for row in rows:
        row["signs_per_second"] = count / row["seconds"]
        row |= ceiling_keys(ceiling, row["seconds"])
    return rows


def _setting(settings: Mapping[str, Any]) -> Setting:
    """Return a step on GPUs: `backward` seconds, and half as long for the forward pass."""
    dim, backward = settings["dim"], settings["backward"]
    return Setting(
        params=dim,
        workers=settings["workers"],
        link=NetworkLink(bandwidth=settings["bandwidth"], latency=_LATENCY),
        backward=backward,
        # A backward pass has two matrix products (for inputs and for weights) for each one of the
        # forward pass.
        forward=backward / 2,
        overheads=typical_overheads("cuda", dim),
    )


def _predict(setting: Setting) -> list[dict[str, Any]]:
    """Return a step with each order and a dense exchange, relative to random reshuffling."""
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
