import json

import pytest

from gradherd.cli import main

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

[[claim]]
id = "small-loss"
text = "cd-grab | is < better"
source = "ours"
paper = "none"
measure = "train_loss"
test = "less"
arm = "cd-grab"
against = "d-rr"

[[claim]]
id = "small-sketch"
text = "never measured here"
source = "ours"
paper = "none"
measure = "train_loss"
test = "less"
arm = "cd-grab, sketch"
against = "d-rr"

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
    assert code == 2 and "--resume adds what is missing" in err
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

    code, out, err = run(capsys, "report", "--evidence")
    assert (code, err) == (0, "gradherd: not measured yet: small: small-sketch\n")
    page = (root / "docs" / "evidence.md").read_text()
    assert "cd-grab \\| is &lt; better" in page and "never measured here" not in page
    assert "gradherd study studies/small.toml" in page and "2 seeds" in page
    assert "(images/evidence/small.svg)" in page
    (root / "docs" / "images" / "evidence" / "old.svg").write_text("<svg/>")
    run(capsys, "report", "--evidence")
    assert (root / "docs" / "evidence.md").read_text() == page
    assert [p.name for p in (root / "docs" / "images" / "evidence").iterdir()] == ["small.svg"]


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
        (["none.toml"], "none.toml: No such file"),
        (["studies/small.toml", "--only", "odd"], "there is no arm 'odd'; there are 'd-rr'"),
        (["studies/small.toml", "--device", "odd"], "--device 'odd' cannot be used"),
        (["studies/bad.toml"], "bad.toml: unknown key 'task2'; known are kind, theme"),
    ],
)
def test_wrong_calls_end_with_one_line(root, capsys, args, says):
    (root / "studies" / "bad.toml").write_text(SMALL.replace("task =", "task2 =", 1))
    code, out, err = run(capsys, "study", *args)
    assert (code, out) == (2, "") and says in err and err.count("\n") == 1


def test_evidence_needs_studies_and_one_place(tmp_path, capsys):
    code, _, err = run(capsys, "report", "--evidence", tmp_path)
    assert code == 2 and "holds no study" in err
    code, _, err = run(capsys, "report", "--evidence", "--out", "page.md")
    assert code == 2 and "no --out" in err
    code, _, err = run(capsys, "report")
    assert code == 2 and "name at least one folder" in err
