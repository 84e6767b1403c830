"""Kinds of studies and tasks that the studies bring along."""

import sys

import pytest
import torch

from gradherd.advise.choices import NetworkLink, Setting, predict, typical_overheads
from gradherd.lab.study.file import read_study
from gradherd.lab.study.kinds import Progress, RunContext, kind_of
from gradherd.lab.study.run import missing_runs, plan_runs, run_planned
from gradherd.lab.tasks.registry import find_task
from gradherd.ordering.sharding import UnitSharding
from studies.kinds.density import density_figures, downsample
from studies.methods import METHODS, ORDERS
from studies.tasks.by_label import permutation_by_label
from tests.lab.study.test_kinds import HERDING, STUDIES, results_of, study

COST, DENSITY = "kinds/cost.py:CostStudy", "kinds/density.py:DensityStudy"


def test_herding_finds_the_published_bounds(tmp_path):
    arms = [{"order": ["cd-grab", "id-grab"]}]
    settings = {"workers": 100, "units": 100, "dim": 16, "rounds": 3}
    found = results_of(study(HERDING, arms, settings), tmp_path)
    bounds = found["cd-grab", 0].figures["series"]["bound"]
    assert bounds == pytest.approx([38.1267, 19.7855, 10.3477, 4.7555], abs=1e-4)
    assert found["id-grab", 0].figures["summary"]["bound"] == pytest.approx(13.5708, abs=1e-4)


def test_seconds_trains_both_with_the_same_seed(tmp_path):
    settings = {"epochs": 2, "batch_size": 64, "lr": 0.05, "limit": 320}
    found = results_of(
        study(
            "kinds/seconds.py:SecondsStudy", [{"order": "pair-grab"}], settings, task="digits-mlp"
        ),
        tmp_path,
    )
    own = found["pair-grab", 0].figures
    arms = [{"order": ["d-rr", "pair-grab"]}]
    both = results_of(
        study("kinds/seconds.py:SecondsStudy", arms, settings, task="digits-mlp"), tmp_path / "both"
    )
    plain = both["d-rr", 0].figures
    # Random reshuffling is trained whether it was asked for or not, and is the measure of itself.
    assert plain["summary"]["time_to_loss"] <= 1 and plain["summary"]["loss_ratio"] == 1
    losses = both["pair-grab", 0].figures["series"]["train_loss"]
    assert own["series"]["train_loss"] == losses
    assert losses[0] == plain["series"]["train_loss"][0]  # The first epoch has the same order.
    assert losses[1] != plain["series"]["train_loss"][1]
    assert own["summary"]["loss_ratio"] == pytest.approx(
        losses[1] / plain["series"]["train_loss"][1], rel=1e-5
    )


def test_series_are_thinned():
    starts, means = downsample([float(n) for n in range(1000)], max_points=10)
    assert len(starts) == 10 and means[0] == 49.5 and starts[1] == 100
    assert downsample([]) == ([], [])


def test_density_shows_the_same_gradients_to_every_sparsifier(tmp_path):
    class Counted(Progress):
        batches = 0

        def begin_arm(self, arm, seed, runs):
            self.batches += 1

    arms = [
        {"sparsify": ["topk", "randomk"], "density": 0.01},
        {"sparsify": "exdyna", "density": 0.01, "method": [{"blocks": 64}, {"rotate": False}]},
    ]
    more = {"task": "digits-mlp", "methods": {"randomk": "methods/randomk.py:RandomK"}}
    one = study(DENSITY, arms, {"workers": 2, "steps": 4}, **more)
    told = Counted()
    where = RunContext(folder=one.folder, progress=told)
    found = {r.arm: r for batch in run_planned(one, plan_runs(one), tmp_path, where) for r in batch}
    assert told.batches == 1  # Trained once.
    assert found["randomk 0.01"].figures["summary"]["build_up"] == pytest.approx(1, abs=0.01)
    assert found["topk 0.01"].figures["summary"]["build_up"] > 1.2
    blocks, still = found["exdyna 0.01, blocks 64"], found["exdyna 0.01, rotate False"]
    assert blocks.figures["summary"]["density_error"] < 0.05
    assert still.settings["method"] == {"rotate": False}
    assert still.figures["series"] != blocks.figures["series"]
    assert len(found["topk 0.01"].figures["series"]["density"]) == 4


def test_a_study_brings_methods_of_its_own(tmp_path):
    arms = [{"sparsify": ["deft", "sage"], "density": 0.01}]
    homes = {"deft": "methods/deft.py:Deft", "sage": "methods/thresholds.py:Sage"}
    more = {"task": "digits-mlp", "methods": homes}
    found = results_of(study(DENSITY, arms, {"workers": 2, "steps": 3}, **more), tmp_path)
    assert {arm for arm, _ in found} == {"deft 0.01", "sage 0.01"}
    assert plan_runs(study("compare", arms, {}, **more))
    for home, says in (
        ("methods/odd.py:Deft", "method 'deft': there is no file"),
        ("methods/deft.py:Odd", "method 'deft': .* has no Selector or Policy 'Odd'"),
        ("methods/thresholds.py:Sage", "method 'deft': there is another one of that name"),
    ):
        with pytest.raises(ValueError, match=says):
            plan_runs(study(DENSITY, arms, {}, task="digits-mlp", methods={"deft": home}))


def test_a_study_brings_orders_of_its_own(tmp_path):
    more = {"task": "digits", "methods": {"saw": "methods/scored.py:Saw"}}
    settings = {"epochs": 3, "workers": 2, "limit": 64}
    one = study("compare", [{"order": ["d-rr", "saw"]}], settings, **more)
    found = results_of(one, tmp_path)
    losses = {arm: found[arm, 0].figures["train_loss"] for arm, _ in found}
    assert set(losses) == {"d-rr", "saw"} and losses["d-rr"] != losses["saw"]


def test_methods_of_studies_are_found_where_the_studies_say():
    named = {
        name: home
        for path in STUDIES.glob("*.toml")
        for name, home in read_study(path).methods.items()
    }
    assert {name: home.rpartition(":")[2] for name, home in named.items()} == {
        name: method.__name__ for name, method in {**METHODS, **ORDERS}.items()
    }


def test_figures_of_steps_by_hand():
    steps = [
        {"density": d, "padding": p, "residual_norm": 1.0, "bytes": 8}
        for d, p in ((0.02, 3.0), (0.01, 2.0), (0.0095, 1.5), (0.012, 1.1))
    ]
    summary = density_figures(steps, 0.01)["summary"]
    assert summary["density_error"] == pytest.approx((1 + 0 + 0.05 + 0.2) / 4)
    assert summary["within_tenth"] == 0.5 and summary["first_ratio"] == 2
    assert summary["build_up"] == pytest.approx(1.075) and summary["padding"] == pytest.approx(1.3)


@pytest.mark.parametrize(
    "arm, says",
    [
        ({"sparsify": "odd", "density": 0.1}, "unknown sparsifier 'odd'; known are dense"),
        ({"sparsify": "topk"}, "no density is set for topk"),
        ({"sparsify": "topk", "density": 2.0}, "density must be in"),
        ({"sparsify": "exdyna", "density": 0.1, "method": {"odd": 1}}, "unknown setting 'odd' of"),
    ],
)
def test_density_refuses_methods_that_are_none(arm, says):
    one = study(DENSITY, [arm], {"workers": 2, "steps": 4}, task="digits-mlp")
    with pytest.raises(ValueError, match=says):
        plan_runs(one)


def test_cost_is_measured_on_real_ranks(tmp_path):
    one = study(COST, [{"case": "coordination", "workers": 2, "dim": 1000}], {"repeats": 1})
    (found,) = results_of(one, tmp_path).values()
    summary = found.figures["summary"]
    assert summary["all-reduce.ratio"] == 1 and summary["sharded.bytes_ratio"] < 1.5
    with pytest.raises(ValueError, match="unknown case 'odd'; known are coordination"):
        kind_of(one).settings(one, {"case": "odd", "workers": 2, "dim": 9})
    assert missing_runs(plan_runs(one), {found.arm: [found]}) == []


def test_cost_of_virtual_runs_needs_no_dim(tmp_path, monkeypatch):
    arm = {"case": "virtual", "workers": 2, "steps": 2}
    one = study(COST, [arm], {"repeats": 1})
    virtual = sys.modules[type(kind_of(one)).__module__].virtual
    monkeypatch.setattr(virtual, "CASES", virtual.CASES[:3])  # Nine runs take long to trace.
    (found,) = results_of(one, tmp_path).values()
    summary = found.figures["summary"]
    assert summary["plain loop.ratio"] == 1 and summary["one run.steps_per_second"] > 0
    assert found.settings == {**arm, "repeats": 1, "batch_size": 1}
    assert missing_runs(plan_runs(one), {found.arm: [found]}) == []
    for more, says in (({"dim": 9}, "unknown setting 'dim'"), ({"steps": 1}, "steps must be at")):
        with pytest.raises(ValueError, match=says):
            kind_of(one).settings(one, {**arm, **more})
    with pytest.raises(ValueError, match="unknown setting 'steps'"):
        kind_of(one).settings(one, {"case": "signs", "workers": 2, "dim": 9, "steps": 2})


def test_signs_are_measured_in_three_forms(tmp_path):
    one = study(COST, [{"case": "signs", "workers": 2, "dim": 100}], {})
    (found,) = results_of(one, tmp_path).values()
    summary = found.figures["summary"]
    assert summary["sequential.ratio"] == 1
    assert all(summary[f"{case}.seconds"] > 0 for case in ("sequential", "block-gram", "balance"))


def test_steps_of_many_workers_are_predicted(tmp_path):
    arm = {"case": "advise", "workers": 64, "dim": 25_000_000, "bandwidth": 1e10, "backward": 0.06}
    one = study(COST, [arm], {"repeats": 1})
    (found,) = results_of(one, tmp_path).values()
    summary, link = found.figures["summary"], NetworkLink(bandwidth=1e10, latency=50e-6)
    assert found.settings == arm  # Nothing is repeated here.
    setting = Setting(
        params=25e6,
        workers=64,
        link=link,
        backward=0.06,
        forward=0.03,
        overheads=typical_overheads("cuda", 25e6),
    )
    assert summary["cd-grab.seconds"] == predict(setting, "dense", "cd-grab").step_seconds
    assert summary["d-rr.ratio"] == 1 < summary["cd-grab.ratio"]
    with pytest.raises(ValueError, match=r"bandwidth must be in \(0, inf\], got 0"):
        kind_of(one).settings(one, {**arm, "bandwidth": 0})
    with pytest.raises(ValueError, match="unknown setting 'odd'; known are case, workers"):
        kind_of(one).settings(study(COST, [arm], {"odd": 1}), arm)


@pytest.mark.parametrize("count, workers", [(12, 3), (13, 3), (2, 4)])
def test_dealing_in_turn_gives_each_worker_a_run_of_the_sorted_labels(count, workers):
    labels = torch.randint(4, (count,), generator=torch.Generator().manual_seed(0))
    order = permutation_by_label(labels, workers)
    assert sorted(order.tolist()) == list(range(count))
    deal = UnitSharding(count, 1, workers, drop_last=False)
    dealt = [labels[order][w::workers] for w in range(workers)]
    assert [len(own) for own in dealt] == list(deal.sizes)
    assert torch.equal(torch.cat(dealt), labels.sort().values)


def test_a_task_of_few_labels_holds_the_same_examples():
    fair = find_task("digits").load()
    task = find_task(f"{STUDIES}/tasks/by_label.py:Digits4")
    split = task.load()
    assert torch.equal(split.train[1].sort().values, fair.train[1].sort().values)
    assert len(split.train[1][0::4].unique()) <= 4 < len(fair.train[1][0::4].unique())
    assert task.name == "digits-by-label-4"
