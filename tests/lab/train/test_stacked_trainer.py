"""Many runs side by side: the same orders and losses as one after the other."""

import gc
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradherd.comm.world import World
from gradherd.lab.tasks.digits import Digits
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.tasks.task import Split
from gradherd.lab.train import stacked_trainer
from gradherd.lab.train.runner import run_all
from gradherd.lab.train.stacked_trainer import (
    StackedTrainer,
    saved_per_example,
    stack_runs,
    why_not_mean_loss,
    why_not_stackable,
)
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from tests.gpu import only_gpu
from tests.lab.train.work import HERE, config_of, no_callback


@pytest.mark.parametrize(
    ("batch_size", "unit", "workers", "limit"),
    [(4, 1, 4, 160), (4, 1, 3, 101), (6, 2, 2, 90), (4, 4, 4, 150), (5, 1, 1, 52)],
)
def test_runs_side_by_side(batch_size, unit, workers, limit):
    arms = [(o, s) for o in ("d-rr", "always-plus", "cd-grab", "id-grab") for s in (0, 5)]
    configs = [
        config_of("digits", order=order, seed=seed, batch_size=batch_size, unit=unit,
                  workers=workers, limit=limit, virtual=True)
        for order, seed in arms
    ]  # fmt: skip
    task = find_task("digits")
    split = task.load(None, limit)
    together = StackedTrainer(configs, task, split)
    alone = [VirtualTrainer(config, task, split) for config in configs]
    for number in (1, 2, 3):
        counters = together.train_epoch(number, no_callback)
        evaluations = together.evaluate()
        for at, trainer in enumerate(alone):
            (own,), (evaluation,) = trainer.train_epoch(number, no_callback), trainer.evaluate()
            assert together.orderings[at].version == trainer.ordering.version, configs[at]
            assert evaluations[at].loss == pytest.approx(evaluation.loss, rel=1e-5)
            mine = counters[at]
            assert (mine.steps, mine.bytes) == (own.steps, own.bytes)
            assert mine.ordering_bytes == own.ordering_bytes
            assert mine.herding_bound == pytest.approx(own.herding_bound, rel=1e-3)
    assert len({ordering.version for ordering in together.orderings}) == len(arms)


def test_several_steps_of_a_call(monkeypatch):
    monkeypatch.setattr(stacked_trainer, "_MANY_STEPS", 2)
    monkeypatch.setattr(stacked_trainer, "_STEPS_PER_CALL", 3)
    test_runs_side_by_side(4, 1, 3, 101)


def test_steps_are_counted_for_every_run():
    configs = [config_of("digits", seed=seed, limit=50, virtual=True) for seed in (0, 1, 2)]
    task, ticks = find_task("digits"), []
    trainer = StackedTrainer(configs, task, task.load(None, 50))
    counters = trainer.train_epoch(1, lambda steps=1: ticks.append(steps))
    assert sum(ticks) == sum(own.steps for own in counters) == 3 * 4


@pytest.mark.parametrize("name", ["optimizer", "clip"])
def test_other_rules(name):
    chosen = {"optimizer": "adamw", "momentum": 0.0, "lr": 1e-3} if name == "optimizer" else {}
    chosen |= {"weight_decay": 0.1} if name == "optimizer" else {"clip": 0.05, "momentum": 0.9}
    configs = [
        config_of("digits", order="cd-grab", seed=seed, limit=100, virtual=True, **chosen)
        for seed in (0, 1)
    ]
    task = find_task("digits")
    split = task.load(None, 100)
    together = StackedTrainer(configs, task, split)
    alone = [VirtualTrainer(config, task, split) for config in configs]
    for number in (1, 2, 3):
        together.train_epoch(number, no_callback)
        for trainer in alone:
            trainer.train_epoch(number, no_callback)
    for fast, trainer in zip(together.evaluate(), alone, strict=True):
        assert fast.loss == pytest.approx(trainer.evaluate()[0].loss, rel=1e-4)


@pytest.mark.parametrize("rows", ["auto", "sketch", "two-sided"])
def test_each_run_has_its_own_rate_and_order(rows):
    shared = {"order": "cd-grab", "limit": 120, "virtual": True, "rows": rows}
    chosen = [{"order": "d-rr"}, {"lr": 0.1}, {"lr": 0.01}, {"order": "id-grab"}]
    configs = [config_of("digits", **shared | one) for one in chosen]
    task = find_task("digits")
    split = task.load(None, 120)
    together = StackedTrainer(configs, task, split)
    apart = [StackedTrainer([config], task, split) for config in configs]
    for number in (1, 2, 3):
        counters = together.train_epoch(number, no_callback)
        for at, trainer in enumerate(apart):
            (own,) = trainer.train_epoch(number, no_callback)
            assert together.orderings[at].version == trainer.orderings[0].version
            assert (counters[at].bytes, counters[at].steps) == (own.bytes, own.steps)
    losses = [evaluation.loss for evaluation in together.evaluate()]
    alone = [trainer.evaluate()[0].loss for trainer in apart]
    assert losses == pytest.approx(alone, rel=1e-5)
    assert len(set(losses)) == 4


def test_which_runs_go_side_by_side():
    model = find_task("digits").model()
    orders = ["d-rr", "cd-grab", "id-grab", "always-plus"]
    runs = [
        config_of("digits", order=order, seed=seed, virtual=True, workers=16)
        for seed in (0, 1)
        for order in orders
    ]
    # Orders that look at gradients of units, and those that do not.
    assert stack_runs(runs, model) == [[0, 3, 4, 7], [1, 2, 5, 6]]
    few = [replace(run, workers=2, batch_size=2, lr=rate) for run in runs for rate in (0.1, 0.2)]
    assert [sorted(stack) for stack in stack_runs(few, model)] == [list(range(16))]
    other = [runs[1], replace(runs[1], momentum=0.5), replace(runs[1], rows="sketch")]
    assert stack_runs(other, model) == [[0], [1], [2]]
    large = nn.Linear(2000, 1000)
    assert stack_runs(runs[:3], large) == [[0], [1], [2]]
    # A model so small that gradients of units cost nothing: all of them.
    tiny = nn.Linear(3, 1)
    assert sorted(stack_runs(runs, tiny)[0]) == list(range(8))
    # So many that a step's gradients would not fit are trained in several stacks.
    many = [config_of("digits", order="cd-grab", seed=seed, workers=64) for seed in range(9)]
    assert [len(stack) for stack in stack_runs(many, nn.Linear(100, 640))] == [1] * 9


def test_a_stack_is_as_large_as_what_its_steps_keep_allows():
    """Scores of a vocabulary take more of a GPU than all that is counted in parameters."""
    task, model = find_task("digits"), find_task("digits").model()
    kept = saved_per_example(task, model, task.load(None, 20).train)
    # Pixels for the gradient of weights, ten scores for that of the loss, and the label.
    assert 64 + 10 <= kept <= 64 + 10 + 11
    runs = [config_of("digits", seed=seed, device="cuda", virtual=True) for seed in range(6)]
    assert [len(stack) for stack in stack_runs(runs, model, kept)] == [6]
    most = (1 << 30) // (runs[0].workers * runs[0].batch_size)
    assert [len(stack) for stack in stack_runs(runs, model, most // 4)] == [4, 2]
    assert [len(stack) for stack in stack_runs(runs, model, 100 * most)] == [1] * 6


@pytest.mark.parametrize(
    ("kind", "sparsify"),
    [(StackedTrainer, "dense"), (VirtualTrainer, "dense"), (VirtualTrainer, "exdyna")],
)
def test_a_trainer_that_was_closed_is_gone(kind, sparsify):
    """At once: one that waits for the garbage collector keeps gigabytes of a GPU from the next."""
    config = config_of("digits", order="cd-grab", sparsify=sparsify, limit=64, virtual=True,
                       density=None if sparsify == "dense" else 0.1)  # fmt: skip
    task = find_task("digits")

    def left_of_one():
        trainer = kind([config] if kind is StackedTrainer else config, task, task.load(None, 64))
        trainer.train_epoch(1, no_callback)
        trainer.evaluate()
        trainer.close()
        return weakref.ref(trainer)

    left_of_one()  # Torch's first imports of a process hold on to who asked for them.
    gc.disable()
    try:
        assert left_of_one()() is None
    finally:
        gc.enable()


def test_runs_one_after_the_other_are_not_all_there(monkeypatch):
    alive, most = weakref.WeakSet(), []

    class Counted(StackedTrainer):
        def __init__(self, *args):
            most.append(len(alive))
            alive.add(self)
            super().__init__(*args)

    monkeypatch.setattr("gradherd.lab.train.runner.StackedTrainer", Counted)
    configs = [config_of("digits", limit=64, batch_size=b, epochs=1, virtual=True) for b in (2, 4)]
    run_all(configs, World.single())  # As above.
    gc.collect()
    most.clear()
    gc.disable()
    try:
        run_all(configs, World.single())
    finally:
        gc.enable()
    assert most == [0, 0]


def test_why_runs_cannot_go_side_by_side():
    config = config_of("digits", order="cd-grab", virtual=True)
    model = find_task("digits").model()
    assert why_not_stackable(config, model) is None
    sparse = config_of("digits", sparsify="topk", density=0.1)
    assert "worker by worker" in why_not_stackable(sparse, model)
    assert "parameters" in why_not_stackable(
        config_of("digits-mlp"), find_task("digits-mlp").model()
    )
    assert "buffers" in why_not_stackable(config, find_task(f"{HERE}:Awkward").model())
    for layer in (nn.LSTM(2, 2), nn.GRU(2, 2), nn.LSTMCell(2, 2)):
        expected = f"vmap has no rule for its recurrent layer ({type(layer).__name__})"
        assert why_not_stackable(config, layer) == expected
    frozen = find_task("digits").model()
    next(frozen.parameters()).requires_grad_(False)
    assert "not trained" in why_not_stackable(config, frozen)
    assert why_not_stackable(config, nn.MultiheadAttention(2, 1)) is None
    columns = find_task("digits").load(None, 96).train
    for layer in (nn.Dropout(0.1), nn.BatchNorm1d(64, track_running_stats=False)):
        drawing = nn.Sequential(layer, nn.Linear(64, 10))
        assert why_not_stackable(config, drawing) is None
        assert why_not_mean_loss(find_task("digits"), drawing, columns) is not None


@pytest.mark.parametrize("name", ["digits", "digits-mlp"])
def test_losses_of_tasks_are_means(name):
    task = find_task(name)
    assert why_not_mean_loss(task, task.model(), task.load(None, 200).train) is None


def test_a_loss_that_is_no_mean_is_trained_alone():
    task = find_task(f"{HERE}:Weighted")
    split = task.load(None, 96)
    assert "the mean of their losses" in why_not_mean_loss(task, task.model(), split.train)
    configs = [
        config_of(f"{HERE}:Weighted", order=order, seed=1, limit=96, epochs=2, virtual=True)
        for order in ("cd-grab", "d-rr")
    ]
    records = run_all(configs, World.single())
    assert [record.order for record in records] == ["cd-grab", "d-rr"]
    for record, config in zip(records, configs, strict=True):
        trainer = VirtualTrainer(config, task, split)
        for row in record.epochs:
            trainer.train_epoch(row.epoch, no_callback)
            assert row.train_loss == trainer.evaluate()[0].loss


def test_a_loss_that_draws_is_seen():
    @dataclass(frozen=True)
    class Drawing(Digits):
        def loss(self, model, *tensors):
            images, labels = tensors
            return F.cross_entropy(model(F.dropout(images)), labels)

    task = Drawing()
    model, columns = task.model(), task.load(None, 96).train
    before = torch.get_rng_state()
    assert why_not_mean_loss(task, model, columns) is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_that_diverges_beside_others_ends_as_it_does_alone():
    configs = [
        config_of("digits", seed=0, lr=lr, limit=96, epochs=3, virtual=True) for lr in (0.05, 1e30)
    ]
    together = run_all(configs, World.single())
    alone = [run_all([config], World.single())[0] for config in configs]
    assert [record.status for record in together] == ["done", "diverged"]
    for one, other in zip(together, alone, strict=True):
        assert [row.bytes for row in one.epochs] == [row.bytes for row in other.epochs]
        assert one.status == other.status


@only_gpu
@pytest.mark.parametrize("name", ["digits", "cifar10-lenet"])
def test_steps_of_stacks_on_a_gpu_are_those_of_a_cpu(name):
    task, limit = find_task(name), 160
    generator = torch.Generator().manual_seed(0)
    shape = (64,) if name == "digits" else (3, 32, 32)
    images = torch.rand(limit, *shape, generator=generator)
    labels = torch.randint(10, (limit,), generator=generator)
    split = Split((images, labels), (images[:40], labels[:40]))
    configs = [
        config_of(name, order=order, seed=seed, batch_size=4, unit=1, workers=4, limit=limit,
                  rows="exact", virtual=True, lr=0.01)
        for order in ("d-rr", "cd-grab") for seed in (0, 5)
    ]  # fmt: skip
    here = StackedTrainer(configs, task, split)
    there = StackedTrainer([replace(config, device="cuda") for config in configs], task, split)
    for number in (1, 2):
        counters, others = (
            here.train_epoch(number, no_callback),
            there.train_epoch(number, no_callback),
        )
        for one, other in zip(counters, others, strict=True):
            assert other.bytes == pytest.approx(one.bytes, rel=1e-2)
        for one, other in zip(here.evaluate(), there.evaluate(), strict=True):
            assert other.loss == pytest.approx(one.loss, rel=1e-2)
