"""`gradherd doctor`: is everything there that gradherd needs, and does it work?"""

from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradherd.cli import doctor_machine as look
from gradherd.cli.doctor_checks import Check, packages
from gradherd.cli.usage import Failed, print_json

_STYLES = {"ok": "green", "missing": "dim", "problem": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check what gradherd needs on this machine, and tell the way out of what is wrong.

    Versions, what torch was built with, GPUs, cores, memory, disks, data sets; and two local
    workers are started to see whether they find each other. Takes some seconds. ok: there and
    working. missing: optional, and not there. problem: does not work. Exit code 1 if something
    is broken that no training can do without.

    Example: gradherd doctor
    """

    json: bool = False
    """Print {"checks": [{"name", "status", "found", "hint"}], "ok"}; status is ok, missing or
    problem."""

    def run(self) -> None:
        """Look at everything."""
        checks = self._checks()
        broken = [one.name for one in checks if one.essential and one.status == "problem"]
        if self.json:
            print_json({"checks": [_plain(one) for one in checks], "ok": not broken})
        else:
            Console().print(_table(checks))
        if broken:
            raise Failed(f"gradherd cannot work well here: see {', '.join(broken)} above")
        if not self.json:
            Console().print(_summary(checks))

    def _checks(self) -> list[Check]:
        console = Console(stderr=True, quiet=self.json)
        with console.status("starting two local workers"):  # shown on a terminal only
            workers = look.local_workers()
        return [
            *packages(),
            *look.distributed(),
            look.gpu(),
            *look.machine(),
            workers,
            *look.data(),
        ]


def _plain(one: Check) -> dict[str, str]:
    return {key: value for key, value in asdict(one).items() if key != "essential"}


def _table(checks: list[Check]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for one in checks:
        mark = f"[{_STYLES[one.status]}]{one.status}[/]"
        table.add_row(one.name, mark, _told(one))
    return table


def _told(one: Check) -> str:
    """Return what was found; a hint that is needed gets a line of its own."""
    found, hint = escape(one.found), escape(one.hint)
    if one.status == "ok":
        return f"{found}  [dim]{hint}[/]" if hint else found
    return f"{found}\n{hint}" if one.status == "problem" else f"{found}  {hint}"


def _summary(checks: list[Check]) -> str:
    odd = [one.name for one in checks if one.status == "problem"]
    if odd:
        return f"What no training can do without works. Look at: {', '.join(odd)}."
    return "All that is needed works; what is missing is optional."
