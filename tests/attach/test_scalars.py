"""Numbers for loggers, and closures, whose gradients must be in them."""

import json
import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import gradherd as gh


@pytest.fixture
def trained():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 3), torch.randn(16, 1))
    model = nn.Linear(3, 1)
    sampler = gh.OrderedSampler(data, "grab", batch_size=4)
    herd = gh.attach(model, order=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    yield model, herd, optimizer, loader
    herd.detach()


def step_by_closure(model, optimizer, x, y):
    def closure():
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_gradients_of_a_closure_are_fed_back_within_the_step(trained):
    model, herd, optimizer, loader = trained
    for number, (x, y) in enumerate(loader):
        step_by_closure(model, optimizer, x, y)
        fed = herd.metrics()["examples_fed_back"]
        assert fed == (4 * (number + 1)) % 16  # after the last batch the next epoch begins
    assert herd.metrics()["epoch"] == 1


def test_scalars_are_numbers_with_a_prefix(trained):
    model, herd, optimizer, loader = trained
    for x, y in loader:
        step_by_closure(model, optimizer, x, y)
        break
    scalars = herd.scalars()
    assert scalars["herd/examples_fed_back"] == 4 and "herd/rows" not in scalars
    assert all(name.startswith("herd/") and math.isfinite(v) for name, v in scalars.items())
    assert json.loads(json.dumps(scalars)) == scalars


class Run:
    """Takes numbers as wandb, trackio and an Accelerator do."""

    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((values.keys(), step))


class Tracking:
    """Takes numbers as mlflow and Lightning's loggers do; step=None is an error there."""

    def __init__(self):
        self.logged = []

    def log_metrics(self, metrics, step=0):
        assert step is not None
        self.logged.append((metrics.keys(), step))


@pytest.mark.parametrize("kind", [Run, Tracking])
def test_log_to_a_tracker(trained, kind):
    herd, tracker = trained[1], kind()
    herd.log_to(tracker, 7)
    herd.log_to(tracker)
    assert [step for _, step in tracker.logged] == [7, None if kind is Run else 0]
    assert all(keys == herd.scalars().keys() for keys, _ in tracker.logged)


def test_log_to_tensorboard(trained, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with SummaryWriter(str(tmp_path)) as writer:
        trained[1].log_to(writer, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == trained[1].scalars().keys()
    assert events.Scalars("herd/examples")[0].step == 3


def test_a_writer_without_a_method_is_refused(trained):
    with pytest.raises(ValueError, match="one of the methods add_scalar, log_metrics, log, got a"):
        trained[1].log_to(object())
