"""Benchmarks outside the package: virtual steps, and what the sparse hook adds to a step."""

import pytest
import torch
from benchmarks import virtual_steps as virtual
from benchmarks.hook_step import bench_hook, one_rank

CPU = torch.device("cpu")
KEYS = {"case", "workers", "dim", "seconds", "bytes", "peak_bytes", "ratio"}


def test_virtual_compares_the_engine_with_a_plain_loop(monkeypatch):
    # On the CPU a graph is traced run by run: nine take 17 seconds, twice; two show the same.
    monkeypatch.setattr(virtual, "_SEEDS", 1)
    monkeypatch.setattr(virtual, "_BALANCED", ("cd-grab", "id-grab"))
    rows = virtual.bench_virtual(2, 1, 2, 1, CPU)
    assert all(KEYS <= set(row) for row in rows)
    cases = ["plain loop", "turns", "one run", "nine runs", "nine runs, d-rr"]
    assert [row["case"] for row in rows] == cases and rows[0]["ratio"] == 1
    assert [row["runs"] for row in rows] == [1, 1, 1, 2, 2]
    assert {(row["workers"], row["dim"], row["batch"]) for row in rows} == {(2, 62_006, 1)}
    for row in rows:
        assert row["steps_per_second"] * row["seconds"] == pytest.approx(1)


def test_virtual_cases_take_the_steps_that_are_asked():
    for case, steps in (("plain loop", 20), ("turns", 2), ("one run", 20)):
        assert virtual.make_case(case, 2, 1, 20, CPU).epoch() == steps
    for case, needs in (("nine runs", True), ("nine runs, d-rr", False)):
        loop = virtual.make_case(case, 2, 1, 2, CPU)
        assert loop.runs == len(loop.trainer.orderings) == 9
        assert {one.policy.needs_rows for one in loop.trainer.orderings} == {needs}


def test_the_hook_is_compared_with_the_dense_step():
    with one_rank(CPU):
        rows = bench_hook(20_500, 0.001, CPU, repeats=2)
    assert [row["case"] for row in rows] == ["step dense", "step exdyna", "step topk"]
    assert all(KEYS <= set(row) for row in rows)
    assert rows[0]["ratio"] == 1 and rows[0]["added_seconds"] == 0
    assert all(row["sync_free"] is None for row in rows)  # known on a GPU only
