"""Finding and reading data, made up and real, whole and damaged."""

import gzip
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from gradherd.lab.tasks import DamagedData, MissingData
from gradherd.lab.tasks import digits as digits_task
from gradherd.lab.tasks.data_files import cache_dir, data_dirs, find_dataset
from gradherd.lab.tasks.datasets import DATASETS
from gradherd.lab.tasks.download import verify_dataset
from tests.lab.tasks import fake_data
from tests.lab.tasks.fake_data import EVERY_TASK, task_named

NEEDY = [name for name in EVERY_TASK if task_named(name).data]
ONE_EACH = ["hmda", "wikitext2-lstm", "m4-mlp", "wikitext2-gpt2", "cifar10-lenet", "fashion-lenet"]
ONE_EACH += ["sst2-transformer"]


def make(root: Path, task: str, form: str) -> Path:
    root.mkdir(exist_ok=True)
    if form == "compact" and task.startswith("cifar10"):
        pytest.importorskip("PIL")
    for name in task_named(task).data:
        fake_data.MAKERS[name](root, form)
    return root


def same(one, other) -> bool:
    columns = zip((*one.train, *one.test), (*other.train, *other.test), strict=True)
    return all(torch.equal(a, b) for a, b in columns)


# Both forms.


@pytest.mark.parametrize("task", ONE_EACH)
def test_compact_and_public_forms_are_the_same_data(any_edition, tmp_path, task):
    splits = [
        task_named(task).load(make(tmp_path / form, task, form)) for form in ("compact", "public")
    ]
    assert same(*splits)
    assert len(splits[0].train[0]) > 1 and len(splits[0].test[0]) > 1


def test_cifar_images_and_labels(any_edition, tmp_path):
    expected = task_named("cifar10-lenet").load(make(tmp_path, "cifar10-lenet", "public"))
    rows = np.concatenate([fake_data.cifar_rows(seed) for seed in range(5)])
    assert np.array_equal(expected.train[1].numpy(), rows[:, 0])
    assert np.array_equal(expected.train[0].numpy().reshape(80, -1), rows[:, 1:])


def test_line_ends_of_another_system(any_edition, tmp_path):
    task = task_named("sst2-transformer")
    expected = task.load(make(tmp_path, "sst2-transformer", "public"))
    for path in (tmp_path / "SST-2").iterdir():
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert same(task.load(tmp_path), expected)


@pytest.mark.parametrize("task", NEEDY)
def test_a_limit_keeps_the_first(any_edition, tmp_path, task):
    make(tmp_path, task, "public")
    whole, few = (task_named(task).load(tmp_path, limit=limit) for limit in (None, 20))
    assert len(few.train[0]) == 20
    assert same(whole.first(20), few)


def test_hmda_is_standardised_by_its_training_part(any_edition, tmp_path):
    split = task_named("hmda").load(make(tmp_path, "hmda", "public"))
    x = split.train[0].double()
    torch.testing.assert_close(x.mean(0), torch.zeros(18, dtype=torch.float64), atol=1e-5, rtol=0)
    constant = torch.arange(18) == 3
    torch.testing.assert_close(x.std(0, unbiased=False)[~constant], torch.ones(17).double())
    assert not x[:, constant].any() and len(x) == 160 and len(split.test[0]) == 40


def test_sequences_overlap_by_one_word(any_edition, tmp_path):
    split = task_named("wikitext2-lstm").load(make(tmp_path, "wikitext2-lstm", "public"))
    (words,) = split.train
    assert torch.equal(words[:-1, -1], words[1:, 0])
    text = (tmp_path / "wikitext-2" / "wiki.train.tokens").read_text()
    count = sum(len(line.split()) + 1 for line in text.splitlines())
    assert len(words) == (count - 1) // 35


def test_phrases_keep_unknown_words_and_quotes(any_edition, tmp_path):
    for part in ("train", "dev"):
        fake_data.put(tmp_path / f"SST-2/{part}.tsv", 'sentence\tlabel\n"a b a \t1\nb\t0\n')
    split = task_named("sst2-transformer").load(tmp_path)
    # b twice, then a and '"a' once each in the order they came; 0 pads, 1 is unknown.
    assert split.train[0][:, :4].tolist() == [[3, 2, 4, 0], [2, 0, 0, 0]]
    assert split.train[1].tolist() == [1, 0]


def test_other_text_gets_other_tokens(any_edition, tmp_path):
    task = task_named("wikitext2-gpt2")
    first = task.load(make(tmp_path, "wikitext2-gpt2", "public"))
    path = tmp_path / "wikitext-2" / "wiki.train.tokens"
    path.write_text(path.read_text().upper())
    assert not torch.equal(task.load(tmp_path).train[0][:9], first.train[0][:9])


# Finding.


def test_folders_are_looked_at_in_order(any_edition, tmp_path, monkeypatch):
    for name in ("given", "named", "cached/gradherd"):
        (tmp_path / name).mkdir(parents=True)
        fake_data.hmda(tmp_path / name, "compact")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cached"))
    monkeypatch.setenv("GRADHERD_DATA", str(tmp_path / "named"))
    for name in ("given", "named", "cached/gradherd"):
        assert find_dataset("hmda-2017", tmp_path / "given").folder == tmp_path / name / "hmda-2017"
        shutil.rmtree(tmp_path / name / "hmda-2017")
    with pytest.raises(MissingData):
        find_dataset("hmda-2017", tmp_path / "given")


def test_the_cache_folder_follows_the_standard(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/gradherd")
    for unusable in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", unusable)
        assert cache_dir() == Path("/home/someone/.cache/gradherd")
    monkeypatch.setenv("GRADHERD_DATA", "~/data")
    assert data_dirs(Path("~/here"))[:2] == [
        Path("/home/someone/here"), Path("/home/someone/data")
    ]  # fmt: skip


@pytest.mark.parametrize("name", DATASETS)
def test_a_missing_set_says_what_where_and_how(tmp_path, monkeypatch, name):
    monkeypatch.setenv("GRADHERD_DATA", str(tmp_path / "gone"))
    with pytest.raises(MissingData) as error:
        find_dataset(name, tmp_path)
    message = str(error.value)
    assert f"data set {name!r}" in message and "\n" not in message
    assert f"{tmp_path}, {tmp_path}/gone (no such folder), {cache_dir()}" in message
    assert DATASETS[name].by_hand in message
    assert (f"gradherd data get {name}" in message) == bool(DATASETS[name].downloads)


def test_the_file_that_lacks_is_named(any_edition, tmp_path):
    fake_data.cifar(tmp_path, "public")
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(MissingData, match=r"cifar-10-batches-bin lacks data_batch_4\.bin"):
        find_dataset("cifar10", tmp_path)


def test_a_data_dir_must_be_a_folder(tmp_path):
    with pytest.raises(ValueError, match=r"data_dir must be a folder that exists, got '.*gone'"):
        find_dataset("m4", tmp_path / "gone")


@pytest.mark.parametrize("task", ["digits", "digits-mlp"])
def test_digits_need_no_folder(task):
    split = task_named(task).load(None)
    assert len(split.train[0]) == 1440 and len(split.test[0]) == 357
    assert split.train[0].min() == 0 and split.train[0].max() == 1


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    pixels, digits = digits_task._read_digits()
    expected = load_digits(return_X_y=True)
    assert np.array_equal(pixels, expected[0]) and np.array_equal(digits, expected[1])


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn", None)
    with pytest.raises(MissingData, match="come with scikit-learn, which is not installed"):
        task_named("digits").load()


def test_sheets_without_pillow(any_edition, tmp_path, monkeypatch):
    make(tmp_path, "cifar10-lenet", "compact")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ValueError, match=r"data_batch_1\.webp needs Pillow"):
        task_named("cifar10-lenet").load(tmp_path)


# Damage.

FILES = [
    ("hmda", "compact", "hmda-2017/hmda-2017-NJ.npz"),
    ("wikitext2-lstm", "compact", "wikitext-2/train.txt.xz"),
    ("wikitext2-gpt2", "compact", "wikitext-2/test.txt.xz"),
    ("wikitext2-gpt2", "compact", "gpt2-bpe/encoder.json"),
    ("m4-mlp", "compact", "m4/Weekly-train.csv.xz"),
    ("cifar10-lenet", "compact", "cifar10/data_batch_1.webp"),
    ("cifar10-lenet", "compact", "cifar10/labels.npz"),
    ("cifar10-lenet", "public", "cifar-10-batches-bin/test_batch.bin"),
    ("fashion-lenet", "compact", "fashion-mnist/train-images-idx3-ubyte.gz"),
    ("fashion-lenet", "public", "FashionMNIST/raw/t10k-labels-idx1-ubyte"),
    ("sst2-transformer", "compact", "sst2/dev.tsv.xz"),
]


@pytest.mark.parametrize("damage", ["cut", "empty", "noise", "text"])
@pytest.mark.parametrize(("task", "form", "file"), FILES)
def test_a_damaged_file_is_named(any_edition, tmp_path, task, form, file, damage):
    path = make(tmp_path, task, form) / file
    fake_data.publish(tmp_path)
    whole = path.read_bytes()
    noise = np.random.default_rng(0).bytes(5000)
    path.write_bytes(
        {
            "cut": whole[: len(whole) * 2 // 3],
            "empty": b"",
            "noise": noise,
            "text": b"hello\n" * 99,
        }[damage]
    )
    with pytest.raises(DamagedData) as error:
        task_named(task).load(tmp_path)
    assert "\n" not in str(error.value)
    assert path.name in str(error.value)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({"X": np.zeros((5, 17)), "y": np.zeros(5)}, r"X \(5, 17\) and y \(5,\)"),
        ({"X": np.zeros((5, 18)), "y": np.zeros(4)}, r"y \(4,\)"),
        ({"X": np.zeros((5, 18)), "y": np.full(5, 2)}, "labels other than 0, 1"),
        ({"X": np.full((5, 18), np.nan), "y": np.zeros(5)}, "not finite"),
        ({"X": np.full((5, 18), "a"), "y": np.zeros(5)}, "expected numbers"),
        ({"X": np.zeros((5, 18))}, "y is not a file in the archive"),
        ({"X": np.array([None] * 3), "y": np.zeros(5)}, "allow_pickle=False"),
    ],
)
def test_hmda_archives_of_another_kind(tmp_path, content, complaint):
    (tmp_path / "hmda-2017").mkdir()
    np.savez(tmp_path / "hmda-2017" / "hmda-2017-NJ.npz", **content)
    with pytest.raises(DamagedData, match=complaint):
        task_named("hmda").load(tmp_path)


@pytest.mark.parametrize(
    ("task", "file", "old", "new", "complaint"),
    [
        ("m4-mlp", "m4/Weekly-train.csv", b'"W3"', b'"W7"', "is damaged, or not the published"),
        ("m4-mlp", "m4/Weekly-test.csv", b'"W3","', b'"W3","1","', "is not the published file"),
        ("sst2-transformer", "SST-2/train.tsv", b"\t1\n", b"\t7\n", "is damaged"),
        ("wikitext2-gpt2", "gpt2-bpe/vocab.bpe", b"t h", b"t", "is truncated"),
        ("wikitext2-lstm", "wikitext-2/wiki.test.tokens", b"cat", b"c\xfft", "is damaged"),
        ("cifar10-lenet", "cifar-10-batches-bin/data_batch_2.bin", b"\x09", b"\x0b", "is damaged"),
        ("fashion-lenet", "FashionMNIST/raw/t10k-labels-idx1-ubyte", b"\3", b"\x0b", "is damaged"),
    ],
)  # fmt: skip
def test_whatever_is_changed_is_refused(any_edition, tmp_path, task, file, old, new, complaint):
    path = make(tmp_path, task, "public") / file
    fake_data.publish(tmp_path)
    task_named(task).load(tmp_path)
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    with pytest.raises(DamagedData, match=f"{path.name} {complaint}"):
        task_named(task).load(tmp_path)


# What was published is known: sizes and checksums.


@pytest.mark.parametrize("task", [name for name in ONE_EACH if name != "hmda"])
def test_another_edition_is_refused(tmp_path, task):
    make(tmp_path, task, "public")
    with pytest.raises(DamagedData, match=r"bytes unpacked instead of [\d,]+; fetch it again"):
        task_named(task).load(tmp_path)


def test_one_wrong_byte_is_found(real, tmp_path):
    source = _find("m4", real)
    content = source.read("Weekly-test.csv")
    shutil.copy(source.paths["Weekly-train.csv"], _folder(tmp_path / "m4"))
    (tmp_path / "m4" / "Weekly-test.csv").write_bytes(content.replace(b"35397.16", b"35397.17"))
    with pytest.raises(DamagedData, match=r"Weekly-test\.csv is damaged, or not the published"):
        task_named("m4-mlp").load(tmp_path)


# The real sets.

SHAPES = {
    "hmda": ([(154_121, 18), (154_121,)], [(38_531, 18), (38_531,)]),
    "wikitext2-lstm": ([(59_675, 36)], [(7_016, 36)]),
    "m4-mlp": ([(107_384, 20), (107_384, 6)], [(359, 20), (359, 13), (359, 1), (359, 1)]),
    "wikitext2-gpt2": ([(19_127, 128)], [(2_311, 128)]),
    "cifar10-lenet": ([(50_000, 3, 32, 32), (50_000,)], [(10_000, 3, 32, 32), (10_000,)]),
    "fashion-lenet": ([(60_000, 1, 28, 28), (60_000,)], [(10_000, 1, 28, 28), (10_000,)]),
    "sst2-transformer": ([(67_349, 64), (67_349,)], [(872, 64), (872,)]),
}


@pytest.mark.parametrize("task", SHAPES)
def test_real_data(real, task):
    if task.startswith("cifar10"):
        pytest.importorskip("PIL")
    one = task_named(task)
    for name in one.data:
        _find(name, real)
    split = one.load(real)
    found = [[tuple(column.shape) for column in part] for part in (split.train, split.test)]
    assert tuple(found) == SHAPES[task]
    torch.manual_seed(0)
    few = split.first(4)
    model = one.model()
    loss = one.loss(model, *few.train)
    loss.backward()
    assert loss.isfinite() and np.isfinite(one.metric(model, *few.test))
    if task == "wikitext2-lstm":
        assert split.train[0].max() == 33_277
    if task == "cifar10-lenet":
        assert split.train[1].bincount().tolist() == [5000] * 10


def test_real_sets_in_public_forms(real, tmp_path):
    """Unpacked, renamed, packed in another way: the same data."""
    fashion, text = _find("fashion-mnist", real), _find("wikitext-2", real)
    raw = _folder(tmp_path / "FashionMNIST" / "raw")
    for file in fashion.form.files:
        (raw / file.name).write_bytes(fashion.read(file.name))
    tokens = _folder(tmp_path / "wikitext-2")
    for part in ("train", "valid"):
        (tokens / f"wiki.{part}.tokens").write_bytes(text.read(f"{part}.txt"))
    with gzip.open(tokens / "test.txt.gz", "wb", compresslevel=1) as file:
        file.write(text.read("test.txt"))
    for name in ("fashion-mnist", "wikitext-2"):
        found = find_dataset(name, tmp_path)
        assert tmp_path in found.folder.parents
        verify_dataset(found)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _find(name: str, folder: Path):
    try:
        return find_dataset(name, folder)
    except MissingData as error:
        pytest.skip(str(error))
