"""The exchange in fixed shapes under DDP on two ranks: what the host's way does, nothing lost."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from gradherd.sparsify.gpu_worker import GpuSteps
from gradherd.sparsify.partitioned import ExDyna
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.worker import Placement, Worker
from tests.attach import device_work


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(device_work.everything, 2)


def test_it_does_what_the_hosts_way_does(ranks):
    """Through buckets that DDP rebuilds after the first backward.

    Layers differ in scale here, so in the first steps a worker may lack candidates and fill up with
    others: nearly the same is sent. `tests/sparsify/test_gpu_worker.py` has equal choices.
    """
    for rank in ranks:
        for mine, wanted in zip(rank["device"]["seen"], rank["host"]["seen"], strict=True):
            one, other = (torch.cat([grad.flatten() for grad in way]) for way in (mine, wanted))
            assert torch.cosine_similarity(one, other, dim=0) > 0.9
        metrics = [rank[name]["metrics"] for name in ("device", "host")]
        for key in ("selected", "steps", "skipped_steps", "always_sent"):
            assert metrics[0][key] == metrics[1][key], key
        assert sum(metrics[0]["per_rank"]) == metrics[0]["selected"]


def test_a_saved_state_continues_to_the_bit(ranks):
    for rank in ranks:
        for mine, wanted in zip(rank["resumed"]["seen"], rank["device"]["seen"], strict=True):
            assert all(torch.equal(one, other) for one, other in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("way", ["host", "device"])
def test_rows_of_a_table_are_averaged_exactly_beside_the_hook(ranks, way):
    for step in range(8):
        wanted = sum(rank[way]["raw"][step][0] for rank in ranks) / 2
        for rank in ranks:
            torch.testing.assert_close(rank[way]["seen"][step][0], wanted, rtol=1e-6, atol=1e-8)
    assert "table.weight" not in ranks[0][way]["residual"]


@pytest.mark.parametrize("way", ["host", "device"])
def test_nothing_is_lost(ranks, way):
    names = list(ranks[0][way]["residual"])
    for at, name in enumerate(names, start=1):
        computed = sum(raw[at] for rank in ranks for raw in rank[way]["raw"])
        sent = 2 * sum(seen[at] for seen in ranks[0][way]["seen"])
        kept = sum(rank[way]["residual"][name] for rank in ranks)
        torch.testing.assert_close(sent + kept, computed, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_calls_the_step_off_everywhere(ranks):
    for rank in ranks:
        assert rank["spoilt"] == [([False, True, False], 2, 1)] * 2


@pytest.mark.parametrize("way", [0, 1], ids=["host", "device"])
def test_a_gradient_is_clipped_before_it_joins_the_residual(ranks, way):
    sent, _, _, norms = ranks[0]["clipped"][way]
    assert min(norms) < 0.1 < max(norms)
    left = sum(rank["clipped"][way][1] for rank in ranks)
    computed = sum(rank["clipped"][way][2] for rank in ranks)
    torch.testing.assert_close(2 * sent + left, computed, rtol=1e-4, atol=1e-7)


def test_a_sum_among_many_ranks_leaves_its_tensor_alone(ranks):
    for number, rank in enumerate(ranks):
        own, total = rank["small"]
        assert own == [number, number + 1.0, number + 2.0] and total == [1.0, 3.0, 5.0]


def test_momentum_in_both_places_is_refused(ranks):
    sgd, adam, plain = ranks[0]["momenta"]
    assert sgd.startswith("SGD has momentum 0.9 and the sparsifier 0.9")
    assert adam.startswith("Adam has momentum 0.9 and the sparsifier 0.9") and plain == ""


class FakeGraph:
    """Knows whether a capture is under way, as the stream of a GPU does."""

    recording = 0

    def capture_begin(self, **_):
        FakeGraph.recording += 1

    def capture_end(self):
        FakeGraph.recording -= 1


def test_a_capture_that_fails_ends(monkeypatch, caplog):
    """Otherwise the stream records all that follows, and every later operation of it fails."""
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    launch = Mock(side_effect=[None, RuntimeError("no memory")])
    monkeypatch.setattr(GpuSteps, "_launch_add", launch)
    steps = GpuSteps(Worker(Sparsify(method=ExDyna(0.01)), 10_000, rank=0, size=1))
    steps.place(Placement([[(0, 10_000)]], 10_000, torch.device("cpu")))
    steps._capture_adds([torch.zeros(1), torch.zeros(1)])
    assert FakeGraph.recording == 0
    assert "no CUDA graph for passes over buckets" in caplog.text
    assert not steps._captures  # not tried again
