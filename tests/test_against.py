"""The comparison with another commit, with measurements that are given, and with a tiny one."""

import json
import subprocess
from pathlib import Path

import pytest
from benchmarks import against
from benchmarks.against import Case, Measured, is_slower, measure, run_case, tree_of

HERE, THERE = Path("/here"), Path("/there")


def given(**times):
    """Return what measures cases: times here and there in turn, by their name."""
    left = {name: [list(side) for side in sides] for name, sides in times.items()}
    calls = []

    def run(case: Case, tree: Path) -> dict[str, Measured]:
        (name,) = case.command
        calls.append((name, tree))
        side = left[name][tree != HERE]
        return {"": Measured(side.pop(0), 1000)} if side else {}

    return run, calls


def test_sides_take_turns_and_the_least_counts():
    run, calls = given(a=([3.0, 2.0, 4.0], [1.0, 2.0, 1.5]), b=([1.0] * 3, []))
    cases = {name: Case((name,)) for name in "ab"}
    a, b = measure(cases, HERE, THERE, 3, run)
    assert calls[:6] == [("a", HERE), ("a", THERE)] * 3
    assert (a["seconds_here"], a["seconds_there"], a["ratio"]) == (2.0, 1.0, 2.0)
    assert (a["spread_here"], a["median_there"], a["memory_ratio"]) == (1.0, 1.5, 1.0)
    assert b["seconds_there"] is b["ratio"] is None and not is_slower(b, 1.0)
    assert is_slower(a, 1.05) and not is_slower(a, 2.0)
    assert not is_slower(a | {"median_there": 2.5}, 1.05)  # noise


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.04, 0), (1.2, 1)])
def test_the_program_fails_if_something_is_slower(factor, code, monkeypatch, capsys):
    monkeypatch.setattr(against, "CASES", {"one": Case(("one",)), "gone": Case(("gone",))})
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=against.ROOT, capture_output=True, text=True
    )
    if commit.returncode:
        pytest.skip("this is no clone")

    def run(case: Case, tree: Path) -> dict[str, Measured]:
        assert (tree / "src" / "gradherd").is_dir()
        seen.add(tree)
        here = {"a": Measured(factor if tree == against.ROOT else 1.0, None)}
        return here if case.command == ("one",) or tree == against.ROOT else {}

    seen: set[Path] = set()
    assert against.main([commit.stdout.strip()], run) == code
    assert len(seen) == 2 and not (seen - {against.ROOT}).pop().exists()
    table = capsys.readouterr().out
    assert "one: a" in table and "missing" in table and ("!" in table.split("seconds:")[0]) == code
    assert against.main([commit.stdout.strip(), "--json", "--only", "one"], run) == code
    found = json.loads(capsys.readouterr().out)
    assert [row["ratio"] for row in found["rows"]] == [factor]
    assert found["slower"] == ["one: a"] * code


def test_a_case_is_run_in_the_tree(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "told.py").write_text(
        'print(\'{"rows": [{"case": "a", "workers": 2, "seconds": 0.5, "peak_bytes": null}]}\')'
    )
    found = run_case(Case(("-m", "told"), prints_rows=True), tmp_path)
    assert found == {"a, 2 workers": Measured(0.5, None)}
    (timed,) = run_case(Case(("-c", "import told")), tmp_path).values()
    assert timed.seconds > 0 and timed.peak_bytes > 1e6
    assert run_case(Case(("-m", "missing")), tmp_path) == {}


def test_what_is_no_commit_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="nothing cannot be read"), tree_of("nothing"):
        pass


def test_the_exchange_of_local_steps_is_measured():
    found = run_case(against.CASES["one-bit"], against.ROOT)
    assert found["CPU of a rank"].seconds > 0
