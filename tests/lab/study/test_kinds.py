import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradherd.lab.study import kinds
from gradherd.lab.study.file import parse_study
from gradherd.lab.study.kinds import RunContext, StudyProgress
from gradherd.lab.study.results import read_arms
from gradherd.lab.study.run import missing_runs, plan_runs, run_planned
from gradherd.lab.train import loop

STUDIES = Path(__file__).parents[3] / "studies"
HERDING = "kinds/herding.py:HerdingStudy"


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
    with pytest.raises(ValueError, match="arm 'cd-grab, sketch_size 4': sketch_size 4 has no"):
        plan_runs(study("compare", [{"order": "cd-grab", "sketch_size": 4}], {}, task="digits"))


def test_a_study_compares_with_powersgd(tmp_path):
    arms = [{"sparsify": ["dense", "powersgd"], "density": 0.2}]
    settings = {"workers": 2, "epochs": 1, "batch_size": 8, "limit": 64}
    found = results_of(study("compare", arms, settings, task="digits"), tmp_path)
    dense, low_rank = (found[name, 0].figures for name in ("dense", "powersgd 0.2"))
    assert low_rank["bytes"] < 0.5 * dense["bytes"]
    assert "virtual" not in found["powersgd 0.2", 0].settings


def test_results_of_other_settings_are_replaced_and_other_seeds_stay(tmp_path):
    arms, settings = [{"order": "cd-grab", "workers": 2}], {"units": 4, "dim": 2, "rounds": 1}
    label = [{**arms[0], "label": "a"}]
    results_of(study(HERDING, label, settings, seeds=[1]), tmp_path)
    results_of(study(HERDING, label, settings, seeds=[2]), tmp_path)
    (path,) = tmp_path.glob("*.json")
    assert path.read_text().count('"seed":') == 2
    results_of(study(HERDING, label, {**settings, "rounds": 2}, seeds=[2]), tmp_path)
    assert path.read_text().count('"seed":') == 1


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
    (stored,) = read_arms(tmp_path, ["d-rr"]).values()
    assert len(stored[0].record().epochs) == 2
    assert missing_runs(planned, {"d-rr": stored}) == planned  # it is run again
    assert stopped_at(25.0) == [("done", 3)]  # over only with its last epoch
    assert stopped_at(0.0) == []  # nothing is begun
    (stored,) = read_arms(tmp_path, ["d-rr"]).values()
    assert missing_runs(planned, {"d-rr": stored}) == []
