"""Whole runs: one plan, divergence, and other numbers of ranks."""

import json
import random

import pytest

from gradherd.comm import checks
from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import plan_runs
from gradherd.lab.train.loop import BadStart
from gradherd.lab.train.record import (
    RECORD_FILE,
    read_record,
)
from gradherd.lab.train.runner import run_all
from tests.attach.mistake_work import log_of_this_rank
from tests.lab.train.work import HERE, config_of
from tests.stress.resizes import BATCH, chain


def test_a_run_that_diverges_ends_there():
    config = config_of(f"{HERE}:Diverging", virtual=True, order="cd-grab")
    (found,) = run_all([config], World.single())
    assert found.status == "diverged" and len(found.epochs) < config.epochs
    assert found.epochs[-1].train_loss is None
    json.dumps(found.to_json(), allow_nan=False)


def diverge_on_a_rank(chosen):
    checks.MOST_BROKEN = 1  # or the epoch, of five steps, ends before
    said = log_of_this_rank()
    config = config_of(f"{HERE}:Diverging", workers=2, **chosen)
    (found,) = run_all([config], World.detect())
    ends = [one for one in said if "batches in a row" in one]
    return found.status, found.epochs[-1].train_loss, len(ends)


@pytest.mark.parametrize(
    "chosen",
    [
        {"order": "cd-grab"},
        {"order": "cd-grab", "unit": 5},
        {"sparsify": "exdyna", "density": 0.5, "order": "d-rr"},
        {"sparsify": "exdyna", "density": 0.5, "order": "cd-grab"},
    ],
)
def test_ranks_whose_gradients_are_not_finite_end_with_a_result(chosen):
    """What ends the run is said, and is no error of the command."""
    assert run_ranks(diverge_on_a_rank, 2, chosen) == [("diverged", None, 1)] * 2


def start_badly(virtual, **chosen):
    configs = [
        config_of(f"{HERE}:BadlyStarted", seed=seed, workers=2, limit=48, virtual=virtual, **chosen)
        for seed in ((0, 1, 2) if virtual else (1,))
    ]
    with pytest.raises(BadStart) as caught:
        run_all(configs, World.single() if virtual else World.detect())
    return str(caught.value)


def test_a_loss_that_is_not_finite_before_training_is_no_result():
    told = (
        "the loss before training is nan or infinite: check the task's data and model "
        "(task badly-started, seed 1)"
    )
    assert start_badly(True) == told  # side by side
    assert start_badly(True, autocast="bf16") == told  # one after the other
    assert start_badly(True, local_steps=2) == told
    assert run_ranks(start_badly, 2, False) == [told, told]


def test_runs_of_two_tasks_are_not_trained_together():
    """They would all be trained on the data of the first."""
    configs = [config_of("digits", epochs=1), config_of("digits-mlp", epochs=1)]
    with pytest.raises(ValueError, match="must have one task and the same data"):
        run_all(configs, World.single())


def test_runs_of_one_plan(tmp_path):
    configs = plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=["d-rr", "cd-grab"],
        sparsifiers=["dense", "topk"],
        density=0.1,
        seeds=[0, 1],
        epochs=2,
        limit=64,
        virtual=True,
    )
    records = run_all(configs, World.single(), out=tmp_path)
    assert {(r.order, r.sparsify, r.seed) for r in records} == {
        (c.order, c.sparsify, c.seed) for c in configs
    }
    for config in configs:
        there = read_record(tmp_path / config.folder() / RECORD_FILE)
        assert there in records and there.status == "done" and len(there.epochs) == 2
        last = there.epochs[-1]
        # Sparse arms take larger steps, and 64 examples are few: accuracy tells that they learn.
        assert last.train_loss < there.start_loss or last.metric > 30
        assert (last.density < 0.5) == (config.sparsify == "topk")
        assert (last.padding is None) == (config.sparsify == "dense")
        assert (last.ordering_bytes > 0) == (config.order == "cd-grab")
        parts = (last.data_seconds, last.compute_seconds, last.ordering_seconds)
        assert sum(parts) + last.exchange_seconds == pytest.approx(last.seconds, rel=0.01)


def test_four_then_two_then_three_ranks():
    chain([4, 2, 3], "exdyna", 1, random.Random(1))


def test_whole_batches_that_ride_on_the_dense_exchange():
    chain([2, 3, 1], "dense", BATCH, random.Random(2))
