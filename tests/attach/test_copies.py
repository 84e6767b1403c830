"""Copies and pickles of an attached model or sampler carry neither herd nor data set."""

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import copy_work as work
from tests.attach.attach_work import network


@pytest.mark.parametrize("name", work.CASES)
def test_copies_of_ddp_models(name):
    for found, same in run_ranks(work.copies, 2, name):
        assert all(found.values()), found
        assert same, "the herd has not noticed its copies"


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("kind", work.COPIES)
def test_copies_of_modules(kind, unit):
    net, herd, data = work.single_copies(unit)
    before = herd.metrics()["examples_fed_back"]
    other = work.COPIES[kind](net)
    assert torch.equal(work.train(other, None, data), work.train(network(), None, data))
    assert herd.metrics()["examples_fed_back"] == before


@pytest.mark.parametrize("unit", [1, 4])
def test_copies_of_samplers(unit):
    _, sampler, *others = work.pickled_sampler(unit)
    for other in others:
        assert sampler.attached
        assert not other.attached
        assert other.state_dict() == sampler.state_dict()
        assert other.state_dict()["position"] == 12
        assert list(other) == list(sampler)[12:]
