import json
import re
from pathlib import Path

from tests.launched import printed_under_torchrun

SCRIPT = Path(__file__).parent.parent / "examples" / "train_ddp.py"


def test_the_example_trains():  # `make example` starts torchrun, without a sparsifier
    printed = printed_under_torchrun(2, SCRIPT, "--epochs", 2, "--sparsify", "exdyna")
    losses = [float(loss) for loss in re.findall(r"^epoch \d+  loss.* (\S+)$", printed, re.M)]
    assert len(losses) == 2 and losses[1] < losses[0] < 2.3
    assert printed.count("cd-grab: final loss") == 1


def test_the_sharded_example_continues_from_its_checkpoint(tmp_path):
    script = SCRIPT.parent / "train_fsdp2.py"
    options = ["--replicas", "2", "--sequences", "64", "--checkpoint", str(tmp_path)]
    losses = []
    for epochs in ("1", "2"):
        printed = printed_under_torchrun(2, script, *options, "--epochs", epochs)
        losses += re.findall(r"^epoch (\d+)  loss (\S+)$", printed, re.M)
    assert [epoch for epoch, _ in losses] == ["0", "1"]
    assert float(losses[1][1]) < float(losses[0][1]) < 6


def test_the_example_fits_on_a_page():
    assert len(SCRIPT.read_text().splitlines()) < 80


def test_the_notebook_runs_from_top_to_bottom(capsys):
    # Its code in a plain namespace: jupyter would start a kernel and add nothing.
    path = Path(__file__).parent.parent / "examples" / "gradherd_tour.ipynb"
    cells = json.loads(path.read_text())["cells"]
    assert len(cells) == 10
    here: dict[str, object] = {}
    for cell in cells:
        assert not cell.get("outputs"), "save it without outputs"
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), here)
    losses, sent = here["losses"], here["sent"]
    assert losses["grab"][-1] < losses["grab"][0] and sent["int2"] < sent["fp32"]
    out = capsys.readouterr().out
    assert float(out.split("largest difference: ")[1].split()[0]) < 1e-6 and "So use " in out
