"""A rank that fails ends the others: within the user's timeout and a few seconds."""

import json
import subprocess
import sys

TIMEOUT = 4
KINDS = (
    "plain stalled",
    "stalled",
    "stalled after",
    "stalled sparse",
    "stalled rows",
    "alone",
    "killed",
    "raising",
    "raising rows in a check",
    "differing: unit",
)


def test_no_process_outlives_the_timeout_of_the_group():
    command = [sys.executable, "-m", "tests.attach.fault_work", str(TIMEOUT), *KINDS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    seconds = json.loads(run.stdout.splitlines()[-1])
    # Plain DDP takes the timeout, too, and the exit of an interpreter, which takes seconds where
    # tests share the cores. Without our timeout a process would stay for half an hour.
    exit_seconds = max(0.0, seconds.pop("plain stalled") - TIMEOUT)
    assert set(seconds) == set(KINDS[1:])
    assert max(seconds.values()) < TIMEOUT + 20 + 3 * exit_seconds, seconds
