"""Many runs side by side: the same orders and losses as one after the other."""

from dataclasses import replace

import pytest
from torch import nn

from gradherd.tasks.registry import find_task
from gradherd.train.batched import BatchedFleet, why_not
from gradherd.train.virtual import VirtualFleet
from tests.train.work import HERE, config_of, no_tick


@pytest.mark.parametrize(
    ("batch_size", "unit", "workers", "limit"),
    [(4, 1, 4, 160), (4, 1, 3, 101), (6, 2, 2, 90), (4, 4, 4, 150), (5, 1, 1, 52)],
)
def test_runs_side_by_side(batch_size, unit, workers, limit):
    arms = [(o, s) for o in ("d-rr", "cd-grab", "id-grab", "always-plus") for s in (0, 5)]
    configs = [
        config_of("digits", order=order, seed=seed, batch_size=batch_size, unit=unit,
                  workers=workers, limit=limit, virtual=True)
        for order, seed in arms
    ]  # fmt: skip
    task = find_task("digits")
    split = task.load(None, limit)
    together = BatchedFleet(configs, task, split)
    alone = [VirtualFleet(config, task, split) for config in configs]
    for number in (1, 2, 3, 4):
        tallies = together.epoch(number, no_tick)
        qualities = together.quality()
        for at, fleet in enumerate(alone):
            (tally,), (quality,) = fleet.epoch(number, no_tick), fleet.quality()
            assert together.orderings[at].version == fleet.ordering.version, configs[at]
            assert qualities[at].loss == pytest.approx(quality.loss, rel=1e-5)
            mine = tallies[at]
            assert (mine.steps, mine.bytes) == (tally.steps, tally.bytes)
            assert mine.ordering_bytes == tally.ordering_bytes
            assert mine.herding_bound == pytest.approx(tally.herding_bound, rel=1e-3)
    assert len({ordering.version for ordering in together.orderings}) == len(arms)


def test_steps_are_counted_for_every_run():
    configs = [config_of("digits", seed=seed, limit=50, virtual=True) for seed in (0, 1, 2)]
    task, ticks = find_task("digits"), []
    fleet = BatchedFleet(configs, task, task.load(None, 50))
    tallies = fleet.epoch(1, lambda steps=1: ticks.append(steps))
    assert sum(ticks) == sum(tally.steps for tally in tallies) == 3 * 4


def test_why_runs_cannot_go_side_by_side():
    config = config_of("digits", order="cd-grab", virtual=True)
    model = find_task("digits").model()
    assert why_not(config, model) is None
    assert "parameters" in why_not(config_of("digits-mlp"), find_task("digits-mlp").model())
    assert "sparsified" in why_not(replace(config, sparsify="topk", density=0.1), model)
    assert "SGD" in why_not(replace(config, clip=1.0), model)
    assert "SGD" in why_not(replace(config, optimizer="adamw", momentum=0.0), model)
    assert "sketches" in why_not(replace(config, rows="sketch"), model)
    assert "buffers" in why_not(config, find_task(f"{HERE}:Awkward").model())
    assert "Dropout" in why_not(config, nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    assert "LSTM" in why_not(config, nn.LSTM(2, 2))
