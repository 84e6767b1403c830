"""One step of many models at once, against autograd and torch's own optimizers."""

import pytest
import torch
from torch import nn

from gradherd.lab.tasks.defaults import Hyperparameters
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Classifier
from gradherd.lab.train.optimizers import FunctionalOptimizer
from gradherd.lab.train.stacked_step import (
    StackedStep,
    _make_gradients,
    make_vmappable,
)
from tests.lab.tasks.fake_data import task_named


def _models(task, count):
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(task.model())
    flat = torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in models])
    return models, flat


def _rule(**changes):
    return Hyperparameters(workers=1, epochs=1, batch_size=1, lr=0.1, **changes)


def _flat_grad(loss, model):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("name", ["digits", "digits-mlp"])
@pytest.mark.parametrize(
    "rule",
    [
        _rule(momentum=0.9, weight_decay=1e-2),
        _rule(),
        _rule(momentum=0.9, clip=0.1),
        _rule(optimizer="adamw", weight_decay=0.1),
    ],
)
def test_a_step_is_that_of_torch(name, rule):
    task = find_task(name)
    columns = task.load(None, 40).train
    models, flat = _models(task, 3)
    step = StackedStep(task, models[0], columns, FunctionalOptimizer(rule), flat)
    rates = torch.tensor([[0.1], [0.05], [0.01]]) * (0.01 if rule.optimizer == "adamw" else 1)
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=rate, weight_decay=rule.weight_decay)
        if rule.optimizer == "adamw"
        else torch.optim.SGD(
            m.parameters(),
            lr=rate,
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
        )
        for m, (rate,) in zip(models, rates.tolist(), strict=True)
    ]
    # AdamW makes a step of the rate out of a gradient that is zero but for its last bits.
    told = torch.full(flat.shape, True)
    generator = torch.Generator().manual_seed(0)
    for count in (4, 4, 3, 4):  # a short batch is another graph
        indices = torch.randint(40, (3, count, 2), generator=generator)  # groups of two
        with torch.no_grad():
            (rows,), (mean,) = step(rates[None], indices[None])
        for at, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            for row, index in zip(rows[at], indices[at], strict=True):
                one = task.loss(model, *(column[index] for column in columns))
                torch.testing.assert_close(row, _flat_grad(one, model), rtol=1e-4, atol=1e-6)
            optimizer.zero_grad()
            task.loss(model, *(column[indices[at].flatten()] for column in columns)).backward()
            whole = torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.testing.assert_close(mean[at], whole, rtol=1e-4, atol=1e-6)
            if rule.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), rule.clip)
            optimizer.step()
            now = nn.utils.parameters_to_vector(model.parameters()).detach()
            told[at] &= (whole.abs() > 1e-5) | (rule.optimizer == "sgd")
            mine, theirs = flat[at, told[at]], now[told[at]]
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
            flat[at] = now  # Last bits do not add up.
    assert told.float().mean() > 0.3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [(3, 1, 0, 1), (5, 2, 2, 1), ((3, 2), (2, 1), (1, 0), (1, 2)), (1, 1, 0, 1)],
)
def test_a_convolution_by_patches(kernel, stride, padding, dilation, bias):
    conv = nn.Conv2d(3, 4, kernel, stride, padding, dilation, bias=bias)
    mine, given = make_vmappable(conv), torch.randn(2, 3, 11, 9)
    found = []
    for layer in (mine, conv):
        images = given.clone().requires_grad_()
        out = layer(images)
        out.square().sum().backward()
        found.append((out, images.grad, *(p.grad for p in layer.parameters())))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_layers_without_another_form_stay():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 3, padding="same"))
    assert [type(layer) for layer in make_vmappable(model)] == [nn.Conv2d, nn.Conv2d]


@pytest.mark.parametrize("name", ["cifar10-lenet", "wikitext2-gpt2"])
@pytest.mark.filterwarnings("error")
def test_no_layer_of_a_task_is_looped_over(name):
    # torch.func warns where it has no rule and would take one example after the other.
    task = task_named(name)
    model = task.model()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach().unsqueeze(0)
    column = {
        "cifar10-lenet": torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8),
        "wikitext2-gpt2": torch.randint(1000, (6, 9)),
    }[name]
    columns = (column, torch.arange(6)) if name == "cifar10-lenet" else (column,)
    indices = torch.tensor([[[0, 1], [4, 3]]])
    rows = _make_gradients(task, model, columns)(flat, tuple(column[indices] for column in columns))
    for row, own in zip(rows[0], indices[0], strict=True):
        expected = _flat_grad(task.loss(model, *(c[own] for c in columns)), model)
        torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["cifar10-lenet", "wikitext2-gpt2"])
def test_steps_of_convolutions_and_of_norms(name):
    """Norms are beyond torch.jit."""
    task = task_named(name)
    models, flat = _models(task, 2)
    columns = (torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8), torch.arange(6))
    if name == "wikitext2-gpt2":
        columns = (torch.randint(1000, (6, 9)),)
    indices = torch.tensor([[[0, 1], [4, 3]], [[2, 5], [1, 0]]])
    with torch.no_grad():
        step = StackedStep(task, models[0], columns, FunctionalOptimizer(_rule()), flat)
        (rows,), _ = step(torch.full((1, 2, 1), 0.01), indices[None])
    for model, batches, own in zip(models, indices, rows, strict=True):
        for index, row in zip(batches, own, strict=True):
            expected = _flat_grad(task.loss(model, *(c[index] for c in columns)), model)
            torch.testing.assert_close(row, expected, rtol=1e-3, atol=1e-5)


def test_the_graph_by_itself_computes_what_its_trace_does(monkeypatch):
    """On a GPU no trace is made of it."""
    task, found = task_named("cifar10-lenet"), []
    columns = (torch.randint(256, (6, 3, 32, 32), dtype=torch.uint8), torch.arange(6))
    indices = torch.tensor([[[0, 1], [4, 3]], [[2, 5], [1, 0]]])
    for traced in (True, False):
        if not traced:
            monkeypatch.setattr(torch.jit, "trace", lambda graph, *given, **options: graph)
        models, flat = _models(task, 2)
        with torch.inference_mode():
            step = StackedStep(task, models[0], columns, FunctionalOptimizer(_rule()), flat)
            for _ in range(2):
                rows, mean = step(torch.full((1, 2, 1), 0.01), indices[None])
        found.append((rows, mean, flat))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


class Scores(Classifier):
    """Linear models with another loss, and with one that asks for more than outputs."""

    def __init__(self, *, bias: bool = True, decays: bool = False) -> None:
        self.bias, self.decays = bias, decays

    def model(self):
        return nn.Linear(5, 3, bias=self.bias)

    def loss(self, model, *tensors):
        scores = model(tensors[0])
        if self.decays:
            scores = scores + 0 * model(tensors[0].flip(1))
        return (scores.tanh() - tensors[1].unsqueeze(1)).square().mean()


@pytest.mark.parametrize("decays", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_a_linear_model_has_the_gradients_of_autograd(group, bias, decays):
    task = Scores(bias=bias, decays=decays)
    generator = torch.Generator().manual_seed(0)
    columns = (torch.randn(20, 5, generator=generator), torch.randn(20, generator=generator))
    models, flat = _models(task, 3)
    gradients = _make_gradients(task, models[0], columns)
    assert ("linear" in gradients.__qualname__) != decays
    indices = torch.randint(20, (3, 4, group), generator=generator)
    found = gradients(flat, tuple(column[indices] for column in columns))
    for model, batches, rows in zip(models, indices, found, strict=True):
        for index, row in zip(batches, rows, strict=True):
            expected = _flat_grad(task.loss(model, *(c[index] for c in columns)), model)
            torch.testing.assert_close(row, expected)


@pytest.mark.parametrize("name", ["digits", "digits-mlp"])
def test_several_steps_are_one_after_the_other(name):
    task = find_task(name)
    columns = task.load(None, 40).train
    indices = torch.randint(40, (5, 3, 4, 2), generator=torch.Generator().manual_seed(0))
    rates = torch.linspace(0.1, 0.01, 15).view(5, 3, 1)
    found = []
    for at_once in (1, 5):
        models, flat = _models(task, 3)
        rule = FunctionalOptimizer(_rule(momentum=0.9))
        step, parts = StackedStep(task, models[0], columns, rule, flat), []
        with torch.no_grad():
            for at in range(0, 5, at_once):
                parts.append(step(rates[at : at + at_once], indices[at : at + at_once]))
        rows, means = (torch.cat(each) for each in zip(*parts, strict=True))
        found.append((rows, means, flat))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
