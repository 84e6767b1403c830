import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "examples" / "train_ddp.py"


def test_the_example_trains_under_torchrun():  # `make example` does so without a sparsifier
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [sys.executable, *launch, str(SCRIPT), "--epochs", "2", "--sparsify", "exdyna"],
        capture_output=True,
        text=True,
        timeout=55,
    )
    assert ran.returncode == 0, ran.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d+  loss.* (\S+)$", ran.stdout, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] < 2.3
    assert "cd-grab: final loss" in ran.stdout


def test_the_example_fits_on_a_page():
    assert len(SCRIPT.read_text().splitlines()) < 80
