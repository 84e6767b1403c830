"""A new sparsifier and a new order need one file and one registry line, as CONTRIBUTING.md shows.

The two examples are read from that page, registered, and sent through everything that reads the
registries: the contracts, replay, compare and the report. Only the last two tests start real ranks:
they are separate processes that import gradherd afresh, so one adds the two files and the two
lines to a copy of the package, and one registers the two classes at the top of a program.
"""

import dataclasses
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import gradherd
from gradherd.cli.main import main
from gradherd.ordering.registry import POLICIES
from gradherd.ordering.shuffles import Shuffle
from gradherd.sparsify.registry import SPARSIFIERS
from tests.contracts import test_policies, test_sparsifiers
from tests.sparsify.rank_work import METHODS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.S | re.M)
ORDER, SPARSIFIER = "learn-once", "cyclic"
# File in the package -> its text, as the page shows it.
FILES = {
    "sparsify/cyclic.py": next(b for b in BLOCKS if b.startswith('"""Cyclic-k')),
    "ordering/learn_once.py": next(b for b in BLOCKS if b.startswith('"""Learn-once')),
}


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    """The two classes of the page."""
    classes = {}
    for file, text in FILES.items():
        path = tmp_path_factory.mktemp("examples") / Path(file).name
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        classes |= {k: v for k, v in vars(module).items() if k in ("CyclicK", "LearnOnce")}
    return classes


@pytest.fixture(autouse=True)
def registered(examples, monkeypatch, tmp_path):
    monkeypatch.setitem(SPARSIFIERS, SPARSIFIER, examples["CyclicK"])
    monkeypatch.setitem(METHODS, SPARSIFIER, examples["CyclicK"])
    monkeypatch.setitem(POLICIES, ORDER, examples["LearnOnce"])
    monkeypatch.chdir(tmp_path)


def contracts(module, model):
    """Return {test: its arguments wherever it tests `model`}; the new method takes its place."""
    found = {}
    for name, function in vars(module).items():
        if not name.startswith("test_") or not hasattr(function, "pytestmark"):
            continue
        axes = [parameters(mark) for mark in function.pytestmark if mark.name == "parametrize"]
        joined = [dict(itertools.chain(*(p.items() for p in c))) for c in itertools.product(*axes)]
        if cases := [arguments for arguments in joined if arguments.get("name") == model]:
            found[name] = (function, cases)
    return found


def parameters(mark):
    """Return one dict of arguments for each value of a parametrize mark."""
    names, values = mark.args[:2]
    if isinstance(names, str):
        return [{names: getattr(value, "values", (value,))[0]} for value in values]
    return [dict(zip(names, getattr(value, "values", value), strict=True)) for value in values]


OF_ORDERS = contracts(test_policies, "cd-grab")
OF_SPARSIFIERS = contracts(test_sparsifiers, "topk")


@pytest.mark.parametrize("test", OF_ORDERS)
def test_the_order_keeps_the_contracts_of_orders(test):
    function, cases = OF_ORDERS[test]
    for arguments in cases:
        function(**{**arguments, "name": ORDER})


@pytest.mark.parametrize("test", OF_SPARSIFIERS)
def test_the_sparsifier_keeps_the_contracts_of_sparsifiers(test):
    function, cases = OF_SPARSIFIERS[test]
    for arguments in cases:
        if "cases" in arguments:
            own = [dataclasses.replace(case, name=SPARSIFIER) for case in arguments["cases"]]
            arguments = {**arguments, "cases": own}
        function(**{**arguments, "name": SPARSIFIER})


def test_contracts_of_orders_hold_no_list_that_must_be_edited(monkeypatch):
    # An order unlike the published ones: sizes and epoch determine it, whatever the seed.
    turn = partial(Shuffle, "turn", lambda orders, epoch, random: [
        torch.arange(len(order)).roll(epoch) for order in orders
    ])  # fmt: skip
    monkeypatch.setitem(POLICIES, "turn", turn)
    spec = importlib.util.spec_from_file_location("policies_again", test_policies.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    again.test_all_published_names_are_there()
    cases = contracts(again, "turn")
    assert len(cases) >= 12
    for function, arguments in cases.values():
        for one in arguments:
            function(**one)


def test_there_are_contracts_to_keep():
    assert len(OF_ORDERS) >= 12 and len(OF_SPARSIFIERS) >= 10


def run(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0, err
    return json.loads(out)


def test_replay(capsys):
    vectors = np.random.default_rng(0).normal(size=(2, 24, 3)).astype("float32")
    np.save("units.npy", vectors)
    learned = run(capsys, "replay", "order", "units.npy", "--order", ORDER, "--rounds", 12)
    balanced = run(capsys, "replay", "order", "units.npy", "--order", "cd-grab", "--rounds", 10)
    # CD-GraB for ten rounds, and no change after that.
    assert learned["bounds"][:11] == balanced["bounds"]
    assert learned["bounds"][10] == learned["bounds"][11] == learned["bounds"][12]

    np.save("steps.npy", vectors)
    words = ("replay", "sparsify", "steps.npy", "--method", SPARSIFIER, "--density", 0.5)
    assert [step["selected"] for step in run(capsys, *words)["steps"]] == [1, 1]


def test_compare_and_report(capsys, tmp_path):
    result = run(
        capsys, "compare", "digits", "--orders", f"d-rr,{ORDER}", "--sparsifiers",
        f"dense,{SPARSIFIER}", "--density", 0.1, "--seeds", 2, "--epochs", 2, "--limit", 80,
        "--workers", 2, "--virtual", "--out", "out",
    )  # fmt: skip
    pairs = [(arm["order"], arm["sparsify"]) for arm in result["arms"]]
    assert pairs == [(o, s) for o in ("d-rr", ORDER) for s in ("dense", SPARSIFIER)]
    run(capsys, "report", "out", "--out", "again.html")
    page = (tmp_path / "again.html").read_text()
    assert ORDER in page and SPARSIFIER in page


@pytest.mark.parametrize("command", ["train", "compare", "replay order", "herding"])
def test_errors_name_the_order(capsys, command):
    option = "--orders" if command in ("compare", "herding") else "--order"
    target = {"train": ["digits"], "compare": ["digits"], "replay order": ["units.npy"]}
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), *target.get(command, []), option, "nonsense"])
    assert stop.value.code == 2 and ORDER in capsys.readouterr().err


def test_one_file_and_one_line_each_are_enough_for_real_ranks(tmp_path):
    package = tmp_path / "src" / "gradherd"
    shutil.copytree(Path(gradherd.__file__).parent, package)
    for file, text in FILES.items():
        (package / file).write_text(text)
    for room, entry, last in (
        ("sparsify", f'"{SPARSIFIER}": "gradherd.sparsify.cyclic:CyclicK"', "SPARSIFIERS"),
        ("ordering", f'"{ORDER}": "gradherd.ordering.learn_once:LearnOnce"', "POLICIES"),
    ):
        assert f"{entry},\n" in PAGE
        registry = package / room / "registry.py"
        text, count = re.subn(
            rf"(^{last}\b.*?)^    \}}",
            rf"\1        {entry},\n    }}",
            registry.read_text(),
            flags=re.S | re.M,
        )
        assert count == 1
        registry.write_text(text)

    def gradherd_copy(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gradherd", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(package.parent)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = gradherd_copy("train", "--help")
    assert ORDER in shown and SPARSIFIER in shown
    result = json.loads(
        gradherd_copy(
            *("train", "digits", "--order", ORDER, "--sparsify", SPARSIFIER, "--density", "0.1"),
            *("--workers", "2", "--epochs", "1", "--limit", "40", "--out", "out", "--json"),
        )
    )
    assert (result["order"], result["sparsify"], result["status"]) == (ORDER, SPARSIFIER, "done")


def test_real_ranks_know_what_a_program_registers_at_its_top(tmp_path):
    for file, text in FILES.items():
        (tmp_path / Path(file).name).write_text(text)
    words = f"train digits --order {ORDER} --sparsify {SPARSIFIER} --workers 2 --epochs 1"
    (tmp_path / "program.py").write_text(f"""
import gradherd as gh
from cyclic import CyclicK
from gradherd.cli.main import main
from learn_once import LearnOnce

gh.SPARSIFIERS["{SPARSIFIER}"] = CyclicK
gh.POLICIES["{ORDER}"] = LearnOnce

if __name__ == "__main__":
    main("{words} --limit 40 --out out --json".split())
""")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["order"], result["sparsify"], result["status"]) == (ORDER, SPARSIFIER, "done")
