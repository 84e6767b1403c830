"""Files from outside: a few hundred spoilt ones, and each defect that spoiling has shown."""

import gzip
import io
import json
import lzma
import os
import struct
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from gradherd.cli.main import main
from gradherd.cli.recordings import load_vectors, open_array
from gradherd.comm.world import World
from gradherd.hooks.state import unpack
from gradherd.lab.report.arms import find_records
from gradherd.lab.tasks.data_files import (
    DamagedData,
    MissingData,
    find_dataset,
    read_arrays,
    read_file,
)
from gradherd.lab.tasks.hmda import HMDA
from gradherd.lab.tasks.images import load_cifar10
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.checkpoint import CheckpointStore, NoUsableCheckpoint
from gradherd.lab.train.record import RECORD_FILE, read_record, write_record
from tests.lab.report.sample_records import record
from tests.lab.tasks import fake_data
from tests.stress.fuzz import fuzz, limits
from tests.stress.mutations import bomb
from tests.stress.targets import TARGETS

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="needs /proc to see how much memory is taken"
)


def test_a_hundred_spoilt_files():  # `make stress` reads 10,000
    found = fuzz(list(range(100)), seed=7)
    outcomes = sum(found.values(), start=next(iter(found.values())).__class__())
    assert outcomes["read"] > 10 and outcomes["refused"] > 50
    assert len(found) > 0.8 * len(TARGETS)


# Arrays.


def header(text: str, content: bytes = b"") -> bytes:
    raw = text.encode("latin1") + b"\n"
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(raw)) + raw + content


HEADERS = {
    "nested": "-" * 9000 + "1",
    "not closed": "{'descr': '<f8', 'fortran_order': False, 'shape': (1, 1, 1), ",
    "no hash": "{[]: 1}",
    "no number": "{'descr': '<f8', 'fortran_order': False, 'shape': (1.0, 1, 1), }",
    "too many": "{'descr': '<f8', 'fortran_order': False, 'shape': (4294967296, 4294967296, 1), }",
    "below zero": "{'descr': '<f8', 'fortran_order': False, 'shape': (-1, -1, 1), }",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1), }",
    "nothing": "{'descr': '|V0', 'fortran_order': False, 'shape': (1, 1, 1), }",
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_numpy_stumbles_over(tmp_path, case):
    content = header(HEADERS[case], bytes(8))
    (tmp_path / "g.npy").write_bytes(content)
    with pytest.raises(ValueError, match=r"g\.npy: (not a \.npy file|array holds)"):
        open_array(tmp_path / "g.npy", ("a", "b", "c"))
    with zipfile.ZipFile(tmp_path / "some.npz", "w") as archive:
        archive.writestr("X.npy", content)
    if case != "nothing":  # an array without bytes, which HMDA refuses by its shape
        with pytest.raises(DamagedData, match=r"some\.npz is not a valid \.npz"):
            read_arrays(tmp_path / "some.npz", ("X",))


@pytest.mark.parametrize("kind", ["m8[s]", "M8[s]"])
def test_times_are_no_numbers(tmp_path, kind):
    np.save(tmp_path / "g.npy", np.zeros((1, 2, 2), kind))
    with pytest.raises(ValueError, match="expected numbers"):
        load_vectors(tmp_path / "g.npy")


def test_numbers_that_are_too_long(tmp_path):
    np.save(tmp_path / "g.npy", np.full((1, 2, 2), np.longdouble("1e4000")))
    with pytest.raises(ValueError, match="NaN or infinite"):  # and no warning, which is an error
        load_vectors(tmp_path / "g.npy")


@pytest.mark.parametrize("how", ["pipe", "folder"])
def test_arrays_that_are_no_file(tmp_path, how):
    (os.mkfifo if how == "pipe" else os.mkdir)(tmp_path / "g.npy")
    with pytest.raises(ValueError, match=r"g\.npy: .*is not a file"):
        load_vectors(tmp_path / "g.npy")


def test_a_name_cannot_speak_for_the_program(tmp_path):
    with pytest.raises(ValueError) as error:
        load_vectors(tmp_path / "a\ngradherd: done\x1b[2J")
    assert str(error.value).isprintable() and "a gradherd: done\N{REPLACEMENT CHARACTER}[2J" in str(
        error.value
    )


def archived(packing: int = zipfile.ZIP_DEFLATED, size: int = 8, **more: bytes) -> bytearray:
    content = io.BytesIO()
    np.save(content, np.zeros(size, np.uint8))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        archive.writestr("X.npy", content.getvalue())
        for name, data in more.items():
            archive.writestr(name, data)
    return bytearray(file.getvalue())


def test_zip_bombs_are_refused_before_they_unpack(tmp_path):
    (tmp_path / "some.npz").write_bytes(archived(size=1 << 28))
    with limits(), pytest.raises(DamagedData, match="bytes, 268,435,456 are allowed"):
        read_arrays(tmp_path / "some.npz", ("X",))


@pytest.mark.parametrize("field", [8, 10, 24], ids=["flags", "packing", "size"])
def test_directories_of_archives_that_lie(tmp_path, field):
    content = archived()
    at = content.index(b"PK\1\2") + field
    for lie in (b"\1\0", b"\x20\0", b"\xff\xff"):
        content[at : at + 2] = lie
        (tmp_path / "some.npz").write_bytes(content)
        if field == 24 and lie == b"\xff\xff":  # more than there is: the array itself is whole
            assert not read_arrays(tmp_path / "some.npz", ("X",))[0].any()
            continue
        with pytest.raises(DamagedData, match=r"some\.npz is not a valid \.npz"):
            read_arrays(tmp_path / "some.npz", ("X",))


# Packed files.


@pytest.mark.parametrize("end", [".gz", ".xz"])
def test_bombs_are_refused_within_memory(tmp_path, end):
    (tmp_path / f"a{end}").write_bytes(bomb(end))
    with limits(), pytest.raises(DamagedData, match=r"more than 268,435,456 bytes unpacked"):
        read_file(tmp_path / f"a{end}")


def test_files_of_several_streams(tmp_path):
    for end, pack in ((".gz", gzip.compress), (".xz", lzma.compress)):
        (tmp_path / f"a{end}").write_bytes(pack(b"one, ") + pack(b"two"))
        assert read_file(tmp_path / f"a{end}") == b"one, two"
    (tmp_path / "a.xz").write_bytes(lzma.compress(b"one") + b"more")
    with pytest.raises(DamagedData, match=r"a\.xz cannot be read: .*; fetch it again"):
        read_file(tmp_path / "a.xz")


def test_a_file_that_is_a_hole(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.truncate(1 << 42)
    with limits(), pytest.raises(DamagedData, match="more than"):
        read_file(tmp_path / "a")


# Other data.


def test_images_that_are_too_large_or_of_another_kind(tmp_path):
    image = pytest.importorskip("PIL.Image")
    fake_data.cifar(tmp_path, "compact")
    path = tmp_path / "cifar10" / "data_batch_1.webp"
    small = path.read_bytes()
    at = small.index(b"VP8L") + 9  # 14 bits of width - 1, 14 bits of height - 1
    for side in (16384, 8192):
        large = ((side - 1) | (side - 1) << 14 | small[at + 3] >> 4 << 28).to_bytes(4, "little")
        path.write_bytes(small[:at] + large + small[at + 4 :])
        with limits(), pytest.raises(DamagedData, match=r"batch_1\.webp is not a valid image"):
            load_cifar10(tmp_path)
    image.new("RGB", (128, 128)).save(path, "png")
    with pytest.raises(DamagedData, match=r"batch_1\.webp is not a valid image"):
        load_cifar10(tmp_path)


@pytest.mark.parametrize("value", [1e300, np.inf])
def test_values_whose_squares_are_none(tmp_path, value):
    (tmp_path / "hmda-2017").mkdir()
    rows = np.full((9, 18), value)
    np.savez(tmp_path / "hmda-2017" / "hmda-2017-NJ.npz", X=rows, y=np.zeros(9))
    with pytest.raises(DamagedData, match="not finite and below"):
        HMDA().load(tmp_path)


def test_names_that_no_folder_has(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADHERD_DATA", raising=False)
    for name in ("x" * 5000, "~nobody-here/x"):
        with pytest.raises(ValueError, match="data_dir must be a folder"):
            find_dataset("m4", Path(name))
        with pytest.raises(ValueError, match="there is no file"):
            find_task(f"{name}.py:A")
    with pytest.raises(MissingData) as error:
        find_dataset("m4", fake_data.put(tmp_path / "a\nb" / "x", b"") or tmp_path / "a\nb")
    assert str(error.value).isprintable()


# Records.


def spoilt(folder: Path, **fields: object) -> Path:
    folder.mkdir(parents=True)
    write_record(record(epochs=2), folder)
    found = json.loads((folder / RECORD_FILE).read_text())
    for name, value in fields.items():
        (found["epochs"][0] if name in found["epochs"][0] else found)[name] = value
    (folder / RECORD_FILE).write_text(json.dumps(found))
    return folder / RECORD_FILE


def deep(levels: int) -> object:
    return [deep(levels - 1)] if levels else 1


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes": 10**400},
        {"train_loss": 1e200},
        {"seed": 10**30},
        {"higher_is_better": "yes"},
        {"start_loss": "low"},
        {"config": {"epochs": 10**400}},
        {"config": {"a": deep(300)}},
        {"hardware": {"memory_bytes": 1e200}},
        {"seconds": "long"},
        {"task": "x" * 100_000 + "\x1b", "order": 3},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_records_of_values_that_no_run_writes(tmp_path, fields):
    path = spoilt(tmp_path / "run", **fields)
    with pytest.raises(
        ValueError, match=r"run/record\.json: damaged record: .*train again"
    ) as error:
        read_record(path)
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


@pytest.mark.parametrize("how", ["folder", "pipe", "hole", "gone"])
def test_records_that_are_no_file(tmp_path, how):
    path = tmp_path / "a\nb" / RECORD_FILE
    path.parent.mkdir()
    if how == "hole":
        with path.open("wb") as file:
            file.truncate(1 << 42)
    elif how == "gone":
        path.symlink_to("nowhere")
    else:
        (os.mkfifo if how == "pipe" else os.mkdir)(path)
    says = "No such file" if how == "gone" else ".* damaged record; remove"
    with limits(), pytest.raises(ValueError, match=rf"a.b/record\.json: {says}") as error:
        find_records([tmp_path])
    assert str(error.value).isprintable()


def test_records_below_more_folders_than_python_can_call(tmp_path):
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1900):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    spoilt(tmp_path / "run")
    try:
        assert len(find_records([tmp_path])) == 1
    finally:  # What pytest would clear up with calls itself once for each of them, too.
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_resuming_with_a_record_of_wrong_values(tmp_path, capsys):
    path = spoilt(tmp_path / "run", seconds="long", status="done")
    options = ["--epochs", "2", "--workers", "1"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "digits", "--resume", "--out", str(path.parent), *options])
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and "record.json: damaged" in said


# Checkpoints.


def checkpoints(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, World.single(), {"lr": 0.1})


def test_folders_with_steps_that_are_no_numbers_of_ours(tmp_path):
    checkpoints(tmp_path).save(10, lambda: {}, {"own": torch.arange(3)})
    for name in ("step-" + "9" * 200, "step-5", "step-00000000\uff17", "step-0000000000000001"):
        (tmp_path / name).mkdir()
    assert checkpoints(tmp_path).load().step == 10


@pytest.mark.parametrize("how", ["identity", "nested", "hole", "pipe", "size"])
def test_manifests_that_no_run_writes(tmp_path, how):
    checkpoints(tmp_path).save(10, lambda: {}, {})
    path = tmp_path / "step-000000010" / "manifest.json"
    manifest = json.loads(path.read_text())
    if how in ("hole", "pipe"):
        path = path.with_name("shared.safetensors")
        path.unlink()
        if how == "pipe":
            os.mkfifo(path)
        else:
            with path.open("wb") as file:
                file.truncate(1 << 42)
    else:
        manifest |= {
            "identity": {"identity": {"lr": "\x1b" * 10**6}},
            "nested": {"identity": {"lr": deep(300)}},
            "size": {"files": {"shared.safetensors": [10**400, 0, 0]}},
        }[how]
        path.write_text(json.dumps(manifest))
    with limits(), pytest.raises(NoUsableCheckpoint, match="step 10") as error:
        checkpoints(tmp_path).load()
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


@pytest.mark.parametrize("tree", ["[" * 10**5, '{"tensor": []}', '{"dict": [[{}, 1]]}', "9" * 5000])
def test_states_of_odd_trees(tree):
    head = json.dumps({"__metadata__": {"tree": tree}}).encode()
    with pytest.raises(ValueError, match="not a saved state"):
        unpack(len(head).to_bytes(8, "little") + head)
