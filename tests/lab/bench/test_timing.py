"""The high-water mark of memory, in a process of its own: the mark is that of all its threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from gradherd.lab.bench.timing import peak_memory
def ones(count):
    global kept
    kept = torch.ones(count)
cpu, kept = torch.device("cpu"), None
print(peak_memory(lambda: None, cpu))
print(peak_memory(lambda: torch.ones(20_000_000), cpu))
print(peak_memory(lambda: ones(10_000_000), cpu))
"""


TRAINING = """
import torch
from benchmarks.model_steps import MODELS, peak_bytes
peak_bytes("lenet", "plain", 8, torch.device("cpu"), None)  # loads code
size = sum(p.numel() for p in MODELS["mlp"].make().parameters())
print(4 * size, peak_bytes("mlp", "plain", 8, torch.device("cpu"), None))
"""


def numbers_of(program: str) -> list[int]:
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"MIMALLOC_PURGE_DELAY": "0"},
    ).stdout
    return [int(word) for word in printed.split()]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's own marks")
def test_a_peak_is_seen_though_it_is_over():
    none, peak, again = numbers_of(PROGRAM)
    assert none < 2_000_000
    assert 78_000_000 < peak < 90_000_000
    assert 38_000_000 < again < 50_000_000


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's own marks")
def test_the_peak_of_a_training_counts_the_model_on_every_device():
    model, peak = numbers_of(TRAINING)
    # Parameters, gradients and momentum: a GPU counted these, and a CPU the last steps alone. What
    # products need beside them depends on the CPU; torch itself, not counted, has 30 times.
    assert 2.9 * model < peak < 6 * model
