import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradherd.advise.choices import Setting, predict
from gradherd.advise.costs import NetworkLink, typical_overheads
from gradherd.lab.bench import bench_virtual as virtual
from gradherd.lab.study import kinds
from gradherd.lab.study.cost_kind import CostStudy
from gradherd.lab.study.density_kind import density_figures
from gradherd.lab.study.file import parse_study
from gradherd.lab.study.kinds import RunContext, StudyProgress
from gradherd.lab.study.label_shards import permutation_by_label
from gradherd.lab.study.results import read_arms
from gradherd.lab.study.run import missing_runs, plan_runs, run_planned
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train import loop
from gradherd.ordering.sharding import UnitSharding

STUDIES = Path(__file__).parents[3] / "studies"


def study(kind, arms, settings, **more):
    given = {name for one in [*arms, settings] for name in one}
    given -= {"order", "sparsify", "case", "label"}
    return parse_study(
        {
            "kind": kind,
            "theme": "open",
            "title": "t",
            "settings": settings,
            "sources": dict.fromkeys(given, "ours"),
            "arms": arms,
            **more,
        },
        name="small",
        folder=STUDIES,
    )


def results_of(one, out):
    where = RunContext(folder=one.folder)
    batches = run_planned(one, plan_runs(one), out, where)
    return {(r.arm, r.seed): r for batch in batches for r in batch}


def test_herding_finds_the_published_bounds(tmp_path):
    arms = [{"order": ["cd-grab", "id-grab"]}]
    settings = {"workers": 100, "units": 100, "dim": 16, "rounds": 3}
    found = results_of(study("herding", arms, settings), tmp_path)
    bounds = found["cd-grab", 0].figures["series"]["bound"]
    assert bounds == pytest.approx([38.1267, 19.7855, 10.3477, 4.7555], abs=1e-4)
    assert found["id-grab", 0].figures["summary"]["bound"] == pytest.approx(13.5708, abs=1e-4)


def test_density_shows_the_same_gradients_to_every_sparsifier(tmp_path):
    class Counted(StudyProgress):
        batches = 0

        def begin_batch(self, batch):
            self.batches += 1

    arms = [
        {"sparsify": ["topk", "randomk"], "density": 0.01},
        {"sparsify": "exdyna", "density": 0.01, "method": [{"blocks": 64}, {"rotate": False}]},
    ]
    one = study("density", arms, {"workers": 2, "steps": 4}, task="digits-mlp")
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


def test_trainings_have_the_settings_of_their_arms(tmp_path):
    arms = [
        {"order": "cd-grab", "rows": "sketch", "sketch_size": 4},
        {"sparsify": "exdyna", "density": 0.1, "method": {"threshold": "online"}},
    ]
    one = study("compare", arms, {"epochs": 1, "limit": 40}, task="digits")
    found = results_of(one, tmp_path)
    sketch, online = found.values()
    assert (sketch.settings["sketch_size"], sketch.settings["method"]) == (4, None)
    assert online.settings["method"] == {"threshold": "online"}
    densities = online.record().epochs[-1].density
    assert densities != pytest.approx(0.1, abs=1e-3)  # By consensus it is 0.1 at every step.
    assert missing_runs(plan_runs(one), {r.arm: [r] for r in found.values()}) == []
    with pytest.raises(ValueError, match="arm 'cd-grab, sketch_size 4': sketch_size goes with"):
        plan_runs(study("compare", [{"order": "cd-grab", "sketch_size": 4}], {}, task="digits"))


def test_a_study_compares_with_powersgd(tmp_path):
    arms = [{"sparsify": ["dense", "powersgd"], "density": 0.2}]
    settings = {"workers": 2, "epochs": 1, "batch_size": 8, "limit": 64}
    found = results_of(study("compare", arms, settings, task="digits"), tmp_path)
    dense, low_rank = (found[name, 0].figures for name in ("dense", "powersgd 0.2"))
    assert low_rank["bytes"] < 0.5 * dense["bytes"]
    assert "virtual" not in found["powersgd 0.2", 0].settings


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
    one = study("density", [arm], {"workers": 2, "steps": 4}, task="digits-mlp")
    with pytest.raises(ValueError, match=says):
        plan_runs(one)


def test_cost_is_measured_on_real_ranks(tmp_path):
    one = study("cost", [{"case": "coordination", "workers": 2, "dim": 1000}], {"repeats": 1})
    (found,) = results_of(one, tmp_path).values()
    summary = found.figures["summary"]
    assert summary["all-reduce.ratio"] == 1 and summary["sharded.bytes_ratio"] < 1.5
    with pytest.raises(ValueError, match="unknown case 'odd'; known are coordination"):
        CostStudy().settings(one, {"case": "odd", "workers": 2, "dim": 9})
    assert missing_runs(plan_runs(one), {found.arm: [found]}) == []


def test_cost_of_virtual_runs_needs_no_dim(tmp_path, monkeypatch):
    monkeypatch.setattr(virtual, "CASES", virtual.CASES[:3])  # Nine runs take long to trace.
    arm = {"case": "virtual", "workers": 2, "steps": 2}
    one = study("cost", [arm], {"repeats": 1})
    (found,) = results_of(one, tmp_path).values()
    summary = found.figures["summary"]
    assert summary["plain loop.ratio"] == 1 and summary["one run.steps_per_second"] > 0
    assert found.settings == {**arm, "repeats": 1, "batch_size": 1}
    assert missing_runs(plan_runs(one), {found.arm: [found]}) == []
    for more, says in (({"dim": 9}, "unknown setting 'dim'"), ({"steps": 1}, "steps must be at")):
        with pytest.raises(ValueError, match=says):
            CostStudy().settings(one, {**arm, **more})
    with pytest.raises(ValueError, match="unknown setting 'steps'"):
        CostStudy().settings(one, {"case": "signs", "workers": 2, "dim": 9, "steps": 2})


def test_steps_of_many_workers_are_predicted(tmp_path):
    arm = {"case": "advise", "workers": 64, "dim": 25_000_000, "bandwidth": 1e10, "backward": 0.06}
    one = study("cost", [arm], {"repeats": 1})
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
    with pytest.raises(ValueError, match="bandwidth must be positive, got 0"):
        CostStudy().settings(one, {**arm, "bandwidth": 0})
    with pytest.raises(ValueError, match="unknown setting 'odd'; known are case, workers"):
        CostStudy().settings(study("cost", [arm], {"odd": 1}), arm)


def test_results_of_other_settings_are_replaced_and_other_seeds_stay(tmp_path):
    arms, settings = [{"order": "cd-grab", "workers": 2}], {"units": 4, "dim": 2, "rounds": 1}
    label = [{**arms[0], "label": "a"}]
    results_of(study("herding", label, settings, seeds=[1]), tmp_path)
    results_of(study("herding", label, settings, seeds=[2]), tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.read_text().count('"seed":') == 2
    results_of(study("herding", label, {**settings, "rounds": 2}, seeds=[2]), tmp_path)
    assert path.read_text().count('"seed":') == 1


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


def test_runs_stop_after_the_epoch_in_which_time_is_over(tmp_path, monkeypatch):
    class Clock(StudyProgress):
        now = 0.0

        def epoch(self, number, losses):
            self.now += 10.0

    clock = Clock()
    for module in (kinds, loop):
        told = SimpleNamespace(time=lambda: clock.now, perf_counter=time.perf_counter)
        monkeypatch.setattr(module, "time", told)
    one = study("compare", [{"order": ["d-rr"]}], {"epochs": 3}, task="digits", seeds=1)
    planned = plan_runs(one)

    def stopped_at(seconds):
        where = RunContext(folder=one.folder, progress=clock, stop_at=clock.now + seconds)
        batches = list(run_planned(one, planned, tmp_path, where))
        return [(r.status, r.figures["epochs"]) for batch in batches for r in batch]

    assert stopped_at(15.0) == [("stopped", 2)]
    (stored,) = read_arms(tmp_path, ["d-rr"], "compare").values()
    assert len(stored[0].record().epochs) == 2
    assert missing_runs(planned, {"d-rr": stored}) == planned  # it is run again
    assert stopped_at(25.0) == [("done", 3)]  # over only with its last epoch
    assert stopped_at(0.0) == []  # nothing is begun
    (stored,) = read_arms(tmp_path, ["d-rr"], "compare").values()
    assert missing_runs(planned, {"d-rr": stored}) == []
