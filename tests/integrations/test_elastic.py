"""torchrun --nnodes 1:4: a second agent joins and is killed; the training goes on and ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    os.environ.get("GRADHERD_INTEGRATIONS") != "all", reason="slow: runs in `make integrations`"
)


def agent(folder: Path, port: int, log: Path) -> subprocess.Popen:
    """Start one machine's torchrun."""
    launch = ["-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", "1"]
    launch += ["--max-restarts", "10", "--monitor-interval", "0.2", "--rdzv-backend", "c10d"]
    launch += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", "last_call_timeout=1"]
    script = [str(ROOT / "examples" / "train_elastic.py"), "--folder", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # as the page says
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, *launch, *script, "--pause", "0.1", "--epochs", "6"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def lose(process: subprocess.Popen) -> None:
    """Kill an agent and its workers at once, as if the machine was lost."""
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):  # workers have sessions of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def wait_for(text: str, log: Path, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.2)


def test_a_rank_joins_and_is_lost(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first_log, second_log = tmp_path / "first", tmp_path / "second"
    first = agent(tmp_path / "run", port, first_log)
    second = None
    try:
        wait_for("1 ranks", first_log, first)
        second = agent(tmp_path / "run", port, second_log)
        # Rank 0 may be on either of them.
        while "2 ranks" not in first_log.read_text() + second_log.read_text():
            assert first.poll() is None, first_log.read_text()[-4000:]
            time.sleep(0.2)
        lose(second)
        assert first.wait(200) == 0, first_log.read_text()[-4000:]
    finally:
        for process in (first, second):
            if process is not None:
                lose(process)
    text = first_log.read_text()
    assert "a state of 1 ranks continues on 2" in text + second_log.read_text()
    assert "a state of 2 ranks continues on 1" in text
    loss = re.search(r"1 ranks, \d+ steps, loss on all data (\S+)", text)
    assert loss is not None and float(loss[1]) < 0.5
