"""A rank that fails ends the others within the user's timeout, not within torch's half an hour."""

import json
import subprocess
import sys

TIMEOUT = 4
KINDS = (
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
    # It ends when the last process of every kind has ended. No second is measured: the exit of an
    # interpreter takes any time where tests share the cores, but not half an hour.
    assert set(json.loads(run.stdout.splitlines()[-1])) == set(KINDS)
