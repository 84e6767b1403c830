"""docs/architecture.md follows one step of each half through the files: through all of them."""

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks

ROOT = Path(gh.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


def listed(title: str) -> tuple[list[str], set[str]]:
    """Return the numbered files of a section of the page, and all files that it names."""
    section = re.split(rf"^## {title}$", PAGE, flags=re.M)[1].split("\n## ")[0]
    files = r"`((?:(?:hooks|comm|ordering|sparsify|rows)/)?\w+\.py)`"
    return re.findall(rf"^\d+\. {files}", section, re.M), set(re.findall(files, section))


def traced(method: str) -> set[str]:
    """Return the files of gradherd that run after the first epoch; on each rank."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 20), torch.randn(16, 3))
    model = DDP(nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files: set[str] = set()
    started = threading.Event()

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if started.is_set() and event == "call" and path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).as_posix())

    threading.setprofile(profile)  # before attach starts its thread
    sampler = None
    if method == "cd-grab":
        sampler = gh.OrderedSampler(data, "cd-grab", batch_size=2, unit=2, seed=0)
        herd = gh.attach(model, order=sampler)
    else:
        herd = gh.attach(model, sparsify=gh.ExDyna(density=0.01))
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    for epoch in range(2):
        for x, y in loader:
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0:
            started.set()
            sys.setprofile(profile)
    list(sampler or ())
    started.clear()
    sys.setprofile(None)
    threading.setprofile(None)
    herd.detach()
    return files


@pytest.mark.parametrize(
    ("method", "title"), [("cd-grab", "One step of CD-GraB"), ("exdyna", "One step of ExDyna")]
)
def test_the_page_names_every_file_of_a_step(method, title):
    numbered, named = listed(title)
    assert len(numbered) == len(set(numbered)) <= 12
    for files in run_ranks(traced, 2, method):
        assert files == named
