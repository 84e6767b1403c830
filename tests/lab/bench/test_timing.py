"""The high-water mark of memory, in a process of its own: the mark is that of all its threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from gradherd.lab.bench.timing import PeakMemory
with PeakMemory(torch.device("cpu")) as none:
    pass
with PeakMemory(torch.device("cpu")) as peak:
    torch.ones(20_000_000)
with PeakMemory(torch.device("cpu")) as again:
    kept = torch.ones(10_000_000)
print(none.bytes, peak.bytes, again.bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's own marks")
def test_a_peak_is_seen_though_it_is_over():
    printed = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MIMALLOC_PURGE_DELAY": "0"},
    ).stdout
    none, peak, again = map(int, printed.split())
    assert none < 2_000_000
    assert 78_000_000 < peak < 90_000_000
    assert 38_000_000 < again < 50_000_000
