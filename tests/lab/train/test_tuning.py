"""Learning rates chosen on held-out examples, the recipe of sparse arms, and divergence."""

import dataclasses

import pytest
import torch

import gradherd as gh
from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import Exchange, plan_runs, sparse_recipe
from gradherd.lab.train.loop import new_record
from gradherd.lab.train.runner import run_all
from gradherd.lab.train.trainer import evaluate
from gradherd.lab.train.tuning import best_rates, hold_out, tuning_runs, what_to_try
from tests.lab.train.work import config_of, record, row

ARMS = [Exchange("dense"), Exchange("topk"), Exchange("dense", None, 3)]


def planned(**more):
    defaults = find_task("digits").defaults
    return plan_runs(
        "digits",
        defaults,
        orders=["d-rr"],
        sparsifiers=ARMS,
        density=0.05,
        seeds=[0, 1],
        **{"limit": 40, "epochs": 1, "virtual": True, "workers": 2, **more},
    )


def test_sparse_arms_have_no_momentum_unless_it_is_chosen():
    dense, sparse, local = planned()[:3]
    assert (dense.lr, dense.momentum) == (0.2, 0.9) == (local.lr, local.momentum)
    assert (sparse.lr, sparse.momentum) == (2.0, 0.0), "0.2 / (1 - 0.9)"
    assert (local.density, local.local_steps, local.exchange) == (None, 3, "dense every 3")
    for chosen in ({"lr": 0.1}, {"momentum": 0.9}):
        assert planned(**chosen)[1].momentum == 0.9
    corrected = config_of(
        "digits", sparsify="topk", density=0.1, momentum=0.0, method={"momentum": 0.9}
    )
    assert sparse_recipe(corrected) == corrected


def test_local_steps_have_the_rate_of_their_recipe():
    local = gh.LocalSteps(every=8)
    few = {"workers": 4, "lr": 0.2, "local_steps": 8, "method": {"values": "int1"}}
    sgd = sparse_recipe(config_of("digits", momentum=0.9, **few))
    assert (sgd.lr, sgd.momentum) == (0.1, 0.9)
    five = sparse_recipe(config_of("digits", momentum=0.9, **{**few, "local_steps": 5}))
    assert five.lr == 0.2, "ResNet-18 lost more at less"
    adamw = sparse_recipe(config_of("digits", optimizer="adamw", **few))
    assert adamw.lr == pytest.approx(0.2 * local.lr_factor(4)) == pytest.approx(0.2)


def test_held_out_examples_are_not_trained_on():
    task = find_task("digits")
    split = task.load(None, 50)
    held = hold_out(split, 0.2)
    assert (len(held.train[0]), len(held.test[0])) == (40, 10)
    assert torch.equal(held.test[0], split.train[0][4::5])
    torch.manual_seed(0)
    model = task.model()
    loss = float(task.loss(model, *held.test).detach())
    config = config_of("digits", held_out=0.2)
    assert evaluate(config, task, model, held).metric == pytest.approx(loss, rel=1e-5)
    kept = new_record(config, task, held, 650)
    assert (kept.metric_name, kept.higher_is_better) == ("loss on held-out examples", False)
    with pytest.raises(ValueError, match="too few"):
        hold_out(task.load(None, 4), 0.2)


@pytest.mark.parametrize(
    ("share", "held"), [(0.4, 20), (0.25, 12), (0.5, 25), (0.9, 45), (0.02, 1), (0.21, 10)]
)
def test_the_share_that_is_held_out_is_the_one_asked_for(share, held):
    task = find_task("digits")
    split = hold_out(task.load(None, 50), share)
    assert (len(split.test[0]), len(split.train[0])) == (held, 50 - held)


def test_each_arm_gets_its_best_rate():
    configs = planned()
    runs = tuning_runs(configs, [1e-6, 0.1, 1e9])
    assert len(runs) == 9 and {run.seed for run in runs} == {10_000}, "a seed that is not compared"
    assert len({run.folder() for run in runs}) == 9
    rates = best_rates(runs, run_all(runs, World.single()))
    assert rates == {config.arm: 0.1 for config in configs}
    gone = [dataclasses.replace(record(), status="diverged", epochs=[row()]) for _ in runs]
    with pytest.raises(ValueError, match=r"diverges at all of lr=1e-06, 0\.1, 1e"):
        best_rates(runs, gone)


def test_a_run_that_has_diverged_says_what_to_try():
    fine = dataclasses.replace(record(), start_loss=2.0, epochs=[row(train_loss=1.0)])
    assert what_to_try(dataclasses.replace(fine, status="done")) is None
    gone = dataclasses.replace(fine, status="diverged", epochs=[row(train_loss=None)])
    assert "not finite; try --lr 0.067, or --lr-warmup" in what_to_try(gone)
    assert "momentum" not in what_to_try(gone)
    risen = dataclasses.replace(
        fine, status="done", density=0.1, sparsify="topk", epochs=[row(train_loss=3.0)]
    )
    assert "has not improved: its loss rose from 2 to 3;" in what_to_try(risen)
    assert "--momentum 0" in what_to_try(risen)
    far = dataclasses.replace(risen, epochs=[row(train_loss=5.0)])
    assert "has diverged: its loss rose from 2 to 5;" in what_to_try(far)
