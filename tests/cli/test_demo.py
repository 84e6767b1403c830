"""`gradherd demo`: what it trains, and that it says nothing that seeds do not show."""

import json
from dataclasses import replace

import pytest

from gradherd.cli import demo
from gradherd.cli.main import main


@pytest.fixture
def small(monkeypatch):
    """Two epochs of few examples."""
    for name in ("order_runs", "exchange_runs"):
        made = getattr(demo, name)

        def few(workers, seeds, made=made):
            return [replace(one, epochs=2, limit=128) for one in made(workers, seeds)]

        monkeypatch.setattr(demo, name, few)


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["demo", *map(str, args)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_the_whole_demo_in_small(capsys, tmp_path, small, monkeypatch):
    options = ("--workers", 2, "--seeds", 1, "--out", tmp_path / "demo")
    code, told, err = run(capsys, *options, "--json")
    assert (code, err) == (0, "")
    result = json.loads(told)
    orders, exchanges = result["comparisons"]
    assert [arm["order"] for arm in orders["arms"]] == ["d-rr", "cd-grab", "always-plus"]
    assert orders["task"] == "digits" and exchanges["task"] == "digits-mlp"
    assert exchanges["arms"][0]["sparsify"] == "dense"
    assert result["report"] == str(tmp_path / "demo" / "report.html")
    # To the bit, but for sums over a stack of workers.
    assert result["ranks"]["equal"] and result["ranks"]["largest_difference"] < 1e-5
    dense, *others = result["predicted"]
    assert all(one["bytes"] < dense["bytes"] / 20 for one in others)
    # As advise predicts: 94 % of a link carries data. Few bytes take nearly the same time on both.
    slower, *little = (
        one["step_seconds"]["1 Gb/s"] - one["step_seconds"]["10 Gb/s"]
        for one in result["predicted"]
    )
    assert slower == pytest.approx(8 * dense["bytes"] * (1e-9 - 1e-10) / 0.94, rel=0.01)
    assert all(0 < more < slower / 20 for more in little)
    # One seed shows nothing, and the demo says so. What is trained already is kept.
    code, told, err = run(capsys, *options, "--resume")
    assert code == 0
    shown = told[told.index("What these seeds show:") :]
    assert shown.count("? ") == shown.count("too few seeds to compare it with ") == 4
    assert "better than" not in shown and "balancing" not in shown
    assert "all trained at the rate chosen for dense" in told
    assert "Next, on your own model:" in told and "gradherd compare my_task.py" in told
    # Ranks that arrive elsewhere are a failure.
    wrong = {"workers": 2, "equal": False, "largest_difference": 0.3}
    monkeypatch.setattr(demo, "check_ranks", lambda *args: wrong)
    for more in ([], ["--json"]):
        code, told, err = run(capsys, *options, "--resume", *more)
        says = json.loads(told)["ranks"] == wrong if more else "losses differ by 3.0e-01" in told
        assert code == 1 and says
        assert err == "gradherd: failed: real workers did not arrive where the simulated ones did\n"


@pytest.mark.parametrize("width", [50, 80])
def test_bars_are_as_long_as_their_values_and_fit(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    rows = [("d-rr", 11.0, "11 epochs"), ("cd-grab", 5.5, "5 epochs"), ("a", 0.001, "no time")]
    demo.print_bars(rows)
    lines = capsys.readouterr().out.splitlines()
    lengths = [max(line.count("█"), line.count("#")) for line in lines]
    assert max(map(len, lines)) <= width
    assert lengths[1] == round(lengths[0] / 2) and lengths[2] == 1
