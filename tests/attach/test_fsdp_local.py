"""Replicas of a sharded model take local steps and exchange their shards: four ranks."""

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import fsdp_local_work as work


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return run_ranks(work.everything, 4, str(folder), timeout=500)


@pytest.mark.parametrize("case", [(2, 2), (4, 1), "momentum"])
def test_the_weights_are_those_of_as_many_plain_modules(ranks, case):
    for rank in ranks:
        sharded, plain, shared, shared_plain = rank["plain"][case]
        assert torch.allclose(sharded, plain, atol=1e-6)
        assert torch.allclose(shared, shared_plain, atol=1e-6)
        assert not torch.allclose(sharded, shared, atol=1e-3)  # within a phase


@pytest.mark.parametrize("values", ["fp32", "int4", "int1"])
def test_replicas_are_equal_to_the_bit_after_an_exchange(ranks, values):
    for rank in ranks:
        before, after, exchanges, residual = rank["sync"][values]
        assert (before, after, exchanges) == (False, True, 3)
        assert (residual > 0) == (values != "fp32")


def test_an_evaluation_of_the_shared_weights_leaves_nothing_behind(ranks):
    for rank in ranks:
        before, inside, after = rank["evaluated"]
        assert torch.equal(before, after)
        assert not torch.allclose(before, inside)
        assert torch.equal(inside, ranks[0]["evaluated"][1])


def test_a_shard_that_is_not_finite_calls_off_the_exchange_of_all(ranks):
    for number, rank in enumerate(ranks):
        shared, own, skipped = rank["not finite"]
        assert skipped == 1
        assert (shared, own) == ((False, True) if number < 2 else (True, False))


@pytest.mark.parametrize("stop", [3, 5])
@pytest.mark.parametrize("name", work.SAVED)
def test_a_loaded_run_continues_to_the_bit(ranks, stop, name):
    for rank in ranks:
        straight, resumed = rank["continued"][stop, name]
        assert torch.equal(straight, resumed)


def test_another_mesh_loads_the_means(ranks):
    for rank in ranks:
        before, after, steps, exchanges = rank["moved"]
        assert (steps, exchanges) == (6, 2)
        assert before.keys() == after.keys()
        assert any(before[name].any() for name in before if name.startswith("residual"))
        for name, tensor in before.items():
            assert torch.allclose(after[name], tensor, atol=1e-7), name


def test_orders_are_learned_beside_local_steps(ranks):
    for rank in ranks:
        assert rank["ordered"] == (2, 1)


def test_what_does_not_fit_is_refused_with_what_to_do(ranks):
    says = {
        "native": "torch averages over replicas before anything could be exchanged sparsely",
        "no mesh": "local exchanges what the replicas of a sharded model have computed, and needs",
        "overlap": "overlap=True is not supported for sharded models",
        "offload": "are offloaded to the CPU, which gradherd does not support: use fully_shard",
    }
    for rank in ranks:
        for name, text in says.items():
            assert text in rank["refused"][name], name
