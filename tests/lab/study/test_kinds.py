from pathlib import Path

import pytest

from gradherd.lab.study.file import parse_study
from gradherd.lab.study.kinds import RunContext
from gradherd.lab.study.run import missing_runs, plan_runs, run_planned

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
