"""Launches and graphs without a GPU: what is checked is where they happen, and that they end."""

import ast
import contextlib
import logging
from pathlib import Path

import pytest
import torch

import gradherd
from gradherd import gpu

FILES = sorted(Path(gradherd.__file__).parent.glob("*/triton_*.py"))


def test_a_launch_happens_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever the tensors' own."""
    current, launched = ["cuda:0"], []

    @contextlib.contextmanager
    def device_of(tensor):
        before, current[0] = current[0], "cuda:1"
        yield
        current[0] = before

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((current[0], grid, args, options))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    first = torch.zeros(1)
    gpu.launch(Kernel(), (4,), first, 2, BLOCK=8)
    assert launched == [("cuda:1", (4,), (first, 2), {"BLOCK": 8})]
    assert current == ["cuda:0"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_are_launched_with_a_guard(file):
    """No `kernel[grid](...)` outside of `gpu.launch`."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    assert not [ast.unparse(call) for call in calls if isinstance(call.func, ast.Subscript)]


class Graph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls = []

    def capture_begin(self, **options):
        self.calls.append("begin")

    def capture_end(self):
        self.calls.append("end")


class Stream:
    def __init__(self, device=None):
        self.waited = 0

    def wait_stream(self, other):
        self.waited += 1


@pytest.fixture
def made(monkeypatch):
    """Every graph that is made."""
    graphs = []

    def make():
        graphs.append(Graph())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    return graphs


def test_works_are_captured_one_by_one(made):
    done = []
    works = [lambda: done.append(1), lambda: done.append(2)]
    assert gpu.captured(works, "a test", torch.device("cuda", 1)) == made
    assert [graph.calls for graph in made] == [["begin", "end"]] * 2
    assert done == [1, 2]


def test_a_capture_that_fails_ends(made, caplog):
    """Otherwise its stream would record whatever follows."""

    def refused():
        raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING, "gradherd"):
        assert gpu.captured([refused], "a test", torch.device("cuda")) is None
    assert made[0].calls == ["begin", "end"]
    assert "no CUDA graph for a test" in caplog.text and "not permitted" in caplog.text


def test_work_beside_the_loop_begins_after_it_and_is_over_at_the_end(monkeypatch):
    """Also if it fails: what it was given may be freed then."""
    done = []

    class Ordered(Stream):
        def __init__(self, device):
            self.device = device

        def record_event(self):
            done.append("event")
            return "event"

        def wait_event(self, event):
            done.append(f"waits for {event}")

        def synchronize(self):
            done.append("host waits")

    monkeypatch.setattr(torch.cuda, "Stream", Ordered)
    monkeypatch.setattr(torch.cuda, "current_stream", Ordered)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    beside = gpu.SideStream(torch.device("cuda", 1)).after_this()
    done.append("the loop goes on")
    with pytest.raises(ValueError), beside:
        done.append("works")
        raise ValueError
    assert done == ["event", "the loop goes on", "waits for event", "works", "host waits"]


def test_work_beside_the_loop_needs_no_stream_on_a_cpu():
    with gpu.SideStream(torch.device("cpu")).after_this() as entered:
        assert entered is None
