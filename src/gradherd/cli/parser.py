"""Make the parser of a command from its dataclass; errors are one sentence.

A field of the dataclass is an option: its type says what is accepted, its default what holds
without it, and the string below it is its help. `Annotated[type, Arg(...)]` says what these cannot.
A field without a default is a positional argument, and a field that is itself a dataclass is a
group of options. argparse does the work.
"""

import argparse
import ast
import dataclasses
import functools
import inspect
import os
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from gradherd.cli.errors import UsageError

_KINDS: dict[Any, tuple[str, str]] = {
    int: ("INT", "a whole number"),
    float: ("FLOAT", "a number"),
    str: ("STR", "a word"),
    Path: ("PATH", "a path"),
}
"""Type of an option -> what help calls its value, and what an error says that it must be."""
T = TypeVar("T")


@dataclass(frozen=True)
class Arg:
    """What --help says about an option beyond its type, its default and its docstring."""

    metavar: str | None = None
    help: str | None = None
    """Instead of a docstring, which cannot name what a registry holds."""
    default: str | None = None
    """What is said of the default instead of its value; nothing if empty."""
    positional: bool = False


class Command(Protocol):
    """The parsed options of a command, ready to run."""

    def run(self) -> None:
        """Do the work and print the result."""
        ...


def terminal_width() -> int:
    """Return how wide help may be: as the terminal; a file or a pipe has no width."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return max(30, shutil.get_terminal_size().columns) if known else 1000


def wrap(text: str, width: int) -> list[str]:
    """Break text between words, not at hyphens: all-reduce and --json are one word each."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Put help beside short options and below long ones, broken between words."""

    def __init__(self, prog: str) -> None:
        width = terminal_width()
        super().__init__(prog, max_help_position=min(24, width // 3), width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(text, width)


def parse(command: type[T], prog: str, words: Sequence[str]) -> T:
    """Return the options of a command as its dataclass.

    Args:
        command: A dataclass of options.
        prog: How it is called, for help and errors.
        words: What follows on the command line.

    Raises:
        UsageError: What is wrong, with which value.
        SystemExit: With code 0, after help was asked for and printed.
    """
    positionals = _positionals(command)
    names = [f"[{one.metavar} ...]" if one.many else one.metavar for one in positionals]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_description(command),
        usage=" ".join([prog, *names, "[options]"]),
        formatter_class=_HelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    _add_options(parser, command)
    try:
        values, rest = parser.parse_known_intermixed_args(list(words))
    except argparse.ArgumentError as error:
        colon = "" if error.message.startswith("must be") else ":"
        wrong = f"{error.argument_name}{colon} {error.message}"
        raise UsageError(f"{wrong} (see {prog} --help)") from None
    if rest:
        raise UsageError(f"there is no option or argument {rest[0]} here (see {prog} --help)")
    for one in positionals:
        if getattr(values, one.name) is MISSING:
            raise UsageError(f"{one.metavar} is missing: {one.help} (see {prog} --help)")
    return _filled(command, values)


@dataclass(frozen=True)
class _Option:
    name: str
    kind: Any
    """int, float, str, Path, bool or a Literal."""
    many: bool
    default: Any
    positional: bool
    metavar: str
    help: str

    def convert(self, text: str) -> Any:
        """Return the value of a word; argparse puts the name of the option before the error."""
        if typing.get_origin(self.kind) is Literal:
            choices = typing.get_args(self.kind)
            if text in choices:
                return text
            allowed = f"one of {', '.join(choices)}"
        else:
            try:
                return self.kind(text)
            except ValueError:
                allowed = _KINDS[self.kind][1]
        raise argparse.ArgumentTypeError(f"must be {allowed}, got {text!r}")

    def add_to(self, group: Any) -> None:
        """Declare this option to argparse."""
        default = list(self.default) if self.many else self.default
        shown = {"default": default, "help": self.help.replace("%", "%%")}
        if self.kind is bool:
            group.add_argument(f"--{self.name.replace('_', '-')}", action="store_true", **shown)
            return
        shown |= {"type": self.convert, "metavar": self.metavar}
        if self.positional:
            group.add_argument(self.name, nargs="*" if self.many else "?", **shown)
        else:
            many = {"nargs": "*", "action": "extend"} if self.many else {}
            group.add_argument(f"--{self.name.replace('_', '-')}", **many, **shown)


def _add_options(group: Any, command: type) -> None:
    for field, hint in _fields(command):
        if _is_group(hint):
            # Its docstring tells what the options have in common.
            about = "\n".join(wrap(str(inspect.getdoc(hint)), terminal_width() - 2))
            _add_options(group.add_argument_group(f"{field.name} options", about), hint)
        else:
            _option(command, field, hint).add_to(group)


def _fields(command: type) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        yield field, hints[field.name]


def _is_group(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _positionals(command: type) -> list[_Option]:
    plain = [one for one in _fields(command) if not _is_group(one[1])]
    return [one for one in (_option(command, *each) for each in plain) if one.positional]


def _option(command: type, field: dataclasses.Field[Any], hint: Any) -> _Option:
    arg = Arg()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
        arg = next(note for note in notes if isinstance(note, Arg))
    kind, many = _plain(hint)
    if typing.get_origin(kind) is Literal:
        metavar = f"{{{','.join(typing.get_args(kind))}}}"
    else:
        metavar = _KINDS[kind][0] if kind is not bool else ""
    text = _docs(command).get(field.name, "") if arg.help is None else arg.help
    default = field.default
    if arg.default is not None:
        text += f" (default: {arg.default})" if arg.default else ""
    elif default not in (MISSING, None, (), "") and kind is not bool:
        text += f" (default: {default})"
    return _Option(
        name=field.name,
        kind=kind,
        many=many,
        default=default,
        positional=arg.positional,
        metavar=arg.metavar or metavar,
        help=text,
    )


def _plain(hint: Any) -> tuple[Any, bool]:
    """Return the type of one value, and whether there may be several: int and True of tuple[int].

    >>> _plain(int | None), _plain(tuple[Path, ...]) == (Path, True)
    ((<class 'int'>, False), True)
    """
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


@functools.cache
def _docs(command: type) -> dict[str, str]:
    """Return the strings below the fields of a dataclass, by the names of the fields."""
    docs: dict[str, str] = {}
    for kind in reversed(command.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except OSError:  # installed without its source: options without help still work
            continue
        assert isinstance(tree, ast.ClassDef)
        for node, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                docs[ast.unparse(node.target)] = " ".join(text.split())
    return docs


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


def _filled(command: type[T], values: argparse.Namespace) -> T:
    """Return the dataclass with what was parsed."""
    filled: dict[str, Any] = {}
    for field, hint in _fields(command):
        if _is_group(hint):
            filled[field.name] = _filled(hint, values)
        else:
            value = getattr(values, field.name)
            filled[field.name] = tuple(value) if isinstance(value, list) else value
    return command(**filled)
