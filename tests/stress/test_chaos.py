"""Faults strike where they should, and a broken promise is told."""

import random

import pytest
import torch
from benchmarks import chaos

from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig


def test_a_promise_that_was_not_kept_is_counted():
    rows = [chaos.Row("cd-grab", "kill", "equal to the bit", True)]
    assert chaos.table(rows).splitlines()[-1].startswith("1 faults, 0 of them")
    rows.append(chaos.Row("cd-grab", "slow", "3 numbers differ", False))
    assert "| 3 numbers differ | **no** |" in chaos.table(rows)
    assert chaos.table(rows).splitlines()[-1].startswith("2 faults, 1 of them")


@pytest.mark.parametrize("seed", range(12))
def test_damage_is_done_to_one_file(seed, tmp_path):
    before = {"a": b"x" * 40, "b": b"y" * 40}
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    chaos.damage(tmp_path, random.Random(seed))
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(dict(before.items() & after.items())) == 1


def test_numbers_that_differ_are_named():
    one = {"a": torch.ones(2), "b": 1, "c": "x"}
    assert chaos.differences(one, dict(one)) == []
    assert chaos.differences(one, {"a": torch.tensor([1.0, 2.0]), "b": 1, "d": 2}) == [
        "a",
        "c",
        "d",
    ]


def test_a_way_of_training_is_struck(tmp_path):
    defaults = find_task("digits").defaults
    settings = {"workers": 2, "epochs": 2, "limit": 64, "batch_size": 8, "sparsify": "exdyna"}
    config = RunConfig.of("digits", defaults, density=0.1, **settings)
    struck = chaos.Chaos("exdyna", config, 2, tmp_path, seed=0)
    for fault in ("kill", "full-disk", "nan"):
        row = struck.strike(fault)
        assert row.kept, row.happened
    # The undisturbed run is what all are measured by.
    struck._expected["step"] = "step-none"
    row = struck.strike("slow")
    assert not row.kept and "1 numbers differ: step" in row.happened


def test_a_sharded_way_of_training_is_struck(tmp_path):
    defaults = find_task("digits").defaults
    settings = {"workers": 2, "epochs": 2, "limit": 64, "batch_size": 8, "order": "cd-grab"}
    config = RunConfig.of("digits", defaults, **settings)
    row = chaos.Chaos("fsdp2", config, 2, tmp_path, seed=0).strike("kill")
    assert row.kept and "resumed on 2: done; equal to the bit" in row.happened
