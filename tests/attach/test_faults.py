"""A rank that fails ends the others: within the user's timeout and a few seconds."""

import json
import subprocess
import sys

import pytest

TIMEOUT = 4
AT_ONCE = ("killed", "raising", "differing", "killed sparse")
BY_TIMEOUT = ("stalled", "stalled after", "stalled sparse", "alone")


@pytest.mark.timeout(150)
def test_no_process_outlives_the_timeout_of_the_group():
    command = [sys.executable, "-m", "tests.attach.fault_work", str(TIMEOUT)]
    run = subprocess.run(
        [*command, *AT_ONCE, *BY_TIMEOUT], capture_output=True, text=True, timeout=120, check=True
    )
    seconds = json.loads(run.stdout.splitlines()[-1])
    print(seconds)
    for kind in AT_ONCE:
        assert seconds[kind] < TIMEOUT, seconds
    for kind in BY_TIMEOUT:
        assert TIMEOUT - 0.5 < seconds[kind] < TIMEOUT + 5, seconds
