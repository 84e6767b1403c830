"""Under torchrun: a rank that dies is started again, and the run ends as if nothing had been."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradherd.comm.ranks import run_ranks
from gradherd.lab.train.record import RECORD_FILE, read_record
from gradherd.lab.train.runner import CHECKPOINT_FOLDER
from tests.lab.train.test_checkpoint import all_of
from tests.lab.train.work import config_of
from tests.stress.kills import differences, last_state

SETTINGS = {
    "order": "cd-grab",
    "sparsify": "topk",
    "density": 0.2,
    "limit": 100,
    "epochs": 8,
    # Given, because the command line has other defaults for sparse runs than the task.
    "lr": 0.2,
    "momentum": 0.9,
}


def children(pid):
    """Return the processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # It has ended meanwhile.
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.timeout(180)  # several starts of torch
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_one_rank_is_killed(tmp_path):
    out = tmp_path / "run"
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [
        *torchrun, "--nproc-per-node=2", "--max-restarts=1", "-m", "gradherd", "train", "digits",
        *options, "--checkpoint-every=5", f"--out={out}", "--resume", "--json",
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as run:  # fmt: skip
        try:
            while not list((out / CHECKPOINT_FOLDER).glob("step-*")):
                assert run.poll() is None, run.stderr.read()
                time.sleep(0.02)
            os.kill(max(children(run.pid)), signal.SIGKILL)
            told, err = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 0, err
    assert "failed to connect" not in err
    assert json.loads(told)["status"] == "done"
    record = read_record(out / RECORD_FILE)
    assert [row.epoch for row in record.epochs] == list(range(1, 9))
    config = config_of("digits", workers=2, **SETTINGS)
    run_ranks(all_of, 2, tmp_path / "straight", config)
    assert differences(last_state(out), last_state(tmp_path / "straight")) == []
