"""FSDP2 and HSDP on four ranks: orders, gradients and bytes beside DDP and plain `fully_shard`."""

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import fsdp_work

EVEN = 5 * 8 + 8 + 8 * 12 + 12 + 12 * 3 + 3  # elements of fsdp_work.Even


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(fsdp_work.everything, 4, timeout=500)


@pytest.mark.parametrize("name", fsdp_work.CASES)
def test_orders_are_those_of_the_gradients(ranks, name):
    for rank in ranks:
        found, want, _ = rank["learned"][name]
        assert found == want
        assert found == ranks[0]["learned"][name][0]
    assert len({str(orders) for orders in found}) == len(found)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (4, 1)])
def test_trainings_are_those_of_ddp(ranks, mesh):
    for rank in ranks:
        (orders, parameters), (expected, plain) = rank["trained"][mesh]
        assert orders == expected
        assert torch.allclose(parameters, plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*fsdp_work.GRADIENTS, "divided by 8"])
def test_gradients_are_those_of_fully_shard(ranks, name):
    for rank in ranks:
        (ours, plain), _, restored = rank["gradients"][name]
        scale = 0.5 if name == "divided by 8" else 1.0  # plain was divided by 4
        assert torch.allclose(ours, plain * scale, rtol=1e-6, atol=1e-7)
        assert restored


def test_the_reduce_scatter_sends_the_bytes_of_a_ring(ranks):
    for rank in ranks:
        sent = rank["gradients"]["plain"][1]["total_bytes"]
        # A ring sends 3 of 4 shards of 4 bytes; shards of 5 and 3 rows are padded, by torch, too.
        padded = EVEN + 12 + 1
        assert sent == 2 * 3 * padded


def test_only_hsdp_sends_gradients_for_ordering_alone(ranks):
    metrics = {name: ranks[0]["learned"][name][2] for name in ("mesh 4", "mesh 2 2")}
    assert "total_bytes" not in metrics["mesh 2 2"]
    assert metrics["mesh 2 2"]["bytes_for_ordering"] > 2 * metrics["mesh 4"]["bytes_for_ordering"]


@pytest.mark.parametrize("pair", [((4,), (2, 2)), ((2, 2), None), (None, (4,))])
def test_what_was_learned_moves_between_meshes_and_ddp(ranks, pair):
    for rank in ranks:
        straight, loaded = rank["resumed"][pair]
        assert loaded == straight
