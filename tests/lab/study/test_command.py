import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradherd.cli.main import main
from gradherd.cli.parser import UsageError

SMALL = """
kind = "compare"
theme = "ordering"
title = "Two orders"
task = "digits"
seeds = 2

[settings]
epochs = 2
limit = 300

[sources]
epochs = "ours"
limit = "ours"
sketch_size = "ours"

[[arms]]
order = ["d-rr", "cd-grab"]

[[arms]]
order = "cd-grab"
rows = "sketch"
sketch_size = 16
label = "sketch"

[[figure]]
title = "Loss & more"
y = "train_loss"
""".replace('sketch_size = "ours"', 'sketch_size = "ours"\nrows = "ours"')


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_study_from_its_file_to_the_page(root, capsys):
    only = ["--only", "d-rr", "cd-grab"]
    code, out, err = run(capsys, "study", "studies/small.toml", *only, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert [one["label"] for one in told["arms"]] == ["d-rr", "cd-grab"]
    assert told["arms"][1]["loss_difference"]["seeds"] == [0, 1]
    assert len(told["headlines"]) == 1 and "too few seeds" in told["headlines"][0]
    assert sorted((r["arm"], r["seed"]) for r in told["runs"]) == [
        ("cd-grab", 0),
        ("cd-grab", 1),
        ("d-rr", 0),
        ("d-rr", 1),
    ]
    results = root / "benchmarks" / "results" / "small"
    assert {path.name for path in results.iterdir()} == {"d-rr.json", "cd-grab.json"}
    assert all(path.stat().st_size < 4000 for path in results.iterdir())

    # Again without --resume: refused. With it: nothing is left to do. One seed lost: one run.
    code, _, err = run(capsys, "study", "studies/small.toml", *only)
    assert code == 2 and "add --resume to run what is missing" in err
    before = {path.name: path.read_bytes() for path in results.iterdir()}
    code, out, _ = run(capsys, "study", "studies/small.toml", *only, "--resume", "--json")
    assert (json.loads(out)["runs"], json.loads(out)["skipped"]) == ([], 4)
    lines = (results / "cd-grab.json").read_text().splitlines()
    lines = [line for line in lines if not line.startswith('{"seed":1')]
    (results / "cd-grab.json").write_text("\n".join(lines).replace("},\n]}", "}\n]}"))
    code, out, _ = run(capsys, "study", "studies/small.toml", *only, "--resume", "--json")
    assert json.loads(out)["runs"] == [{"arm": "cd-grab", "seed": 1, "status": "done"}]
    again = {path.name: path.read_bytes() for path in results.iterdir()}
    assert before["d-rr.json"] == again["d-rr.json"] and again["cd-grab.json"].count(b'"seed"') == 2

    # As the page of a study says: the same runs again, beside the stored ones.
    again = "study studies/small.toml --only cd-grab d-rr --out again/small"
    code, out, err = run(capsys, *again.split())
    assert (code, err) == (0, "") and "cd-grab: too few seeds to compare it with d-rr" in out
    # Virtual workers take turns: their seconds say nothing about a step.
    assert "sketch" not in out and "times the seconds" not in out


BOUNDS = f"""
kind = "{Path(__file__).parents[3]}/studies/kinds/herding.py:HerdingStudy"
title = "Two orders of random vectors"
seeds = 2
[settings]
workers = 2
units = 8
dim = 4
rounds = 2
[[arms]]
order = ["d-rr", "cd-grab"]
"""


def test_runs_that_do_not_train_end_with_the_means_of_what_they_measured(root, capsys):
    (root / "studies" / "bounds.toml").write_text(BOUNDS)
    code, out, err = run(capsys, "study", "studies/bounds.toml", "--json")
    told = json.loads(out)
    assert (code, err) == (0, "") and [arm["seeds"] for arm in told["arms"]] == [[0, 1]] * 2
    order = told["arms"][1]
    assert order["label"] == "cd-grab" and set(order["summary"]) == {"start", "bound", "mean"}
    assert order["summary"]["bound"]["mean"] > 0 < order["summary"]["bound"]["std"]
    code, out, _ = run(capsys, "study", "studies/bounds.toml", "--resume")
    lines = out.splitlines()
    assert code == 0 and lines[1].startswith("cd-grab (2 seeds): start ") and " ± " in lines[1]
    assert lines[-1] == "bounds: 0 runs, 4 skipped; results in benchmarks/results/bounds"


def test_the_plan_shows_what_is_left(root, capsys):
    code, out, _ = run(capsys, "study", "studies/small.toml", "--plan", "--json")
    told = json.loads(out)
    assert code == 0 and len(told["left"]) == 6 and told["skipped"] == 0
    assert not (root / "benchmarks").exists()
    code, out, _ = run(capsys, "study", "studies/small.toml", "--plan")
    assert code == 0 and "seeds to run" in out


@pytest.mark.parametrize(
    "args, says",
    [
        (["studies/small.toml", "--only", "odd"], "there is no arm 'odd'; there are 'd-rr'"),
        (["studies/small.toml", "--device", "odd"], "--device must be cpu or cuda, got 'odd'"),
        (["studies/bad.toml"], "bad.toml: unknown key 'task2'; known are kind, title"),
        (["studies/small.toml", "--out", "studies/bad.toml"], "bad.toml' is a file, not a folder"),
        (
            ["studies/small.toml", "--out", "studies/bad.toml/x"],
            "bad.toml' is a file, not a folder",
        ),
    ],
)
def test_wrong_calls_end_with_one_line(root, capsys, args, says):
    (root / "studies" / "bad.toml").write_text(SMALL.replace("task =", "task2 =", 1))
    code, out, err = run(capsys, "study", *args)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def results_of(folder):
    """Return lines of runs by file, without what differs from one making to the next."""
    kept = {}
    for path in sorted(folder.iterdir()):
        found = json.loads(path.read_text())
        kept[path.name] = [(r["seed"], r["figures"]["train_loss"]) for r in found["runs"]]
    return kept


def test_processes_side_by_side_find_the_same(root, capsys):
    code, out, err = run(capsys, "study", "studies/small.toml", "--jobs", "2", "--out", "two")
    assert (code, err) == (0, "") and "6 runs" in out
    run(capsys, "study", "studies/small.toml", "--out", "one")
    two, one = results_of(root / "two"), results_of(root / "one")
    assert len(two) == 3 and two.keys() == one.keys()
    for name, runs in two.items():
        assert [seed for seed, _ in runs] == [seed for seed, _ in one[name]] == [0, 1]
        # Stacks of three and of six runs: on some CPUs the last bit depends on the place in them.
        for (_, losses), (_, expected) in zip(runs, one[name], strict=True):
            assert losses == pytest.approx(expected, rel=1e-5)


def test_a_study_for_a_gpu_says_so_where_there_is_none(root, capsys, monkeypatch):
    monkeypatch.setattr("gradherd.cli.study.usable_device", no_device)
    (root / "studies" / "gpu.toml").write_text(SMALL.replace("seeds", 'device = "cuda"\nseeds', 1))
    code, out, err = run(capsys, "study", "studies/gpu.toml")
    assert (code, out) == (2, "") and "--device cpu" in err and err.count("\n") == 1
    assert not (root / "benchmarks").exists()


def no_device(name):
    raise UsageError(f"--device {name!r} cannot be used here")


def test_without_what_reports_need_nothing_is_run(root):
    code = "import sys; sys.modules['scipy'] = None; from gradherd.cli.main import main; main()"
    command = [sys.executable, "-c", code, "study", "studies/small.toml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "reports need scipy" in done.stderr and "pip install jinja2 scipy" in done.stderr
    assert not (root / "benchmarks").exists()
