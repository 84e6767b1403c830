"""Triton's programs on the CPU, by its interpreter: in a process of its own.

Whether Triton interprets is settled when it is imported, and by then other tests have done so.
"""

import os
import subprocess
import sys

import pytest

MODULES = [
    "tests/sparsify/test_triton_kernels.py",
    "tests/local/test_triton_mean.py",
    "tests/ordering/test_triton_gram.py",
    "tests/ordering/test_device_signs.py",
    "tests/rows/test_triton_layers.py",
    "tests/rows/test_triton_sketches.py",
]


def test_programs_do_what_they_should(pytestconfig):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", *MODULES, "-q", "-p", "no:cacheprovider"]
    # Options of the tests around this one may print more than the dots that are counted below.
    hidden = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTEST_ADDOPTS": ""}
    ran = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=os.environ | hidden,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    # Most ran: what was skipped, for want of a GPU, shows as s.
    assert ran.stdout.count(".") > 2 * ran.stdout.count("s"), ran.stdout
