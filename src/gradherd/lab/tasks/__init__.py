"""The tasks: data, models, losses and metrics.

Names are imported when they are first used: `gradherd data list` reads only the table of data
sets and does not wait for torch.
"""

from typing import TYPE_CHECKING

from gradherd.lazy import lazy_names

if TYPE_CHECKING:
    from gradherd.lab.tasks.data_files import MissingData as MissingData
    from gradherd.lab.tasks.registry import TASKS as TASKS
    from gradherd.lab.tasks.registry import find_task as find_task
    from gradherd.lab.tasks.safe_readers import DamagedData as DamagedData
    from gradherd.lab.tasks.task import Defaults as Defaults
    from gradherd.lab.tasks.task import Split as Split
    from gradherd.lab.tasks.task import Task as Task

_HOMES = {
    "MissingData": "data_files",
    "TASKS": "registry",
    "find_task": "registry",
    "DamagedData": "safe_readers",
    "Defaults": "task",
    "Split": "task",
    "Task": "task",
}
"""Name -> the module of this package that defines it; says the same as the imports above."""
__all__ = list(_HOMES)
__getattr__ = lazy_names(__name__, _HOMES)
