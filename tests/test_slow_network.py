"""The slow network: real namespaces, real limits, and nothing left of them."""

import importlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.netns import INTERFACE, Namespaces, NetworkError, missing

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "slow_network.py"
TINY = ("--workers", "2", "--params", "2e5", "--rates", "20M", "--seconds", "0.1", "--no-training")
WHY_NOT = missing()
needs_network = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def left(pid: int) -> list[str]:
    """Namespaces and links that a process has made and that are still there."""
    listed = [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=True).stdout
        for what in (["netns", "list"], ["-o", "link", "show"])
    ]
    return re.findall(rf"\bgh{pid}\S*", "".join(listed))


@needs_network
def test_two_ranks_on_a_slow_link_are_measured_and_counted():
    cases = "dense,exdyna,dense+cd-grab"
    ran = subprocess.Popen(
        [sys.executable, str(SCRIPT), *TINY, "--cases", cases, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = ran.communicate(timeout=500)
    assert ran.returncode == 0, err
    assert left(ran.pid) == []
    record = json.loads(out)
    assert {"command", "hardware", "versions", "config", "links", "rows", "shown"} <= set(record)
    rows = {(row["case"], row["rate"]): row for row in record["rows"]}
    assert len(rows) == 6
    # 800 kB at 20 Mb/s take 0.32 s, and no machine is fast enough to change that.
    for case in ("dense", "dense+cd-grab"):
        slow = rows[case, 2e7]
        assert slow["step_seconds"] > 0.3
        assert slow["counted_over_payload"] == pytest.approx(1, abs=0.05)
    assert rows["exdyna", 2e7]["kernel_tx_bytes"] < 0.02 * rows["dense", 2e7]["kernel_tx_bytes"]
    more = rows["dense+cd-grab", 2e7]["kernel_tx_bytes"] / rows["dense", 2e7]["kernel_tx_bytes"]
    assert more < 1.02
    assert rows["dense", 2e7]["predicted_seconds"] > 0.3


@needs_network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_is_left_when_it_is_stopped(number):
    ran = subprocess.Popen(
        [sys.executable, str(SCRIPT), *TINY, "--cases", "dense"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while len(left(ran.pid)) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left(ran.pid)
    os.kill(ran.pid, number)
    try:
        out, err = ran.communicate(timeout=200)
    finally:
        ran.kill()
        ran.wait()
    assert (ran.returncode, out) == (130, "") and "interrupted" in err
    assert left(ran.pid) == []


@needs_network
def test_a_failure_leaves_nothing():
    with pytest.raises(NetworkError, match="tbf"), Namespaces(1) as net:
        assert len(left(os.getpid())) >= 3
        space = net.namespace(0)
        subprocess.run(["ip", "-n", space, "link", "del", INTERFACE], check=True)
        net.limit(1e6)
    assert left(os.getpid()) == []


@needs_network
@pytest.mark.parametrize("rate", [0.0, -8.0, math.nan])
def test_rates_are_above_zero(rate):
    with pytest.raises(NetworkError, match="above 0"), Namespaces(1) as net:
        net.limit(rate)


@needs_network
def test_what_a_killed_run_left_is_removed_by_the_next():
    ended = subprocess.Popen(["true"])
    ended.wait()
    subprocess.run(["ip", "netns", "add", f"gh{ended.pid}-0"], check=True)
    with Namespaces(1):
        assert left(ended.pid) == []


def test_options_are_explained_and_checked(capsys, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)  # as for a script, which finds its neighbours
    options = importlib.import_module("slow_network").options
    for words, code, said in (
        (["--help"], 0, ("--rates", "sudo python")),
        (["--rates", "fast"], 2, ("'fast' is not a link speed",)),
    ):
        with pytest.raises(SystemExit) as stop:
            options().parse_args(words)
        assert stop.value.code == code
        text = "".join(capsys.readouterr())
        assert all(one in text for one in said)


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert re.search("need root: run it with sudo$|is not installed$", missing())
