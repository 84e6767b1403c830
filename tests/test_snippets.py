"""Every block of Python in the pages runs: fragments here, whole programs in other tests."""

import re
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks
from gradherd.lab.train.record import write_record
from tests.lab.report.sample_records import orders

ROOT = Path(__file__).parent.parent
# Pages whose blocks are whole programs or files, and the tests that run them.
ELSEWHERE = {
    "CONTRIBUTING.md": "contracts/test_adding_a_method.py",
    "frameworks.md": "integrations/test_pages.py",
    "own_task.md": "test_my_task.py",
    "start.md": "test_docs.py",
}


def fragments() -> list[tuple[str, str]]:
    """Return the page and the text of each block that leans on names of the reader's program."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        if page.name not in (*ELSEWHERE, "measure.md"):  # see the test of the report below
            name = str(page.relative_to(ROOT))
            found += [(name, block) for block in blocks_of(page)]
    return found


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"^```py\w*\n(.*?)^```", page.read_text(), re.S | re.M)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(4, 96), nn.Tanh())
        self.head = nn.Linear(96, 2)

    def forward(self, x):
        return self.head(self.blocks(x))


def reader(page: str, block: str, folder: str) -> dict:
    """Return what the program of a reader of this page holds before the block."""
    torch.manual_seed(0)
    net = Net()
    dataset = TensorDataset(torch.randn(128, 4), torch.randint(2, (128,)))
    own = dict(gh=gh, torch=torch, nn=nn, dcp=dcp, DDP=DDP, DataLoader=DataLoader, Net=Net)
    own |= dict(fully_shard=fully_shard, init_device_mesh=init_device_mesh, device="cpu", step=1)
    own |= dict(net=net, model=net, dataset=dataset, loss_fn=nn.CrossEntropyLoss(), epochs=2)
    own |= dict(folder=folder, losses=torch.rand(128).tolist())
    own |= dict(run=SimpleNamespace(log=lambda values, step: dict(values)))
    own |= dict(writer=SimpleNamespace(add_scalar=lambda name, value, step: float(value)))
    if "for text in dataset" in block:
        own["dataset"] = ["a" * (i % 7 + 1) for i in range(128)]
    own["sampler"] = gh.OrderedSampler(dataset, "cd-grab", batch_size=32, unit=32)
    own["loader"] = DataLoader(dataset, batch_size=32, sampler=own["sampler"])
    own["optimizer"] = torch.optim.SGD(net.parameters(), lr=0.1)
    if "sharded" in page:
        own["mesh"] = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        own["state"] = net.state_dict()
        if "dcp" in block:
            fully_shard(net)
            own["state"] = net.state_dict()
    elif "DDP(" not in block:
        own["model"] = DDP(net)
    if "herd." in block and "herd = " not in block:
        # Rows of single examples, as in the page's first block; FSDP has a rule for each layer.
        own["sampler"] = gh.OrderedSampler(dataset, "cd-grab", batch_size=32)
        own["herd"] = gh.attach(own["model"], order=own["sampler"])
    return own


def run_fragments(found: list[tuple[str, str]], folder: str) -> list[str]:
    """Run fragments on this rank; return those that failed, with their errors."""
    torch.set_num_threads(1)
    failed = []
    for page, block in found:
        own = reader(page, block, folder)
        # Not as written: 32 cards are not at hand, workers of the loader would each import torch.
        block = block.replace('"cuda", (4, 8)', '"cpu", (2, 1)').replace("workers=4", "workers=0")
        block = block.replace('"runs/a"', f'"{folder}"')
        try:
            exec(compile(block, page, "exec"), own)
            if "herd" in own:
                train_two_steps(own)
        except Exception as error:  # all ranks fail alike, so the others can still run
            failed.append(f"{page}: {type(error).__name__}: {error}\n{block}")
        finally:
            if "herd" in own:
                own["herd"].detach()
    return failed


def train_two_steps(own: dict) -> None:
    """Train with what the fragment has made: it is whole, and gradients are finite."""
    model = own.get("ddp", own["model"])
    loader = DataLoader(own["dataset"], batch_size=32, sampler=own["sampler"])
    for _, (x, y) in zip(range(2), loader, strict=False):
        own["loss_fn"](model(x), y).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        own["optimizer"].step()
        own["optimizer"].zero_grad()


def test_fragments_run_in_a_program_of_two_ranks():
    found = fragments()
    assert len(found) >= 10
    with tempfile.TemporaryDirectory() as folder:
        failed, other = run_ranks(run_fragments, 2, found, folder)
    assert not failed, "\n".join(failed)
    assert not other, "\n".join(other)


def test_a_report_and_arrays_are_written_as_the_page_shows(tmp_path, monkeypatch):
    for index, record in enumerate(orders(seeds=2)):
        folder = tmp_path / "gradherd-runs" / str(index)
        folder.mkdir(parents=True)
        write_record(record, folder)
    monkeypatch.chdir(tmp_path)
    for block in blocks_of(ROOT / "docs" / "measure.md"):
        exec(compile(block, "measure.md", "exec"), {})
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert {path.name for path in tmp_path.glob("*.npy")} == {"units.npy", "steps.npy"}


def test_whole_programs_are_run_by_other_tests():
    for page, test in ELSEWHERE.items():
        text = (ROOT / "tests" / test).read_text()
        assert page in text, page
