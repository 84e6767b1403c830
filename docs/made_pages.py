"""Writes what the command line prints into the pages: python docs/made_pages.py.

docs/cli.md is what `gradherd COMMAND --help` prints; docs/advise.md shows an output of advise. A
test compares the pages with new ones.
"""

import contextlib
import io
import os
import re
import shlex
import textwrap
from pathlib import Path

from gradherd.cli.main import COMMANDS, main

DOCS = Path(__file__).parent
_WIDTH = 100
_INTRODUCTION = """\
# Command line

What `gradherd COMMAND --help` prints, made by `python docs/made_pages.py`.

Results go to stdout, progress and errors to stderr. `--json` prints one object for programs; future
versions add keys but never rename them. Exit codes: 0 success, 1 failure, 2 wrong usage, 130
Ctrl-C, 143 stopped by SIGTERM after saving. An error is one line that starts with `gradherd: `;
`GRADHERD_TRACEBACK=1` shows the traceback, `GRADHERD_QUIET=1` no progress, and `GRADHERD_DATA`
names the folder of the data sets. Commands that train start local worker processes, or join those
of `torchrun -m gradherd ...`.
"""


def cli_page() -> str:
    """Return the text of docs/cli.md."""
    parts = [_INTRODUCTION, f"```\n{help_of()}\n```\n"]
    parts += [f"## gradherd {name}\n\n```\n{help_of(name)}\n```\n" for name in COMMANDS]
    return "\n".join(parts)


def advise_page() -> str:
    """Return docs/advise.md with the output of the command above it."""
    text = (DOCS / "advise.md").read_text()
    found = re.search(r"(?<=^gradherd )(advise [^\n]*)\n```\n\n```\n(.*?)```", text, re.S | re.M)
    if found is None:
        raise ValueError("docs/advise.md shows no output of advise")
    lines = printed_by(found[1]).splitlines()
    shown = "\n".join(
        line if len(line) <= _WIDTH else textwrap.fill(line, _WIDTH) for line in lines
    )
    return text[: found.start(2)] + shown + "\n" + text[found.end(2) :]


def help_of(name: str = "") -> str:
    """Return the help of a command, or that of all."""
    return printed_by(f"{name} --help").strip()


def printed_by(command: str) -> str:
    """Return what a command prints, without colours and spaces at the end of lines."""
    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(_WIDTH)
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            main(shlex.split(command))
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return re.sub(r"\x1b\[[\d;]*m| +$", "", output.getvalue(), flags=re.M)


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_page())
    (DOCS / "advise.md").write_text(advise_page())
