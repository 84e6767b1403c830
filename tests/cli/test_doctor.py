"""`gradherd doctor`: what it finds here, and what it says where something is wrong."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from gradherd.cli import doctor
from gradherd.cli.doctor import PACKAGES, Check, Package, check_package
from gradherd.cli.main import main

ROOT = Path(__file__).parents[2]
WORKS = Check("two local workers", "ok", "stubbed", essential=True)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A folder to stand in, without the data and the variables of whoever runs the tests."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("GRADHERD_DATA", "GLOO_SOCKET_IFNAME", *doctor.LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    return here


@pytest.fixture
def no_workers(monkeypatch):
    """Start no processes where they are not the point."""
    monkeypatch.setattr(doctor, "local_workers", lambda: WORKS)


def examined(capsys, *args) -> tuple[int, dict[str, dict[str, str]], str]:
    """Return the exit code, every check by name, and stderr."""
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--json", *args])
    out, err = capsys.readouterr()
    printed = json.loads(out)
    assert list(printed) == ["checks", "ok"] and printed["ok"] == (stop.value.code == 0)
    for one in printed["checks"]:
        assert list(one) == ["name", "status", "found", "hint"]
        assert one["status"] in ("ok", "missing", "problem") and one["found"]
        assert one["status"] == "ok" or one["hint"], f"no way out for {one['name']}"
    checks = {one["name"]: one for one in printed["checks"]}
    assert len(checks) == len(printed["checks"])
    return stop.value.code, checks, err


def test_all_is_well_where_the_tests_run(capsys, place):
    code, checks, err = examined(capsys)
    assert (code, err) == (0, "")
    for name in ("python", "torch", "numpy", "scikit-learn", "cores", "memory"):
        assert checks[name]["status"] == "ok"
    assert checks["torch"]["found"].startswith("2.")
    assert checks["two local workers"]["status"] == "ok"
    assert float(checks["two local workers"]["found"].split()[-2]) > 0  # seconds
    assert str(place) in checks["disk, current folder"]["found"]
    assert not list(place.iterdir())


def test_it_reads_well_for_people(capsys, no_workers):
    with pytest.raises(SystemExit) as stop:
        main(["doctor"])
    out, err = capsys.readouterr()
    assert (stop.value.code, err) == (0, "")
    assert all(one.name in out for one in PACKAGES)
    assert "Everything that training needs works" in out


def test_packages_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for one in PACKAGES:
        if one.essential:
            assert any(
                need.startswith(f"{one.name}>={one.least}") for need in project["dependencies"]
            )
        elif not one.get:
            assert f"{one.name}>={one.least}" in [*extras["tasks"], *extras["report"]]


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [
        (None, "missing", ["not installed", "for fun", "pip install funny"]),
        ("__version__ = '3.1'", "ok", ["3.1", "for fun"]),
        ("__version__ = '2.9.5'", "problem", ["2.9.5", "needs 2.10", "pip install funny"]),
        (
            "raise ImportError('wrong\\nABI')",
            "problem",
            ["cannot be imported", "wrong ABI", "reinstall"],
        ),
    ],
)
def test_a_package_in_every_state(tmp_path, monkeypatch, source, status, words):
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "funny_one", raising=False)
    if source is not None:
        (tmp_path / "funny_one.py").write_text(source)
    result = check_package(Package("funny-one", "funny_one", "2.10", "fun", "pip install funny"))
    monkeypatch.delitem(sys.modules, "funny_one", raising=False)
    assert result.status == status and not result.essential
    assert all(word in f"{result.found} {result.hint}" for word in words)


def test_what_is_needed_and_lacks_is_a_problem():
    result = check_package(
        Package("a", "no_such_module_here", "1", "all", "get it", essential=True)
    )
    assert (result.status, result.essential) == ("problem", True)


def test_workers_that_cannot_meet_are_code_1(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "sum_of_ranks", fails)
    code, checks, err = examined(capsys)
    result = checks["two local workers"]
    assert code == 1 and result["status"] == "problem" and "no network today" in result["found"]
    assert "--virtual" in result["hint"]
    assert err.startswith("gradherd: failed: ") and "two local workers" in err


def fails() -> float:
    raise ConnectionError("no network today")


def test_workers_that_take_too_long_are_a_problem(monkeypatch):
    result = doctor.local_workers(deadline=0.0)
    assert result.status == "problem" and "TimeoutError" in result.found


def test_variables_of_a_launcher_that_has_gone(capsys, monkeypatch, no_workers):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, checks, _ = examined(capsys)
    result = checks["launcher variables"]
    assert code == 0 and result["status"] == "problem"
    assert "WORLD_SIZE=4" in result["found"] and "unset RANK WORLD_SIZE" in result["hint"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert examined(capsys)[1]["launcher variables"]["status"] == "ok"


def test_a_disk_without_room_is_code_1(capsys, monkeypatch, no_workers):
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 60)
    code, checks, err = examined(capsys)
    assert code == 1 and "disk, current folder" in err
    assert "--out" in checks["disk, current folder"]["hint"]


def test_a_folder_that_cannot_be_written_to(place):
    place.rmdir()
    result = doctor.disk()
    assert result.status == "problem" and "--out" in result.hint
    assert "cannot be written to" in result.found
