"""Replicas of a sharded model exchange their gradients sparsely: four ranks, all meshes."""

import pytest
import torch

from gradherd.lab.ranks import run_ranks
from tests.attach import fsdp_sparse_work as work


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(folder):
    return run_ranks(work.everything, 4, str(folder), timeout=500)


def close(one, two):
    return torch.allclose(one, two, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("name", ["exdyna", "topk", "dense"])
def test_what_was_sent_and_what_waits_is_the_sum_of_gradients(ranks, shape, name):
    for rank in ranks:
        total, found, metrics = rank["conserved"][shape, name]
        assert close(found, total)
        if name != "dense" and shape != (1, 4):
            assert metrics["residual_norm"] > 0
            assert metrics["density"] < 0.5


@pytest.mark.parametrize("name", ["unused", "bf16", "clipped"])
def test_nothing_is_lost_in_other_cases(ranks, name):
    for rank in ranks:
        total, found, _ = rank[name]
        assert close(found, total)


@pytest.mark.parametrize("name", work.METHODS)
def test_replicas_stay_equal_to_the_bit(ranks, name):
    for rank in ranks:
        equal, moved = rank["replicas"][name]
        assert equal
        assert moved > 0.01


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), "children"])
def test_the_dense_method_gives_the_gradients_of_hsdp(ranks, shape):
    for rank in ranks:
        ours, torchs = rank["native"][shape]
        assert close(ours, torchs)


@pytest.mark.parametrize("how", ["sync", "all-reduce"])
def test_accumulated_gradients_are_exchanged_once(ranks, how):
    for rank in ranks:
        together, apart = rank["delayed"][how]
        assert close(together, apart)


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(ranks):
    for rank in ranks:
        assert rank["not finite"] == (True, True, 1)


@pytest.mark.parametrize("name", ["continued", "with momentum"])
def test_a_loaded_run_continues_to_the_bit(ranks, name):
    for rank in ranks:
        straight, resumed = rank[name]
        assert torch.equal(straight, resumed)


def test_every_rank_loads_what_it_has_saved_and_nothing_else(ranks):
    for rank in ranks:
        for (before, after), said in rank["own states"]:
            assert before == after
            assert len(said) == 3
            assert all("place" in one or "rank" in one for one in said)


@pytest.mark.parametrize("shape", [(4, 1), (1, 2)])
def test_another_mesh_loads_all_residuals(ranks, folder, shape):
    others = [rank["loaded"] for rank in ranks]
    if shape != (4, 1):
        others = run_ranks(work.loaded, 2, str(folder / "moved"), shape)
    for rank, (waits, finite, steps) in zip(ranks, others, strict=False):
        assert finite
        assert steps == 7
        assert sum(bool(tensor.any()) for tensor in rank["saved"].values()) == 3
        for name, tensor in rank["saved"].items():
            assert torch.allclose(waits[name], tensor, rtol=1e-6, atol=1e-8)


def test_what_does_not_fit_is_refused_with_what_to_do(ranks):
    says = {
        "native": "torch averages over replicas before anything could be exchanged sparsely",
        "no mesh": "call fully_shard(model, mesh=mesh['shard']) and attach(..., mesh=mesh)",
        "other mesh": "mesh must have two dimensions, one of which is the mesh that fully_shard",
        "mesh alone": "mesh goes with sparsify",
        "ranks": "order was made for ranks [0, 1, 2, 3], but the model averages gradients over",
        "batches": "rows='batch' would exchange whole gradients beside the sparse ones",
        "ddp": "mesh goes with sparsify or local, and a model that fully_shard was called on",
        "two momenta": "SGD has momentum 0.5 and the sparsifier 0.9",
    }
    for rank in ranks:
        for name, text in says.items():
            assert text in rank["refused"][name], name
