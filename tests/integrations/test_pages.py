"""docs/frameworks.md: the programs of each framework run, print what it says, and are short."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.conformance import PAGE, programs, section
from tests.launched import printed_under_torchrun

ROOT = Path(__file__).parents[2]
# Section, number of the program in it, and what that prints.
PROGRAMS = {
    ("torchdata", 0): "56 steps, learned 3 epochs",
    ("Accelerate", 0): "11 batches are left of epoch 1",
    ("transformers", 0): "16 steps, learned 2 epochs",
    ("Lightning", 0): "learned 3 epochs",
    ("Lightning", 1): "48 steps, learned 3 epochs",
    ("Ray Train", 0): "learned 3 epochs",
}
PACKAGES = {"Accelerate": "accelerate", "Lightning": "lightning", "Ray Train": "ray"}
SLOW = ("Lightning", "Ray Train")
# Started as the page says: these need no other ranks, or start them themselves.
START_RANKS = (("torchdata", 0), ("Lightning", 1), ("Ray Train", 0))


@pytest.mark.parametrize(("title", "number"), PROGRAMS)
def test_programs_print_what_the_page_says(title, number, tmp_path, monkeypatch):
    if title in SLOW and os.environ.get("GRADHERD_INTEGRATIONS") != "all":
        pytest.skip("slow: runs in `make integrations`")
    if not find_spec(PACKAGES.get(title, title)) or not find_spec("accelerate"):
        pytest.skip(f"{title} is not installed")
    says = PROGRAMS[title, number]
    assert f"prints `{says}`" in section(title)
    (tmp_path / "train.py").write_text(programs(title)[number])
    if title not in SLOW:
        # On ranks that have imported torch already; one for a program that needs no others.
        monkeypatch.chdir(tmp_path)
        ranks = 1 if (title, number) in START_RANKS else 2
        assert says in printed_under_torchrun(ranks, "train.py")
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *([] if (title, number) in START_RANKS else launch), "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-6000:]
    assert says in ran.stdout


@pytest.mark.parametrize(("title", "number"), PROGRAMS)
def test_at_most_five_lines_are_new(title, number):
    if title != "torchdata":  # where the loop is the reader's own, nothing is
        assert 1 <= len(re.findall(r"# new\b", programs(title)[number])) <= 5


def test_all_programs_of_the_page_are_listed():
    blocks = re.findall(r"^ *```py", PAGE.read_text(), re.M)
    assert len(blocks) == len(PROGRAMS)
    for title in {title for title, _ in PROGRAMS}:
        assert len(programs(title)) == len([one for one, _ in PROGRAMS if one == title]), title
