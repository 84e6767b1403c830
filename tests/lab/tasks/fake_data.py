"""Tiny data sets, made up, in every form that the real ones come in."""

import gzip
import hashlib
import io
import json
import lzma
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from gradherd.lab.tasks import TASKS, Task, find_task
from gradherd.lab.tasks.data_files import find_below
from gradherd.lab.tasks.datasets import DATASETS, DataFile
from gradherd.lab.tasks.images import read_batches

_FOLDER = Path(__file__).parents[3] / "studies" / "tasks"
OF_STUDIES = {
    "wikitext2-gpt2": f"{_FOLDER}/gpt2.py:WikiText2GPT2",
    "wikitext2-lstm": f"{_FOLDER}/lstm.py:WikiText2LSTM",
    "cifar10-resnet18": f"{_FOLDER}/resnet18.py:Cifar10ResNet18",
    "m4-mlp": f"{_FOLDER}/m4.py:M4MLP",
    "sst2-transformer": f"{_FOLDER}/sst2.py:SST2Transformer",
}
"""Tasks that studies bring along -> what a command takes for them."""
EVERY_TASK = (*TASKS, *OF_STUDIES)
PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
BATCHES = (*PARTS, "test_batch")
WORDS = "the cat sat on a mat while its 12 friends , all of them kind , ran away .".split()


def task_named(name: str) -> Task:
    """Return a task of the package, or of a study."""
    return find_task(OF_STUDIES.get(name, name))


def put(path: Path, content: bytes | str) -> None:
    """Write a file, packed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = content.encode() if isinstance(content, str) else content
    pack = {".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)
    path.write_bytes(pack(raw))


def lines(count: int, seed: int) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS, draw.integers(3, 12))) for _ in range(count)]


def wikitext(root: Path, form: str) -> None:
    for seed, part in enumerate(("train", "valid", "test")):
        text = "".join(f" {line} \n" for line in lines(700 if part == "train" else 400, seed))
        name = f"{part}.txt.xz" if form == "compact" else f"wiki.{part}.tokens"
        put(root / "wikitext-2" / name, text)


def gpt2_bpe(root: Path, form: str) -> None:
    from studies.tasks.gpt2 import _BYTE_CHARACTERS

    merges = ["t h", "th e", "Ġ the", "a t", "c at"]
    tokens = [*_BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in merges)]
    vocabulary = json.dumps({token: number for number, token in enumerate(tokens)})
    put(root / "gpt2-bpe" / "encoder.json", vocabulary)
    put(root / "gpt2-bpe" / "vocab.bpe", "#version: 0.2\n" + "\n".join(merges) + "\n")


def m4(root: Path, form: str) -> None:
    draw = np.random.default_rng(0)
    train, test = (['"V1","V2"'], ['"V1","V2"'])
    for at in range(64):
        walk = (100 + draw.standard_normal(60 + at + 13).cumsum()).round(3)
        cells = [f'"{value}"' for value in walk[:-13]]
        train.append(",".join([f'"W{at}"', *cells, *[""] * (63 - at)]))
        test.append(",".join([f'"W{at}"', *(f'"{value}"' for value in walk[-13:])]))
    end = ".xz" if form == "compact" else ""
    put(root / "m4" / f"Weekly-train.csv{end}", "\n".join(train) + "\n")
    put(root / "m4" / "Weekly-test.csv", "\n".join(test) + "\n")


def sst2(root: Path, form: str) -> None:
    folder, end = (root / "sst2", ".xz") if form == "compact" else (root / "SST-2", "")
    for seed, (part, count) in enumerate((("train", 100), ("dev", 70))):
        rows = [f'"{line} \t{int("kind" in line)}\n' for line in lines(count, seed)]
        put(folder / f"{part}.tsv{end}", "".join(["sentence\tlabel\n", *rows]))


def hmda(root: Path, form: str) -> None:
    draw = np.random.default_rng(0)
    x = draw.standard_normal((200, 18)).astype(np.float32) * 50 + 1000
    x[:, 3] = 7
    y = (x[:, 0] > 1000).astype(np.int8)
    (root / "hmda-2017").mkdir(parents=True)
    np.savez_compressed(root / "hmda-2017" / "hmda-2017-NJ.npz", X=x, y=y, columns=["c"] * 18)


def fashion(root: Path, form: str) -> None:
    folder, end = (
        (root / "fashion-mnist", ".gz") if form == "compact" else (root / "FashionMNIST/raw", "")
    )
    for seed, (part, count) in enumerate((("train", 90), ("t10k", 70))):
        pixels, kinds = images(count, (28, 28), seed)
        head = np.array([0x803, count, 28, 28], ">u4").tobytes()
        put(folder / f"{part}-images-idx3-ubyte{end}", head + pixels.tobytes())
        head = np.array([0x801, count], ">u4").tobytes()
        put(folder / f"{part}-labels-idx1-ubyte{end}", head + kinds.tobytes())


def images(count: int, shape: tuple[int, ...], seed: int):
    draw = np.random.default_rng(seed)
    kinds = draw.integers(0, 10, count, np.uint8)
    return draw.integers(0, 256, (count, *shape), np.uint8), kinds


def cifar_rows(seed: int) -> np.ndarray:
    """A batch of 16 images as rows of the binary form."""
    pixels, kinds = images(16, (3072,), seed)
    return np.concatenate([kinds[:, None], pixels], 1)


def cifar(root: Path, form: str) -> None:
    rows = {name: cifar_rows(seed) for seed, name in enumerate(BATCHES)}
    if form == "compact":
        cifar_sheets(root / "cifar10", rows)
    elif form == "public":
        for name in BATCHES:
            put(root / "cifar-10-batches-bin" / f"{name}.bin", rows[name].tobytes())
    else:
        with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as archive:
            for name in BATCHES:
                entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
                entry.size = rows[name].size
                archive.addfile(entry, io.BytesIO(rows[name].tobytes()))


def cifar_sheets(folder: Path, rows: dict[str, np.ndarray]) -> None:
    from PIL import Image

    folder.mkdir(parents=True)
    for name in BATCHES:
        tiles = rows[name][:, 1:].reshape(4, 4, 3, 32, 32).transpose(0, 3, 1, 4, 2)
        Image.fromarray(np.ascontiguousarray(tiles.reshape(128, 128, 3))).save(
            folder / f"{name}.webp", lossless=True
        )
    np.savez(folder / "labels.npz", **{name: rows[name][:, 0] for name in BATCHES})


MAKERS = {
    "hmda-2017": hmda,
    "wikitext-2": wikitext,
    "gpt2-bpe": gpt2_bpe,
    "m4": m4,
    "cifar10": cifar,
    "fashion-mnist": fashion,
    "sst2": sst2,
}
"""Data set -> what writes it below a folder, in the form "compact" or "public" (and others)."""


def publish(root: Path) -> None:
    """Make what is below a folder the published edition: its sizes and checksums are known.

    After the fixture `any_edition`, which puts the real ones back in the end.
    """
    for name, dataset in list(DATASETS.items()):
        local = find_below(dataset, root)
        if local is None or name == "hmda-2017":
            continue
        form = dataset.forms[0]  # of CIFAR-10 the binary one, which sheets are converted to
        if name == "cifar10":
            contents = {f"{key}.bin": rows.tobytes() for key, rows in read_batches(local).items()}
        else:
            contents = {file.name: local.read(file.name) for file in form.files}
        files = tuple(_published(file, contents[file.name]) for file in form.files)
        DATASETS[name] = replace(dataset, forms=(replace(form, files=files), *dataset.forms[1:]))


def _published(file: DataFile, content: bytes) -> DataFile:
    return replace(file, size=len(content), sha256=hashlib.sha256(content).hexdigest())
