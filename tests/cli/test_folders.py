"""Output folders: resumed comparisons, locks, and what an interrupted command says."""

import contextlib
import json
import sys
from pathlib import Path

import pytest

from gradherd.cli import folders, launch
from gradherd.cli.main import main
from gradherd.cli.parser import CommandFailed, UsageError
from gradherd.lab.train.record import RECORD_FILE, read_record

SMALL = ["--virtual", "--workers", "2", "--epochs", "1", "--limit", "16"]
COMPARE = ["compare", "digits", "--orders", "d-rr,cd-grab", *SMALL]


@pytest.fixture(autouse=True)
def stand_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_a_resumed_comparison_keeps_finished_runs_and_trains_the_others(capsys):
    code, first, _ = call(capsys, *COMPARE, "--seeds", 2, "--out", "a", "--json")
    assert code == 0
    before = {path: path.read_text() for path in Path("a").rglob(RECORD_FILE)}
    assert len(before) == 4
    # One was interrupted, one was lost.
    interrupted, lost = sorted(before)[:2]
    interrupted.write_text(before[interrupted].replace('"done"', '"interrupted"'))
    lost.unlink()
    code, again, _ = call(capsys, *COMPARE, "--seeds", 2, "--out", "a", "--json", "--resume")
    assert code == 0

    def losses(text):
        return [arm["final_loss"] for arm in json.loads(text)["arms"]]

    assert losses(again) == losses(first)
    for path, text in before.items():
        assert (path.read_text() == text) == (path not in (interrupted, lost)), path
        assert read_record(path).status == "done"
    # More seeds: what is there stays, and the first arm stays the baseline.
    code, more, _ = call(capsys, *COMPARE, "--seeds", 3, "--out", "a", "--json", "--resume")
    assert code == 0 and json.loads(more)["baseline"] == "d-rr"
    assert len(list(Path("a").rglob(RECORD_FILE))) == 6


def test_what_cannot_be_resumed_is_refused(capsys):
    code, _, err = call(capsys, *COMPARE, "--seeds", 1, "--out", "a", "--resume")
    assert code == 0 and "'a' holds nothing yet, so all runs are trained" in err
    for args, words in [
        ([*COMPARE, "--resume"], "--resume needs --out"),
        (["demo", "--resume"], "--resume needs --out"),
        ([*COMPARE, "--out", "a"], "--resume keeps its finished runs and trains the others"),
        ([*COMPARE, "--out", "a", "--resume", "--lr", "0.1"], "a run with lr 0.2, not 0.1"),
        ([*COMPARE, "--out", "a", "--resume", "--workers", "4"], "a run with workers 2, not 4"),
        (["train", "digits", *SMALL[1:], "--out", "a", "--resume"], "is not empty"),
    ]:
        code, out, err = call(capsys, *args)
        assert (code, out) == (2, "") and words in err and err.count("\n") == 1, err
    assert call(capsys, "train", "digits", *SMALL, "--out", "b")[0] == 0
    code, _, err = call(capsys, *COMPARE, "--out", "b", "--resume")
    assert code == 2 and "'b' is not empty" in err


def test_an_arm_that_is_named_in_two_ways_is_trained_once(capsys):
    named = ["compare", "digits", *SMALL, "--seeds", 1, "--out", "a", "--density", 0.1, "--json"]
    code, out, err = call(capsys, *named, "--sparsifiers", "dense,topk,topk:0.1")
    assert code == 0, err
    assert [arm["label"] for arm in json.loads(out)["arms"]] == ["dense", "topk 0.1"]
    assert len(list(Path("a").rglob(RECORD_FILE))) == 2
    code, _, err = call(capsys, *named, "--sparsifiers", "topk,topk:0.1")
    assert code == 2 and "only one arm (d-rr, topk)" in err


def test_rates_of_another_grid_are_not_kept_in_silence(capsys):
    tuned = [*COMPARE, "--seeds", 1, "--out", "a", "--tune"]
    assert call(capsys, *tuned, "lr=0.1,0.2")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in Path("a").rglob(RECORD_FILE)}
    assert len(before) == 4 + 2
    # Runs that tune are kept like others, those of a larger grid are added, and a page leaves
    # them out. More seeds are no reason to choose again.
    assert call(capsys, *tuned, "lr=0.1,0.2", "--resume", "--seeds", 2)[0] == 0
    assert call(capsys, *tuned, "lr=0.1,0.2,1e-6", "--resume", "--seeds", 2)[0] == 0
    after = {path: path.stat().st_mtime_ns for path in Path("a").rglob(RECORD_FILE)}
    assert len(after) == 6 + 4 and before.items() <= after.items()
    code, out, err = call(capsys, "report", "a", "--json")
    assert code == 0, err
    arms = json.loads(out)["comparisons"][0]["arms"]
    assert [arm["seeds"] for arm in arms] == [[0, 1], [0, 1]]
    code, _, err = call(capsys, *tuned, "lr=1e-6,1e-5", "--resume")
    assert code == 2 and "holds a run with lr 0." in err, err


@pytest.mark.skipif(sys.platform == "win32", reason="folders are not locked there")
def test_a_folder_has_one_writer_at_a_time(capsys):
    with folders.output_folder(Path("a"), "x") as out:
        for more in ([], ["--resume"]):
            code, told, err = call(capsys, *COMPARE, "--out", "a", *more)
            assert (code, told) == (2, "") and out.is_dir()
            assert "--out 'a' is in use by another command: wait until it ends, or" in err
    assert not Path("a").exists()  # nothing was written
    with folders.output_folder(Path("a"), "x"):
        pass  # and it is free again


def test_a_file_system_without_locks_is_used_without_one(monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def unsupported(file, flags):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with folders.output_folder(Path("a"), "x") as out:
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_what_survives_is_said_with_the_way_to_continue(capsys, monkeypatch, error):
    """The third of four runs does not come to its end."""
    run_all, left = launch.run_all, [2]

    def stops(configs, *args, out, **options):
        records = run_all(configs[: left[0]], *args, out=out, **options)
        if left[0] < len(configs):
            raise error
        return records

    monkeypatch.setattr(launch, "run_all", stops)
    code, out, err = call(capsys, *COMPARE, "--seeds", 2, "--out", "a")
    assert out == ""
    assert "2 runs finished, 2 epochs on record: gradherd report a shows them; " in err
    assert "repeat the command with --out a --resume to continue" in err
    if isinstance(error, OSError):
        assert code == 1 and "No space left on device" in err and err.count("\n") == 1
    else:
        assert code == 130
        assert err.endswith("gradherd: interrupted\n") and err.count("\n") == 2
    left[0] = 4
    assert call(capsys, *COMPARE, "--seeds", 2, "--out", "a", "--resume")[0] == 0
    assert {read_record(path).status for path in Path("a").rglob(RECORD_FILE)} == {"done"}


def test_a_single_run_says_what_survives(capsys, monkeypatch):
    folder = Path("a")
    assert call(capsys, "train", "digits", *SMALL, "--out", "a")[0] == 0
    capsys.readouterr()
    record = folder / RECORD_FILE
    record.write_text(record.read_text().replace('"done"', '"interrupted"'))
    left = "0 runs finished, 1 epoch on record: gradherd report a shows them"
    with pytest.raises(CommandFailed, match=rf"^no\. Stop; {left}$"):
        with folders.telling_survivors(folder):
            raise CommandFailed("no. Stop")
    (folder / "checkpoints" / "step-3").mkdir(parents=True)
    with contextlib.suppress(KeyboardInterrupt), folders.telling_survivors(folder):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == (
        f"gradherd: {left}; repeat the command with --out a --resume to continue\n"
    )
    # Nothing survived: the error is what it was. A wrong call is not about what survives.
    for kind in (CommandFailed, UsageError):
        with pytest.raises(kind, match=r"^x$"), folders.telling_survivors(Path("away")):
            raise kind("x")


def test_a_damaged_record_does_not_hide_an_interrupt(capsys, monkeypatch):
    run_all = launch.run_all

    def stops(configs, *args, out, **options):
        run_all(configs[:2], *args, out=out, **options)
        Path(out, "damaged").mkdir()
        Path(out, "damaged", RECORD_FILE).write_text('{"format": 1, "epo')
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "run_all", stops)
    code, out, err = call(capsys, *COMPARE, "--seeds", 2, "--out", "a")
    assert (code, out) == (130, "") and err.endswith("gradherd: interrupted\n"), err
    assert "2 runs finished, 2 epochs on record: gradherd report a shows them; " in err
