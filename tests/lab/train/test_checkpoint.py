"""Checkpoints: whole or not there, checked when read; and runs that go on to the bit."""

import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from gradherd.comm.world import World
from gradherd.hooks.herd import Herd
from gradherd.lab.ranks import RankError, run_ranks
from gradherd.lab.train.checkpoint import CheckpointStore, NoUsableCheckpoint
from gradherd.lab.train.record import RECORD_FILE, read_record
from gradherd.lab.train.runner import CHECKPOINT_FOLDER, CheckpointOptions, run_all
from tests.lab.train.work import HERE, config_of
from tests.stress.kills import Training, differences, last_state, stress

SINGLE = World.single()


def checkpoints(folder, **more):
    return CheckpointStore(folder, SINGLE, {"order": "d-rr", "lr": 0.1} | more)


def saved(folder, *steps):
    for step in steps:
        checkpoints(folder).save(
            step, lambda step=step: {"step": step}, {"own": torch.arange(step)}
        )


def test_the_newest_is_read_and_two_are_kept(tmp_path):
    assert checkpoints(tmp_path / "none").load() is None
    saved(tmp_path, 1, 5, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000005", "step-000000010"]
    loaded = checkpoints(tmp_path).load()
    assert (loaded.step, loaded.shared) == (10, {"step": 10}) and len(loaded.part(0)["own"]) == 10


@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "rank-0.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone", "empty"])
def test_a_damaged_one_is_passed_over(tmp_path, caplog, name, damage):
    saved(tmp_path, 5, 10)
    path = tmp_path / "step-000000010" / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        path.write_bytes({"cut": data[:-3], "flip": flipped, "empty": b""}[damage])
    if (name, damage) == ("manifest.json", "flip"):
        # One bit may leave it a manifest, but not this run's.
        path.write_bytes(data.replace(b'"order"', b'"ordes"'))
    assert checkpoints(tmp_path).load().step == 5
    assert "step 10" in caplog.text and "skipping a checkpoint" in caplog.text
    shutil.rmtree(tmp_path / "step-000000005")
    with pytest.raises(NoUsableCheckpoint, match=r"no checkpoint in .* can be used \(step 10"):
        checkpoints(tmp_path).load()


def test_every_byte_of_a_checkpoint_counts(tmp_path):
    saved(tmp_path, 10)
    folder = tmp_path / "step-000000010"
    for name in ("shared.safetensors", "rank-0.safetensors"):
        data = (folder / name).read_bytes()
        for at in range(len(data)):
            (folder / name).write_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])
            with pytest.raises(NoUsableCheckpoint, match="damaged"):
                checkpoints(tmp_path).load()
        (folder / name).write_bytes(data)
    assert checkpoints(tmp_path).load().step == 10


def test_one_of_another_run_is_refused_with_the_reason(tmp_path):
    saved(tmp_path, 10)
    with pytest.raises(NoUsableCheckpoint, match=r"saved with lr 0\.1, this run has 0\.2"):
        checkpoints(tmp_path, lr=0.2).load()
    path = tmp_path / "step-000000010" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"workers": 3}))
    with pytest.raises(NoUsableCheckpoint, match="manifest is damaged: 3 workers"):
        checkpoints(tmp_path).load()
    path.write_text(json.dumps(manifest | {"format": 1}))
    with pytest.raises(NoUsableCheckpoint, match="format is 1, expected 2"):
        checkpoints(tmp_path).load()


def test_one_of_an_older_version_had_no_setting_that_came_later(tmp_path):
    saved(tmp_path, 10)
    assert checkpoints(tmp_path, sketch_size=None, method=None).load().step == 10
    with pytest.raises(NoUsableCheckpoint, match="saved with sketch_size None, this run has 8"):
        checkpoints(tmp_path, sketch_size=8).load()


def test_going_on_from_an_older_one_forgets_the_later(tmp_path):
    saved(tmp_path, 50, 100)
    (tmp_path / "step-000000100" / "manifest.json").write_text("cut")
    assert checkpoints(tmp_path).load().step == 50
    saved(tmp_path, 60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000050", "step-000000060"]


def test_the_same_step_again_is_never_missing(tmp_path, monkeypatch):
    saved(tmp_path, 10)

    def killed(self, target):
        if self.name.endswith(".draft"):
            raise KeyboardInterrupt
        return renamed(self, target)

    renamed = Path.rename
    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 10)
    monkeypatch.undo()
    assert not (tmp_path / "step-000000010").exists()
    assert checkpoints(tmp_path).load().step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000010"]
    saved(tmp_path, 10)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000010"]


def test_drafts_are_cleared_away(tmp_path):
    saved(tmp_path, 10)
    shutil.copytree(tmp_path / "step-000000010", tmp_path / ".step-000000020.draft")
    assert checkpoints(tmp_path).load().step == 10
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000010"]


def test_a_full_disk_leaves_the_one_before(tmp_path, monkeypatch):
    saved(tmp_path, 10)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no checkpoint was written: No space left on device"):
        saved(tmp_path, 20)
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000010"]
    assert checkpoints(tmp_path).load().step == 10


# Whole runs.


def train(out, saving, **chosen):
    config = config_of("digits", limit=90, epochs=3, **chosen)
    return run_all([config], World.detect(), out=out, saving=saving)[0].status


def train_all(out, arms, every, resume):
    for at, arm in enumerate(arms):
        train(out / str(at), CheckpointOptions(every=every, resume=resume), **arm)


ARMS = [
    {"order": "cd-grab", "unit": 4},
    {"order": "cd-grab"},
    {"order": "grab", "rows": "sketch"},
    {"order": "d-rr", "sparsify": "topk", "density": 0.1},
    {"order": "id-pair-grab", "sparsify": "exdyna", "density": 0.1},
    {
        "order": "cd-grab",
        "local_steps": 4,
        "lr_schedule": "cosine",
        "method": {"overlap": True, "outer_momentum": 0.5},
    },
    {"local_steps": 4, "method": {"values": "int2"}},
]


def test_a_run_goes_on_from_any_checkpoint(tmp_path):
    """Ends after each arm's last checkpoint but one: what follows must be the same again."""
    run_ranks(train_all, 3, tmp_path, ARMS, 5, False)
    seen = []
    for at in range(len(ARMS)):
        folder = tmp_path / str(at)
        losses = [row.train_loss for row in read_record(folder / RECORD_FILE).epochs]
        seen.append((last_state(folder), losses))
        shutil.rmtree(max((folder / CHECKPOINT_FOLDER).glob("step-*")))
    run_ranks(train_all, 3, tmp_path, ARMS, 5, True)
    for at, (there, losses) in enumerate(seen):
        assert differences(last_state(tmp_path / str(at)), there) == [], ARMS[at]
        record = read_record(tmp_path / str(at) / RECORD_FILE)
        assert [row.train_loss for row in record.epochs] == losses
        assert [row.epoch for row in record.epochs] == [1, 2, 3] and record.status == "done"


def test_sigterm_saves_first(tmp_path):
    """Told to end, the run saves itself; what goes on ends as if nothing had happened."""
    out, told = tmp_path / "run", []

    def started(pids):
        def tell():
            while not (out / "metrics.jsonl").exists():  # an epoch was written down
                time.sleep(0.02)
            for pid in pids:
                os.kill(pid, signal.SIGTERM)

        told.append(threading.Thread(target=tell, daemon=True))
        told[0].start()

    both = {"order": "cd-grab", "sparsify": "topk", "density": 0.2}
    config = config_of(f"{HERE}:Unhurried", limit=60, epochs=6, **both)
    ended = run_ranks(all_of, 2, out, config, on_start=started)
    assert ended == ["stopped", "stopped"]
    record = read_record(out / RECORD_FILE)
    assert record.status == "stopped" and len(record.epochs) < 6
    assert run_ranks(all_of, 2, out, config) == ["done", "done"]
    assert run_ranks(all_of, 2, tmp_path / "straight", config) == ["done", "done"]
    assert differences(last_state(out), last_state(tmp_path / "straight")) == []


def all_of(out, config):
    saving = CheckpointOptions(resume=True, poll_seconds=0.01)
    return run_all([config], World.detect(), out=out, saving=saving)[0].status


def test_more_epochs_after_the_end(tmp_path):
    config = config_of("digits", limit=60, epochs=2, order="cd-grab")
    run_ranks(all_of, 2, tmp_path / "a", config)
    longer = config_of("digits", limit=60, epochs=4, order="cd-grab")
    run_ranks(all_of, 2, tmp_path / "a", longer)
    run_ranks(all_of, 2, tmp_path / "b", longer)
    assert differences(last_state(tmp_path / "a"), last_state(tmp_path / "b")) == []
    rows = read_record(tmp_path / "a" / RECORD_FILE).epochs
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2, 3, 4]


def test_fewer_epochs_than_were_begun(tmp_path):
    config = config_of("digits", limit=60, epochs=3, order="cd-grab", workers=2)
    assert run_ranks(every_step, 2, tmp_path, config) == ["done", "done"]
    before = last_state(tmp_path)
    fewer = config_of("digits", limit=60, epochs=2, order="cd-grab", workers=2)
    assert run_ranks(all_of, 2, tmp_path, fewer) == ["done", "done"]
    assert differences(last_state(tmp_path), before) == []


def test_killed_before_the_exchange_that_ends_a_run_of_local_steps(tmp_path):
    """The newest checkpoint is of the last step: nothing is left to train, but to exchange."""
    config = config_of("digits", limit=60, epochs=3, local_steps=7, workers=2)
    with pytest.raises(RankError, match="killed before the exchange"):
        run_ranks(every_step_but_no_sync, 2, tmp_path / "killed", config)
    left = last_state(tmp_path / "killed")
    assert run_ranks(all_of, 2, tmp_path / "killed", config) == ["done", "done"]
    assert run_ranks(every_step, 2, tmp_path / "straight", config) == ["done", "done"]
    there = last_state(tmp_path / "straight")
    assert there["step"] == left["step"] and left["rank-0/local/taken"] > 0
    assert differences(last_state(tmp_path / "killed"), there) == []
    rows, straight = (
        read_record(tmp_path / name / RECORD_FILE).epochs for name in ("killed", "straight")
    )
    for name in ("train_loss", "metric", "bytes"):
        assert [getattr(row, name) for row in rows] == [getattr(row, name) for row in straight]


def every_step_but_no_sync(out, config):
    with mock.patch.object(Herd, "sync", side_effect=RuntimeError("killed before the exchange")):
        return every_step(out, config)


def test_every_part_of_other_ranks_is_checked(tmp_path):
    config = config_of("digits", limit=60, epochs=1, order="cd-grab", workers=2)
    run_ranks(all_of, 2, tmp_path, config)
    newest = max((tmp_path / CHECKPOINT_FOLDER).glob("step-*"))
    (newest / "rank-1.safetensors").write_bytes(b"cut")
    other = config_of("digits", limit=60, epochs=2, order="cd-grab", workers=1)
    with pytest.raises(RankError, match=r"rank-1\.safetensors is damaged"):
        run_ranks(all_of, 1, tmp_path, other)


def test_killed_and_gone_on():
    found = stress([Training(epochs=3)], kills=1, seed=1)["both"]
    assert found["kills"] >= 1 and found["numbers"] > 100 and not found["differing_runs"]


def test_checkpoints_are_small(tmp_path: Path):
    """Model, momentum, a residual for each rank, 16 bytes a unit, the running sum, and settings."""
    config = config_of(
        "digits-mlp",
        limit=203,
        epochs=2,
        order="cd-grab",
        sparsify="exdyna",
        density=0.01,
        workers=2,
    )
    run_ranks(all_of, 2, tmp_path, config)
    size = sum(
        path.stat().st_size for path in max((tmp_path / CHECKPOINT_FOLDER).glob("step-*")).iterdir()
    )
    parameters, sketch = 301_066, 512
    assert size < 4 * parameters * (2 + 2) + 16 * 203 + 4 * sketch + 60_000


def every_step(out, config):
    saving = CheckpointOptions(every=1)
    return run_all([config], World.detect(), out=out, saving=saving)[0].status


def test_checkpoints_of_whole_batches_are_small(tmp_path: Path):
    """... and in the middle of a pair one gradient for each rank."""
    config = config_of(
        "digits-mlp", limit=256, epochs=1, order="cd-grab", batch_size=16, unit=16, workers=2
    )
    run_ranks(every_step, 2, tmp_path, config)
    parameters, units, sizes = 301_066, 16, []
    for folder in sorted((tmp_path / CHECKPOINT_FOLDER).glob("step-*")):
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))
    pair_open, pair_done = (4 * parameters * n + 16 * units + 60_000 for n in (2 + 1 + 2, 2 + 1))
    assert max(sizes) < pair_open
    assert min(sizes) < pair_done < max(sizes), "one of them was taken in the middle of a pair"
