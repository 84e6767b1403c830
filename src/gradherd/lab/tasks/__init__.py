"""The tasks: data, models, losses and metrics.

Names are imported when they are first used: `gradherd data list` reads only the table of data
sets and does not wait for torch.
"""

from typing import TYPE_CHECKING

from gradherd.lazy import lazy_names

if TYPE_CHECKING:
    from gradherd.lab.tasks.data_files import DamagedData as DamagedData
    from gradherd.lab.tasks.data_files import MissingData as MissingData
    from gradherd.lab.tasks.registry import TASKS as TASKS
    from gradherd.lab.tasks.registry import find_task as find_task
    from gradherd.lab.tasks.task import Defaults as Defaults
    from gradherd.lab.tasks.task import Split as Split
    from gradherd.lab.tasks.task import Task as Task

_HOMES = {
    "gradherd.lab.tasks.data_files": ("DamagedData", "MissingData"),
    "gradherd.lab.tasks.registry": ("TASKS", "find_task"),
    "gradherd.lab.tasks.task": ("Defaults", "Split", "Task"),
}

__getattr__, __all__ = lazy_names(__name__, _HOMES)
