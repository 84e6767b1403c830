"""Make the parser of a command from its dataclass; errors are one sentence.

A field of the dataclass is an option: its type says what is accepted, its default what holds
without it, and the string below it is its help. `Annotated[type, Arg(...)]` says what these cannot:
above all `parse`, which reads and checks a value, so that a command gets no wrong one. A field that
is itself a dataclass is a group of options. argparse does the work. Nothing here imports torch.
"""

import argparse
import contextlib
import dataclasses
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from gradherd.cli.terminal import terminal_width, wrap
from gradherd.lab.text import field_texts
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS

_KINDS: dict[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("NAME", "a word"),
    Path: ("PATH", "a path"),
}
"""Type of an option -> what help calls its value, and what an error says that it must be."""
T = TypeVar("T")


class UsageError(ValueError):
    """The call is wrong (exit code 2): one line with the option, the value and what is allowed."""


class CommandFailed(RuntimeError):
    """The call is right but the work failed (exit code 1): one line that says what happened."""


@contextlib.contextmanager
def usage_errors(settings: Collection[str] = ()) -> Iterator[None]:
    """Turn a ValueError inside into a UsageError: whatever is wrong is wrong with the call.

    Args:
        settings: Names that are options: one that the error begins with is written as its option.
    """
    try:
        yield
    except UsageError:
        raise
    except ValueError as error:
        found = re.match(r"(unknown )?(\w+)", str(error))
        if found is None or found[2] not in settings:
            raise UsageError(str(error)) from None
        option, rest = f"--{found[2].replace('_', '-')}", str(error)[found.end() :]
        raise UsageError(f"{option}: unknown{rest}" if found[1] else option + rest) from None


@dataclass(frozen=True)
class Arg:
    """What a type, a default and the text below a field do not say about an option."""

    metavar: str | None = None
    help: str | None = None
    """Instead of the text below the field."""
    known: Iterable[str] = ()
    """All names that it takes; {known} in its text stands for them. A tuple takes several."""
    default: str | None = None
    """What is said of the default instead of its value; nothing if empty."""
    positional: bool = False
    parse: Callable[[str], Any] | None = None
    """Returns the value of a word; raises ValueError with what is wrong with it."""


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return a reader of whole numbers, none too small or so large that it must be a slip."""

    def read(text: str) -> int:
        value = _of_kind(int, text)
        if value < least:
            raise ValueError(f"must be at least {least}, got {value}")
        if most is not None and value > most:
            raise ValueError(f"must be at most {most:,}, got {value}")
        return int(value)

    return read


def share(text: str) -> float:
    """Read a number in (0, 1]."""
    value = float(_of_kind(float, text))
    if not 0 < value <= 1:  # also refuses nan
        raise ValueError(f"must be in (0, 1], got {value}")
    return value


def one_of(known: Iterable[str]) -> Callable[[str], str]:
    """Return a reader of one of these names."""

    def read(text: str) -> str:
        if text not in known:
            moved = POLICIES.hint(text) or SPARSIFIERS.hint(text)
            raise ValueError(f"unknown {text!r}; choose from {', '.join(known)}{moved}")
        return text

    return read


def separated(read: Callable[[str], T], what: str) -> Callable[[str], tuple[T, ...]]:
    """Return a reader of values that are separated by commas; one given twice counts once.

    >>> separated(one_count, "number")("4, 1e6,4")
    (4, 1000000)
    """

    def read_all(text: str) -> tuple[T, ...]:
        words = list(filter(None, map(str.strip, text.split(","))))
        if not words:
            raise ValueError(f"must name at least one {what}, got {text!r}")
        # What is given twice would be run twice, into the same folder.
        return tuple(dict.fromkeys(map(read, words)))

    return read_all


def one_count(text: str) -> int:
    """Read a positive whole number, which may be written 2e6."""
    try:
        value = float(text)
    except ValueError:
        value = 0
    # 1e400 parses as infinity, which int() refuses with an OverflowError.
    if not math.isfinite(value) or value < 1 or value != int(value):
        raise ValueError(f"{text!r} is not a positive whole number")
    if value > 2**53:  # larger floats are not exact
        raise ValueError(f"{text!r} is too large")
    return int(value)


Count = Annotated[int, Arg(parse=whole(1))]
Counts = Annotated[tuple[int, ...], Arg(metavar="N,N", parse=separated(one_count, "number"))]
Density = Annotated[float, Arg(parse=share)]
FolderOption = Annotated[Path | None, Arg(metavar="DIR")]
FileArgument = Annotated[Path, Arg(metavar="FILE", positional=True)]


def _of_kind(kind: Any, text: str) -> Any:
    try:
        if kind is Path and not text:  # Path("") is the current folder
            raise ValueError
        return kind(text)
    except ValueError:
        raise ValueError(f"must be {_KINDS[kind][1]}, got {text!r}") from None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Put help beside short options and below long ones, broken between words."""

    def __init__(self, prog: str) -> None:
        width = terminal_width()
        super().__init__(prog, max_help_position=min(24, width // 3), width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ": did you mean ...?" with the known word that is nearest, or nothing.

    >>> did_you_mean("--epoch", ["--epochs", "--out"]), did_you_mean("x", ["--out"])
    (': did you mean --epochs?', '')
    """
    near = difflib.get_close_matches(word, list(known), 1, 0.75)
    return f": did you mean {near[0]}?" if near else ""


def parse(command: type[T], prog: str, words: Sequence[str]) -> T:
    """Return the options of a command as its dataclass.

    Raises:
        UsageError: What is wrong, with which value.
        SystemExit: With code 0, after help was asked for and printed.
    """
    options = list(_options(command))
    positionals = [one for one in options if one.arg.positional]
    names = [f"[{one.metavar} ...]" if one.many else one.metavar for one in positionals]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_description(command),
        usage=" ".join([prog, *names, "[options]"]),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups: dict[type, Any] = {command: parser}
    for one in options:
        if one.owner not in groups:
            # Its docstring tells what the options have in common.
            about = "\n".join(wrap(str(inspect.getdoc(one.owner)), terminal_width() - 2))
            groups[one.owner] = parser.add_argument_group(f"{one.group} options", about)
        one.add_to(groups[one.owner])
    try:
        values, rest = parser.parse_known_intermixed_args(list(words))
    except argparse.ArgumentError as error:
        message = error.message
        if (unwanted := re.fullmatch("ignored explicit argument (.*)", message)) is not None:
            message = f"takes no value, got {unwanted[1]}"
        colon = "" if message.startswith(("must ", "takes ")) else ":"
        wrong = f"{error.argument_name}{colon} {message}"
        raise UsageError(f"{wrong} (see {prog} --help)") from None
    if rest:
        near = did_you_mean(rest[0].partition("=")[0], [one.flag for one in options])
        raise UsageError(f"there is no option or argument {rest[0]} here{near} (see {prog} --help)")
    filled: dict[type, dict[str, Any]] = {owner: {} for owner in groups}
    for one in options:
        value = getattr(values, one.name)
        if value is MISSING:
            raise UsageError(f"{one.metavar} is missing: {one.help} (see {prog} --help)")
        filled[one.owner][one.name] = tuple(value) if isinstance(value, list) else value
    for one in options:
        if one.group:
            filled[command][one.group] = one.owner(**filled[one.owner])
    return command(**filled[command])


@dataclass(frozen=True)
class _Option:
    name: str
    kind: Any
    """int, float, str, Path, bool or a Literal; whatever `arg.parse` returns if there is one."""
    many: bool
    """Whether it can be repeated."""
    default: Any
    arg: Arg
    text: str
    """What is below the field."""
    owner: type
    """The dataclass that it is a field of."""
    group: str
    """The field of the command that holds this dataclass; empty for the command's own options."""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        if self.arg.metavar is not None:
            return self.arg.metavar
        choices = typing.get_args(self.kind)
        return f"{{{','.join(choices)}}}" if choices else _KINDS[self.kind][0]

    @property
    def help(self) -> str:
        text = self.text if self.arg.help is None else self.arg.help
        text = text.replace("{known}", ", ".join(self.arg.known))
        shown = self.arg.default
        if shown is None and self.kind is not bool and self.default not in (MISSING, None, (), ""):
            several = isinstance(self.default, tuple)
            shown = ",".join(map(str, self.default)) if several else str(self.default)
        return f"{text} (default: {shown})" if shown else text

    def convert(self, text: str) -> Any:
        """Return the value of a word; argparse puts the name of the option before the error."""
        choices = typing.get_args(self.kind)
        try:
            if self.arg.parse is not None:
                return self.arg.parse(text)
            if not choices:
                return _of_kind(self.kind, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if text not in choices:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(choices)}, got {text!r}")
        return text

    def add_to(self, group: Any) -> None:
        """Declare this option to argparse."""
        shown: dict[str, Any] = {"default": self.default, "help": self.help.replace("%", "%%")}
        if self.kind is bool:
            group.add_argument(self.flag, action="store_true", **shown)
            return
        shown |= {"type": self.convert, "metavar": self.metavar}
        if self.many:
            shown |= {"nargs": "*", "default": []}
        if self.arg.positional:
            group.add_argument(self.name, **{"nargs": "?", **shown})
        else:
            group.add_argument(self.flag, **shown, **({"action": "extend"} if self.many else {}))


def _options(owner: type, group: str = "") -> Iterator[_Option]:
    """Yield the options of a dataclass and of the groups in it."""
    hints, texts = typing.get_type_hints(owner, include_extras=True), field_texts(owner)
    for field in dataclasses.fields(owner):
        name, kind, arg = field.name, hints[field.name], Arg()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from _options(kind, name)
            continue
        if typing.get_origin(kind) is Annotated:
            kind, arg = typing.get_args(kind)
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        several = typing.get_origin(kind) is tuple
        if arg.known and arg.parse is None:
            one, what = one_of(arg.known), f"of {', '.join(arg.known)}"
            arg = dataclasses.replace(arg, parse=separated(one, what) if several else one)
        many = several and arg.parse is None
        if many:
            kind = typing.get_args(kind)[0]
        yield _Option(name, kind, many, field.default, arg, texts.get(name, ""), owner, group)


def _description(command: type) -> str:
    """Return the docstring of a command, its paragraphs broken at the width of the terminal."""
    blocks = []
    for paragraph in str(inspect.getdoc(command)).split("\n\n"):
        text = " ".join(paragraph.split())
        # Examples are copied, so they stay whole.
        prose, *examples = text.split("Example: ")
        lines = wrap(prose, terminal_width()) + [f"Example: {one.strip()}" for one in examples]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)
