"""The tasks: data, models, losses and metrics."""

from gradherd.lab.tasks.data_files import MissingData as MissingData
from gradherd.lab.tasks.registry import TASKS as TASKS
from gradherd.lab.tasks.registry import find_task as find_task
from gradherd.lab.tasks.safe_readers import DamagedData as DamagedData
from gradherd.lab.tasks.task import Defaults as Defaults
from gradherd.lab.tasks.task import Split as Split
from gradherd.lab.tasks.task import Task as Task
