"""Lines of progress for logs: what they say, and how often."""

import itertools
import sys
import time

import pytest

from gradherd.cli import progress
from gradherd.cli.main import main
from gradherd.cli.progress import ProgressBar
from gradherd.lab.tasks import find_task
from gradherd.lab.train.config import plan_runs


@pytest.fixture
def clock(monkeypatch):
    """Seconds that have passed; advance them by adding to the list's entry. Progress is shown."""
    monkeypatch.delenv(progress.QUIET)
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def configs():
    return plan_runs(
        "digits", find_task("digits").defaults, orders=["d-rr", "cd-grab"], sparsifiers=["dense"],
        density=None, seeds=range(1), epochs=1,
    )  # fmt: skip


def test_lines_say_how_far_it_is_and_become_rarer(capsys, clock):
    with ProgressBar() as bar:
        bar.begin(2, 4000)
        bar.group(configs()[:1])
        times = []
        for step in range(3999):
            if step == 5:
                bar.epoch(1, [0.25])
            clock[0] += 1
            bar.step()
            if capsys.readouterr().err:
                times.append(step + 1)
    assert times[0] == 10 and times[1] == 20
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps) and gaps[-1] > 300 and len(times) < 50


def test_a_line_names_run_share_loss_and_time_left(capsys, clock):
    with ProgressBar() as bar:
        bar.begin(2, 100)
        bar.group(configs()[1:])
        bar.epoch(3, [0.125])
        for _ in range(10):
            clock[0] += 2
            bar.step(2)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("gradherd: run 1 of 2: cd-grab, seed 0, 10 %, epoch 3, loss 0.125, ")
    assert lines[0].endswith(" left") and "20 %" in lines[1]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("how", ["quiet", "terminal"])
def test_no_lines_if_they_are_unwanted(capsys, clock, monkeypatch, how):
    if how == "terminal":  # it has the bar
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar(quiet=how == "quiet") as bar:
        bar.begin(1, 10)
        clock[0] += 1000
        bar.step()
    assert "gradherd:" not in capsys.readouterr().err


@pytest.mark.parametrize("quiet", [[], ["--quiet"], "environment"])
def test_a_training_prints_lines_unless_told_not_to(capsys, monkeypatch, tmp_path, quiet):
    if quiet != "environment":
        monkeypatch.delenv(progress.QUIET)
    monkeypatch.setattr(progress, "_FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "_LINES_PER_TIME", 1e9)
    more = [] if quiet == "environment" else quiet
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit) as stop:
        main(["train", "digits", "--virtual", "--epochs", "1", "--limit", "16", "--workers", "2",
              "--out", out, "--json", *more])  # fmt: skip
    assert stop.value.code == 0
    lines = capsys.readouterr().err.splitlines()
    assert bool(lines) == (quiet == [])
    assert all(line.startswith("gradherd: d-rr, seed 0, ") for line in lines)


@pytest.mark.parametrize("width", [50, 80, 160])
def test_a_line_on_a_terminal_is_replaced_in_place_and_erased(capsys, clock, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ProgressBar(study_runs=12) as bar:
        bar.begin_arm("id-pair-grab + exdyna 0.001", 0, 1)
        bar.begin(1, 8)
        bar.epoch(10, [0.61234])
        clock[0] += 30
        bar.step(3)
    *lines, last = capsys.readouterr().err.split("\r")[1:]
    assert last == "\x1b[K" and "\n" not in "".join(lines)
    out = lines[-1].removesuffix("\x1b[K")
    assert len(out) < width
    # No number is cut: if there is too little room, the name is.
    assert out.endswith(", 38 %, epoch 10, loss 0.6123, 50 s left")
    assert ("id-pair-grab + exdyna 0.001, seed 0" in out) == (width == 160)
    assert ("########" in out) == (width == 160)
