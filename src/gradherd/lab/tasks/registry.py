"""All tasks by name, and custom tasks from a Python file."""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.digits import Digits, DigitsMLP
from gradherd.lab.tasks.hmda import HMDA
from gradherd.lab.tasks.images import Cifar10LeNet, FashionLeNet
from gradherd.lab.tasks.task import REQUIRED, Defaults, Task, as_task, check_call
from gradherd.lab.text import check_known, one_line, printable

TASKS: dict[str, Callable[[], Task]] = {
    one.name: one for one in (Digits, DigitsMLP, HMDA, Cifar10LeNet, FashionLeNet)
}
"""Tasks by name."""
_TEXT = (str, "a text")
_MEMBERS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("name", "description", "metric_name"), _TEXT),
    "higher_is_better": (bool, "True or False"),
    "data": (tuple, "a tuple of names of data sets"),
    "defaults": (Defaults, "gradherd.lab.tasks.Defaults"),
}
"""What the members of a task must be that are no methods, in words."""


def find_task(name: str) -> Task:
    """Return the task of that name, or the class given as `path/to/file.py:ClassName`.

    A file is executed, as by an import; a name without a colon executes nothing.

    >>> find_task("digits").metric_name
    'test accuracy (%)'
    """
    if ":" in name:
        return _from_file(name)
    if name not in TASKS:
        raise ValueError(
            f"unknown task {name!r}; known are {', '.join(TASKS)}; "
            "for your own task give path/to/file.py:ClassName"
        )
    return as_task(TASKS[name]())


def class_in_file(name: str, what: str, *bases: type) -> Any:
    """Return the class that `path/to/file.py:ClassName` names.

    Args:
        name: The file, which is executed, and the class.
        what: What it is in errors.
        *bases: It must inherit from one of these, if there are any.
    """
    # The last colon: the path may hold others.
    file, _, class_name = name.rpartition(":")
    path = Path(os.path.expanduser(file))
    if not os.path.isfile(path):
        raise ValueError(f"{what}: there is no file {file!r}")
    found = None
    if class_name.isidentifier():  # An invalid name executes nothing.
        found = getattr(import_file(path, what), class_name, None)
    fits = isinstance(found, type) and issubclass(found, bases) if bases else callable(found)
    if not fits:
        kind = " or ".join(base.__name__ for base in bases) or "class"
        raise ValueError(f"{what}: {printable(file, 200)} has no {kind} {class_name!r}")
    return found


def _from_file(name: str) -> Task:
    make, class_name = class_in_file(name, f"task {name!r}"), name.rpartition(":")[2]
    try:
        # Anything may be raised: it is the code of a user.
        task = make()
    except Exception as error:
        raise ValueError(f"task {name!r}: {class_name}() fails: {one_line(error)}") from error
    missing = [member for member in REQUIRED if not hasattr(task, member)]
    if missing:
        raise ValueError(
            f"task {name!r}: {class_name} is not a task, it lacks {', '.join(missing)}"
        )
    for member, (kind, words) in _MEMBERS.items():
        value = getattr(task, member)
        if not isinstance(value, kind) or value == "":
            got = type(value).__name__ if member == "defaults" else repr(value)
            raise ValueError(f"task {name!r}: {class_name}.{member} must be {words}, got {got}")
    for one in task.data:
        check_known(f"data set of task {name!r}", one, DATASETS)
    check_call(task, "load(data_dir, limit)", None, None)
    check_call(task, "model()")
    return as_task(task)


def import_file(path: Path, what: str) -> ModuleType:
    """Execute a Python file and return its module; `what` is its name in errors."""
    # A unique module name: files of the same name in two folders must not share a module.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"gradherd_task_{path.stem}_{digest}", path)
    if spec is None or spec.loader is None:
        raise ValueError(
            f"{what}: {printable(path, 200)} is not a Python file, its name must end in .py"
        )
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their own module while they are being defined.
    sys.modules[spec.name] = module
    # A run that fails leaves nothing beside the user's file.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    # SystemExit: a script without a __main__ guard may call sys.exit.
    except (Exception, SystemExit) as error:
        # Else the next attempt would get a module that is half initialised.
        del sys.modules[spec.name]
        raise ValueError(f"{what}: {printable(path, 200)} fails: {one_line(error)}") from error
    finally:
        sys.dont_write_bytecode = before
    return module
