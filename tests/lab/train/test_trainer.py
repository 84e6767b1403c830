"""Evaluation on ranks."""

import pytest
import torch

from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.trainer import evaluate, full_loss
from tests.lab.train.work import HERE, Awkward, config_of


def losses():
    torch.set_num_threads(1)  # The number of threads decides on the order of sums.
    task = find_task("digits-mlp")
    torch.manual_seed(3)
    model, columns = task.model(), task.load(None, 333).train
    return [full_loss(task, model, columns, World.detect(), chunk) for chunk in (10, 50, 1000)]


def test_the_full_loss_does_not_depend_on_ranks():
    task = find_task("digits-mlp")
    torch.manual_seed(3)
    model, columns = task.model(), task.load(None, 333).train
    plain = float(task.loss(model, *columns).detach())
    alone = run_ranks(losses, 1)[0]
    assert alone == pytest.approx([plain] * 3, rel=1e-5)
    assert run_ranks(losses, 3) == [alone] * 3


class Forgetful(Awkward):
    """Its metric does not ask for evaluation mode."""

    def metric(self, model, *tensors):
        return self.loss(model, *tensors)


def test_a_task_is_measured_in_evaluation_mode():
    config, split = config_of(f"{HERE}:Awkward"), Awkward().load()
    torch.manual_seed(0)
    model = Awkward().model()
    model[3].eval()  # Frozen on purpose: stays so.
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = evaluate(config, Forgetful(), model, split)
    other = evaluate(config, Awkward(), model, split)
    assert found.metric == other.metric and found.loss == pytest.approx(other.loss)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model] == [True, True, True, False, True]
