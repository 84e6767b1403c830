"""`gradherd doctor`: check that this machine has what gradherd needs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli.arguments import json_help, print_json
from gradherd.cli.errors import CommandFailed
from gradherd.cli.tables import plain_table, print_sentence, print_table

if TYPE_CHECKING:
    from gradherd.cli.doctor_checks import Check

_STATUS_STYLES = {"ok": "green", "missing": "dim", "problem": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorCommand:
    """Check what gradherd needs on this machine, and say how to fix what is wrong.

    Looks at versions, the build of torch, GPUs, cores, memory, disks and data sets, and starts two
    local workers to see whether they can talk to each other. Takes a few seconds. Every check is
    ok, missing (an optional part is not installed) or a problem (it does not work). Exit code 1 if
    something does not work that every training needs.

    Example: gradherd doctor
    """

    json: Annotated[
        bool,
        json_help(
            'Print {"checks": [{"name", "status", "found", "hint"}], "ok"}; status is ok,'
            " missing or problem."
        ),
    ] = False

    def run(self) -> None:
        """Run all checks and print them."""
        checks = self._checks()
        broken = [check.name for check in checks if check.essential and check.status == "problem"]
        if self.json:
            print_json({"checks": [_as_json(check) for check in checks], "ok": not broken})
        else:
            print_table(_table(checks))
        if broken:
            # After the table, so that "above" is true; scripts see the exit code.
            raise CommandFailed(f"gradherd will not work well here: see {', '.join(broken)} above")
        if not self.json:
            print_sentence(_summary(checks), Console())

    def _checks(self) -> list[Check]:
        # Late, for the sake of --help: the checks import torch.
        from gradherd.cli import doctor_checks as checks_of

        console = Console(stderr=True, quiet=self.json)
        with console.status("starting two local workers"):  # drawn on a terminal only
            workers = checks_of.local_workers()
        return [
            *checks_of.packages(),
            *checks_of.distributed(),
            checks_of.gpu(),
            *checks_of.machine(),
            workers,
            *checks_of.data(),
        ]


def _as_json(check: Check) -> dict[str, str]:
    return {key: value for key, value in asdict(check).items() if key != "essential"}


def _table(checks: list[Check]) -> Table:
    table = plain_table()
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in checks:
        status = f"[{_STATUS_STYLES[check.status]}]{check.status}[/]"
        table.add_row(check.name, status, _details(check))
    return table


def _details(check: Check) -> str:
    """Return what was found and the hint, which gets its own line if there is a problem."""
    found, hint = escape(check.found), escape(check.hint)
    if check.status == "ok":
        return f"{found}  [dim]{hint}[/]" if hint else found
    return f"{found}\n{hint}" if check.status == "problem" else f"{found}  {hint}"


def _summary(checks: list[Check]) -> str:
    problems = [check.name for check in checks if check.status == "problem"]
    if problems:
        return f"Everything that training needs works. Have a look at: {', '.join(problems)}."
    return "Everything that training needs works; what is missing is optional."
