"""Local steps in the trainers: the same bits on ranks and in one process, and divergence."""

import dataclasses

import pytest
import torch

from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.runner import run_all
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from tests.lab.tasks.fake_data import OF_STUDIES
from tests.lab.train.work import HERE, config_of, on_ranks, train_and_follow

ARMS = [
    config_of("digits", limit=50, workers=2, epochs=2, order="cd-grab", local_steps=3),
    config_of(
        "digits",
        limit=50,
        workers=2,
        epochs=2,
        lr_warmup=0.2,
        lr_schedule="cosine",
        local_steps=4,
        method={"overlap": True, "outer_momentum": 0.5, "outer_lr": 0.7},
    ),
    # Statistics of BatchNorm and dropout masks are each worker's own.
    config_of(f"{HERE}:Awkward", workers=2, local_steps=2, method={"dense_below": 0}),
]


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(on_ranks, 2, ARMS)


@pytest.mark.parametrize("at", range(len(ARMS)))
def test_ranks_and_one_process_have_the_same_bits(ranks, at):
    config = dataclasses.replace(ARMS[at], virtual=True)
    task = find_task(config.task)
    trainer = VirtualTrainer(config, task, task.load(None, config.limit))
    virtual = train_and_follow(trainer, trainer.ordering, config.epochs)
    for number, (version, own, evaluation, weights) in enumerate(virtual):
        there = ranks[0][at][number]
        assert version == there[0]
        assert evaluation.metric == pytest.approx(there[2].metric, rel=1e-5)
        assert evaluation.loss == pytest.approx(there[2].loss, rel=1e-5)
        torch.testing.assert_close(weights, there[3], rtol=0, atol=0)
        if not (config.method or {}).get("overlap"):
            for name in ("steps", "bytes", "density", "padding", "skipped_steps"):
                assert getattr(own, name) == getattr(there[1], name), name
            assert own.residual_norm == there[1].residual_norm > 0
    # After the last epoch what is left of a phase is exchanged, too.
    assert torch.equal(ranks[0][at][-1][3], ranks[1][at][-1][3])
    assert not torch.equal(ranks[0][at][0][3], ranks[1][at][0][3])


def diverging(virtual):
    config = config_of(f"{HERE}:Diverging", workers=2, local_steps=1, virtual=virtual)
    (record,) = run_all([config], World.single() if virtual else World.detect())
    return record.status, record.sparsify, [row.steps for row in record.epochs]


def test_a_run_that_diverges_ends_at_the_same_step_on_ranks_and_in_one_process():
    # The third exchange in a row that is called off ends it, within the first epoch of 5 steps; a
    # step that ends a run is not counted.
    assert diverging(True) == ("diverged", "dense every 1", [2])
    assert run_ranks(diverging, 2, False) == [("diverged", "dense every 1", [2])] * 2


def test_learning_rates_of_a_run():
    config = config_of("digits", epochs=2, lr=1.0, lr_warmup=0.25, lr_schedule="cosine")
    rates = [config.lr_at(epoch, step, 4) for epoch in (1, 2) for step in range(4)]
    expected = [
        0.5,
        1.0,
        *(0.5 * (1 + torch.cos(torch.tensor(k / 6 * torch.pi))) for k in range(6)),
    ]
    assert rates == pytest.approx([float(rate) for rate in expected], abs=1e-6)
    steady = config_of("digits", epochs=2, lr=1.0, lr_warmup=0.5)
    assert [steady.lr_at(2, step, 4) for step in range(4)] == [1.0] * 4
    # A task's drops give way to cosine, and stay with a warm-up alone.
    assert config_of(OF_STUDIES["wikitext2-lstm"], lr_schedule="cosine").lr_drop is None
    assert config_of(OF_STUDIES["wikitext2-lstm"], lr_warmup=0.1).lr_drop is not None


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"lr_warmup": 1.0}, r"lr_warmup must be in \[0, 1\), got 1.0"),
        ({"lr_schedule": "linear"}, "unknown lr_schedule 'linear'; known are constant"),
        ({"lr_schedule": "cosine", "lr_drop": 0.1, "lr_drop_every": 3}, "choose one"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"local_steps": 2, "method": {"outer_lr": 0}}, r"outer_lr must be in \(0, inf\), got 0"),
        ({"local_steps": 2, "method": {"outer_lr": "a"}}, "outer_lr must be a number, got 'a'"),
        ({"local_steps": 2, "method": {"odd": 1}}, "method has odd, which local steps do not have"),
        ({"local_steps": 2, "method": {"momentum": 0.9}, "momentum": 0.0}, "do not have"),
        ({"local_steps": 2, "sparsify": "topk", "density": 0.1}, "leave out topk"),
        ({"local_steps": 2, "method": {"outer_lr": float("nan")}}, "JSON values"),
        ({"method": {"outer_lr": 0.9}}, "method goes with a sparsifier"),
    ],
)
def test_bad_settings(wrong, says):
    with pytest.raises(ValueError, match=says):
        config_of("digits", **wrong)
