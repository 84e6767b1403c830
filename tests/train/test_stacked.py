"""One traced step of many models, against autograd and torch's own SGD."""

import pytest
import torch
from torch import nn

from gradherd.tasks.registry import find_task
from gradherd.train.stacked import Rule, StackedStep


@pytest.mark.parametrize("name", ["digits", "digits-mlp"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.9, 1e-2), (0.0, 0.0)])
def test_a_step_is_that_of_sgd(name, momentum, decay):
    task, rule = find_task(name), Rule(momentum=momentum, weight_decay=decay)
    columns = task.load(None, 40).train
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(task.model())
    flat = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])
    velocity, step = torch.zeros_like(flat), StackedStep(task, models[0], columns, rule)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum, weight_decay=decay)
        for m in models
    ]
    generator = torch.Generator().manual_seed(0)
    for count in (4, 4, 3, 4):  # a short batch is another graph
        indices = torch.randint(40, (3, count), generator=generator)
        with torch.no_grad():
            rows, mean = step(flat, velocity, torch.tensor(0.1), indices)
        for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for row, index in zip(rows[at], indices[at], strict=True):
                one = task.loss(model, *(column[index : index + 1] for column in columns))
                grads = torch.autograd.grad(one, list(model.parameters()))
                expected = torch.cat([grad.flatten() for grad in grads])
                torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-6)
            optimizer.zero_grad()
            task.loss(model, *(column[indices[at]] for column in columns)).backward()
            whole = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.testing.assert_close(mean[at], whole, rtol=1e-4, atol=1e-6)
            optimizer.step()
            now = nn.utils.parameters_to_vector(model.parameters()).detach()
            torch.testing.assert_close(flat[at], now, rtol=1e-4, atol=1e-5)
