"""`gradherd report`."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from gradherd.cli.main import main
from gradherd.cli.report import print_comparison
from gradherd.lab.report.comparison import compare
from gradherd.lab.train.record import write_record
from tests.lab.report.sample_records import hostile, orders, record, sparsifiers


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["report", *map(str, args)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def saved(folder, records):
    for index, one in enumerate(records):
        # Folders in the opposite order: what counts is when a run was started.
        place = folder / f"{len(records) - index:03d}" / "deep"
        place.mkdir(parents=True)
        write_record(replace(one, started=f"2026-01-01T00:00:{index:02d}"), place)
    return folder


def test_table_verdicts_and_page(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    saved(tmp_path, [*orders(), *sparsifiers()])
    code, out, err = run(capsys, tmp_path)
    assert (code, err) == (0, "")
    assert all(arm in out for arm in ("d-rr", "always-plus", "cd-grab", "exdyna 0.01"))
    assert all(figure in out for figure in ("0.0268 ± 0.0023*", "97.81 ± 0.26 ", "9.36 MB*"))
    assert "\narm " in out  # a table, which fits
    assert "+ cd-grab: better than d-rr, whose final loss it reaches after 10 epochs" in out
    assert "exdyna 0.01: no difference from dense shown" in out and "interval " not in out
    assert "corrected by Holm's method" in out
    assert f"report: {tmp_path / 'report.html'}" in out
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path / "018" / "deep" / "record.json") in page


def test_json_is_that_of_compare(capsys, tmp_path):
    first, second = saved(tmp_path / "a", orders()), saved(tmp_path / "b", sparsifiers())
    page = tmp_path / "page.html"
    code, out, err = run(capsys, first, second, tmp_path, "--out", page, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["report"] == str(page) and page.exists()
    assert [one["task"] for one in found["comparisons"]] == ["digits", "digits-mlp"]
    assert [one["baseline"] for one in found["comparisons"]] == ["d-rr", "dense"]
    assert [arm["order"] for arm in found["comparisons"][0]["arms"]] == [
        "d-rr", "always-plus", "cd-grab",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["{tmp}/runs/001/deep/record.json"], "record.json is not a folder"),
        (["{tmp}/empty"], "empty: no record.json in it or below"),
        (["{tmp}/runs", "--out", "{tmp}"], "is a folder; name a file in it"),
        (["{tmp}/runs", "--out", "{tmp}/no/x.html"], "there is no folder"),
        (["{tmp}/runs", "--out", "/dev/null"], "/dev/null is not a regular file"),
        (["{tmp}/runs", "{tmp}/twice"], "same task, arm and seed (digits, d-rr + dense, seed 0)"),
        (["{tmp}/damaged"], "damaged/record.json: no JSON after line 1"),
        (["{tmp}/foreign"], "foreign/record.json: not a record of a run"),
    ],
)
def test_wrong_usage_is_one_line(capsys, tmp_path, args, complaint):
    saved(tmp_path / "runs", [record(epochs=2)])
    saved(tmp_path / "twice", [record(epochs=2)])
    (tmp_path / "empty").mkdir()
    for name, text in (("damaged", "{"), ("foreign", '{"format": 7}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(text + " " if name == "foreign" else '{"a": }')
    code, out, err = run(capsys, *(arg.format(tmp=tmp_path) for arg in args))
    assert (code, out) == (2, "")
    assert err.startswith("gradherd: ") and err.count("\n") == 1 and complaint in err
    assert not (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"task": 3}, "task is 3, not a string"),
        ({"config": None}, "config is None, not a table"),
        ({"seed": "one"}, "seed is 'one', not an integer"),
        ({"density": "x"}, "density is 'x', not a number"),
        ({"epochs": None}, "damaged record"),
        ({"row": {"train_loss": "low"}}, "epoch 1: train_loss is 'low', not a number"),
        ({"row": {"seconds": None}}, "epoch 1: seconds is None, not a number"),
        ({"row": {"bytes": float("inf")}}, "epoch 1: bytes is None, not an integer"),
        ({"row": {"epoch": 4}}, "epoch 1: epoch is 4"),
    ],
)
def test_damaged_figures_are_named(capsys, tmp_path, change, complaint):
    found = record(epochs=2).to_json()
    row = change.pop("row", {})
    found["epochs"][0].update(row)
    (tmp_path / "record.json").write_text(json.dumps({**found, **change}))
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert str(tmp_path / "record.json") in err and complaint in err


def test_losses_that_are_not_finite_are_a_finding(capsys, tmp_path):
    found = record(epochs=2).to_json()
    found["epochs"][1]["train_loss"] = float("nan")
    (tmp_path / "record.json").write_text(json.dumps(found))
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "diverged" in out and "not finite after epoch 2" in out


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_folder_that_cannot_be_written_to(capsys, tmp_path):
    saved(tmp_path, [record(epochs=2)])
    tmp_path.chmod(0o500)
    code, _, err = run(capsys, tmp_path)
    tmp_path.chmod(0o700)
    assert code == 2 and "cannot be written to" in err


def test_disk_that_is_full_is_one_line(capsys, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradherd.lab.report.page.write_report", full)
    code, _, err = run(capsys, saved(tmp_path, [record(epochs=2)]))
    assert code == 1 and "No space left on device" in err and err.count("\n") == 1


def test_terminal_does_not_obey_records(capsys):
    evil = "\x1b]0;owned\x07[red]x[/red][/] \ud800"
    print_comparison(
        compare([hostile(evil, record(epochs=2)), hostile(evil, record("b", epochs=2))]), None
    )
    out = capsys.readouterr().out
    assert "\x1b]0" not in out and "\x07" not in out and "[red]x[/red][/]" in out


@pytest.mark.parametrize("missing", ["jinja2", "scipy"])
def test_missing_package_is_named_with_the_way_out(tmp_path, missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; from gradherd.cli.main import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"reports need {missing}" in done.stderr
    assert "pip install jinja2 scipy" in done.stderr
