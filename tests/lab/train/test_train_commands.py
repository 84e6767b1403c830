"""`gradherd train`, `compare` and `demo` as a user calls them."""

import json
import re
from pathlib import Path

import pytest
import torch.distributed as dist

from gradherd.cli import launch
from gradherd.cli.main import main
from gradherd.lab.train.record import RECORD_FILE, read_record
from tests.lab.train.work import HERE

SMALL = ["--epochs", "2", "--limit", "48", "--workers", "2"]


def run(capsys, *args):
    with pytest.raises(SystemExit) as caught:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return caught.value.code, out, err


@pytest.mark.parametrize("virtual", [[], ["--virtual"]])
def test_train(capsys, tmp_path, virtual):
    out = tmp_path / "deep" / "run"
    args = ["train", "digits", "--order", "cd-grab", "--seed", 3, *SMALL, "--out", out, "--json"]
    code, told, err = run(capsys, *args, *virtual)
    assert (code, err) == (0, "")
    result = json.loads(told)
    record = read_record(out / RECORD_FILE)
    assert (result["order"], result["seed"], result["epochs"]) == ("cd-grab", 3, 2)
    assert result["final_loss"] == record.epochs[-1].train_loss < record.start_loss
    assert record.status == "done" and record.config["virtual"] == bool(virtual)
    assert record.config["workers"] == 2 and record.train_examples == 48
    found = sorted(path.name for path in out.iterdir())
    assert found == [*([] if virtual else ["checkpoints"]), "metrics.jsonl", RECORD_FILE]


def test_a_finished_run_is_shown_again_and_goes_on_for_more_epochs(capsys, tmp_path):
    args = ["train", "digits", *SMALL, "--out", tmp_path / "a", "--json"]
    first = json.loads(run(capsys, *args)[1])
    again = json.loads(run(capsys, *args, "--resume")[1])
    assert again == first
    longer = json.loads(run(capsys, *args, "--resume", "--epochs", 3)[1])
    assert longer["epochs"] == 3 and longer["final_loss"] < first["final_loss"]


def test_the_length_of_sketches_can_be_chosen(capsys, tmp_path):
    args = ["train", "digits", "--order", "grab", *SMALL, "--virtual", "--out", tmp_path / "a"]
    code, _, err = run(capsys, *args, "--rows", "sketch", "--sketch-size", 8)
    assert (code, err) == (0, "")
    assert read_record(tmp_path / "a" / RECORD_FILE).config["sketch_size"] == 8
    code, _, err = run(capsys, *args, "--sketch-size", 8)
    assert (
        code == 2 and "--sketch-size 8 has no effect with rows 'auto': choose rows 'sketch'" in err
    )
    code, _, err = run(capsys, *args, "--rows", "sketch", "--sketch-size", 0)
    assert code == 2 and "--sketch-size must be at least 1, got 0" in err


@pytest.mark.parametrize("virtual", [["--virtual"], []])
def test_a_task_that_returns_the_wrong_thing_is_told_so_in_a_sentence(capsys, tmp_path, virtual):
    for name, says in (
        ("VectorLoss", "loss() must return one number, .*, got a tensor of shape (48,)"),
        ("TupleLoss", "loss() must return one number, .*, got a tuple"),
        ("TupleSplit", "load() must return a gradherd.lab.tasks.Split, got a tuple"),
        ("DatasetSplit", "train must be a tuple of tensors, .*, got a TensorDataset"),
        ("ArraySplit", "train must be a tuple of tensors, .*, got a ndarray"),
        ("ShortLoss", "loss(model, *train) must be possible, with 3 arguments: too many"),
        ("NoNumber", "metric() must return one number, got a NoneType"),
    ):
        args = ["train", f"{HERE}:{name}", *SMALL, "--out", tmp_path / name, *virtual]
        code, _, err = run(capsys, *args)
        (line,) = err.strip().splitlines()
        assert code == 2 and re.search(re.escape(says).replace(r"\.\*", ".*"), line), line


def test_tuning_under_torchrun_joins_its_group_once(capsys, tmp_path, monkeypatch):
    """One rank of torchrun, in this process."""
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x", "RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    joined, join = [], launch.join_torchrun_group
    monkeypatch.setattr(launch, "join_torchrun_group", lambda name: (joined.append(1), join(name)))
    args = ["compare", "digits", "--orders", "d-rr,grab", "--tune", "lr=0.1,0.2", "--epochs", 1]
    code, told, _ = run(
        capsys, *args, "--limit", 24, "--seeds", 1, "--out", tmp_path / "a", "--json"
    )
    assert (code, len(json.loads(told)["arms"])) == (0, 2)
    assert (joined, dist.is_initialized()) == ([1], False)


def test_train_for_people(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, told, err = run(capsys, "train", "digits", *SMALL, "--virtual")
    assert (code, err) == (0, "") and "test accuracy (%)" in told and "->" in told
    (folder,) = (tmp_path / "gradherd-runs").iterdir()
    assert re.fullmatch(r"train-digits-\d{8}-\d{6}", folder.name) and folder.name in told


@pytest.mark.parametrize("virtual", [[], ["--virtual"]])
def test_compare(capsys, tmp_path, virtual):
    out = tmp_path / "out"
    code, told, err = run(
        capsys, "compare", "digits", "--orders", "d-rr,cd-grab", "--sparsifiers", "dense,exdyna",
        "--density", 0.1, "--seeds", 2, *SMALL, *virtual, "--json", "--out", out,
    )  # fmt: skip
    assert (code, err) == (0, "")
    result = json.loads(told)
    assert result["task"] == "digits" and result["baseline"] == "d-rr + dense"
    assert [(arm["order"], arm["sparsify"]) for arm in result["arms"]] == [
        ("d-rr", "dense"),
        ("d-rr", "exdyna"),
        ("cd-grab", "dense"),
        ("cd-grab", "exdyna"),
    ]
    for arm in result["arms"]:
        assert {"final_loss", "final_metric", "epochs_to_baseline", "bytes", "seconds"} <= set(arm)
        assert set(arm["final_loss"]) == set(arm["final_metric"]) == {"mean", "std"}
        assert len(arm["loss_by_epoch"]) == 2
        assert arm["loss_by_epoch"][-1] == pytest.approx(arm["final_loss"]["mean"])
    assert result["arms"][0]["epochs_to_baseline"] == 2
    assert result["report"] == str(out / "report.html")
    assert 'class="chart"' in (out / "report.html").read_text()
    assert len(list(out.rglob(RECORD_FILE))) == 8
    code, told, _ = run(capsys, "report", out, "--json")
    again = json.loads(told)["comparisons"][0]
    assert code == 0 and again["baseline"] == result["baseline"]
    # Small virtual runs go side by side, so they start before the others.
    assert {arm["label"]: arm["final_loss"] for arm in again["arms"]} == {
        arm["label"]: arm["final_loss"] for arm in result["arms"]
    }


INFINITE_TASK = """
from dataclasses import dataclass
from gradherd.lab.tasks.digits import Digits

@dataclass(frozen=True)
class Infinite(Digits):
    def loss(self, *args):
        return super().loss(*args) * float("inf")
"""
STUDY = """
kind = "compare"
theme = "ordering"
title = "Two orders"
task = "mine.py:Infinite"
seeds = 1
settings = {epochs = 2, limit = 48, workers = 2}
sources = {epochs = "ours", limit = "ours", workers = "ours"}

[[arms]]
order = ["d-rr", "cd-grab"]
"""


@pytest.mark.parametrize(
    "words",
    [
        ["train", "mine.py:Infinite", *SMALL, "--out", "out"],
        ["train", "mine.py:Infinite", *SMALL, "--out", "out", "--virtual"],
        ["compare", "mine.py:Infinite", *SMALL, "--out", "out", "--virtual", "--seeds", "1"],
        ["study", "mine.toml", "--out", "out"],
    ],
    ids=["train", "train-virtual", "compare", "study"],
)
def test_a_loss_that_is_infinite_before_training(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(INFINITE_TASK)
    (tmp_path / "mine.toml").write_text(STUDY)
    told = (
        "gradherd: failed: the loss before training is nan or infinite: check the task's data and "
        "model (task digits, seed 0)\n"
    )
    assert run(capsys, *words) == (1, "", told)
    for path in filter(Path.is_file, (tmp_path / "out").rglob("*")):
        assert path.name == RECORD_FILE
        record = read_record(path)
        assert (record.status, record.epochs) == ("failed", [])
    # What was left is no result: it is trained again, and fails again.
    if "train" not in words or "--virtual" not in words:
        assert run(capsys, *words, "--resume")[:2] == (1, "")


def test_what_is_compared_by_default(capsys, tmp_path):
    code, told, _ = run(
        capsys, "compare", "digits", *SMALL, "--seeds", 1, "--virtual", "--out", tmp_path / "a"
    )
    assert code == 0 and "cd-grab" in told and "report:" in told
    code, told, _ = run(
        capsys, "compare", "digits", "--sparsifiers", "dense,topk,topk-int4:0.02", *SMALL,
        "--seeds", 1, "--virtual", "--out", tmp_path / "b", "--json",
    )  # fmt: skip
    arms = json.loads(told)["arms"]
    assert [(arm["order"], arm["sparsify"], arm["density"]) for arm in arms] == [
        ("d-rr", "dense", None),
        ("d-rr", "topk", 0.01),
        ("d-rr", "topk-int4", 0.02),
    ]
    assert arms[2]["bytes"] < arms[1]["bytes"]
