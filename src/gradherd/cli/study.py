"""`gradherd study`: run the arms and seeds of a study file, and keep small results."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from gradherd.cli.options import check_data, named_task, usable_device
from gradherd.cli.parser import (
    Arg,
    Count,
    FileArgument,
    FolderOption,
    UsageError,
    usage_errors,
)
from gradherd.cli.terminal import print_json, print_table
from gradherd.lab.text import counted, mean_and_std

# Imported by the functions that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from gradherd.lab.study.file import Study
    from gradherd.lab.study.kinds import PlannedRun
    from gradherd.lab.study.results import RunResult

RESULTS = Path("benchmarks") / "results"


@dataclass(frozen=True, kw_only=True)
class StudyCommand:
    """Run the arms and seeds of a study file and keep their results as small files.

    A study is a TOML file with arms and seeds. Its results are meant to be committed: one file per
    arm, with one line per seed. At the end you see a table of all arms that have results; those of
    a training are compared with the first, as `gradherd compare` does.

    You can run a study in parts. --only and --seeds select runs, --resume skips those that already
    have results with the same settings. An interrupted run leaves no result and is run again.

    Example: gradherd study studies/hmda.toml --resume
    """

    file: FileArgument
    """The study, as TOML."""
    resume: bool = False
    """Skip runs that have results; without this, there must be no results yet."""
    only: Annotated[tuple[str, ...], Arg(metavar="ARM")] = ()
    """Run only these arms; `cd-grab*` matches every arm whose name starts with cd-grab."""
    seeds: tuple[int, ...] = ()
    """Run only these of the study's seeds."""
    plan: bool = False
    """Show what would be run and what is there already; run nothing."""
    device: str | None = None
    """cpu or cuda; by default what the file says."""
    jobs: Count = 1
    """Number of runs at a time, each in its own process; on a CPU use its number of cores."""
    data_dir: FolderOption = None
    """Folder to search for data first, before GRADHERD_DATA and the cache folder."""
    out: FolderOption = None
    """Folder for results; by default benchmarks/results/NAME."""
    json: bool = False
    """Print {"study", "kind", "out", "runs": [{"arm", "seed", "status"}], "skipped"} and, for
    trainings, what `gradherd compare --json` prints; else "arms": [{"label", "seeds", "summary"}].
    """

    def run(self) -> None:
        """Read the file, run what is missing, and print the table of its arms."""
        if self.device is not None:
            usable_device(self.device)
        # All before any run, so that a missing package is reported at once.
        from gradherd.lab.report import comparison as _  # noqa: F401
        from gradherd.lab.study.file import read_study
        from gradherd.lab.study.kinds import kind_of
        from gradherd.lab.study.results import read_arms
        from gradherd.lab.study.run import missing_runs, plan_runs

        with usage_errors():
            study = read_study(self.file)
            planned = plan_runs(study, self.only, self.seeds)
            out = RESULTS / study.name if self.out is None else self.out
            results = read_arms(out, dict.fromkeys(run.arm for run in planned))
            todo = missing_runs(planned, results)
        # Before the checks of --out and --resume: looking at a plan must always work.
        if self.plan:
            self._print_plan(study, planned, todo)
            return
        if results and not self.resume:
            arms = ", ".join(repr(arm) for arm in list(results)[:3])
            raise UsageError(
                f"{out} holds results of {arms}{' ...' if len(results) > 3 else ''}: add --resume "
                "to run what is missing, remove them, or name another --out"
            )
        if kind_of(study).alone and self.jobs > 1:
            raise UsageError(
                f"--jobs must be 1, got {self.jobs}: kind {study.kind} measures time, so nothing "
                "may run at the same time"
            )
        # Before hours of training whose results could not be written.
        _check_out(out)
        runs = self._run_missing(study, todo, out)
        self._print_result(study, out, runs, len(planned) - len(todo))

    def _run_missing(
        self, study: Study, todo: Sequence[PlannedRun], out: Path
    ) -> list[dict[str, Any]]:
        from gradherd.cli.launch import reported_errors
        from gradherd.cli.progress import ProgressBar
        from gradherd.lab.study.kinds import RunContext, task_path
        from gradherd.lab.study.run import run_planned

        if not todo:
            return []
        if study.task is not None:
            # Only if something is to be run: verdicts on existing results need no data.
            check_data(named_task(task_path(study.task, study.folder)), self.data_dir)
        runs: list[dict[str, Any]] = []
        bar = ProgressBar(study_runs=len(todo))
        try:
            # Results are written run by run, so SIGTERM leaves none half-written.
            with reported_errors(), bar:
                context = RunContext(
                    folder=study.folder,
                    device=_device(study, self.device),
                    data_dir=self.data_dir,
                    progress=bar,
                )
                for results in run_planned(study, todo, out, context, self.jobs):
                    runs += [{"arm": r.arm, "seed": r.seed, "status": r.status} for r in results]
        except KeyboardInterrupt:
            # Their results are on disk, and --resume runs the rest.
            print(f"gradherd: {len(runs)} of {len(todo)} runs are in {out}", file=sys.stderr)
            raise
        return runs

    def _print_result(
        self, study: Study, out: Path, runs: list[dict[str, Any]], skipped: int
    ) -> None:
        from gradherd.lab.study.run import current_results

        results = current_results(study, out)
        trained = all("summary" not in one.figures for runs in results.values() for one in runs)
        arms = _compare(results, self.json) if trained else _summaries(results, self.json)
        if self.json:
            result = {"study": study.name, "kind": study.kind, "out": str(out), "runs": runs}
            print_json({**result, "skipped": skipped, **arms})
            return
        diverged = sum(run["status"] == "diverged" for run in runs)
        details = f", {skipped} skipped" if skipped else ""
        details += f", {diverged} diverged" if diverged else ""
        print(f"{study.name}: {counted(len(runs), 'run')}{details}; results in {out}")

    def _print_plan(
        self, study: Study, planned: Sequence[PlannedRun], todo: Sequence[PlannedRun]
    ) -> None:
        if self.json:
            left_over = [{"arm": run.arm, "seed": run.seed} for run in todo]
            skipped = len(planned) - len(todo)
            result = {"study": study.name, "kind": study.kind, "left": left_over}
            print_json({**result, "skipped": skipped})
            return
        rows = []
        for arm in dict.fromkeys(run.arm for run in planned):
            missing = [run.seed for run in todo if run.arm == arm]
            done = [run.seed for run in planned if run.arm == arm and run.seed not in missing]
            rows.append((arm, " ".join(map(str, done)), " ".join(map(str, missing))))
        print_table(rows, ("arm", "seeds with results", "seeds to run"), title=study.title)


def _compare(results: Mapping[str, Sequence[RunResult]], json: bool) -> dict[str, Any]:
    """Compare trained arms with the first one; print it unless it is for JSON."""
    from gradherd.cli.report import print_comparison
    from gradherd.lab.report.comparison import compare_named
    from gradherd.lab.report.comparison_table import comparison_json

    comparison = compare_named(
        [(name, [one.record() for one in runs]) for name, runs in results.items()]
    )
    if not json:
        print_comparison(comparison, None)
    return comparison_json(comparison, None)


def _summaries(results: Mapping[str, Sequence[RunResult]], json: bool) -> dict[str, Any]:
    """Return the means of what runs that do not train have measured; print them unless for JSON."""
    from gradherd.lab.report.stats import mean_std

    arms = []
    for name, runs in results.items():
        names = runs[0].figures["summary"]
        means = {one: mean_std([run.figures["summary"].get(one) for run in runs]) for one in names}
        # What a case does not measure is there, too, without a value.
        means = {one: found for one, found in means.items() if found.mean is not None}
        seeds = [run.seed for run in runs]
        arms.append(
            {"label": name, "seeds": seeds, "summary": {k: vars(v) for k, v in means.items()}}
        )
        if not json:
            said = [f"{k} {mean_and_std(v.mean, v.std, len(seeds))}" for k, v in means.items()]
            print(f"{name} ({counted(len(seeds), 'seed')}): {', '.join(said)}")
    return {"arms": arms}


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be written to before any run is lost to it."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir():
        raise UsageError(f"--out {str(out)!r}: {str(existing)!r} is a file, not a folder")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"--out {str(out)!r}: the folder {str(existing)!r} cannot be written to")


def _device(study: Study, option: str | None) -> str:
    """Return the device of --device, or that of the file if it can be used."""
    if option is not None:
        return option
    try:
        # Not replaced by a CPU in silence: a study that takes hours on a GPU would take days.
        usable_device(study.device)
    except UsageError:
        raise UsageError(
            f"{study.name} is meant for a GPU, and there is none: add --device cpu (much slower)"
        ) from None
    return study.device
