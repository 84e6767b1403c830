"""Wrong calls, damaged files, full disks, Ctrl-C: one line, the right code, nothing left behind."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from gradherd.cli.main import main
from gradherd.lab.train.record import read_record
from tests.launched import printed_under_torchrun

REAL = os.environ.get("GRADHERD_DATA")
ROOT = Path(__file__).parents[2]
M4 = f"{ROOT}/studies/tasks/m4.py:M4MLP"
QUICK = ("--virtual", "--workers", "2", "--epochs", "1", "--limit", "16")
"""Options of a run that takes no time and no process."""
BAD_TASK = """
from dataclasses import dataclass
from gradherd.lab.tasks.digits import Digits

@dataclass(frozen=True)
class Bad(Digits):
    def {method}(self, *args, **kwargs):
        raise {error}("the\\nmoon is full")
"""

ONE_SIDED_TASK = """
import time
from dataclasses import dataclass
import torch.distributed as dist
from gradherd.lab.tasks.digits import Digits

@dataclass(frozen=True)
class Bad(Digits):
    def load(self, *args, **kwargs):
        if dist.get_rank() == 0:
            time.sleep(50)  # is ended long before: its peer has failed
        raise RuntimeError("the moon is full")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """A folder to stand in, away from the data and the cache of whoever runs the tests."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("GRADHERD_DATA", raising=False)
    monkeypatch.delenv("GRADHERD_TRACEBACK", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return here


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file with what is in it, every folder with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def refused(capsys, *args, code: int = 2) -> str:
    """Run a command that must fail in one line and leave everything as it was; return the line."""
    before = contents(Path.cwd())
    with pytest.raises(SystemExit) as stop:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    check_refusal(stop.value.code, out, err, code)
    assert contents(Path.cwd()) == before
    return err


SEVERAL = """
import json, sys
from gradherd.cli.main import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as stop:
        print(end=f"\\0{stop.code}\\0", flush=True)
        print(end="\\0", file=sys.stderr, flush=True)
"""


def said_by_a_process(*calls: list[str]) -> list[tuple[int, str, str]]:
    """Run commands in a process of its own, so that what worker processes say is heard, too.

    All in the same one: it and the server of its ranks import torch once.

    Returns:
        Exit code, stdout and stderr of each call.
    """
    command = [sys.executable, "-c", SEVERAL, json.dumps(calls)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    outs, codes = ran.stdout.split("\0")[:-1:2], ran.stdout.split("\0")[1::2]
    return list(zip(map(int, codes), outs, ran.stderr.split("\0")[:-1], strict=True))


def check_refusal(exit_code: int | str | None, out: str, err: str, code: int) -> None:
    assert (exit_code, out) == (code, ""), err
    assert err.startswith("gradherd: ") and err.count("\n") == 1, err


COMMANDS = r"""
--nope | unknown command '--nope'
fly | unknown command 'fly'; choose from: demo
trian | unknown command 'trian': did you mean train?
train digits --epoch 3 | there is no option or argument --epoch here: did you mean --epochs? (see
train digits --epochs 1e3 | --epochs must be a whole number, got '1e3'
train digits --batch-size 1.5 | --batch-size must be a whole number, got '1.5'
train digits --weight-decay -1 | --weight-decay must be in [0, inf)
train digits --json=yes | --json takes no value, got 'yes' (see
train digits --lr-warmup 2 | --lr-warmup must be in [0, 1), got 2
train digits --lr-schedule linear | --lr-schedule must be one of constant, cosine, got 'linear'
train digits --optimizer lion | --optimizer must be one of sgd, adamw, got 'lion'
train digits --autocast bf16 | --autocast 'bf16' works with simulated workers
train digits --autocast fp16 --virtual | --autocast must be one of bf16, got 'fp16'
train digits --lr-drop 0.1 | --lr-drop and lr_drop_every go together, got 0.1 and None
train digits --lr-drop 2 --lr-drop-every 1 | --lr-drop must be in (0, 1], got 2
train digits --local-steps 0 | --local-steps must be at least 1, got 0
train digits --sketch-size 8 | --sketch-size
train digits --augment | task 'digits' has no augmentation: leave out augment
train digits --order cd-grab --rows batch | rows 'batch' order whole batches: got unit 1 of 4
compare digits --tune lr=1,2 --limit 2 --virtual | 2 examples are too few to hold out a share of 0.2
train digits --device gpu | --device must be cpu or cuda, got 'gpu'
train digits --checkpoint-every 0 | --checkpoint-every
train digits extra | there is no option or argument extra here
train digits --nope | there is no option or argument --nope here
train digits.py | 'digits.py'
train :X | ':X'
train digits --unit 0 | --unit must be at least 1, got 0
train digits --limit 0 | --limit must be at least 1, got 0
train digits --resume | --resume needs --out
train digits --workers 1000000 | --workers starts at most 256 processes, got 1000000: --virtual
train | TASK is missing: Name of a task
train digit | 'digit' .. digits-mlp .. file.py:ClassName
train away.py:My | there is no file 'away.py'
train digits --order | --order: expected one argument (see
train digits --order grub | --order: unknown 'grub'; choose from d-rr
train digits --sparsify top | --sparsify: unknown 'top'; choose from dense
train digits --sparsify topk --density 0 | --density must be in (0, 1], got 0
train digits --sparsify topk --density few | --density must be a number, got 'few'
train digits --density 0.1 | --density 0.1 has no effect: nothing is sparsified
train digits --workers 0 | --workers must be at least 1, got 0
train digits --epochs 0 | --epochs must be at least 1, got 0
train digits --batch-size 0 | --batch-size must be at least 1
train digits --limit -5 | --limit must be at least 1, got -5
train digits --seed -1 | --seed must be
train digits --seed 1.5 | --seed must be a whole number, got '1.5' (see
train digits --seed 1000000000000000000000000000000 | --seed must be
train digits --unit 3 | --unit must divide batch_size 4, got 3
train digits --rows all | --rows: unknown 'all'
train digits --lr -1 | --lr must be in (0, inf)
train digits --lr nan | --lr must be in (0, inf) .. nan
train digits --lr inf | --lr must be in (0, inf) .. inf
train digits --lr fast | --lr must be a number, got 'fast' (see
train digits --weight-decay nan | --weight-decay .. nan
train digits --momentum 1 | --momentum must be in [0, 1), got 1
train hmda --data-dir away | 'away' .. folder
train digits --data-dir away | --data-dir must be a folder that exists, got 'away'
train digits --data-dir '' | --data-dir must be a path, got ''
study kind.toml --data-dir '' | --data-dir must be a path, got ''
train fashion-lenet | 'fashion-mnist' .. gradherd data get fashion-mnist .. cache
compare digits --tune lr | --tune
compare digits --tune momentum=1 | --tune
compare digits --tune lr=-1,1 | --tune
compare digits --tune lr=1 --lr 1 | --lr and --tune
compare digits --sparsifiers exdyna:x | exdyna:x
compare digits --sparsifiers exdyna:2 | exdyna:2
compare digits --sparsifiers exdyna:0.1@0 | exdyna:0.1@0
compare digits --sparsifiers dense,exdyna-int3 | unknown 'int3'; choose from fp32
compare digits --sparsifiers exdyna,dense-int4 | 'dense-int4' has a format of values
compare digits --seeds 1.5 | --seeds must be a whole number, got '1.5'
compare digits --resume | --resume needs --out
compare digits --seeds 10000000000 | --seeds must be at most 10,000, got 10000000000
compare hmda | 'hmda-2017' .. hmda-2017-NJ.npz
compare digits --orders d-rr,x | --orders: unknown 'x'; choose from d-rr
compare digits --sparsifiers x | --sparsifiers: unknown 'x'; choose from dense
compare digits --sparsifiers dense,topk --density nan | --density must be in (0, 1], got nan
compare digits --density 0.1 | --density 0.1
compare digits --seeds 0 | --seeds must be at least 1, got 0
compare digits --orders cd-grab | only one arm (cd-grab, dense) .. at least two .. gradherd train
compare digits --orders d-rr,d-rr | only one arm
demo --workers 1000 | --workers must be at most 256, got 1000
demo --seeds 100000 | --seeds must be at most 10,000
demo --workers 0 | --workers must be at least 1, got 0
study | FILE is missing
study nowhere.toml | nowhere.toml: No such file
study bad.toml | bad.toml
study kind.toml | kind.toml: there is no title
study bin.toml | bin.toml
study methods.toml | methods.toml: methods must be a table, got {'mine': 3}
report null | null/record.json: not a record of a run: format is None, expected 1
study kind.toml --jobs 0 | --jobs must be at least 1, got 0
study folder.toml | folder.toml: it is not a file
herding --units 0 | --units must be at least 1, got 0
herding --dim -1 | --dim must be at least 1, got -1
herding --orders all | --orders: unknown 'all'
herding --workers 99999999999999999999999 | must be at most 8,589,934,592
herding --workers 0 | --workers must be at least 1, got 0
herding --seed -3 | --seed must be at least 0, got -3
herding --orders , | --orders must name at least one of d-rr
replay order flat.npy | flat.npy: array has shape (5,)
replay order objects.npy | objects.npy: not a .npy file of numbers (it holds Python objects)
replay order text.npy | text.npy: not a .npy file
replay order nan.npy | nan.npy
replay order complex.npy | expected real numbers
replay order words.npy | expected numbers
replay sparsify flat.npy | flat.npy
replay sparsify nan.npy | step 0 is not finite
replay sparsify cube.npy --values int3 | --values must be one of fp32, bf16
replay sparsify cube.npy --threshold x | --threshold must be one of consensus, online, got 'x'
replay sparsify cube.npy --method deft | unknown 'deft'; choose .. deft is now in studies/methods
compare digits --sparsifiers sidco | unknown 'sidco'; choose .. sidco is now in studies/methods
compare digits --orders d-rr,saw | unknown 'saw'; choose .. saw is now in studies/methods
replay sparsify cube.npy --out flat.npy | flat.npy
replay order cut.npy | cut.npy: not a .npy file of numbers (its end is missing)
replay order folder.npy | folder.npy: not a .npy file of numbers (it is not a file)
replay | replay needs a subcommand: replay order
replay ordre | unknown command 'replay ordre': did you mean replay order?
replay order | FILE is missing: Array (workers, units, dim)
replay order none.npy | none.npy: no such file
replay order cube.npy --order cd-grab,d-rr | --order: unknown 'cd-grab,d-rr'
replay order cube.npy --order d-rr --signs walk | --signs 'walk' has no effect
replay order cube.npy --signs x | --signs: unknown 'x'; choose from greedy
replay order cube.npy --start x | --start must be one of identity, random, got 'x'
replay order cube.npy --rounds -1 | --rounds must be at least 0, got -1
replay sparsify cube.npy --density 2 | --density must be in (0, 1], got 2.0
replay sparsify cube.npy --method best | --method: unknown 'best'; choose from dense, exdyna
replay sparsify cube.npy --method topk --threshold online | --threshold online has no effect
bench step --workers '' | --workers must name at least one number
bench rows --batch 0 | --batch must be at least 1, got 0
bench sparsify --density 0 | --density must be in (0, 1], got 0
bench step --batch 0 | --batch must be at least 1, got 0
bench step --params 0 | --params: '0' is not a positive whole number
bench coordination --repeats 0 | --repeats must be at least 1, got 0
bench dance | unknown command 'bench dance'
bench coordination --dim inf | --dim: 'inf' is not a positive whole number
bench rows --device meta | --device must be cpu or cuda, got 'meta'
bench rows --params 1e4,1e5 | --params: '1e4,1e5' is not a positive whole number
advise --params 1M --backward | --backward: expected one argument
advise --params 1M --backward 1 --bandwidth 0 | '0' must be above 0
advise --params 1e99 --backward 1s | --params: '1e99' must be at most 1e+15 parameters
advise | --params is missing: the number of parameters, such as 25M
advise --params 25M | --backward is missing: the time of a backward pass on one worker
advise --params many --backward 50ms | --params: 'many' is not a number of parameters
advise --params 0.5 --backward 50ms | --params must be in [1, inf), got 0.5
advise --model resnet50 --bandwidth fast | --bandwidth: 'fast' is not a link
advise --model resnet50 --latency '1 week' | --latency: '1 week' is not a time
advise --model resnet50 --workers 1000000000 | --workers must be at most
advise --model resnet50 --density nan | --density must be in (0, 1], got nan
advise --model resnet50 --rank 0 | --rank must be in [1, inf), got 0
advise --model resnet50 --side 0 | --side must be in [1, inf), got 0.0
advise --model resnet50 --overlap 2 | --overlap must be in [0, 1], got 2.0
advise --model resnet50 --device tpu | --device: unknown 'tpu'
advise --params 1e6 --measure | --measure on a GPU needs torchrun
advise --params 1e12 --measure --device cpu | --measure builds a model of 1e+12
advise --params 1e6 --measure --density 7 | --density must be in (0, 1]
advise --model resnet51 | --model: unknown 'resnet51'; choose from resnet18
advise --model resnet50 --params 1M | --model resnet50 has its own --params
advise --model resnet50 --device cpu | with --device cpu give --backward
report broken | broken/record.json: no JSON after line 1, column 7: a damaged record
report text.npy | text.npy
report | name at least one folder
report away | away: no such folder
report . --out away/x.html | --out away/x.html: there is no folder away
report broken --oout x | there is no option or argument --oout here
report broken --watch | no option or argument --watch here
data check --data-dir flat.npy | : --data-dir must be a folder that exists, got 'flat.npy'
data get nothing | 'nothing'
doctor --json yes | there is no option or argument yes here
"""
"""A wrong call, and what the one line about it says; " .. " stands for anything."""


@pytest.fixture
def bad_files(place):
    arrays = {
        "cube": np.zeros((2, 3, 4)),
        "flat": np.zeros(5),
        "nan": np.full((2, 2, 4), np.nan),
        "complex": np.zeros((2, 2, 4), dtype=complex),
        "words": np.array([[["a"]]]),
        "objects": np.array([{}], dtype=object),
    }
    for name, array in arrays.items():
        np.save(place / f"{name}.npy", array)
    (place / "text.npy").write_text("hello")
    (place / "cut.npy").write_bytes((place / "cube.npy").read_bytes()[:150])
    for folder in ("folder.npy", "folder.toml", "broken"):
        (place / folder).mkdir()
    (place / "broken" / "record.json").write_text('{"a": ')
    (place / "null").mkdir()
    (place / "null" / "record.json").write_text("null")
    methods = 'kind = "compare"\ntitle = "t"\nmethods = {mine = 3}\n[[arms]]\norder = "d-rr"\n'
    (place / "methods.toml").write_text(methods)
    (place / "bad.toml").write_text("kind = ")
    (place / "kind.toml").write_text('kind = "dance"\n')
    (place / "bin.toml").write_bytes(b"\xff\xfe\x00")


def test_wrong_calls_say_what_is_wrong_with_which_value(capsys, bad_files):
    # In one test: the files and the checks around each call cost more than the calls.
    for line in COMMANDS.strip().splitlines():
        call, says = line.split(" | ")
        err = refused(capsys, *shlex.split(call))
        assert all(words in err for words in says.split(" .. ")), f"{line}: {err}"
        for internal in ("Traceback", "NoneType", "Expected", "Errno", "argparse", "<class"):
            assert internal not in err, line


DIGITS = "from gradherd.lab.tasks.digits import Digits\nclass X(Digits):"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there(capsys):
    assert "'cuda' cannot be used here" in refused(capsys, "train", "digits", "--device", "cuda")


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("x = (", "X", ["SyntaxError", "line 1"]),
        ("import away_from_here", "X", ["away_from_here"]),
        ("class X: pass", "X", ["X is not a task", "lacks", "defaults"]),
        ("class X: pass", "Y", ["has no class 'Y'"]),
        ("X = 3", "X", ["has no class 'X'"]),
        ("class X:\n def __init__(self): raise KeyError('k')", "X", ["X() fails", "'k'"]),
        (
            f"{DIGITS}\n def load(self): return super().load()",
            "X",
            ["'digits': load(data_dir, limit) must be possible, with 2 arguments: too many"],
        ),
        (f"{DIGITS}\n def model(self): pass", "X", ["return a torch.nn.Module, got a NoneType"]),
        (
            f"{DIGITS}\n def model(self): return super().model().requires_grad_(False)",
            "X",
            ["its model has no parameter that is trained"],
        ),
        (f"{DIGITS}\n name = ''", "X", ["X.name must be a text, got ''"]),
        (f"{DIGITS}\n metric_name = None", "X", ["X.metric_name must be a text, got None"]),
        (f"{DIGITS}\n higher_is_better = 'yes'", "X", ["must be True or False, got 'yes'"]),
        (f"{DIGITS}\n data = 'm4'", "X", ["X.data must be a tuple of names of data sets, got"]),
        (f"{DIGITS}\n data = ('moon',)", "X", ["'moon'; known are hmda-2017"]),
        (f"{DIGITS}\n model = None", "X", ["'digits': model must be a method, got a NoneType"]),
        (f"{DIGITS}\n metric = None", "X", ["'digits': metric must be a method, got a NoneType"]),
        pytest.param(
            "import sys; sys.exit(3)",
            "X",
            ["mine.py", "SystemExit"],
        ),
    ],
)
def test_a_file_that_holds_no_task(capsys, place, source, kind, words):
    (place / "mine.py").write_text(source)
    err = refused(capsys, "train", f"mine.py:{kind}", *QUICK)
    assert f"'mine.py:{kind}'" in err or "'digits'" in err, err
    assert all(word in err for word in words), err


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ("super().loss(*args).detach()", "loss() must depend on the model"),
        ("super().loss(*args).round().long()", "got a tensor of shape () of torch.int64"),
        ("super().loss(*args) + 0j", "got a tensor of shape () of torch.complex64"),
    ],
)
def test_a_loss_that_cannot_be_trained(capsys, place, loss, words):
    # Runs side by side would train on zeros without a word.
    (place / "mine.py").write_text(f"{DIGITS}\n def loss(self, *args): return {loss}")
    assert words in refused(capsys, "train", "mine.py:X", *QUICK)


@pytest.mark.parametrize("rank", ["x", None])
def test_what_torchrun_has_left_in_a_shell_is_not_torchrun(capsys, monkeypatch, rank):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "left")
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    assert "--lr must be in (0, inf)" in refused(capsys, "train", "digits", "--lr", "nan")


@pytest.mark.parametrize("command", ["train", "compare", "demo"])
def test_an_out_that_is_not_ours(capsys, place, command):
    task = [] if command == "demo" else ["digits"]
    (place / "file").write_text("mine")
    (place / "full" / "empty").mkdir(parents=True)  # not ours to remove
    (place / "full" / "keep.txt").write_text("mine, too")
    for out, words in [
        ("file", ["--out 'file'", "is a file"]),
        ("full", ["--out 'full'", "not empty", "name a new folder"]),
        ("file/below", ["--out 'file/below'", "Not a directory"]),
    ]:
        err = refused(capsys, command, *task, "--out", out)
        assert all(word in err for word in words), err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_out_in_a_folder_that_cannot_be_written_to(capsys, place):
    (place / "locked").mkdir(mode=0o555)
    err = refused(capsys, "train", "digits", "--out", "locked/out")
    assert "--out 'locked/out'" in err and "Permission denied" in err


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mine.py", "train mine.py:X"),
        ("cube.npy", "replay order cube.npy"),
        ("bad.toml", "study bad.toml"),
        ("null/record.json", "report null"),
    ],
)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read(capsys, place, bad_files, name, call):
    (place / "mine.py").write_text(DIGITS + " pass")
    (place / name).chmod(0)
    with pytest.raises(SystemExit) as stop:
        main(call.split())
    check_refusal(stop.value.code, *(told := capsys.readouterr()), 2)
    assert name in told.err and "ermission denied" in told.err
    assert not any(word in told.err for word in ("Errno", "damaged", "numbers"))


@pytest.mark.parametrize("method", ["load", "model"])
def test_a_task_that_fails_leaves_no_empty_folder(capsys, place, method):
    (place / "mine.py").write_text(BAD_TASK.format(method=method, error="RuntimeError"))
    err = refused(capsys, "train", "mine.py:Bad", *QUICK, "--out", "out", code=1)
    assert "RuntimeError: the moon is full" in err


@pytest.mark.parametrize(
    "out",
    [
        pytest.param([]),
        pytest.param(["--out", "a/b/c"]),
    ],
    ids=["default", "deep"],
)
def test_a_task_that_fails_leaves_no_empty_folder_above(capsys, place, out):
    (place / "mine.py").write_text(BAD_TASK.format(method="load", error="RuntimeError"))
    refused(capsys, "train", "mine.py:Bad", *QUICK, *out, code=1)


LATE_TASK = """
from gradherd.lab.tasks.digits import Digits

class Bad(Digits):
    calls = 0
    def metric(self, *args):
        Bad.calls += 1
        if Bad.calls > 2:
            raise RuntimeError("the moon is full")
        return 0.0
"""


def test_a_task_that_fails_before_it_is_trained_leaves_nothing(capsys, place):
    # With the same --out, the call that is mended would be refused otherwise.
    (place / "mine.py").write_text(BAD_TASK.format(method="loss", error="RuntimeError"))
    err = refused(capsys, "train", "mine.py:Bad", *QUICK, "--out", "out", code=1)
    assert "RuntimeError: the moon is full" in err


def test_a_task_that_fails_in_training_says_so_in_its_record(capsys, place):
    (place / "mine.py").write_text(LATE_TASK)
    with pytest.raises(SystemExit) as stop:
        main(["train", "mine.py:Bad", *QUICK, "--epochs", "3", "--out", "out"])
    out, err = capsys.readouterr()
    check_refusal(stop.value.code, out, err, 1)
    assert "RuntimeError: the moon is full" in err and "--out out --resume" not in err
    record = read_record(place / "out" / "record.json")
    assert (record.status, len(record.epochs)) == ("failed", 1)


def test_a_task_too_large_for_the_memory(capsys, place):
    load = "import torch; torch.empty(10**15)"
    (place / "mine.py").write_text(f"{DIGITS}\n def load(self, *args): {load}")
    err = refused(capsys, "train", "mine.py:X", *QUICK, code=1)
    assert err == "gradherd: out of memory: you tried to allocate 4000000000000000 bytes\n"


def test_a_task_that_raises_value_error_has_failed(capsys, place):
    (place / "mine.py").write_text(BAD_TASK.format(method="load", error="ValueError"))
    err = refused(capsys, "train", "mine.py:Bad", *QUICK, "--out", "out", code=1)
    assert "the moon is full" in err


def test_what_workers_say(capsys, place):
    options = ["train", "digits", "--epochs", "1", "--limit", "16", "--out", "a"]
    with pytest.raises(SystemExit) as stop:
        main([*options, "--workers", "2"])
    assert stop.value.code == 0
    capsys.readouterr()
    err = refused(capsys, *options, "--workers", "2", "--resume", "--order", "cd-grab")
    assert "cd-grab" in err and "d-rr" in err
    # A task that fails on one of the workers, data that were cut in half, and a run that goes on.
    (place / "mine.py").write_text(ONE_SIDED_TASK)
    calls = [["train", "mine.py:Bad", "--workers", "2", "--epochs", "1", "--out", "out"]]
    if cut := REAL and (Path(REAL) / "m4").is_dir() and cut_in_half(place, "Weekly-test"):
        options_of_m4 = ["--data-dir", "data", "--workers", "2", "--epochs", "1", "--out", "out"]
        calls += [["train", M4, *options_of_m4]]
    before = contents(place)
    *refusals, done = said_by_a_process(
        *calls, [*options, "--workers", "1", "--epochs", "2", "--resume"]
    )
    for refusal in refusals:
        check_refusal(*refusal, 1)
    assert "RuntimeError: the moon is full" in refusals[0][2]
    if cut:
        err = refusals[1][2]
        assert cut.name in err and "again" in err and "gradherd.lab.tasks" not in err
    code, _, err = done
    assert code == 0 and err.count("a state of 2 ranks continues on 1") == 1
    record = json.loads((place / "a" / "record.json").read_text())
    assert [row["epoch"] for row in record["epochs"]] == [1, 2]
    assert [workers for _, workers in record["config"]["world_sizes"]] == [2, 1]
    # Only the run that went on has left something.
    after = contents(place)
    assert {name for name in after if after[name] != before.get(name)} <= {
        name for name in after if name.split("/")[0] == "a"
    }


def cut_in_half(place: Path, name: str) -> Path:
    """Copy a real set, with one of its files cut in half."""
    if not REAL:
        pytest.skip("needs the real data sets: set GRADHERD_DATA to their folder")
    source = Path(REAL) / "m4"
    if not source.is_dir():
        pytest.skip("needs the real data set m4, which is not in GRADHERD_DATA")
    target = place / "data" / "m4"
    target.mkdir(parents=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    path = next(target.glob(f"{name}*"))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("name", ["Weekly-train", "Weekly-test"])
def test_data_that_was_cut_in_half(capsys, place, name):
    path = cut_in_half(place, name)
    err = refused(capsys, "train", M4, "--data-dir", "data", *QUICK, "--out", "out", code=1)
    assert path.name in err and "again" in err


@pytest.fixture
def small_disk(place):
    """A disk of 64 KiB, and a way to leave so many pages of it free."""
    disk = place / "disk"
    disk.mkdir()
    made = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
    )
    if not made or made.returncode:
        pytest.skip("needs to mount a small disk, which this user may not")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def leave_free(disk: Path, pages: int) -> None:
    page = os.sysconf("SC_PAGE_SIZE")
    free = shutil.disk_usage(disk).free
    (disk / "other").write_bytes(bytes(free - pages * page))
    assert shutil.disk_usage(disk).free == pages * page


@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_full_disk_leaves_nothing_behind(capsys, small_disk, command):
    leave_free(small_disk, 0)
    err = refused(capsys, command, "digits", *QUICK, "--out", "disk/out", code=1)
    assert "failed: No space left on device: disk/out/" in err and "record.json" in err


def test_a_disk_that_fills_up_leaves_a_whole_record(capsys, small_disk):
    leave_free(small_disk, 2)
    options = ["--virtual", "--workers", "2", "--limit", "16", "--epochs", "40"]
    with pytest.raises(SystemExit) as stop:
        main(["train", "digits", *options, "--out", "disk/out"])
    out, err = capsys.readouterr()
    check_refusal(stop.value.code, out, err, 1)
    assert "No space left on device" in err
    left = sorted(path.name for path in (small_disk / "out").iterdir())
    assert set(left) <= {"record.json", "metrics.jsonl"} and "record.json" in left
    assert len(read_record(small_disk / "out" / "record.json").epochs) < 40
    for line in (small_disk / "out" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_result_that_cannot_be_written(place):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "gradherd", "herding", "--units", "8", "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=500,
        )
    check_refusal(ran.returncode, "", ran.stderr, 1)
    assert "No space left on device" in ran.stderr


def test_every_extra_that_is_advised_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    places = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    advised = {
        extra
        for path in places
        for extra_names in re.findall(r"'\.\[([a-z,]+)\]'", path.read_text())
        for extra in extra_names.split(",")
    }
    assert advised and advised <= set(extras)


def test_a_report_of_an_empty_folder(capsys, place):
    (place / "runs").mkdir()
    err = refused(capsys, "report", "runs")
    assert "runs: no record.json in it or below" in err


DAMAGE = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no record": lambda text: "[1, 2]",
    "other format": lambda text: text.replace('"format": 1', '"format": 99'),
    "a row lacks its loss": lambda text: text.replace('"train_loss"', '"loss"'),
    "a loss that is a word": lambda text: re.sub(
        r'"train_loss": [^,]+', '"train_loss": "low"', text
    ),
}


def test_a_report_of_a_damaged_record(capsys, place):
    with pytest.raises(SystemExit):
        main(["train", "digits", *QUICK, "--out", "runs/a"])
    capsys.readouterr()
    record = place / "runs" / "a" / "record.json"
    whole = record.read_text()
    (place / "runs" / "report.html").write_text("an older page")
    for name, damage in DAMAGE.items():
        record.write_text(damage(whole))
        assert "runs/a/record.json" in refused(capsys, "report", "runs"), name


def test_the_way_out_of_a_damaged_record(capsys, place):
    (place / "record.json").write_text('{"format": 1, "epo')
    err = refused(capsys, "report", ".")
    assert "damaged" in err and re.search("remove|again|without it", err)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.parametrize("how", [["--workers", "2"], ["--virtual"]], ids=["workers", "virtual"])
def test_ctrl_c_keeps_what_was_done(place, how):
    command = ["compare", "digits", "--orders", "d-rr,cd-grab", "--seeds", "2", "--epochs", "500"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gradherd", *command, *how, "--out", "out"],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What is started in the background of a shell is deaf to Ctrl-C, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: process.poll() is not None or has_epoch(place / "out"), 300)
        assert process.poll() is None, process.communicate()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)
        wait_for(lambda: not alive_in(process.pid), 100)
    finally:
        if alive_in(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert (process.returncode, out) == (130, "")
    lines = err.splitlines()
    assert 1 <= len(lines) <= 2 and all(line.startswith("gradherd: ") for line in lines), err
    assert lines[-1] == "gradherd: interrupted"
    records = [read_record(path) for path in (place / "out").rglob("record.json")]
    assert records and {one.status for one in records} <= {"interrupted", "done"}
    assert any(one.epochs for one in records)
    # A page is not written in a hurry; the first line says which command shows what is there.
    assert " on record: gradherd report out shows them" in lines[0]
    assert not [path for path in (place / "out").rglob("*") if path.name.endswith(".draft")]


def has_epoch(folder: Path) -> bool:
    return any(read_record(path).epochs for path in folder.rglob("record.json"))


def wait_for(condition, seconds: float) -> None:
    """Return when something has become true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def alive_in(session: int) -> list[str]:
    """The processes of a session that have not ended; those nobody has asked about have."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().rpartition(")")
        except OSError:  # It ended while we looked.
            continue
        state, _, _, its_session = rest.split()[:4]
        if int(its_session) == session and state not in "ZX":
            alive.append(name)
    return alive


def test_train_under_torchrun_speaks_once(place):
    options = ["train", "digits", "--epochs", "1", "--limit", "64", "--out", "X", "--json"]
    # Fails if there are two of them.
    printed = json.loads(printed_under_torchrun(2, "-m", "gradherd", *options))
    assert printed["status"] == "done" and printed["epochs"] == 1 and printed["out"] == "X"
    record = read_record(place / "X" / "record.json")
    assert record.config["workers"] == 2 and record.epochs[0].train_loss == printed["final_loss"]
