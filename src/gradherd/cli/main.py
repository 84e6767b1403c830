"""The `gradherd` command line: find the command, parse its options, report errors in one line.

Each command is a frozen dataclass of options with a `run` method, in a module of this package that
is imported only when the command is called. Exit codes: 0 done, 1 failed, 2 wrong usage, 130
interrupted. Results go to stdout, progress and errors to stderr.
"""

import importlib
import os
import re
import select
import sys
from collections.abc import Sequence

from gradherd.cli.parser import CommandFailed, UsageError, did_you_mean, parse
from gradherd.cli.terminal import terminal_width, torchrun_rank, wrap
from gradherd.lab.text import printable, reason_of
from gradherd.lazy import BadMethod

COMMANDS = {
    "demo": "see both halves at work in a minute, with an HTML report",
    "train": "train a task once and record every epoch",
    "compare": "compare orders or sparsifiers on one task over seeds",
    "study": "run all arms and seeds of a study file; keep the results",
    "herding": "compare orders on random vectors, without training",
    "replay order": "reorder recorded gradients with any policy",
    "replay sparsify": "sparsify recorded gradients: what is sent, what stays?",
    "bench coordination": "time balancing across workers against all-reduce",
    "bench rows": "time per-example gradients against vmap and a loop",
    "bench sparsify": "time selection and exchange against topk and all-reduce",
    "bench step": "time a whole DDP step with cd-grab and with d-rr",
    "advise": "predict step times: will a sparse exchange pay here?",
    "report": "compare recorded runs and write one HTML page",
    "data list": "list data sets: which are here, how to get the others",
    "data get": "download a data set from its usual public source",
    "data check": "verify sizes and checksums of the data sets here",
    "doctor": "check that this machine has what gradherd needs",
}
"""Command -> one line of help; `bench rows` is the class BenchRowsCommand of `cli.bench`."""
# Everything else under torchrun would do the same work once per rank and print it as often.
_ON_ALL_RANKS = ("train", "compare", "advise")
"""Commands that run on every rank under torchrun."""
_MODULES = {"compare": "train", "herding": "replay"}
"""Modules that are not called like the first word of the command."""
_FOR_REPORTS = ("jinja2", "scipy")
"""Packages of the extra `report`."""


def main(args: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code.

    Args:
        args: Words after `gradherd`; those of this process if None.
    """
    words = list(sys.argv[1:] if args is None else args)
    try:
        _run(words)
        # Flushed here, so that a closed pipe or a full disk is caught below and not at exit, where
        # Python would print a traceback.
        sys.stdout.flush()
    except (UsageError, BadMethod) as error:
        _fail(2, str(error))
    except CommandFailed as error:
        _fail(1, f"failed: {error}")
    except KeyboardInterrupt:
        # 130 is what a shell reports for a process that SIGINT has ended: 128 + 2.
        _fail(130, "interrupted")
    except BrokenPipeError as error:
        if not _has_reader():
            # head or less has closed the pipe. Point stdout elsewhere, or Python would complain
            # again when it flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        # Another pipe: one to a worker process, or to the server that starts them.
        _fail(1, f"failed: {reason_of(error) or 'Broken pipe'}: a process of ours has ended")
    except Exception as error:
        # A traceback tells a user nothing; whoever debugs asks for it.
        if os.environ.get("GRADHERD_TRACEBACK"):
            raise
        kind = type(error).__name__
        if isinstance(error, MemoryError):  # sizes are options, so the advice is to lower them
            _fail(1, f"out of memory: {str(error) or 'try smaller sizes'}")
        # Torch's own, on a CPU, between the name of a source file and a number of the system.
        if asked := re.search(r"can't allocate memory: (you tried .*? bytes)", str(error)):
            _fail(1, f"out of memory: {asked[1]}")
        if isinstance(error, OSError):  # a disk that is full, a file that is gone: no defect
            _fail(1, f"failed: {reason_of(error) or kind}")
        _fail(1, f"failed: {kind}: {error} (set GRADHERD_TRACEBACK=1 to see where)")
    sys.exit(0)


def _has_reader() -> bool:
    """Return whether what is printed still goes somewhere."""
    if not hasattr(select, "poll"):  # Windows: a broken pipe is most often that of stdout
        return False
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except OSError:  # stdout is no file, but what a program has put in its place
        return True
    return not any(event & select.POLLERR for _, event in poll.poll(0))


def _run(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return
    if words[0] == "--version":
        from gradherd import __version__

        print(f"gradherd {__version__}")
        return
    # Two words first: "bench" alone is a group, "bench rows" a command.
    name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), None)
    if name is None:
        group = [known for known in COMMANDS if known.split()[0] == words[0]]
        if group and words[1:2] in (["-h"], ["--help"]):
            print(overview(group))
            return
        asked = " ".join(words[: 2 if group else 1])
        known = ", ".join(group or COMMANDS)
        if group and len(words) == 1:
            raise UsageError(f"{asked} needs a subcommand: {known}")
        near = did_you_mean(asked, COMMANDS)
        raise UsageError(f"unknown command {asked!r}{near or f'; choose from: {known}'}")
    if torchrun_rank() != 0 and name not in _ON_ALL_RANKS:
        return  # torchrun started several processes, but this command needs only one.
    # One --help imports one module.
    module = importlib.import_module(f"gradherd.cli.{_MODULES.get(name) or name.split()[0]}")
    command_class = getattr(module, f"{name.title().replace(' ', '')}Command")
    parsed = parse(command_class, f"gradherd {name}", words[len(name.split()) :])
    try:
        parsed.run()
    except ModuleNotFoundError as error:
        # Commands import what they need before they start to work. Any other missing module is a
        # defect, not an extra to install.
        package = (error.name or "").partition(".")[0]
        if package not in _FOR_REPORTS:
            raise
        raise UsageError(
            f"reports need {package}, which is not installed: pip install jinja2 scipy"
        ) from None


def overview(names: Sequence[str] = tuple(COMMANDS)) -> str:
    """Return the list of commands, as `gradherd --help` prints it."""
    width = terminal_width()
    end = (
        "Run `gradherd COMMAND --help` for options and examples. Results go to stdout (--json for "
        "programs), progress to stderr. Exit codes: 0 done, 1 failed, 2 wrong usage."
    )
    lines = ["gradherd: distributed PyTorch training in fewer epochs or fewer bytes", ""]
    for name in names:
        left, right = f"  gradherd {name}", COMMANDS[name]
        beside = f"{left:<30} {right}"
        if len(beside) <= width:
            lines.append(beside)
        else:
            lines += [left, *(f"      {line}" for line in wrap(right, width - 6))]
    return "\n".join([*lines, "", *wrap(end, min(width, 88))])


def _fail(code: int, message: str) -> None:
    # Under torchrun a wrong call is wrong on every rank: let rank 0 say so. Work may fail on any.
    if code == 1 or torchrun_rank() == 0:
        # The message may quote file names and other input, which may hold control characters.
        print(f"gradherd: {printable(message)}", file=sys.stderr)
    sys.exit(code)
