"""Tasks by name, and tasks of one's own."""

import sys
from pathlib import Path

import pytest
import torch

from gradherd.lab.tasks import TASKS, find_task
from gradherd.lab.tasks.datasets import TASK_DATA

REPOSITORY = Path(__file__).parents[3]
OWN = '''
"""A task of someone's own."""
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from gradherd.lab.tasks import Defaults, Split


@dataclass(frozen=True)
class Line:
    """A straight line through noise."""

    slope: float = 2.0
    name: ClassVar = "line"
    description: ClassVar = "a straight line"
    data: ClassVar = ()
    metric_name: ClassVar = "test error"
    higher_is_better: ClassVar = False
    defaults: ClassVar = Defaults(
        workers=2, batch_size=4, lr=0.1, epochs=3, seeds=1, source="Made up."
    )

    def load(self, data_dir=None, limit=None):
        x = torch.linspace(-1, 1, 40).unsqueeze(1)
        return Split((x, self.slope * x), (x, self.slope * x)).first(limit)

    def model(self):
        return nn.Linear(1, 1)

    def loss(self, model, x, y):
        return (model(x) - y).square().mean()

    def metric(self, model, x, y):
        with torch.no_grad():
            return float(self.loss(model, x, y))


class Half:
    name = "half"
    loss = metric = None


class Loose(Line):
    defaults = {"lr": 0.1}


class Asking:
    def __init__(self, something):
        pass


number = 3
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_task_of_ones_own_trains(own):
    task = find_task(f"{own}:Line")
    split = task.load(limit=10)
    assert task.name == "line" and len(split.train[0]) == 10
    torch.manual_seed(0)  # A start that is nearly right already has little to learn.
    model = task.model()
    before = task.metric(model, *split.test)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.defaults.lr)
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, *split.train).backward()
        optimizer.step()
    assert task.metric(model, *split.test) < before / 4


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("Curve", "has no class 'Curve'"),
        ("number", "has no class 'number'"),
        ("", "has no class ''"),
        ("a b", "has no class 'a b'"),
        ("Half", "Half is not a task, it lacks description, data, metric_name"),
        ("Loose", "Loose.defaults must be gradherd.lab.tasks.Defaults, got dict"),
        ("Asking", r"Asking\(\) fails: TypeError"),
    ],
)
def test_what_is_no_task_is_refused_in_one_line(own, kind, complaint):
    with pytest.raises(ValueError, match=complaint) as error:
        find_task(f"{own}:{kind}")
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        find_task(f"{tmp_path}/gone.py:Line")
    with pytest.raises(ValueError, match="there is no file"):
        find_task(f"{tmp_path}:Line")
    (tmp_path / "task.txt").write_text(OWN)
    with pytest.raises(ValueError, match=r"its name must end in \.py"):
        find_task(f"{tmp_path}/task.txt:Line")
    (tmp_path / "broken.py").write_text("1 / 0")
    with pytest.raises(ValueError, match=r"broken\.py fails: ZeroDivisionError"):
        find_task(f"{tmp_path}/broken.py:Line")
    assert not any("gradherd_task_broken" in name for name in sys.modules)


def test_files_of_one_name_stay_apart(tmp_path):
    for slope in (2, 5):
        (tmp_path / str(slope)).mkdir()
        (tmp_path / str(slope) / "own.py").write_text(OWN.replace("2.0", f"{slope}.0"))
    tasks = [find_task(f"{tmp_path}/{slope}/own.py:Line") for slope in (2, 5)]
    assert [task.slope for task in tasks] == [2, 5]


@pytest.mark.parametrize("name", ["digit", "", "../digits", "own.py", "os"])
def test_unknown_names_execute_nothing(own, monkeypatch, name):
    monkeypatch.chdir(own.parent)
    loaded = set(sys.modules)
    with pytest.raises(ValueError, match=f"unknown task '{name}'; known are digits, digits-mlp"):
        find_task(name)
    assert set(sys.modules) == loaded


def test_names_are_those_of_the_tasks():
    assert {make().name for make in TASKS.values()} == set(TASKS)


def test_the_table_of_data_says_what_tasks_say():
    assert {name: make().data for name, make in TASKS.items()} == TASK_DATA
