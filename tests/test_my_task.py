"""Tasks of one's own, as the pages show them: they train as they are written there."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from gradherd.cli.main import main
from gradherd.lab.tasks import TASKS, Split, find_task
from gradherd.lab.train.record import read_record

ROOT = Path(__file__).parent.parent
EXAMPLE = f"{ROOT / 'examples' / 'my_task.py'}:Spirals"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *args) -> dict:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    return json.loads(out)


def test_the_example_draws_the_same_points_every_time():
    task = find_task(EXAMPLE)
    first, second = task.load(), task.load()
    assert all(map(torch.equal, first.train + first.test, second.train + second.test))
    assert isinstance(first, Split) and len(first.train[0]) == 600 and len(first.test[0]) == 300
    assert (first.train[1].bincount() + first.test[1].bincount()).tolist() == [300, 300, 300]
    assert len(task.load(limit=7).train[0]) == 7


@pytest.mark.parametrize("workers", [2, 3, 6])
def test_every_worker_of_the_example_has_a_fair_share_of_each_class(workers):
    arms = find_task(EXAMPLE).load().train[1]
    for worker in range(workers):  # Unit g goes to worker g mod W.
        share = arms[worker::workers].bincount(minlength=3) / (600 / workers)
        assert (share - 1 / 3).abs().max() < 0.15


def test_the_example_learns(capsys, place):
    told = run(capsys, "train", EXAMPLE, "--order", "cd-grab", "--virtual", "--out", "out")
    record = read_record(place / "out" / "record.json")
    assert told["status"] == "done" and told["epochs"] == find_task(EXAMPLE).defaults.epochs
    assert record.start_metric < 60 < 80 < told["final_metric"]
    assert told["final_loss"] < record.start_loss / 2


def test_the_example_measures_without_a_trace():
    task = find_task(EXAMPLE)
    torch.manual_seed(0)
    model = task.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    task.metric(model, *task.load().test)
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_example_can_be_compared(capsys):
    arms = run(
        capsys, "compare", EXAMPLE, "--orders", "d-rr,cd-grab", "--seeds", 2, "--epochs", 2,
        "--limit", 60, "--virtual", "--out", "out",
    )["arms"]  # fmt: skip
    assert [arm["order"] for arm in arms] == ["d-rr", "cd-grab"]
    assert arms[0]["loss_by_epoch"] != arms[1]["loss_by_epoch"]


def test_the_example_is_a_frozen_dataclass():
    assert dataclasses.is_dataclass(find_task(EXAMPLE))
    with pytest.raises(dataclasses.FrozenInstanceError):
        find_task(EXAMPLE).noise = 1.0


def test_the_task_in_the_page_trains_as_it_stands(capsys, place):
    page = (ROOT / "docs" / "own_task.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (place / "line.py").write_text(block)
    told = run(capsys, "train", "line.py:Line", "--virtual", "--out", "out")
    assert told["task"] == "line" and told["status"] == "done" and told["final_loss"] < 1


@pytest.mark.parametrize("name", TASKS)
def test_the_page_has_the_size_and_the_settings_of_each_task(name):
    page = (ROOT / "docs" / "own_task.md").read_text()
    task = find_task(name)
    size = re.findall(rf"^\| `{name}` \| [^|]+ \| ([\d,]+) \|", page, re.M)[0]
    assert int(size.replace(",", "")) == sum(p.numel() for p in task.model().parameters())
    (settings,) = re.findall(rf"^\| `{name}` \| (\d+ x \d+) \|", page, re.M)
    assert settings == f"{task.defaults.workers} x {task.defaults.batch_size}"
