"""The page of each framework: its program runs and prints what the page says, and is short."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.conformance import program
from tests.launched import printed_under_torchrun

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Page, number of the program in it, and what that prints: all programs of these pages.
PROGRAMS = {
    ("integrations", 0): "56 steps, learned 3 epochs",
    ("accelerate", 0): "11 batches are left of epoch 1",
    ("transformers", 0): "16 steps, learned 2 epochs",
    ("lightning", 0): "learned 3 epochs",
    ("lightning", 1): "48 steps, learned 3 epochs",
    ("ray", 0): "learned 3 epochs",
}
SLOW = ("lightning", "ray")
# Started as the page says: these need no other ranks, or start them themselves.
START_RANKS = (("integrations", 0), ("lightning", 1), ("ray", 0))


@pytest.mark.parametrize(("page", "number"), PROGRAMS)
def test_programs_print_what_the_page_says(page, number, tmp_path, monkeypatch):
    if page in SLOW and os.environ.get("GRADHERD_INTEGRATIONS") != "all":
        pytest.skip("slow: runs in `make integrations`")
    if not find_spec({"integrations": "torchdata"}.get(page, page)) or not find_spec("accelerate"):
        pytest.skip(f"{page} is not installed")
    says = PROGRAMS[page, number]
    assert f"prints `{says}`" in (DOCS / f"{page}.md").read_text()
    (tmp_path / "train.py").write_text(program(page, number))
    if page not in SLOW:
        # On ranks that have imported torch already; one for a program that needs no others.
        monkeypatch.chdir(tmp_path)
        ranks = 1 if (page, number) in START_RANKS else 2
        assert says in printed_under_torchrun(ranks, "train.py")
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *([] if (page, number) in START_RANKS else launch), "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert says in ran.stdout


@pytest.mark.parametrize(("page", "number"), [*PROGRAMS, ("composer", 0)])
def test_at_most_five_lines_are_new(page, number):
    if page != "integrations":  # where the loop is the reader's own, nothing is
        assert 1 <= len(re.findall(r"# new\b", program(page, number))) <= 5


def test_all_programs_of_the_pages_are_listed():
    for page in {page for page, _ in PROGRAMS} - {"integrations"}:  # has a fragment, too
        listed = [number for name, number in PROGRAMS if name == page]
        blocks = re.findall(r"^ *```py", (DOCS / f"{page}.md").read_text(), re.M)
        assert len(blocks) == len(listed), page
