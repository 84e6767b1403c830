"""docs/architecture.md follows one step of each half through the files: through all of them."""

import re
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.ranks import run_ranks

ROOT = Path(gh.__file__).parent
THREAD = ("ordering/coordination.py", "StepComparison.compare")
"""The first item of the thread, whose items come last on the page."""
BESIDE = {"local/triton_mean.py"}
"""Files of local steps on a GPU, which are not traced."""
PAGE = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text()


def listed(title: str) -> tuple[list[tuple[str, str]], set[str]]:
    """Return the numbered (file, function) of a section of the page, and all files in it."""
    section = re.split(rf"^## {title}$", PAGE, flags=re.M)[1].split("\n## ")[0]
    files = r"`((?:(?:hooks|comm|local|ordering|sparsify|rows)/)?\w+\.py)`"
    numbered = re.findall(rf"^\d+\. {files}, `([\w.]+)`:", section, re.M)
    assert len(numbered) == len(re.findall(r"^\d+\. ", section, re.M)) <= 12
    return numbered, set(re.findall(files, section))


def traced(method: str) -> list[tuple[str, str, str]]:
    """Return the calls of gradherd in the second epoch: thread, file, function; on each rank."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 20), torch.randn(16, 3))
    net = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 3))
    model = net if method == "local" else DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[tuple[str, str, str]] = []
    started = threading.Event()

    def profile(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if started.is_set() and event == "call" and path.is_relative_to(ROOT):
            file, thread = path.relative_to(ROOT).as_posix(), threading.current_thread().name
            calls.append((thread, file, frame.f_code.co_qualname))

    threading.setprofile(profile)  # before attach starts its thread
    sampler = None
    if method == "cd-grab":
        sampler = gh.OrderedSampler(data, "cd-grab", batch_size=2, unit=2, seed=0)
        herd = gh.attach(model, order=sampler)
    elif method == "local":
        herd = gh.attach(model, local=gh.LocalSteps(every=2), optimizer=optimizer)
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
    return calls


def in_order(calls: list[tuple[str, str]], items: list[tuple[str, str]]) -> bool:
    """Return whether all items are first called in turn, from a call of the first to the next."""
    begins = [at for at, call in enumerate(calls) if call == items[0]]
    for begin, end in pairwise([*begins, len(calls)]):
        once = list(dict.fromkeys(call for call in calls[begin:end] if call in items))
        if once == items:
            return True
    return False


@pytest.mark.parametrize(
    ("method", "title"),
    [
        ("cd-grab", "One step of CD-GraB"),
        ("exdyna", "One step of ExDyna"),
        ("local", "One exchange of local steps"),
    ],
)
def test_the_page_follows_a_step_through_every_file(method, title):
    numbered, named = listed(title)
    apart = BESIDE if method == "local" else set()
    for calls in run_ranks(traced, 2, method):
        assert {file for _, file, _ in calls} == named - apart
        by_thread: dict[str, list[tuple[str, str]]] = {}
        for thread, *call in calls:
            by_thread.setdefault(thread, []).append(tuple(call))
        split = numbered.index(THREAD) if THREAD in numbered else len(numbered)
        assert in_order(by_thread.pop("MainThread"), numbered[:split])
        for own in by_thread.values():
            assert in_order(own, numbered[split:])
