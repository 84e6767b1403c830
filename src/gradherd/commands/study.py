"""`gradherd study`: run what a file describes, and keep small results."""

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradherd.commands.bench_show import usable_device
from gradherd.commands.train_options import AnyPath, check_data, known_task
from gradherd.commands.usage import Failed, UsageError, print_json
from gradherd.study.archive import read_arms
from gradherd.study.file import Study as StudyFile
from gradherd.study.file import read_study
from gradherd.study.kind import Piece, Told, Where
from gradherd.study.run import left, planned, run_pieces
from gradherd.tasks.read import DamagedData

RESULTS = Path("benchmarks") / "results"


@dataclass(frozen=True, kw_only=True)
class Study:
    """Run the arms and seeds that a TOML file describes; results are small files to be committed.

    Each arm has one file with a line for each seed. A study may be run in pieces: --only and
    --seeds pick runs, --resume leaves out what is there already with the same settings; a run that
    was interrupted left nothing and is run again. `gradherd report --evidence` makes the page.

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
    device: str = "cpu"
    """Where: cpu or cuda."""
    data_dir: AnyPath = None
    """Folder to look for data in first; then come GRADHERD_DATA and the cache folder."""
    out: AnyPath = None
    """Folder for results; benchmarks/results/NAME if not given."""
    json: bool = False
    """Print {"study", "kind", "out", "runs": [{"arm", "seed", "status"}], "skipped"}."""

    def run(self) -> None:
        """Read, plan, run, tell."""
        usable_device(self.device)
        try:
            study = read_study(self.file)
            pieces = planned(study, self.only, self.seeds)
            out = RESULTS / study.name if self.out is None else self.out
            there = read_arms(out, dict.fromkeys(piece.arm for piece in pieces), study.kind)
        except ValueError as error:
            raise UsageError(str(error)) from None
        todo = left(pieces, there)
        if self.plan:
            self._show_plan(study, pieces, todo)
            return
        if there and not self.resume:
            arms = ", ".join(repr(arm) for arm in list(there)[:3])
            raise UsageError(
                f"{out} holds results of {arms}{' ...' if len(there) > 3 else ''}: --resume adds "
                "what is missing; or remove them, or name another --out"
            )
        made = self._made(study, todo, out)
        self._end(study, out, made, len(pieces) - len(todo))

    def _made(self, study: StudyFile, todo: Sequence[Piece], out: Path) -> list[dict[str, Any]]:
        if study.task is not None and todo:
            task = str(study.folder / study.task) if ":" in study.task else study.task
            check_data(known_task(task), self.data_dir)
        made: list[dict[str, Any]] = []
        # To be ended is to be interrupted: what is written so far is whole.
        before = signal.signal(signal.SIGTERM, _interrupt)
        try:
            with Bar(len(todo)) as bar:
                where = Where(
                    folder=study.folder, device=self.device, data_dir=self.data_dir, told=bar
                )
                for results in run_pieces(study, todo, out, where):
                    made += [{"arm": r.arm, "seed": r.seed, "status": r.status} for r in results]
        except KeyboardInterrupt:
            print(f"gradherd: {len(made)} of {len(todo)} runs are in {out}", file=sys.stderr)
            raise
        except DamagedData as error:
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
        if self.json:
            told = {"study": study.name, "kind": study.kind, "out": str(out), "runs": made}
            print_json({**told, "skipped": skipped})
            return
        lost = sum(one["status"] == "diverged" for one in made)
        more = f", {skipped} were there" if skipped else ""
        more += f", {lost} diverged" if lost else ""
        print(f"{study.name}: {len(made)} runs{more}; results in {out}")

    def _show_plan(
        self,
        study: StudyFile,
        pieces: Sequence[Piece],
        todo: Sequence[Piece],
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


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Bar(Told):
    """One bar on stderr if that is a terminal: the steps of the batch at hand, and which it is."""

    def __init__(self, runs: int) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("left of it"),
            TimeRemainingColumn(),
        )
        quiet = not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=quiet)
        self._task = self._bar.add_task("", total=None, loss="")
        self._runs, self._done = runs, 0

    def __enter__(self) -> "Bar":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def pieces(self, batch: Sequence[Piece]) -> None:
        """Name what goes on."""
        first, self._done = self._done + 1, self._done + len(batch)
        span = f"{first}" if len(batch) == 1 else f"{first}-{self._done}"
        what = f"{batch[0].arm}, seed {batch[0].seed}" if len(batch) == 1 else "together"
        text = f"run {span} of {self._runs}: {escape(what)}"
        self._bar.reset(self._task, total=None, description=text, loss="")

    def begin(self, runs: int, steps: int) -> None:
        """Draw an empty bar."""
        self._bar.reset(self._task, total=steps)

    def step(self, steps: int = 1) -> None:
        """Move on."""
        self._bar.advance(self._task, steps)

    def epoch(self, number: int, losses: list[float | None]) -> None:
        """Show the loss after an epoch: that of the last run."""
        loss = "not finite" if losses[-1] is None else f"{losses[-1]:.4g}"
        self._bar.update(self._task, loss=f"epoch {number}, loss {loss}")
