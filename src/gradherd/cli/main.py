"""The command line: find the command, read its options, say in one line what is wrong.

Each command is a frozen dataclass of options with a `run` method, in a file of its own under
`cli/`; it is imported when it is called. Exit codes: 0 done, 1 failed, 2 wrong usage.
"""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from gradherd.cli.usage import Failed, UsageError


class Command(Protocol):
    """A command's options, ready to run."""

    def run(self) -> None:
        """Do it, print it."""
        ...


COMMANDS = {
    "demo": ("demo:Demo", "both halves at work in three minutes, and a page about it"),
    "train": ("train:Train", "train a task once, and write down how it went"),
    "compare": ("compare:Compare", "orders or sparsifiers on one task: who won, and is it sure?"),
    "study": ("study:Study", "run a study that a file describes, and keep its results"),
    "herding": ("herding:Herding", "random vectors: how short does each order keep prefix sums?"),
    "replay order": (
        "replay_order:ReplayOrder",
        "what order would a policy find for my gradients?",
    ),
    "replay sparsify": (
        "replay_sparsify:ReplaySparsify",
        "what would a sparsifier have sent of my gradients?",
    ),
    "bench signs": ("bench_signs:BenchSigns", "signs of a step: block-Gram against the loop"),
    "bench coordination": (
        "bench_coordination:BenchCoordination",
        "balancing across workers against all-reduce and all-gather",
    ),
    "bench rows": ("bench_rows:BenchRows", "per-example gradients against vmap and a loop"),
    "bench sparsify": (
        "bench_sparsify:BenchSparsify",
        "picking against torch.topk, a sparse exchange against all-reduce and PowerSGD",
    ),
    "bench step": ("bench_step:BenchStep", "a whole DDP step with cd-grab against d-rr"),
    "bench virtual": ("bench_virtual:BenchVirtual", "virtual runs of LeNet against a plain loop"),
    "advise": ("advise:Advise", "will a sparse exchange pay here? predicted step times"),
    "report": ("report:Report", "records of runs -> what they show, and one HTML page"),
    "data list": ("data_list:DataList", "which data sets are there, and how to get the others"),
    "data get": ("data_get:DataGet", "download a data set from its usual public source"),
    "data check": ("data_check:DataCheck", "are the data sets that are there whole?"),
    "doctor": ("doctor:Doctor", "is all there that gradherd needs, and does it work?"),
}
"""Command -> (module:class under gradherd.cli, one line of help)."""
_ON_RANKS = ("train", "compare", "advise")
"""Commands that every process that torchrun started takes part in."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = list(sys.argv[1:] if args is None else args)
    try:
        _run(words)
        sys.stdout.flush()
    except UsageError as error:
        _fail(2, str(error))
    except Failed as error:
        _fail(1, f"failed: {error}")
    except KeyboardInterrupt:
        _fail(130, "interrupted")
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Nothing more can be written, not at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError as error:
        _fail(1, f"out of memory: {_one_line(str(error)) or 'try smaller sizes'}")
    except Exception as error:
        if os.environ.get("GRADHERD_TRACEBACK"):
            raise
        what = f"{type(error).__name__}: {_one_line(str(error))}"
        _fail(1, f"failed: {what} (GRADHERD_TRACEBACK=1 shows where)")
    sys.exit(0)


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return
    if words[0] == "--version":
        from gradherd import __version__

        print(f"gradherd {__version__}")
        return
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
    if name is None:
        group = [known for known in COMMANDS if known.split()[0] == words[0]]
        if group and words[1:2] in (["-h"], ["--help"]):
            print(overview(group))
            return
        asked = " ".join(words[: 2 if group else 1])
        known = ", ".join(group or COMMANDS)
        if group and len(words) == 1:
            raise UsageError(f"{asked} needs to know which: {known}")
        raise UsageError(f"no command {asked!r}; there are: {known}")
    if os.environ.get("RANK", "0") != "0" and name not in _ON_RANKS:
        return  # Started by torchrun: the other commands are for one process, and print once.
    module, kind = COMMANDS[name][0].split(":")
    command = getattr(importlib.import_module(f"gradherd.cli.{module}"), kind)
    _parse(command, f"gradherd {name}", words[len(name.split()) :]).run()


def overview(names: Sequence[str] = tuple(COMMANDS)) -> str:
    """Return the list of commands."""
    lines = [f"  gradherd {name:<19} {COMMANDS[name][1]}" for name in names]
    return "\n".join(
        [
            "gradherd: distributed PyTorch training in fewer epochs and fewer bytes",
            "",
            *lines,
            "",
            "`gradherd COMMAND --help` tells more. Results go to stdout (--json for programs),",
            "progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage.",
        ]
    )


def _parse(command: type[Command], prog: str, args: list[str]) -> Command:
    import tyro

    style = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(command, prog=prog, args=args, config=style)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(f"{_unboxed(complaint.getvalue())} (see {prog} --help)") from None


def _unboxed(text: str) -> str:
    """Return tyro's complaint, which comes in a drawn box, as one line."""
    lines = [line.strip("│╭╰╮╯ ") for line in text.splitlines()[1:]]
    rule = next((i for i, line in enumerate(lines) if line.startswith("──")), len(lines))
    return _one_line(" ".join(lines[:rule]))


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fail(code: int, message: str) -> None:
    # What is wrong with a call is wrong for all processes that torchrun started: one speaks.
    if code == 1 or os.environ.get("RANK", "0") == "0":
        # Names that the user typed may hold anything: a line stays a line.
        shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in message)
        print(f"gradherd: {shown}", file=sys.stderr)
    sys.exit(code)
