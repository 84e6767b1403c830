"""Records and the files that a run writes."""

import json
import os

import pytest

from gradherd.lab.train.loop import METRICS_FILE, RunWriter
from gradherd.lab.train.record import (
    RECORD_FILE,
    RunRecord,
    read_record,
    write_atomic,
    write_record,
)
from tests.lab.train.work import record, row


def test_records_come_back(tmp_path):
    there = record(epochs=[row(), row(2, train_loss=None)])
    write_record(there, tmp_path)
    assert read_record(tmp_path / RECORD_FILE) == there
    assert sorted(path.name for path in tmp_path.iterdir()) == [RECORD_FILE]
    assert there.config["lr"] == 0.2 and there.config["source"].startswith("Our own")


def test_other_versions_have_other_fields(tmp_path):
    found = record(epochs=[row()]).to_json()
    found["news"] = 1
    found["density_by_step"] = [{"step": 0, "mean": 1.0, "min": 1.0, "max": 1.0}]
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


def test_files_are_written_as_a_run_goes_on(tmp_path):
    writer = RunWriter(record(), tmp_path / "run")
    assert read_record(tmp_path / "run" / RECORD_FILE).status == "running"
    writer.update(start_loss=2.0, start_metric=None)
    writer.add(row())
    writer.add(row(2))
    assert len(read_record(tmp_path / "run" / RECORD_FILE).epochs) == 2
    assert writer.update(status="done").status == "done"
    lines = (tmp_path / "run" / METRICS_FILE).read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    last = read_record(tmp_path / "run" / RECORD_FILE)
    assert (last.status, last.start_loss) == ("done", 2.0)
