"""Settings, records, journals, series and losses, each for itself."""

import dataclasses
import json
import math
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.ranks import run_ranks
from gradherd.comm.world import World
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig, plan_runs
from gradherd.lab.train.environment import hardware, versions
from gradherd.lab.train.loop import METRICS_FILE, RunWriter, new_record
from gradherd.lab.train.mean_hook import SMALL, MeanHook, mean_bytes, mean_of
from gradherd.lab.train.measurements import BinnedSeries, herding_bound
from gradherd.lab.train.record import (
    RECORD_FILE,
    EpochRow,
    RunRecord,
    read_record,
    write_atomic,
    write_record,
)
from gradherd.lab.train.runner import run_all
from gradherd.lab.train.trainer import full_loss
from gradherd.lab.train.virtual_trainer import row_settings
from gradherd.rows.settings import SketchRows
from gradherd.sparsify.exclusive import Online
from tests.lab.train.work import HERE, config_of

# Settings.

EXDYNA = {"sparsify": "exdyna", "density": 0.1}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"order": "fly"}, "unknown order 'fly'; known are d-rr"),
        ({"sparsify": "all", "density": 0.1}, "unknown sparsify 'all'"),
        ({"sparsify": "topk"}, "density goes with a sparsifier, got None with topk"),
        ({"density": 0.1}, "density goes with a sparsifier, got 0.1 with dense"),
        ({"sparsify": "topk", "density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"sparsify": "topk", "density": 2.0}, r"density must be in \(0, 1\], got 2.0"),
        ({"rows": "all"}, "unknown rows 'all'"),
        ({"sketch_size": 8}, "sketch_size goes with rows='sketch', got 8 with 'auto'"),
        ({"rows": "sketch", "sketch_size": 0}, "sketch_size must be at least 1 or None, got 0"),
        ({"method": {"blocks": 8}}, "method goes with a sparsifier, got {'blocks': 8} with dense"),
        ({**EXDYNA, "method": {"odd": 1}}, "unknown setting 'odd' of exdyna; known are threshold"),
        ({**EXDYNA, "method": {"blocks": 0}}, "blocks must be at least 1, got 0"),
        ({**EXDYNA, "method": {"capacity": math.inf}}, "method must be a dict of JSON values"),
        ({**EXDYNA, "method": {"threshold": Online()}}, "method must be a dict of JSON values"),
        ({**EXDYNA, "method": {"warmup": 9}}, "run with values, .*, momentum, warmup_steps"),
        ({**EXDYNA, "method": {"momentum": "a"}}, "exdyna cannot be run with {'momentum': 'a'}"),
        (
            {**EXDYNA, "momentum": 0.5, "method": {"momentum": 0.9}},
            "method has momentum 0.9, which replaces .* with momentum 0, got sgd with 0.5",
        ),
        (
            {**EXDYNA, "momentum": 0.0, "optimizer": "adamw", "method": {"momentum": 0.9}},
            "must be sgd with momentum 0, got adamw with 0.0",
        ),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"unit": 3}, "unit must divide batch_size 4, got 3"),
        ({"seed": -1}, r"seed must be in \[0, 2147483648\), got -1"),
        ({"limit": 0}, "limit must be at least 1 or None, got 0"),
        ({"lr": 0.0}, "lr must be positive and finite, got 0.0"),
    ],
)
def test_settings_are_checked(wrong, says):
    with pytest.raises(ValueError, match=says):
        config_of("digits", **wrong)


def test_settings_of_rows_and_methods_are_handed_on():
    assert config_of("digits", rows="sketch").row_choice() == "sketch"
    sketch = config_of("digits", rows="sketch", sketch_size=8)
    assert sketch.row_choice() == SketchRows(size=8)
    assert row_settings(sketch, True, 650) == SketchRows(size=8)
    still = config_of("digits", **EXDYNA, method={"rotate": False})
    assert len({still, sketch, config_of("digits", **EXDYNA)}) == 3
    written = record(config=dataclasses.asdict(still)).to_json()
    assert json.loads(json.dumps(written))["config"]["method"] == {"rotate": False}


def test_whole_batches_stay_whole_batches():
    resnet = find_task("cifar10-resnet18").defaults
    assert RunConfig.of("x", resnet, batch_size=8).unit == 8
    assert RunConfig.of("x", resnet, batch_size=8, unit=2).unit == 2
    assert config_of("digits", batch_size=8).unit == 1


def test_arms_are_crossed_and_runs_have_folders_of_their_own():
    runs = plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=["d-rr", "cd-grab"],
        sparsifiers=["dense", "topk"],
        density=0.5,
        seeds=range(2),
        epochs=3,
    )
    assert [run.arm for run in runs[:4]] == [
        ("d-rr", "dense", None),
        ("d-rr", "topk", 0.5),
        ("cd-grab", "dense", None),
        ("cd-grab", "topk", 0.5),
    ]
    assert len({run.folder() for run in runs}) == len(runs) == 8


# Records.


def row(epoch=1, **more):
    base = dict.fromkeys((f.name for f in dataclasses.fields(EpochRow)), 1)
    return EpochRow(**base | {"epoch": epoch, "load": [1.0, 2.0], **more})


def record(**more):
    task = find_task("digits")
    return dataclasses.replace(
        new_record(config_of("digits"), task, task.load(None, 20), 650), **more
    )


def test_records_come_back(tmp_path):
    there = record(epochs=[row(), row(2, train_loss=None)], density_by_step=[{"step": 0}])
    write_record(there, tmp_path)
    assert read_record(tmp_path / RECORD_FILE) == there
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD_FILE]
    assert there.config["lr"] == 0.2 and there.config["source"].startswith("Our own")


def test_later_versions_may_add(tmp_path):
    found = record(epochs=[row()]).to_json()
    found["news"] = 1
    found["epochs"][0]["news"] = 2
    assert RunRecord.from_json(found).epochs == [row()]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"format": 2}', '{"format": 1}', '{"format": 1, "epochs": [1]}']
)
def test_damaged_records_are_named(tmp_path, text):
    (tmp_path / RECORD_FILE).write_text(text)
    with pytest.raises(ValueError, match=RECORD_FILE):
        read_record(tmp_path / RECORD_FILE)


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "page"
    write_atomic(path, "old")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*page"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_journal_writes_as_it_goes(tmp_path):
    writer = RunWriter(record(), tmp_path / "run", tensorboard=True)
    assert read_record(tmp_path / "run" / RECORD_FILE).status == "running"
    writer.start(2.0, None)
    writer.add(row(), [])
    writer.add(row(2), [{"step": 0, "mean": 1.0, "min": 1.0, "max": 1.0}])
    assert len(read_record(tmp_path / "run" / RECORD_FILE).epochs) == 2
    writer.end("done")
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    last = read_record(tmp_path / "run" / RECORD_FILE)
    assert (last.status, last.start_loss) == ("done", 2.0)
    events = [p for p in (tmp_path / "run").iterdir() if "tfevents" in p.name]
    assert len(events) == 1 and events[0].stat().st_size > 500


def test_surroundings_are_told():
    assert set(versions()) == {"gradherd", "torch", "numpy", "python"}
    told = hardware()
    assert told["cores"] >= 1 and told["cpu"] and told["accelerator"] is None
    json.dumps(told)


# Series.


@given(st.lists(st.floats(0, 1), min_size=1, max_size=200), st.sampled_from([2, 4, 10]))
def test_bins_hold_all_of_a_series(values, most):
    series = BinnedSeries(most)
    for value in values:
        series.add(value)
    found = series.to_json()
    assert len(found) <= most
    starts = [int(one["step"]) for one in found]
    for one, begin, end in zip(found, starts, [*starts[1:], len(values)], strict=True):
        part = values[begin:end]
        assert one["mean"] == pytest.approx(sum(part) / len(part))
        assert (one["min"], one["max"]) == (min(part), max(part))


def test_prefix_sums_are_bounded_as_by_hand():
    means = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    centred = means.double() - means.double().mean(0)
    sums, worst = torch.zeros(4, dtype=torch.float64), 0.0
    for step in centred:
        sums = sums + step
        worst = max(worst, float(sums.abs().max()))
    assert herding_bound(means, 12) == pytest.approx(12 * worst)


# Losses and means on ranks.


def losses():
    task = find_task("digits-mlp")
    torch.manual_seed(3)
    model, columns = task.model(), task.load(None, 333).train
    return [full_loss(task, model, columns, World.detect(), chunk) for chunk in (10, 50, 1000)]


def test_the_full_loss_does_not_depend_on_ranks():
    task = find_task("digits-mlp")
    torch.manual_seed(3)
    model, columns = task.model(), task.load(None, 333).train
    plain = float(task.loss(model, *columns).detach())
    alone = [full_loss(task, model, columns, World.single(), chunk) for chunk in (10, 50, 1000)]
    assert alone == pytest.approx([plain] * 3, rel=1e-5)
    assert run_ranks(losses, 3) == [alone] * 3


def averaged(sizes):
    """Return, for models of these sizes, the gradient of this rank, the mean and the bytes."""
    world, found = World.detect(), []
    for size in sizes:
        torch.manual_seed(0)
        model = nn.Linear(size, 1, bias=size % 2 == 1)
        ddp = DDP(model)
        hook = MeanHook(ddp, world)
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(world.rank))
        own = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        ddp(x).square().mean().backward()
        flat = [torch.cat([g.flatten() for g in grads]) for grads in (own, [
            p.grad for p in model.parameters()])]  # fmt: skip
        found.append((*flat, hook.bytes, hook.seconds))
    return found


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_mean_over_ranks(workers):
    sizes = [1, 2, 7, 650, SMALL + 2]
    ranks = run_ranks(averaged, workers, sizes)
    for at, size in enumerate(sizes):
        grads = torch.stack([rank[at][0] for rank in ranks])
        for rank in ranks:
            torch.testing.assert_close(rank[at][1], grads.mean(0))
            assert torch.equal(rank[at][1], ranks[0][at][1])
            if grads.shape[1] <= SMALL:
                assert torch.equal(rank[at][1], mean_of(grads))
            assert rank[at][2] == pytest.approx(mean_bytes(grads.shape[1], workers), rel=1e-6)
            assert (rank[at][3] > 0) == (workers > 1), size


# Whole runs.


def test_a_run_that_diverges_ends_there():
    config = config_of(f"{HERE}:Diverging", virtual=True, order="cd-grab")
    (found,) = run_all([config], World.single())
    assert found.status == "diverged" and len(found.epochs) < config.epochs
    assert found.epochs[-1].train_loss is None
    json.dumps(found.to_json(), allow_nan=False)


def test_runs_of_one_plan(tmp_path):
    configs = plan_runs(
        "digits",
        find_task("digits").defaults,
        orders=["d-rr", "cd-grab"],
        sparsifiers=["dense", "topk"],
        density=0.1,
        seeds=[0, 1],
        epochs=2,
        limit=64,
        virtual=True,
    )
    records = run_all(configs, World.single(), out=tmp_path)
    assert {(r.order, r.sparsify, r.seed) for r in records} == {
        (c.order, c.sparsify, c.seed) for c in configs
    }
    for config in configs:
        there = read_record(tmp_path / config.folder() / RECORD_FILE)
        assert there in records and there.status == "done" and len(there.epochs) == 2
        last = there.epochs[-1]
        assert last.train_loss < there.start_loss
        assert (last.density < 0.5) == (config.sparsify == "topk")
        assert (last.load is None) == (config.sparsify == "dense")
        assert (last.ordering_bytes > 0) == (config.order == "cd-grab")
        parts = (last.data_seconds, last.compute_seconds, last.ordering_seconds)
        assert sum(parts) + last.exchange_seconds == pytest.approx(last.seconds, rel=0.01)
