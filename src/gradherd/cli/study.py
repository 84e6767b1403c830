"""`gradherd study`: run what a file describes, and keep small results."""

import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.bench_show import usable_device
from gradherd.cli.claims_show import as_claims, print_claims
from gradherd.cli.study_bar import Bar
from gradherd.cli.train_options import AnyPath, check_data, known_task
from gradherd.cli.usage import Failed, UsageError, at_least, print_json
from gradherd.lab.study.file import read_study
from gradherd.lab.study.kinds import PlannedRun, RunContext, task_path
from gradherd.lab.study.results import RunResult, read_arms, read_other_studies
from gradherd.lab.study.run import (
    ProcessDied,
    kind_of,
    missing_runs,
    plan_runs,
    reusable_results,
    run_planned,
    store_results,
)
from gradherd.lab.study.spec import Study as StudyFile
from gradherd.lab.tasks.safe_readers import DamagedData
from gradherd.lab.text import counted

if TYPE_CHECKING:
    from gradherd.lab.report.claims import Verdict

RESULTS = Path("benchmarks") / "results"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run the arms and seeds that a TOML file describes; results are small files to be committed.

    It ends with the verdict on each claim that the file makes and its results can tell about. Each
    arm has one file with a line for each seed. A study may be run in pieces: --only and
    --seeds pick runs, --resume leaves out what is there already with the same settings; a run that
    was interrupted left nothing and is run again. --resume also takes over what another study in
    benchmarks/results has run with the same settings. `gradherd report --evidence` makes the page.

    Example: gradherd study studies/hmda.toml --resume
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The study, as TOML."""
    resume: bool = False
    """Leave out runs whose results are there; without it there must be none."""
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ARM", help_behavior_hint="")] = ()
    """Only arms of these names; `cd-grab*` is all that begin so."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT", help_behavior_hint="")] = ()
    """Only these seeds of the file's."""
    plan: bool = False
    """Show what would be run and what is there; run nothing."""
    device: str | None = None
    """Where: cpu or cuda; as the file says if not given."""
    jobs: int = 1
    """Processes that make runs side by side: on a CPU as many as it has cores."""
    data_dir: AnyPath = None
    """Folder to look for data in first; then come GRADHERD_DATA and the cache folder."""
    out: AnyPath = None
    """Folder for results; benchmarks/results/NAME if not given."""
    json: bool = False
    """Print {"study", "kind", "out", "runs": [{"arm", "seed", "status"}], "skipped",
    "claims": [{"id", "verdict", "ours"}]}."""

    def run(self) -> None:
        """Read, plan, run, tell."""
        at_least("--jobs", self.jobs, 1)
        if self.device is not None:
            usable_device(self.device)
        try:
            study = read_study(self.file)
            pieces = plan_runs(study, self.only, self.seeds)
            _check_told(study)
            out = RESULTS / study.name if self.out is None else self.out
            there = read_arms(out, dict.fromkeys(piece.arm for piece in pieces), study.kind)
            todo = missing_runs(pieces, there)
        except ValueError as error:
            raise UsageError(str(error)) from None
        found = self._elsewhere(study, todo)
        taken = {(one.arm, one.seed) for one in found}
        todo = [piece for piece in todo if (piece.arm, piece.seed) not in taken]
        if self.plan:
            self._show_plan(study, pieces, todo)
            return
        if there and not self.resume:
            arms = ", ".join(repr(arm) for arm in list(there)[:3])
            raise UsageError(
                f"{out} holds results of {arms}{' ...' if len(there) > 3 else ''}: --resume adds "
                "what is missing; or remove them, or name another --out"
            )
        if kind_of(study).alone and self.jobs > 1:
            raise UsageError(f"--jobs: kind {study.kind} measures time, its runs go one by one")
        _check_out(out)
        store_results(study, out, found)
        made = self._made(study, todo, out)
        self._end(study, out, made, len(pieces) - len(todo))

    def _elsewhere(self, study: StudyFile, todo: Sequence[PlannedRun]) -> list[RunResult]:
        """Return results of these runs that another study has.

        Only where results of studies are known to be side by side, and not of those that measure
        time: they are of one machine.
        """
        if not self.resume or self.out is not None or kind_of(study).alone or not todo:
            return []
        told = partial(print, "gradherd: passed over:", file=sys.stderr)
        return reusable_results(todo, read_other_studies(RESULTS, study.name, study.kind, told))

    def _made(
        self, study: StudyFile, todo: Sequence[PlannedRun], out: Path
    ) -> list[dict[str, Any]]:
        if not todo:
            return []
        if study.task is not None:
            check_data(known_task(task_path(study.task, study.folder)), self.data_dir)
        made: list[dict[str, Any]] = []
        # To be ended is to be interrupted: what is written so far is whole.
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with Bar(len(todo)) as bar:
                where = RunContext(
                    folder=study.folder,
                    device=_device(study, self.device),
                    data_dir=self.data_dir,
                    progress=bar,
                )
                for results in run_planned(study, todo, out, where, self.jobs):
                    made += [{"arm": r.arm, "seed": r.seed, "status": r.status} for r in results]
        except KeyboardInterrupt:
            print(f"gradherd: {len(made)} of {len(todo)} runs are in {out}", file=sys.stderr)
            raise
        except (DamagedData, ProcessDied) as error:
            raise Failed(str(error)) from None
        finally:
            signal.signal(signal.SIGTERM, before)
        return made

    def _end(
        self,
        study: StudyFile,
        out: Path,
        made: list[dict[str, Any]],
        skipped: int,
    ) -> None:
        verdicts = _verdicts(study, out)
        if self.json:
            told = {"study": study.name, "kind": study.kind, "out": str(out), "runs": made}
            print_json({**told, "skipped": skipped, "claims": as_claims(verdicts)})
            return
        print_claims(verdicts)
        lost = sum(one["status"] == "diverged" for one in made)
        more = f", {skipped} were there" if skipped else ""
        more += f", {lost} diverged" if lost else ""
        print(f"{study.name}: {counted(len(made), 'run')}{more}; results in {out}")

    def _show_plan(
        self,
        study: StudyFile,
        pieces: Sequence[PlannedRun],
        todo: Sequence[PlannedRun],
    ) -> None:
        waiting = [{"arm": one.arm, "seed": one.seed} for one in todo]
        if self.json:
            skipped = len(pieces) - len(todo)
            told = {"study": study.name, "kind": study.kind, "left": waiting}
            print_json({**told, "skipped": skipped})
            return
        table = Table(title=escape(study.title), title_justify="left")
        for name in ("arm", "seeds that are there", "seeds to run"):
            table.add_column(name)
        for arm in dict.fromkeys(piece.arm for piece in pieces):
            open_ = [one.seed for one in todo if one.arm == arm]
            there = [p.seed for p in pieces if p.arm == arm and p.seed not in open_]
            table.add_row(escape(arm), " ".join(map(str, there)), " ".join(map(str, open_)))
        Console().print(table)


def _check_told(study: StudyFile) -> None:
    """Refuse claims and figures that no result can serve, as long as nothing has been run."""
    try:
        from gradherd.lab.report.told import check_told
    except ModuleNotFoundError:  # `_verdicts` says what is missing.
        return
    check_told(study)


def _check_out(out: Path) -> None:
    """Refuse a folder that cannot be written to, before there is something to lose."""
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise UsageError(f"--out {str(out)!r}: {str(there)!r} is a file, not a folder")
    if not os.access(there, os.W_OK):
        raise UsageError(f"--out {str(out)!r}: the folder {str(there)!r} cannot be written to")


def _verdicts(study: StudyFile, out: Path) -> "list[Verdict]":
    """Return what the results tell about the claims; without what reports need, nothing."""
    try:
        from gradherd.lab.report.evidence import judged
    except ModuleNotFoundError as error:
        lacking = f"verdicts need {error.name}: pip install 'gradherd[report]'"
        print(f"gradherd: {lacking}", file=sys.stderr)
        return []
    return judged(study, out)[1]


def _device(study: StudyFile, asked: str | None) -> str:
    """Return where to run: as asked, or as the file says, if that can be used."""
    if asked is not None:
        return asked
    try:
        usable_device(study.device)
    except UsageError:
        raise UsageError(
            f"{study.name} is meant for a GPU and there is none: --device cpu takes much longer"
        ) from None
    return study.device


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
