"""detach gives back what attach took, and a model can be attached again."""

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import detach_work as work


@pytest.mark.parametrize("name", work.CASES)
def test_threads_files_and_memory_are_given_back(name):
    for counts in run_ranks(work.attach_and_detach, 2, name, 4):
        *resources, alive = zip(*counts, strict=True)
        assert alive == (0, 0, 0, 0)
        for held in resources:  # the first time may start threads and files that torch keeps
            assert held[1] >= held[3], counts


@pytest.mark.parametrize("name", work.CASES)
def test_a_model_that_is_dropped_without_detach_is_freed(name):
    for counts in run_ranks(work.attach_and_detach, 2, name, 6, False):
        threads, tasks, files, alive = zip(*counts, strict=True)
        assert alive == (0,) * 6
        for held in (threads, tasks, files):
            assert held[2] >= held[5], counts


@pytest.mark.parametrize("name", work.CASES)
def test_a_model_can_be_attached_again(name):
    for between, gradients, again, first, taken in run_ranks(work.attach_again, 2, name):
        assert torch.allclose(*between, rtol=1e-12)
        assert torch.equal(*gradients)
        seconds = ("ordering_seconds", "exchange_seconds", "signs_cpu_seconds")
        assert {k: v for k, v in again.items() if k not in seconds} == {
            k: v for k, v in first.items() if k not in seconds
        }
        assert "model is attached already" in taken


@pytest.mark.parametrize("name", work.CASES)
def test_a_group_outlives_its_model_until_another_is_attached(tmp_path, name):
    """Freed by DDP's C++ part, gloo's threads and the process would wait for each other."""
    assert run_ranks(work.group_outlives_its_model, 1, str(tmp_path / "store"), name) == [
        [True, True, False, True]
    ]
