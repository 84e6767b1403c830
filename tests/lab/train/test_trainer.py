"""Evaluation on ranks."""

import pytest
import torch

from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.trainer import full_loss


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
