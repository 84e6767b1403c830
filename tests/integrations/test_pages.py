"""The page of each framework: its program runs and prints what the page says, and is short."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.conformance import program

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAMS = {
    "accelerate": "11 batches are left of epoch 1",
    "transformers": "16 steps, learned 2 epochs",
    "lightning": "learned 3 epochs",
    "ray": "learned 3 epochs",
}
SLOW = ("lightning", "ray")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PROGRAMS)
def test_programs_print_what_the_page_says(page, tmp_path):
    if page in SLOW and os.environ.get("GRADHERD_INTEGRATIONS") != "all":
        pytest.skip("slow: runs in `make integrations`")
    if not find_spec(page) or not find_spec("accelerate"):
        pytest.skip(f"{page} is not installed")
    assert PROGRAMS[page] in (DOCS / f"{page}.md").read_text().split("```")[2]
    (tmp_path / "train.py").write_text(program(page))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *(launch if page != "ray" else []), "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert PROGRAMS[page] in ran.stdout


@pytest.mark.parametrize("page", [*PROGRAMS, "composer"])
def test_at_most_five_lines_are_new(page):
    assert 1 <= len(re.findall(r"# new\b", program(page))) <= 5
