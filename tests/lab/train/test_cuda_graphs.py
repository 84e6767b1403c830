"""Passes recorded on a GPU: the same numbers, and called where recording would change them."""

import copy
import logging
import random
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradherd.lab.tasks.images import ResidualBlock
from gradherd.lab.tasks.task import Split
from gradherd.lab.train import cuda_graphs
from gradherd.lab.train.cuda_graphs import GraphedFunction, RngStates, has_dropout
from gradherd.lab.train.trainer import EpochCounters
from gradherd.lab.train.virtual_trainer import GradientsOnStreams, VirtualTrainer
from tests.gpu import only_gpu
from tests.lab.train.work import Awkward, Carrying, config_of, no_callback

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Images(Awkward):
    """Convolutions, batch statistics and a way around them; nothing is drawn."""

    name: ClassVar = "images"

    def load(self, data_dir=None, limit=None):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(50, 3, 8, 8, generator=generator)
        y = torch.randint(5, (50,), generator=generator)
        return Split((x, y), (x[:9], y[:9])).first(limit)

    def model(self):
        return nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            ResidualBlock(8, 16, 2),
            nn.Flatten(),
            nn.Linear(144, 5),
        )

    def loss(self, model, *tensors):
        return nn.functional.cross_entropy(model(tensors[0]), tensors[1])


@dataclass(frozen=True)
class Drawing(Images):
    """Scales its images by a number that is drawn on the CPU."""

    name: ClassVar = "drawing"

    def loss(self, model, *tensors):
        return super().loss(model, tensors[0] * float(1 + torch.rand(())), tensors[1])


@dataclass(frozen=True)
class Asking(Images):
    """Asks for a number, which the GPU must have computed first."""

    name: ClassVar = "asking"

    def loss(self, model, *tensors):
        loss = super().loss(model, *tensors)
        assert loss.item() >= 0
        return loss


@dataclass(frozen=True)
class Waiting(Images):
    """Waits for the GPU in a way that only a capture finds."""

    name: ClassVar = "waiting"

    def loss(self, model, *tensors):
        if tensors[0].is_cuda:
            torch.cuda.synchronize()
        return super().loss(model, *tensors)


def trainer_of(task, *, capture=True, **chosen):
    settings = {"workers": 3, "batch_size": 4, "unit": 1, "lr": 0.02, "virtual": True} | chosen
    config = config_of(f"{__file__}:{type(task).__name__}", **settings)
    return VirtualTrainer(config, task, task.load(), capture=capture)


# Where there is no GPU.


def test_on_a_cpu_the_function_is_called():
    seen = []

    def doubled(x):
        seen.append(x)
        return (2 * x,)

    captured = GraphedFunction(doubled)
    for number in range(4):
        x = torch.full((2,), float(number))
        assert torch.equal(captured(x)[0], 2 * x) and seen[-1] is x
    assert captured.graphs == 0 and captured.fallback_reason is None


@pytest.mark.parametrize("draw", [lambda: F.dropout(torch.ones(3)), random.random, np.random.rand])
def test_draws_are_seen(draw):
    before = RngStates(CPU)
    torch.ones(3).sum()
    torch.rand(1, generator=torch.Generator())
    assert not before.have_advanced()
    draw()
    assert before.have_advanced()


class OnGpu:
    """Says that it is on a GPU."""

    is_cuda, shape, dtype, device = True, torch.Size([2]), torch.float32, CPU


@pytest.mark.parametrize("draws", [False, True])
def test_when_it_is_captured(draws, monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="gradherd")
    calls = []

    def function(*tensors):
        calls.append(tensors)
        return (torch.rand(1) if draws else torch.ones(1),)

    def fails(self, tensors):
        try:
            raise RuntimeError("first\nand more")
        except RuntimeError:
            raise RuntimeError("second") from None

    captured = GraphedFunction(function)
    if not draws:
        assert captured(OnGpu())[0] == 1 and captured.fallback_reason is None
    monkeypatch.setattr(GraphedFunction, "_capture", fails)
    for _ in range(3):
        captured(OnGpu())
    # Three in the loop; and one before it, or one that drew and was undone.
    assert len(calls) == 4
    assert captured.fallback_reason == ("it draws random numbers" if draws else "first")
    assert caplog.text.count("not captured") == 1

    replays = []
    monkeypatch.setattr(
        GraphedFunction, "_capture", lambda self, tensors: lambda *t: (replays.append(t),)
    )
    captured, calls[:] = GraphedFunction(lambda *tensors: (calls.append(tensors),)), []
    for _ in range(5):
        captured(OnGpu())
    assert (len(calls), len(replays), captured.graphs) == (1, 4, 1)


def test_a_call_that_draws_is_undone():
    count, drawn = torch.zeros(()), []

    def draws(x):
        count.add_(1)
        drawn.append((torch.rand(()).item(), random.random(), float(np.random.rand())))
        return (count,)

    captured, before = GraphedFunction(draws, restore=[count]), RngStates(CPU)
    assert captured.attempt(OnGpu()) is None and "random" in captured.fallback_reason
    assert count == 0 and not before.have_advanced()
    assert captured(OnGpu())[0] == 1 and drawn[0] == drawn[1]


@pytest.mark.parametrize("chosen", [{}, {"local_steps": 2}], ids=["every step", "local steps"])
def test_workers_of_a_loss_that_draws_have_numbers_of_their_own(chosen, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "_all_on_gpu", lambda tensors: True)
    task, seen = Drawing(), []
    for pretend in (False, True):
        trainer = trainer_of(task, **chosen)
        if pretend:
            exchange, data = trainer.exchange, trainer._examples.tensors
            together = GradientsOnStreams(trainer._config, trainer._loss, exchange, data)
            buffers = [buffer for model in exchange.models for buffer in model.buffers()]
            trainer._graphed = GraphedFunction(together, restore=buffers)
        trainer.train_epoch(1, no_callback)
        seen.append(list(trainer.model.state_dict().values()))
    assert "random" in trainer._graphed.fallback_reason
    assert all(map(torch.equal, *seen))


def test_which_models_drop():
    assert has_dropout(Awkward().model())
    assert has_dropout(nn.LSTM(2, 2, num_layers=2, dropout=0.1))
    assert has_dropout(nn.TransformerEncoderLayer(4, 2))
    assert not has_dropout(nn.TransformerEncoderLayer(4, 2, dropout=0.0))
    assert not has_dropout(Images().model())


def test_what_is_captured_are_the_gradients_of_all_workers():
    trainer, task = trainer_of(Images()), Images()
    trainer.model.train()
    batch, columns = torch.arange(24).view(3, 8), task.load().train
    wanted, models = [], []
    for own in batch:  # as on ranks: all start from rank 0's buffers, which stay
        model = copy.deepcopy(trainer.model)
        task.loss(model, *(column[own] for column in columns)).backward()
        wanted.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        models.append(model)
    beside = GradientsOnStreams(trainer._config, trainer._loss, trainer.exchange, columns)
    (grads,) = beside(batch)
    assert torch.equal(grads, torch.stack(wanted))
    assert [b.tolist() for b in trainer.model.buffers()] == [
        b.tolist() for b in models[0].buffers()
    ]


# Where there is one.


def train_and_follow(trainer, epochs=3):
    """Train; return the parameters and buffers after each epoch."""
    seen = []
    for number in range(1, epochs + 1):
        (own,) = trainer.train_epoch(number, no_callback)
        assert own.seconds > 0 and own.exchange_seconds > 0
        seen.append([value.clone() for value in trainer.model.state_dict().values()])
    return seen


def same(some, others):
    for here, there in zip(some, others, strict=True):
        for mine, its in zip(here, there, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@only_gpu
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"clip": 0.5},
        {"order": "cd-grab", "batch_size": 4, "unit": 4},
        {"sparsify": "exdyna", "density": 0.1},
    ],
    ids=str,
)
def test_replayed_runs_are_those_that_are_called(chosen):
    replayed = trainer_of(Images(), device="cuda", **chosen)
    called = trainer_of(Images(), device="cuda", capture=False, **chosen)
    same(train_and_follow(replayed), train_and_follow(called))
    # The last batch of an epoch is a short one, unless batches are ordered.
    assert replayed._graphed.graphs == (1 if "unit" in chosen else 2)
    assert replayed._graphed.fallback_reason is None and called._graphed is None


@pytest.mark.gpu
@only_gpu
def test_a_state_is_carried_through_replays():
    replayed = trainer_of(Carrying(), device="cuda", order="cd-grab", unit=4)
    called = trainer_of(Carrying(), device="cuda", capture=False, order="cd-grab", unit=4)
    same(train_and_follow(replayed), train_and_follow(called))
    assert replayed._graphed.graphs == 1 and replayed._graphed.fallback_reason is None
    for mine, its in zip(replayed._loss.tensors, called._loss.tensors, strict=True):
        assert mine.any()
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@only_gpu
def test_warming_up_leaves_no_trace():
    count = torch.zeros((), device="cuda")

    def counted(x):
        count.add_(1)
        return x * count, count.clone()

    captured = GraphedFunction(counted, restore=[count])
    for number in range(1, 6):
        x = torch.full((3,), float(number), device="cuda")
        product, so_far = captured(x)
        assert so_far.item() == count.item() == number
        assert torch.equal(product, x * number)
    assert captured.graphs == 1


@pytest.mark.gpu
@only_gpu
def test_inference_mode():
    captured = GraphedFunction(lambda x: (x + 1,))
    with torch.inference_mode():
        for number in range(3):
            assert captured(torch.full((2,), number, device="cuda"))[0].tolist() == [number + 1] * 2
    assert captured(torch.full((2,), 7, device="cuda"))[0].tolist() == [8, 8]
    assert captured.graphs == 1


@pytest.mark.gpu
@only_gpu
def test_a_model_with_dropout_is_called():
    assert trainer_of(Awkward(), device="cuda")._graphed is None


@pytest.mark.gpu
@only_gpu
def test_a_loss_that_draws_is_called(caplog):
    caplog.set_level(logging.INFO, logger="gradherd")
    trainer = trainer_of(Drawing(), device="cuda")
    same(
        train_and_follow(trainer),
        train_and_follow(trainer_of(Drawing(), device="cuda", capture=False)),
    )
    assert "random" in trainer._graphed.fallback_reason and trainer._graphed.graphs == 0
    assert caplog.text.count("not captured") == 1
    batch = torch.arange(12, device="cuda").view(3, 4)
    assert not torch.equal(
        trainer._gradients(batch, EpochCounters())[0], trainer._gradients(batch, EpochCounters())[0]
    )


@pytest.mark.gpu
@only_gpu
@pytest.mark.parametrize("task", [Asking(), Waiting()], ids=["asking", "waiting"])
def test_what_cannot_be_captured_is_called(task, caplog):
    caplog.set_level(logging.INFO, logger="gradherd")
    trainer = trainer_of(task, device="cuda")
    same(
        train_and_follow(trainer), train_and_follow(trainer_of(task, device="cuda", capture=False))
    )
    assert trainer._graphed.graphs == 0
    assert caplog.text.count("not captured") == 1
    # Nothing is broken: numbers are drawn, the stream is the usual one, and others are captured.
    assert torch.rand(3, device="cuda").isfinite().all()
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    other = trainer_of(Images(), device="cuda")
    train_and_follow(other)
    assert other._graphed.graphs == 2


@pytest.mark.gpu
@only_gpu
def test_nothing_waits_for_the_gpu_between_steps():
    trainer, ticks = trainer_of(Images(), device="cuda"), []
    train_and_follow(trainer)

    def tick(steps=1):
        ticks.append(steps)
        torch.cuda.set_sync_debug_mode("error" if len(ticks) < 5 else "default")

    try:
        trainer.train_epoch(4, tick)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ticks) == 5
