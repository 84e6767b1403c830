"""What is trained: data, models, losses and metrics, one file per task."""

from gradherd.tasks.data import MissingData as MissingData
from gradherd.tasks.read import DamagedData as DamagedData
from gradherd.tasks.registry import TASKS as TASKS
from gradherd.tasks.registry import find_task as find_task
from gradherd.tasks.task import Defaults as Defaults
from gradherd.tasks.task import Split as Split
from gradherd.tasks.task import Task as Task
