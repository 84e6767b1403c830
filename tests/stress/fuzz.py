"""Feed spoilt files to everything that reads files, and to the command line.

    python -m tests.stress.fuzz --inputs 10000

Every input must give a good result, or one clear sentence that names the file: in time, within
memory, with nothing run and nothing written that should not be. The first that does otherwise ends
the run with what is needed to see it again.
"""

import argparse
import collections
import contextlib
import io
import logging
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gradherd.cli.main import main as command_line
from tests.stress import mutations
from tests.stress.targets import REFUSED, TARGETS, Target

SECONDS = 10
"""Of the processor; a hang that takes none is ended after ten times as many."""
MEMORY = 700 << 20
"""Bytes that reading a file may take."""
EVERY = 25
"""One input in so many is given to the command line, too."""


class Violation(AssertionError):
    """An input that did what none may do."""


class TooLong(BaseException):
    """Time is over; no `except Exception` may hide it."""


@dataclass(frozen=True)
class Place:
    """Where an input is tried: its own folder, one for output, and one that must not change."""

    root: Path

    @property
    def files(self) -> Path:
        return self.root / "files"

    @property
    def out(self) -> Path:
        return self.root / "out"

    @property
    def home(self) -> Path:
        return self.root / "home"

    def fresh(self) -> None:
        for folder in (self.files, self.out):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def check(self) -> None:
        """Raise Violation if something was left behind."""
        there = sorted(path.name for path in self.root.iterdir())
        if there != ["files", "home", "out"] or any(self.home.iterdir()):
            raise Violation(f"something was written outside: {there}, {list(self.home.iterdir())}")


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """End what takes too long, and refuse memory beyond what is allowed."""

    def stop(number: int, frame: object) -> None:
        raise TooLong(f"it took more than {SECONDS} s")

    before = [(one, signal.signal(one, stop)) for one in (signal.SIGPROF, signal.SIGALRM)]
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    others = signal.setitimer(signal.ITIMER_REAL, 10 * SECONDS)  # a test has a time limit, too
    most = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + 2 * MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (room, most[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    except TooLong as error:
        raise Violation(str(error)) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for one, handler in before:
            signal.signal(one, handler)
        signal.setitimer(signal.ITIMER_REAL, *others)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10
    if grown > MEMORY:
        raise Violation(f"it took {grown >> 20} MiB")


def try_reader(target: Target, folder: Path, path: Path) -> str:
    """Read a spoilt file; return "read" or "refused"."""
    with limits(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            target.read(folder, path)
            outcome = "read"
        except REFUSED as error:
            _check_message(str(error), target, path)
            outcome = "refused"
        except (Exception, SystemExit) as error:
            raise Violation(f"it raised {type(error).__name__}: {error}") from error
    if told:
        raise Violation(f"it warned: {told[0].message}")
    return outcome


def _check_message(message: str, target: Target, path: Path) -> None:
    if not message.isprintable():
        raise Violation(f"its message is not one plain line: {message[:300]!r}")
    if len(message) > 12_000:
        raise Violation(f"its message has {len(message)} characters: {message[:300]}")
    # Of an edition that is not the published one, any file may be named first.
    others = [one.name for one in path.parent.parent.rglob("*")] if "instead of" in message else []
    names = [path.name.split(".")[0], path.parent.name, *others]
    if target.named and not any(_plain(name) in message for name in names):
        raise Violation(f"its message does not name the file: {message[:300]}")


def _plain(name: str) -> str:
    return max(re.findall("[a-zA-Z0-9_-]+", name), key=len, default=name)


def try_command(target: Target, place: Place, folder: Path, path: Path) -> str:
    """Give a spoilt file to the command line; return its exit code."""
    put_in = {"DIR": str(folder), "FILE": str(path)}
    words = [put_in.get(word, word.replace("OUT", str(place.out))) for word in target.command]
    out, err = io.StringIO(), io.StringIO()
    with limits(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line(words)
            code: Any = "none"
        except SystemExit as stop:
            code = stop.code
        except Exception as error:
            raise Violation(f"the command raised {type(error).__name__}: {error}") from error
    said = err.getvalue()
    good = not said or (said.startswith("gradherd: ") and said.count("\n") == 1)
    if code not in (0, 1, 2) or not good or "GRADHERD_TRACEBACK" in said or "Traceback" in said:
        raise Violation(f"exit code {code}, and it said {said[:500]!r}")
    if code and not said and target.command[:2] != ("data", "check"):
        raise Violation(f"exit code {code} without a word")
    return f"exit {code}"


def one_input(number: int, seed: int, place: Place) -> tuple[Target, str, list[str]]:
    """Make input `number` and try it; return its kind, what was done to it, and what came of it."""
    chance = random.Random(f"{seed} {number}")
    target = chance.choices(TARGETS, [target.weight for target in TARGETS])[0]
    place.fresh()
    folder = place.files
    if chance.random() < 0.1:
        folder = folder / chance.choice(mutations.NAMES)
        folder.mkdir()
    path = target.make(folder)
    if chance.random() < 0.05 and target.found:
        what = mutations.misplace(path, chance)
    else:
        data, done = path.read_bytes(), []
        for _ in range(chance.choice([1, 1, 1, 2])):
            spoil = chance.choice(target.spoil)
            done.append(getattr(spoil, "__name__", "inside"))
            with contextlib.suppress(ValueError, IndexError, KeyError, EOFError, RecursionError,
                                     *mutations.UNPACKABLE):  # fmt: skip
                data = spoil(data, chance)  # A second one may not find what it needs any more.
        path.write_bytes(data)
        what = "+".join(done)
    outcomes = []
    try:
        outcomes.append(try_reader(target, folder, path))
        place.check()
        if target.command and number % EVERY == 0:
            outcomes.append(try_command(target, place, folder, path))
            place.check()
    except Violation as error:
        raise Violation(
            f"{target.name}, spoilt by {what}: {error}\n"
            f"see it again: python -m tests.stress.fuzz --seed {seed} --only {number}"
        ) from error.__cause__
    return target, what, outcomes


def fuzz(inputs: list[int], seed: int, tell: Any = None) -> dict[str, collections.Counter[str]]:
    """Try these inputs; return what came of them by kind. Raises Violation at the first bad one."""
    found: dict[str, collections.Counter[str]] = {}
    kept = {name: os.environ.get(name) for name in ("GRADHERD_DATA", "XDG_CACHE_HOME", "HOME")}
    here, threads, level = Path.cwd(), torch.get_num_threads(), logging.getLogger("gradherd").level
    with tempfile.TemporaryDirectory(prefix="gradherd-fuzz-") as name:
        place = Place(Path(name))
        place.home.mkdir()
        os.environ.pop("GRADHERD_DATA", None)
        os.environ |= {"XDG_CACHE_HOME": str(place.out), "HOME": str(place.home)}
        os.chdir(place.home)
        torch.set_num_threads(1)
        logging.getLogger("gradherd").setLevel(logging.CRITICAL)
        for end in (".gz", ".xz"):
            mutations.bomb(end)  # It takes a second, which no input has.
        try:
            for done, number in enumerate(inputs, 1):
                target, _, outcomes = one_input(number, seed, place)
                found.setdefault(target.name, collections.Counter()).update(outcomes)
                if tell is not None and done % 500 == 0:
                    tell(f"{done} inputs", flush=True)
        finally:
            os.chdir(here)
            torch.set_num_threads(threads)
            logging.getLogger("gradherd").setLevel(level)
            for key, value in kept.items():
                os.environ.pop(key, None) if value is None else os.environ.update({key: value})
    return found


def main() -> int:
    """Read the options and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="try this input alone")
    args = parser.parse_args()
    begin = time.monotonic()
    numbers = list(range(args.inputs)) if args.only is None else [args.only]
    try:
        found = fuzz(numbers, args.seed, print)
    except Violation as error:
        print(f"violation: {error}", file=sys.stderr)
        if error.__cause__ is not None and args.only is not None:
            raise
        return 1
    columns = ("read", "refused", "exit 0", "exit 1", "exit 2")
    print(f"{'kind':<40}" + "".join(f"{column:>9}" for column in columns))
    total: collections.Counter[str] = collections.Counter()
    for name, counts in sorted(found.items()):
        print(f"{name:<40}" + "".join(f"{counts[column]:>9}" for column in columns))
        total += counts
    print(f"{'all':<40}" + "".join(f"{total[column]:>9}" for column in columns))
    print(
        f"{len(numbers)} inputs, seed {args.seed}, {time.monotonic() - begin:.0f} s: no violation"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
