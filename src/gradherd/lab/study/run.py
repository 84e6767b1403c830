"""Plan the runs of a study, make those that are missing, and store their results."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradherd.lab.ranks import run_parts
from gradherd.lab.study.file import Study
from gradherd.lab.study.kinds import PlannedRun, RunContext, kind_of
from gradherd.lab.study.results import (
    RunResult,
    is_done,
    read_arms,
    same_settings,
    write_results,
)
from gradherd.lab.train.loop import Progress
from gradherd.lab.train.measurements import hardware, versions
from gradherd.lab.train.record import locked

RunBatch = Callable[..., list[RunResult]]
"""Makes the runs of a batch, given their `context` by name; picklable."""


def plan_runs(
    study: Study, only: Sequence[str] = (), seeds: Sequence[int] = ()
) -> list[PlannedRun]:
    """Return the runs of a study, seed by seed.

    All arms of a seed come before the next seed: a study that is interrupted has complete pairs.

    Args:
        study: The study.
        only: Names of arms, or patterns such as `cd-grab*`; empty takes all.
        seeds: Some of the study's seeds; empty takes all.

    Raises:
        ValueError: A name or seed does not exist, or an arm's settings are invalid.
    """
    unknown = [seed for seed in seeds if seed not in study.seeds]
    if unknown:
        known = ", ".join(map(str, study.seeds))
        raise ValueError(f"there is no seed {unknown[0]}; there are {known}")
    # Settings of all arms are checked before the first run: an error in the last arm must not
    # surface after hours of training.
    kind, chosen = kind_of(study), {}
    for name, own in study.arms.items():
        # `fnmatchcase`: plain `fnmatch` ignores case on some systems.
        if only and not any(fnmatch.fnmatchcase(name, pattern) for pattern in only):
            continue
        try:
            chosen[name] = kind.settings(study, own)
        except (ValueError, TypeError) as error:
            raise ValueError(f"arm {name!r}: {error}") from None
    for pattern in only:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in study.arms):
            names = ", ".join(map(repr, study.arms))
            raise ValueError(f"there is no arm {pattern!r}; there are {names}")
    return [
        PlannedRun(arm=name, seed=seed, settings=settings)
        for seed in study.seeds
        if not seeds or seed in seeds
        for name, settings in chosen.items()
    ]


def missing_runs(
    runs: Sequence[PlannedRun], stored: Mapping[str, Sequence[RunResult]]
) -> list[PlannedRun]:
    """Return the runs that have no stored result, by arm, with the same settings."""
    return [run for run in runs if not is_done(stored.get(run.arm, ()), run.seed, run.settings)]


def current_results(study: Study, folder: Path) -> dict[str, list[RunResult]]:
    """Return the results of a study by arm; an arm without any is left out.

    Raises:
        ValueError: A file of results is damaged.
    """
    kind, current = kind_of(study), {}
    for name, results in read_arms(folder, study.arms).items():
        # Results of earlier settings stay on disk until the arm runs again; they say nothing about
        # the arm as the file defines it now.
        settings = kind.settings(study, study.arms[name])
        own = [
            one
            for one in results
            if one.seed in study.seeds and same_settings(one.settings, settings)
        ]
        if own:
            current[name] = own
    return current


def run_planned(
    study: Study, runs: Sequence[PlannedRun], out: Path, context: RunContext, jobs: int = 1
) -> Iterator[list[RunResult]]:
    """Make runs, write their results into `out`, and yield them batch by batch.

    Results of other seeds of the same arm stay; those of other settings are replaced.

    Args:
        study: The study.
        runs: Its runs.
        out: Folder for results.
        context: Device, data and progress.
        jobs: Number of processes; see `run_parallel`.
    """
    kind = kind_of(study)
    batches = kind.batches(runs, context)
    # In this process, so that progress shows single steps.
    if jobs == 1:
        for batch in batches:
            context.progress.begin_arm(batch[0].arm, batch[0].seed, len(batch))
            # Stored batch by batch: an interruption loses only what was under way.
            yield store_results(study, out, run_batch(study, batch, context))
        return
    # Steps happen in other processes, which report only a finished run.
    context.progress.start(f"{len(runs)} runs, {jobs} at a time", len(runs))
    for results in run_parallel(partial(run_batch, study), batches, context, jobs):
        context.progress.step(len(results))
        yield store_results(study, out, results)


def run_batch(study: Study, batch: Sequence[PlannedRun], context: RunContext) -> list[RunResult]:
    """Make the runs of a batch."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    outcomes, known = kind_of(study).run(batch, context), hardware(context.device)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # Processes share the GPU: cached memory is missing elsewhere.
    # What figures depend on; results are public, so nothing else of the machine.
    machine = {name: known[name] for name in ("cpu", "cores", "accelerator")}
    about: dict[str, Any] = {"versions": versions(), "hardware": machine, "started": started}
    return [
        RunResult(**vars(run), **vars(one), **about)
        for run, one in zip(batch, outcomes, strict=True)
    ]


def store_results(study: Study, out: Path, results: list[RunResult]) -> list[RunResult]:
    """Add results to the files, which are read again: other runs may have finished meanwhile."""
    if not results:
        return results  # Nothing to write: a study that is refused must leave no folder behind.
    out.mkdir(parents=True, exist_ok=True)
    # Two processes that add a seed to the same arm at once would each write what they have read.
    with locked(out, wait=True):
        stored = read_arms(out, {one.arm for one in results})
        for arm in dict.fromkeys(one.arm for one in results):
            settings = next(one.settings for one in results if one.arm == arm)
            # One file, one set of settings: seeds of earlier ones would not be comparable.
            known = [one for one in stored.get(arm, []) if same_settings(one.settings, settings)]
            new = {one.seed: one for one in results if one.arm == arm}
            unchanged = [one for one in known if one.seed not in new]
            write_results(out, study.name, study.kind, [*unchanged, *new.values()])
    return results


def run_parallel(
    run: RunBatch, batches: Sequence[Sequence[PlannedRun]], context: RunContext, jobs: int
) -> Iterator[list[RunResult]]:
    """Run batches in several processes, and yield each one's results when it ends.

    A batch that fails does not stop the others; the first error is raised after the last of them.
    If a process is killed, or the caller is interrupted, all processes end; batches that were
    under way have no results and must be run again.
    """
    parts = split_batches(batches, jobs)
    if not parts:
        return
    # A progress bar belongs to this process, and cannot be sent to another.
    quiet = dataclasses.replace(context, progress=Progress())
    failed: Exception | None = None
    for _, results in run_parts(partial(run, context=quiet), parts, jobs, "spawn"):
        if isinstance(results, Exception):  # Raised below, once the others are done.
            failed = failed or results
        else:
            yield results
    if failed is not None:
        raise failed


def split_batches(batches: Sequence[Sequence[PlannedRun]], jobs: int) -> list[list[PlannedRun]]:
    """Split batches so that every process has work, if there are enough runs.

    Runs of a batch share work, so no batch is split further than that takes.
    """
    # A kind may put all runs into one batch; then all processes but one would be idle.
    largest = max(1, math.ceil(sum(map(len, batches)) / jobs))
    counts = [math.ceil(len(batch) / largest) for batch in batches]
    # Every count-th run: arms differ in cost, and neighbours are of the same seed.
    pairs = zip(batches, counts, strict=True)
    return [list(batch[at::count]) for batch, count in pairs for at in range(count)]
