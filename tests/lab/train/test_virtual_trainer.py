"""Workers in one process and real ranks: the same run, to the bit."""

import os
from pathlib import Path

import pytest
import torch

from gradherd.comm.ranks import run_ranks
from gradherd.lab.tasks.registry import TASKS
from gradherd.lab.train.virtual_trainer import VirtualTrainer
from tests.lab.train.work import HERE, config_of, in_one_process, on_ranks

REAL = os.environ.get("GRADHERD_DATA")


def same(real, virtual, *, bits=True):
    for (order, own, evaluation, weights), there in zip(real, virtual, strict=True):
        assert order == there[0]
        assert own.steps == there[1].steps
        assert own.ordering_bytes == there[1].ordering_bytes
        assert own.bytes == pytest.approx(there[1].bytes, rel=1e-5)
        if bits:
            assert torch.equal(weights, there[3])
            assert evaluation == there[2]
            assert own.herding_bound == there[1].herding_bound
            assert own.residual_norm == there[1].residual_norm
            assert (own.density, own.load) == (there[1].density, there[1].load)
        else:
            torch.testing.assert_close(weights, there[3], rtol=1e-3, atol=1e-4)
            assert evaluation.loss == pytest.approx(there[2].loss, rel=1e-3)


def arms(workers):
    """Runs of the small tasks: odd numbers of units, short last batches, every kind of row."""
    # A third epoch once: what the second order is made of.
    some = {"limit": 90, "epochs": 3 if workers == 3 else 2, "workers": workers}
    digits = [
        {"order": "d-rr"},
        {"order": "always-plus"},
        {"order": "cd-grab"},
        {"order": "cd-grab", "batch_size": 6, "unit": 2, "limit": 100},
        {"order": "id-pair-grab"},
        {"order": "grab", "rows": "sketch"},
        {"order": "grab", "rows": "sketch", "sketch_size": 8},
        {"order": "cd-grab", "unit": 4},
        {"order": "id-grab", "unit": 4, "rows": "sketch"},
    ]
    mlp = [
        {"order": "cd-grab"},
        {"sparsify": "exdyna", "density": 0.01},
        {"sparsify": "exdyna", "density": 0.01, "method": {"rotate": False, "blocks": 64}},
        {
            "sparsify": "exdyna",
            "density": 0.01,
            "momentum": 0.0,
            "method": {"momentum": 0.9, "warmup_steps": 5, "dense_below": 12},
        },
        {"sparsify": "topk", "density": 0.02, "order": "cd-grab", "unit": 8},
        {"sparsify": "micro", "density": 0.01, "order": "pair-grab"},
    ]
    return [
        *(config_of("digits", **(some | one)) for one in digits),
        *(config_of("digits-mlp", **(some | one)) for one in mlp),
    ]


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_small_tasks(workers):
    configs = arms(workers)
    ranks = run_ranks(on_ranks, workers, configs)
    for at, config in enumerate(configs):
        try:
            # Inner products of whole batches are added up in another order.
            whole = config.unit == config.batch_size and config.order != "d-rr"
            same(ranks[0][at], in_one_process(config), bits=workers == 1 or not whole)
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from error
        for rank in ranks[1:]:
            for mine, first in zip(rank[at], ranks[0][at], strict=True):
                assert mine[0] == first[0] and torch.equal(mine[3], first[3])


def test_batch_statistics_and_dropout_are_those_of_ranks():
    config = config_of(f"{HERE}:Awkward")
    ranks = run_ranks(on_ranks, config.workers, [config])
    same(ranks[0][0], in_one_process(config))


LARGE = [name for name in TASKS if not name.startswith("digits")]
# Few examples of a step: three steps in a second or two.
BATCH = {"cifar10-resnet18": 2, "sst2-transformer": 2}


@pytest.mark.parametrize("name", LARGE)
def test_three_steps_of_every_other_task(name):
    if not REAL:
        pytest.skip("needs the real data sets: set GRADHERD_DATA to their folder")
    config = config_of(name, order="cd-grab", workers=2, epochs=1, batch_size=BATCH.get(name))
    config = config_of(
        name,
        order="cd-grab",
        workers=2,
        epochs=1,
        batch_size=config.batch_size,
        limit=6 * config.batch_size,
    )
    ranks = run_ranks(on_ranks, 2, [config], Path(REAL))
    assert ranks[0][0][0][1].steps == 3
    same(ranks[0][0], in_one_process(config, Path(REAL)), bits=False)


def test_rows_of_what_is_sent_are_that_and_cost_nothing():
    common = {"sparsify": "exdyna", "density": 0.1, "workers": 2, "batch_size": 8, "unit": 8}
    common |= {"order": "cd-grab", "virtual": True, "limit": 96}
    trainer = VirtualTrainer(*_task_of(config_of("digits", rows="payload", **common)))
    seen = []
    observe = trainer.ordering.observe
    trainer.ordering.observe = lambda rows, **first: (seen.append(rows), observe(rows, **first))
    before = trainer.ordering.version
    (counters,) = trainer.train_epoch(1, lambda steps=1: None)
    assert (counters.ordering_bytes, len(seen), trainer.ordering.version != before) == (0, 6, True)
    # Both workers send what is selected, and all that is averaged: residuals hold the rest.
    sent = torch.cat(seen)
    assert ((sent != 0).float().mean((0, 2)) < 0.3).all()
    torch.testing.assert_close(sent[-1].mean(0), trainer._averager.mean)


def test_rows_of_what_is_sent_need_a_sparsifier_and_whole_batches():
    common = {"rows": "payload", "order": "cd-grab", "virtual": True, "workers": 2, "limit": 96}
    for chosen in ({"batch_size": 8, "unit": 8}, {"sparsify": "topk", "density": 0.1, "unit": 1}):
        with pytest.raises(ValueError, match="rows='payload' orders whole batches"):
            VirtualTrainer(*_task_of(config_of("digits", **common, **chosen)))


def _task_of(config):
    task = TASKS[config.task]()
    return config, task, task.load(None, config.limit)
