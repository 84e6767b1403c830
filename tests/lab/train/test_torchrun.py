"""Under torchrun: a rank that dies is started again, and the run ends as if nothing had been.

torchrun's agent runs in a thread of this process, so that its ranks are forks of a process that has
imported torch: as programs of their own, four ranks and torchrun would do so five times.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from gradherd.cli.main import main
from gradherd.lab import ranks
from gradherd.lab.train.record import RECORD_FILE, read_record
from gradherd.lab.train.runner import CHECKPOINT_FOLDER
from tests.lab.train.test_checkpoint import all_of
from tests.lab.train.work import HERE, config_of
from tests.stress.kills import differences, last_state

SETTINGS = {
    "order": "cd-grab",
    "sparsify": "topk",
    "density": 0.2,
    "limit": 60,
    "epochs": 5,
    # Given, because the command line has other defaults for sparse runs than the task.
    "lr": 0.2,
    "momentum": 0.9,
}


def program(words: list[str], folder: Path) -> None:
    """Be a rank of torchrun that runs the command line."""
    name = f"pid-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    (folder / name).write_text(str(os.getpid()))
    try:
        main(words)
    except SystemExit as stop:
        if stop.code:  # torchrun's own ranks would exit with it
            raise RuntimeError(f"exit code {stop.code}") from stop


def test_one_rank_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")  # the agent sets it for good
    out, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    options = [f"--{name}={value}" for name, value in SETTINGS.items()]
    words = ["train", f"{HERE}:Unhurried", *options, "--checkpoint-every=5"]
    words += [f"--out={out}", "--resume", "--json"]
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="tests", max_restarts=1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="forkserver",
        monitor_interval=0.1, logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL),
    )  # fmt: skip
    ended = []

    def launch():
        try:
            ended.append(elastic_launch(config, program)(words, tmp_path))
        except BaseException as error:
            ended.append(error)

    ranks.start_fork_server(program)
    agent = threading.Thread(target=launch, daemon=True)
    agent.start()
    while not list((out / CHECKPOINT_FOLDER).glob("step-*")):
        assert agent.is_alive(), (ended, said(logs))
        time.sleep(0.02)
    os.kill(int((tmp_path / "pid-1-0").read_text()), signal.SIGKILL)
    agent.join(400)
    assert ended == [{0: None, 1: None}], (ended, said(logs))
    assert (tmp_path / "pid-1-1").exists()
    assert "failed to connect" not in said(logs)
    (told,) = (p.read_text() for p in logs.rglob("stdout.log") if p.read_text().strip())
    assert json.loads(told)["status"] == "done"
    record = read_record(out / RECORD_FILE)
    assert [row.epoch for row in record.epochs] == list(range(1, 6))
    config = config_of(f"{HERE}:Unhurried", workers=2, **SETTINGS)
    ranks.run_ranks(all_of, 2, tmp_path / "straight", config)
    assert differences(last_state(out), last_state(tmp_path / "straight")) == []


def said(logs: Path) -> str:
    return "".join(path.read_text() for path in logs.rglob("stderr.log"))
