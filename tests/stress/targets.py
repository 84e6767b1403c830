"""Every kind of file that the program reads: a good one, ways to spoil it, and what reads it."""

import hashlib
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradherd.cli.recordings import load_vectors, open_array
from gradherd.comm.world import World
from gradherd.hooks.state import pack, unpack
from gradherd.lab.report.arms import find_records
from gradherd.lab.report.page import render
from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import RunResult, read_results, write_results
from gradherd.lab.tasks import download
from gradherd.lab.tasks.data_files import find_dataset
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.download import verify_dataset
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.checkpoint import CheckpointStore, NoUsableCheckpoint
from gradherd.lab.train.record import write_record
from gradherd.replay.recorded import replay_sparsify
from gradherd.sparsify.settings import make_settings
from tests.lab.report.sample_records import record
from tests.lab.tasks import fake_data
from tests.stress import mutations
from tests.stress.mutations import BYTES, EVIL, JSON, TEXT, Mutation

SINGLE = World.single()
STATE = {"step": 10, "list": [1, None, 2.5, "x"], "own": torch.arange(50), 3: (True, {})}


@dataclass(frozen=True)
class Target:
    """One kind of file."""

    name: str
    make: Callable[[Path], Path]
    """Writes good files below a folder and returns the one to spoil."""
    spoil: list[Mutation]
    read: Callable[[Path, Path], None]
    """Takes the folder and the file; raises what a reader raises, AssertionError if it is wrong."""
    command: tuple[str, ...] = ()
    """The command that reads it; DIR and FILE are put in."""
    weight: int = 2
    named: bool = True
    """Whether what is raised must name the file or its folder."""
    found: bool = True
    """Whether it is found at its place, where something else may lie."""


# Data sets.


def _set(names: tuple[str, ...], form: str, file: str, root: Path) -> Path:
    for name in names:
        fake_data.MAKERS[name](root, form)
    return root / file


def _load(task: str, limit: int | None, root: Path, path: Path) -> None:
    split = fake_data.task_named(task).load(root, limit)
    for column in (*split.train, *split.test):
        assert len(column) and bool(column.isfinite().all()), f"{task} has values that are none"


def _check(name: str, root: Path, path: Path) -> None:
    verify_dataset(find_dataset(name, root))


def _of_set(task: str, form: str, file: str, spoil: list[Mutation], **more: Any) -> Target:
    limit = 3 if "gpt2" in task else None
    quick = ("--virtual", "--workers", "2", "--epochs", "1", "--limit", "8")
    called = fake_data.OF_STUDIES.get(task, task)
    train = ("train", called, "--data-dir", "DIR", *quick, "--out", "OUT/run")
    command = (
        train if task in ("hmda", "m4-mlp") else ("data", "check", "--data-dir", "DIR", "--json")
    )
    return Target(
        name=f"{task.split('-')[0]} {file.rpartition('/')[2]}",
        make=partial(_set, fake_data.task_named(task).data, form, file),
        spoil=spoil,
        read=partial(_load, task, limit),
        command=command,
        **more,
    )


def _packed(end: str, spoil: list[Mutation]) -> list[Mutation]:
    inside: Mutation = partial(mutations.inside_packed, end=end, spoil=spoil)
    return [*BYTES, inside, inside, inside, inside, inside]


def _zipped(spoil: list[Mutation]) -> list[Mutation]:
    inside: Mutation = partial(mutations.inside_zip, spoil=spoil)
    return [*BYTES, inside, inside, inside, inside, inside, inside]


NPY: list[Mutation] = [*BYTES, *[mutations.npy] * 7]
DATA = [
    _of_set("hmda", "compact", "hmda-2017/hmda-2017-NJ.npz", _zipped(NPY), weight=4),
    _of_set("wikitext2-lstm", "compact", "wikitext-2/train.txt.xz", _packed(".xz", TEXT)),
    _of_set("wikitext2-lstm", "public", "wikitext-2/wiki.test.tokens", TEXT),
    _of_set("wikitext2-gpt2", "public", "gpt2-bpe/encoder.json", JSON),
    _of_set("wikitext2-gpt2", "public", "gpt2-bpe/vocab.bpe", TEXT),
    _of_set("m4-mlp", "compact", "m4/Weekly-train.csv.xz", _packed(".xz", TEXT)),
    _of_set("m4-mlp", "public", "m4/Weekly-test.csv", TEXT),
    _of_set("sst2-transformer", "compact", "sst2/dev.tsv.xz", _packed(".xz", TEXT)),
    _of_set("sst2-transformer", "public", "SST-2/train.tsv", TEXT),
    _of_set(
        "fashion-lenet", "compact", "fashion-mnist/t10k-images-idx3-ubyte.gz", _packed(".gz", BYTES)
    ),
    _of_set("fashion-lenet", "public", "FashionMNIST/raw/train-labels-idx1-ubyte", BYTES),
    _of_set("cifar10-lenet", "public", "cifar-10-batches-bin/data_batch_2.bin", BYTES),
    _of_set("cifar10-lenet", "compact", "cifar10/test_batch.webp", BYTES),
    _of_set("cifar10-lenet", "compact", "cifar10/labels.npz", _zipped(NPY)),
]


def _download(root: Path) -> Path:
    fake_data.sst2(root, "public")
    path = root / "SST-2.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("train.tsv", "dev.tsv"):
            archive.write(root / "SST-2" / name, f"SST-2/{name}")
    return path


def _unzip(root: Path, path: Path) -> None:
    (url,) = DATASETS["sst2"].downloads
    download._unpack(url, path, root)


# Recorded gradients.


def _gradients(root: Path) -> Path:
    np.save(root / "g.npy", np.random.default_rng(0).standard_normal((2, 4, 6)).astype(np.float32))
    return root / "g.npy"


def _vectors(root: Path, path: Path) -> None:
    assert bool(load_vectors(path).isfinite().all())


def _replay(root: Path, path: Path) -> None:
    gradients = open_array(path, ("steps", "workers", "dim"))
    replay_sparsify(gradients[:2], make_settings("topk", 0.5))


# Records.


def _record(root: Path) -> Path:
    for seed, order in enumerate(("d-rr", "cd-grab")):
        (root / order).mkdir()
        write_record(record(order, "topk", 0.1, epochs=3, seed=seed), root / order)
    return root / "cd-grab" / "record.json"


def _report(root: Path, path: Path) -> None:
    found = find_records([root])
    page = render([one for _, one in found], files=[str(path) for path, _ in found])
    assert "<script" not in page and "</script" not in page, "a record adds a script"
    assert not any(evil in page for evil in ("<img src=x", "<svg onload", "\x1b", "\x00"))


# Checkpoints.


def _checkpoint(file: str, root: Path) -> Path:
    for step in (10, 20):
        CheckpointStore(root, SINGLE, {"lr": 0.1}).save(
            step, lambda: STATE, {"own": torch.arange(9)}
        )
    return root / "step-000000020" / file


def _load_checkpoint(root: Path, path: Path) -> None:
    loaded = CheckpointStore(root, SINGLE, {"lr": 0.1}).load()
    assert loaded is not None and loaded.step in (10, 20)
    assert loaded.shared["step"] == 10 and len(loaded.part(0)["own"]) == 9


def _load_forged(root: Path, path: Path) -> None:
    """Read a spoilt state whose manifest was made to agree with it."""
    manifest = path.parent / "manifest.json"
    if path.is_file() and path.stat().st_size < 1 << 30:
        told = json.loads(manifest.read_text())
        data = path.read_bytes()
        digest = hashlib.blake2b(data, digest_size=16).digest()
        halves = [int.from_bytes(half, "big", signed=True) for half in (digest[:8], digest[8:])]
        told["files"][path.name] = [len(data), *halves]
        manifest.write_text(json.dumps(told))
    assert CheckpointStore(root, SINGLE, {"lr": 0.1}).load() is not None


def _odd_steps(root: Path) -> Path:
    path = _checkpoint("manifest.json", root)
    for name in (
        "step-9" * 30,
        "step-" + "9" * 200,
        "step-0000000\uff177",
        "step-5",
        "step--000000001",
    ):
        (root / name).mkdir()
    (root / "step-999999999999999999").write_bytes(b"")
    (root / ".step-000000030.draft").symlink_to(root / "step-000000010")
    return path


def _unpack(root: Path, path: Path) -> None:
    if path.is_file() and path.stat().st_size < 1 << 30:
        unpack(path.read_bytes())


def _state(root: Path) -> Path:
    (root / "state").write_bytes(pack(STATE))
    return root / "state"


def _tree(data: bytes, chance: random.Random) -> bytes:
    """Spoil the JSON before a state's tensors, and say its length."""
    size = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + size])
    if chance.random() < 0.6:
        tree = chance.choice(JSON)(head["__metadata__"]["tree"].encode(), chance)
        head["__metadata__"]["tree"] = tree.decode("utf-8", "replace")
        raw = json.dumps(head).encode()
    else:
        raw = mutations.other_value(json.dumps(head).encode(), chance)
    return len(raw).to_bytes(8, "little") + raw + data[8 + size :]


STATES: list[Mutation] = [*BYTES, *[_tree] * 5]


# Names of tasks.


def _name(root: Path) -> Path:
    (root / "mine.py").write_text("class A: pass\n")
    return root / "mine.py"


def _find_task(root: Path, path: Path) -> None:
    names = [str(path), f"{path}:A", f"{path}:", f":{path}", f"~nobody-here/{path.name}:A", "~:A"]
    names += [f"{'x' * 5000}.py:A", "\0:A", f"{path}:A:B", *EVIL, *(f"{evil}:A" for evil in EVIL)]
    for name in names:
        try:
            find_task(name)
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"{name!r} is no task")


# Studies.

STUDY = """kind = "compare"
theme = "open"
title = "Two orders"
task = "digits"
seeds = 2
[settings]
epochs = 2
[sources]
epochs = "ours"
lr = "ours"
[[arms]]
order = ["d-rr", "cd-grab"]
lr = [0.1, 0.2]
[[claim]]
id = "a"
text = "One is better"
source = "ours"
paper = "none"
measure = "train_loss"
test = "less"
arm = "cd-grab, lr 0.1"
against = "d-rr, lr 0.1"
"""


def _study(root: Path) -> Path:
    (root / "small.toml").write_text(STUDY)
    return root / "small.toml"


def _read_study(root: Path, path: Path) -> None:
    found = read_study(path)
    assert len(found.arms) < 10_000


def _toml(data: bytes, chance: random.Random) -> bytes:
    """Put an odd value in the place of one that is there."""
    lines = data.split(b"\n")
    at = chance.randrange(len(lines))
    odd = [b"[]", b"{}", b"-1", b"nan", b"1e400", b"true", b'""', b"9" * 5000, b"[" * 3000,
           b"[[1]]", b'"\\u001b[31m"', b"1979-05-27", b"[" + b"1," * 5000 + b"]", b"{a.b.c = 1}",
           *(json.dumps(evil).encode() for evil in EVIL)]  # fmt: skip
    lines[at] = lines[at].split(b"=")[0] + b"= " + chance.choice(odd)
    return b"\n".join(lines)


def _results(root: Path) -> Path:
    told = {"settings": {"order": "d-rr"}, "status": "done", "about": {}, "versions": {}}
    told |= {"hardware": {}, "started": "2026-01-01", "arm": "d-rr"}
    runs = [RunResult(seed=seed, figures={"series": {"x": [1.0, 2.5]}}, **told) for seed in (0, 1)]
    write_results(root, "small", "compare", runs)
    return root / "d-rr.json"


def _read_results(root: Path, path: Path) -> None:
    for one in read_results(path):
        assert isinstance(one.seed, int) and isinstance(one.figures, dict)


def _report_command() -> tuple[str, ...]:
    return ("report", "DIR", "--out", "OUT/page.html", "--json")


TARGETS = [
    *DATA,
    Target("download zip", _download, _zipped(TEXT), _unzip, named=False, found=False),
    Target("vectors npy", _gradients, NPY, _vectors,
           ("replay", "order", "FILE", "--rounds", "1", "--json"), weight=5),
    Target("gradients npy", _gradients, NPY, _replay,
           ("replay", "sparsify", "FILE", "--out", "OUT/s", "--json"), weight=5),
    Target("record json", _record, JSON, _report, _report_command(), weight=8),
    Target("checkpoint manifest", partial(_checkpoint, "manifest.json"), JSON, _load_checkpoint,
           weight=4),
    Target("checkpoint shared", partial(_checkpoint, "shared.safetensors"), STATES,
           _load_checkpoint),
    Target("checkpoint own", partial(_checkpoint, "rank-0.safetensors"), STATES,
           _load_checkpoint),
    Target("checkpoint forged", partial(_checkpoint, "shared.safetensors"),
           STATES, _load_forged, weight=3),
    Target("checkpoint names", _odd_steps, JSON, _load_checkpoint, weight=1),
    Target("packed state", _state, STATES, _unpack, weight=4, named=False),
    Target("study toml", _study, [*TEXT, _toml, _toml, _toml], _read_study,
           ("study", "FILE", "--plan", "--out", "OUT/r"), weight=3),
    Target("study results", _results, JSON, _read_results, weight=3),
    Target("task file", _name, TEXT, _find_task, weight=1, named=False),
]  # fmt: skip
REFUSED = (ValueError, NoUsableCheckpoint)
"""What a reader may raise."""
