import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gradherd.cli.main import main
from gradherd.comm.world import World
from gradherd.lab.bench.bench_coordination import CASES, published_loop
from gradherd.lab.bench.bench_rows import RowsBench, mlp
from gradherd.rows.capture import Capture

KEYS = {"case", "workers", "dim", "seconds", "bytes", "peak_bytes", "ratio"}


def result(capsys, *args) -> dict:
    with pytest.raises(SystemExit) as stop:
        main([*map(str, args), "--json"])
    assert stop.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_coordination_shows_all_schemes_and_their_bytes(capsys):
    output = result(
        capsys, "bench", "coordination", "--workers", "2,3", "--dim", 3001, "--repeats", 1
    )
    rows = output["rows"]
    assert output["bench"] == "coordination" and output["device"] == "cpu"
    assert [(row["workers"], row["case"]) for row in rows] == [
        (workers, case) for workers in (2, 3) for case in ("all-reduce", "all-gather", "sharded")
    ]
    assert all(KEYS <= set(row) for row in rows)
    for ring, gather, sharded in (rows[:3], rows[3:]):
        workers = ring["workers"]
        assert ring["ratio"] == 1
        assert ring["bytes"] == 2 * 4 * 3001 * (workers - 1) // workers
        assert gather["bytes"] == 4 * 3001 * (workers - 1)
        # Slices cost what all-reduce does; products and the odd rest come on top.
        assert 0 <= sharded["bytes"] - ring["bytes"] < 400


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's own marks")
def test_coordination_takes_slices_of_two_steps_and_of_the_running_sum(capsys):
    dim = 2_000_000

    def peaks() -> list[float]:
        options = ("--workers", "4", "--dim", dim, "--repeats", 1)
        rows = result(capsys, "bench", "coordination", *options)["rows"]
        return [row["peak_bytes"] / (4 * dim) for row in rows if row["case"] == "sharded"]

    # In gradients: 2.25 are taken; mimalloc, in PyTorch's ARM wheels, adds 1.25 of its own;
    # gathering whole gradients takes 15. The mark is that of the whole process: on a busy
    # machine another thread may add to it, but not each time.
    assert any(all(1 < peak < 4.5 for peak in peaks()) for _ in range(4))


def test_rows_shows_every_way_to_them(capsys):
    output = result(capsys, "bench", "rows", "--params", 9000, "--batch", 4)
    assert [row["case"] for row in output["rows"]] == ["plain", "vmap", "loop", "exact", "sketch"]
    assert all(KEYS <= set(row) for row in output["rows"])


def test_step_compares_both_orders(capsys):
    options = ("--workers", 2, "--params", 9000, "--batch", 2, "--repeats", 1)
    drr, cd = result(capsys, "bench", "step", *options)["rows"]
    assert (drr["case"], cd["case"]) == ("d-rr", "cd-grab") and drr["ratio"] == 1
    assert KEYS <= set(drr) and 0 < cd["bytes"] - drr["bytes"] < 100


def test_sparsify_compares_picking_and_whole_exchanges(capsys):
    output = result(capsys, "bench", "sparsify", "--workers", "3", "--dim", 20_500, "--repeats", 2,
        "--density", 0.001)  # fmt: skip
    rows = output["rows"]
    assert all(KEYS <= set(row) for row in rows)
    cases = ["copy", "eager", "topk", "fused", "dense", "fp16", "powersgd", "exdyna"]
    assert [row["case"] for row in rows] == cases
    assert [row["workers"] for row in rows] == [1] * 4 + [3] * 4
    dense, fp16, _, exdyna = rows[4:]
    assert dense["ratio"] == rows[0]["ratio"] == 1
    assert dense["bytes"] == 2 * 4 * 20_500 * 2 // 3
    assert fp16["bytes"] == dense["bytes"] // 2
    assert 0 < exdyna["bytes"] < dense["bytes"] / 50


@pytest.mark.parametrize("params", [9000, 100_000, 2_000_000])
def test_mlp_has_about_as_many_parameters_as_asked(params):
    assert 0.95 * params <= sum(p.numel() for p in mlp(params).parameters()) <= params


def test_what_is_measured_is_the_same_gradient_in_all_cases():
    bench = RowsBench(5000, 3, torch.device("cpu"))
    capture = Capture(bench.model)
    bench.plain()
    rows = capture.pop_rows(3)
    whole = torch.cat([p.grad.flatten() for p in bench.model.parameters()])
    torch.testing.assert_close(rows.mean(0), whole)
    bench.model.zero_grad()
    F.cross_entropy(bench.model(bench.x[:1]), bench.y[:1]).backward()
    first = torch.cat([p.grad.flatten() for p in bench.model.parameters()])
    torch.testing.assert_close(rows[0], first)


def test_published_loop_is_greedy():
    signs = published_loop(torch.tensor([[1.0, 0.0], [1.0, 1.0], [-3.0, 0.0]]), torch.zeros(2))
    assert signs == [True, False, True]  # the last one is a tie


@pytest.mark.parametrize("name", CASES)
def test_one_worker_alone_keeps_its_gradient(name):
    case, grad = CASES[name](World.single(), 7, 2), torch.arange(7.0)
    for _ in range(2):
        case.step(grad)
        case.wait()
    assert torch.equal(grad, torch.arange(7.0)) and case.bytes == 0
