"""All tasks by name, and tasks of one's own from a file."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from gradherd.lab.tasks.data_files import expand_user, is_file
from gradherd.lab.tasks.digits import Digits, DigitsMLP
from gradherd.lab.tasks.hmda import HMDA
from gradherd.lab.tasks.lenet import Cifar10LeNet, FashionLeNet
from gradherd.lab.tasks.m4 import M4MLP
from gradherd.lab.tasks.resnet18 import Cifar10ResNet18
from gradherd.lab.tasks.safe_readers import printable
from gradherd.lab.tasks.sst2 import SST2Transformer
from gradherd.lab.tasks.task import Defaults, Task
from gradherd.lab.tasks.wikitext2 import WikiText2GPT2, WikiText2LSTM

TASKS: dict[str, Callable[[], Task]] = {
    "digits": Digits,
    "digits-mlp": DigitsMLP,
    "hmda": HMDA,
    "wikitext2-lstm": WikiText2LSTM,
    "m4-mlp": M4MLP,
    "wikitext2-gpt2": WikiText2GPT2,
    "cifar10-lenet": Cifar10LeNet,
    "cifar10-resnet18": Cifar10ResNet18,
    "fashion-lenet": FashionLeNet,
    "sst2-transformer": SST2Transformer,
}
"""Tasks by name."""

_MEMBERS = tuple(name for name in vars(Task) if not name.startswith("_"))


def find_task(name: str) -> Task:
    """Return the task of that name, or the one that `path/to/file.py:ClassName` says.

    A file is executed, as importing it would; a name without a colon executes nothing.

    >>> find_task("digits").metric_name
    'test accuracy (%)'
    """
    if ":" in name:
        return _from_file(name)
    if name not in TASKS:
        raise ValueError(
            f"unknown task {name!r}; known are {', '.join(TASKS)}; one of your own is "
            "path/to/file.py:ClassName"
        )
    return TASKS[name]()


def _from_file(name: str) -> Task:
    where, _, kind = name.rpartition(":")
    path = expand_user(Path(where))
    if not is_file(path):
        raise ValueError(f"task {name!r}: there is no file {where!r}")
    make = getattr(_imported(path, name), kind, None) if kind.isidentifier() else None
    if not callable(make):
        raise ValueError(f"task {name!r}: {printable(where)} has no class {kind!r}")
    try:
        task = make()
    except Exception as error:
        raise ValueError(f"task {name!r}: {kind}() fails: {_reason(error)}") from error
    lack = [member for member in _MEMBERS if not hasattr(task, member)]
    if lack:
        raise ValueError(f"task {name!r}: {kind} is no task, it lacks {', '.join(lack)}")
    if not isinstance(task.defaults, Defaults):
        raise ValueError(
            f"task {name!r}: {kind}.defaults must be gradherd.lab.tasks.Defaults, "
            f"got {type(task.defaults).__name__}"
        )
    found: Task = task
    return found


def _imported(path: Path, name: str) -> ModuleType:
    # A name of its own: files of one name in two folders must not become the same module.
    mark = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(f"gradherd_task_{path.stem}_{mark}", path)
    if spec is None or spec.loader is None:
        raise ValueError(
            f"task {name!r}: {printable(str(path))} is no Python file, its name must end in .py"
        )
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their own module up while they are made.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(
            f"task {name!r}: {printable(str(path))} fails: {_reason(error)}"
        ) from error
    return module


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
