"""`gradherd data list | get | check`; downloads come from a server of our own."""

import functools
import hashlib
import http.server
import json
import tarfile
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.cli.main import main
from gradherd.lab.tasks.data_files import cache_dir
from gradherd.lab.tasks.datasets import DATASETS
from tests.lab.tasks import fake_data
from tests.lab.tasks.fake_data import EVERY_TASK, task_named


def run(capsys, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["data", *map(str, args)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


class Server(http.server.SimpleHTTPRequestHandler):
    asked: list[str]
    lie = 0

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def send_header(self, key, value):
        more = self.lie if key == "Content-Length" else 0
        super().send_header(key, str(int(value) + more) if more else value)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A public source: serves a folder, and the sets know nothing but it."""
    folder = tmp_path / "public"
    folder.mkdir()
    Server.asked, Server.lie = [], 0
    handler = functools.partial(Server, directory=str(folder))
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    address = f"http://127.0.0.1:{httpd.server_port}"
    for name, dataset in list(DATASETS.items()):
        downloads = tuple(f"{address}/{url.rpartition('/')[2]}" for url in dataset.downloads)
        monkeypatch.setitem(DATASETS, name, replace(dataset, downloads=downloads))
    yield folder
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def offer(folder: Path, name: str) -> None:
    """Put a made-up set on the server as its public source has it."""
    work = folder.parent / "work"
    work.mkdir(exist_ok=True)
    form = {"cifar10": "archive", "fashion-mnist": "compact"}.get(name, "public")
    fake_data.MAKERS[name](work, form)
    files = [path for path in work.rglob("*") if path.is_file()]
    if name == "sst2":
        with zipfile.ZipFile(folder / "SST-2.zip", "w") as archive:
            for path in files:
                archive.write(path, f"SST-2/{path.name}")
        return
    for path in files:
        parts = path.name.split(".")
        renamed = f"{parts[1]}.txt" if path.name.startswith("wiki.") else path.name
        path.rename(folder / renamed)


@pytest.mark.parametrize("name", [name for name, one in DATASETS.items() if one.downloads])
def test_get_makes_a_set_usable(capsys, any_edition, server, name):
    offer(server, name)
    code, out, err = run(capsys, "get", name, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert list(result) == ["name", "folder", "files", "bytes"]
    folder = cache_dir() / name
    assert (result["name"], result["folder"]) == (name, str(folder))
    assert sorted(result["files"]) == sorted(path.name for path in folder.iterdir())
    assert result["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert [path.name for path in cache_dir().iterdir()] == [name]  # nothing half done
    if name != "gpt2-bpe":  # which no task needs alone
        task = next(task for task in map(task_named, EVERY_TASK) if task.data == (name,))
        assert len(task.load(limit=10).train[0]) == 10

    asked = len(Server.asked)
    code, out, _ = run(capsys, "get", name)
    assert code == 0 and "checked" in out and len(Server.asked) == asked


def test_get_into_a_folder_of_ones_own(capsys, any_edition, server, tmp_path):
    offer(server, "m4")
    code, out, _ = run(capsys, "get", "m4", "--data-dir", tmp_path / "mine")
    assert code == 0 and str(tmp_path / "mine" / "m4") in out
    assert not cache_dir().exists()
    assert json.loads(run(capsys, "list", "--data-dir", tmp_path / "mine", "--json")[1])


def fails(capsys, name: str, complaint: str) -> None:
    code, out, err = run(capsys, "get", name)
    assert (code, out) == (1, "") and err.startswith("gradherd: ") and err.count("\n") == 1
    assert complaint in err
    assert not cache_dir().exists()


def test_get_without_network(capsys, monkeypatch):
    m4 = DATASETS["m4"]
    gone = replace(m4, downloads=("http://127.0.0.1:9/x.csv",))
    monkeypatch.setitem(DATASETS, "m4", gone)
    fails(capsys, "m4", "cannot fetch http://127.0.0.1:9/x.csv: ")


def test_get_what_is_not_there(capsys, any_edition, server):
    fails(capsys, "m4", "csv: HTTP Error 404: File not found; try again, or put m4/ with Weekly")


def test_get_when_the_connection_breaks(capsys, any_edition, server):
    offer(server, "m4")
    Server.lie = 1000
    fails(capsys, "m4", "the connection ended after ")


def test_get_refuses_what_was_not_published(capsys, server):
    offer(server, "m4")
    fails(capsys, "m4", "the download of 'm4' is not the published data set: ")


def test_get_refuses_one_wrong_byte(capsys, any_edition, server, monkeypatch):
    offer(server, "gpt2-bpe")
    dataset = DATASETS["gpt2-bpe"]
    (form,) = dataset.forms
    files = tuple(
        replace(file, sha256=hashlib.sha256((server / file.name).read_bytes()).hexdigest())
        for file in form.files
    )
    sums = replace(dataset, forms=(replace(form, files=files),))
    monkeypatch.setitem(DATASETS, "gpt2-bpe", sums)
    path = server / "vocab.bpe"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"c at", b"c au"))
    fails(capsys, "gpt2-bpe", "vocab.bpe is damaged, or not the published file")
    path.write_bytes(whole)
    assert run(capsys, "get", "gpt2-bpe")[0] == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"<html>", "not a valid archive"), (b"PK\x05\x06" + bytes(18), "some files are missing")],
)
def test_get_refuses_an_archive_that_is_none(capsys, any_edition, server, content, complaint):
    (server / "SST-2.zip").write_bytes(content)
    fails(capsys, "sst2", complaint)


@pytest.mark.parametrize("case", ["link", "out", "html"])
def test_get_refuses_an_archive_that_leads_out(capsys, any_edition, server, case):
    path = server / "cifar-10-binary.tar.gz"
    if case == "html":
        path.write_bytes(b"<html>")
    else:
        name = "../../outside" if case == "out" else "cifar-10-batches-bin/data_batch_1.bin"
        entry = tarfile.TarInfo(name)
        if case == "link":
            entry.type, entry.linkname = tarfile.LNKTYPE, "/etc/passwd"
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(entry)
    fails(capsys, "cifar10", "cifar-10-binary.tar.gz is not a valid archive")


def test_get_mends_what_is_damaged(capsys, any_edition, server):
    offer(server, "fashion-mnist")
    assert run(capsys, "get", "fashion-mnist")[0] == 0
    path = cache_dir() / "fashion-mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:99])
    assert run(capsys, "check")[0] == 1
    assert run(capsys, "get", "fashion-mnist")[0] == 0
    assert run(capsys, "check")[0] == 0


def test_get_into_a_place_that_cannot_be_written(capsys, any_edition, server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    code, _, err = run(capsys, "get", "m4", "--data-dir", tmp_path / "file")
    assert code == 1 and "cannot write 'm4' into" in err and err.count("\n") == 1


def test_get_what_has_no_source(capsys):
    fails(capsys, "hmda-2017", "no download is known for 'hmda-2017': make hmda-2017/")


def test_list_tells_where_and_how(capsys, any_edition, tmp_path):
    fake_data.hmda(tmp_path, "compact")
    code, out, err = run(capsys, "list", "--data-dir", tmp_path, "--json")
    result = json.loads(out)
    assert (code, err) == (0, "") and list(result) == ["folders", "sets"]
    assert result["folders"] == [str(tmp_path), str(cache_dir())]
    sets = {entry["name"]: entry for entry in result["sets"]}
    assert list(sets) == list(DATASETS)
    assert sets["hmda-2017"] == {
        "name": "hmda-2017",
        "title": DATASETS["hmda-2017"].title,
        "tasks": ["hmda"],
        "found": str(tmp_path / "hmda-2017"),
        "form": "npz",
        "advice": None,
    }
    assert sets["cifar10"]["found"] is None
    assert sets["cifar10"]["advice"].startswith("gradherd data get cifar10, or unpack ")
    assert sets["cifar10"]["tasks"] == ["cifar10-lenet"]
    assert sets["wikitext-2"]["tasks"] == []  # of studies alone


def test_list_reads_well_for_people(capsys, any_edition, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    fake_data.hmda(tmp_path / "[red]", "compact")  # a name that looks like markup
    code, out, _ = run(capsys, "list", "--data-dir", tmp_path / "[red]")
    assert code == 0 and all(name in out for name in DATASETS)
    assert "[red]/hmda-2017 (npz)" in out and "gradherd data get m4" in out
    assert "scikit-learn is needed for digits, digits-mlp" in out


def test_check_tells_whole_from_damaged(capsys, any_edition, tmp_path):
    fake_data.m4(tmp_path, "compact")
    fake_data.hmda(tmp_path, "compact")
    assert run(capsys, "check", "--data-dir", tmp_path)[0] == 0
    path = tmp_path / "m4" / "Weekly-train.csv.xz"
    path.write_bytes(path.read_bytes()[:-5])
    code, out, err = run(capsys, "check", "--data-dir", tmp_path, "--json")
    assert code == 1 and err.startswith("gradherd: failed: damaged: m4; ") and err.count("\n") == 1
    sets = {entry["name"]: entry for entry in json.loads(out)["sets"]}
    assert list(sets["m4"]) == ["name", "status", "found", "form", "problem"]
    assert sets["m4"]["status"] == "damaged" and "Weekly-train.csv.xz" in sets["m4"]["problem"]
    assert sets["hmda-2017"]["status"] == "ok" and sets["hmda-2017"]["problem"] is None
    assert sets["sst2"]["status"] == "missing" and sets["sst2"]["found"] is None
    code, out, _ = run(capsys, "check", "--data-dir", tmp_path)
    assert code == 1 and "damaged" in out


def test_check_says_what_it_could_not_read(capsys, any_edition, tmp_path, monkeypatch):
    pytest.importorskip("PIL")
    fake_data.cifar(tmp_path, "compact")
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    code, out, _ = run(capsys, "check", "--data-dir", tmp_path, "--json")
    entry = next(one for one in json.loads(out)["sets"] if one["name"] == "cifar10")
    assert code == 0 and entry["status"] == "unchecked" and "Pillow" in entry["problem"]


@pytest.mark.parametrize("command", ["list", "check"])
def test_a_folder_that_is_none(capsys, tmp_path, command):
    code, out, err = run(capsys, command, "--data-dir", tmp_path / "gone")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "--data-dir must be a folder that exists" in err


def test_the_real_sets_are_whole(capsys, real):
    code, out, _ = run(capsys, "check", "--data-dir", real, "--json")
    statuses = {entry["name"]: entry["status"] for entry in json.loads(out)["sets"]}
    assert code == 0 and set(statuses.values()) <= {"ok", "missing", "unchecked"}
    assert "ok" in statuses.values()
