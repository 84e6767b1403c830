"""Ranks agree before the first step, on the model's own group, or all of them say why not."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from gradherd.hooks.agreement import RankAgreement
from gradherd.lab.ranks import run_ranks
from tests.attach import agreement_work as work
from tests.attach.agreement_work import SAME, SPARSE

CHANGES = {
    "order (CDGraB": {"policy": "d-rr"},
    "batch_size (4 on rank 0; 8 on rank 1)": {"batch": 8},
    "unit (4 on rank 0; 2 on rank 1)": {"unit": 2, "rows": "sketch"},
    "rows (BatchRows() on rank 0; SketchRows(reduction='mean', batch_dim=None, layers=16": {
        "rows": "sketch"
    },
    "seed (0 on rank 0; 3 on rank 1)": {"seed": 3},
    "length of the data set (24 on rank 0; 28 on rank 1)": {"examples": 28},
}
SPARSE_CHANGES = {
    "density=0.05": {"sparsify": work.gh.Sparsify(method=work.gh.ExDyna(density=0.1))},
    "none on rank 1": {"sparsify": None},
}


def test_settings_that_differ_are_named_on_all_ranks():
    ranks = run_ranks(work.differing, 2, list(CHANGES.values()))
    for found in ranks:
        for expected, error in zip(CHANGES, found, strict=True):
            assert expected in error
            # At once: after the timeout of the group, half an hour, this test would have ended.
            assert error.startswith("ValueError: ranks differ in")


def test_sparsifiers_that_differ():
    for found in run_ranks(work.differing, 2, list(SPARSE_CHANGES.values()), SPARSE):
        for expected, error in zip(SPARSE_CHANGES, found, strict=True):
            assert "ranks differ in sparsify (Sparsify(method=ExDyna(density=0.05" in error
            assert expected in error


def test_a_rank_that_fails_is_named_on_the_others():
    other, own = (found[0] for found in run_ranks(work.differing, 2, [{"rows": "fast"}]))
    assert own.startswith("ValueError: rows must be one of")
    assert other.startswith("RuntimeError: attach() failed on rank 1: rows must be one of")


def test_frozen_on_one_rank():
    for error in run_ranks(work.other_parameters, 2):
        assert "trainable parameters (2 on rank 0; 1 on rank 1)" in error
        assert "trainable elements (18 on rank 0; 15 on rank 1)" in error


def test_attached_alone():
    error, _ = run_ranks(work.alone, 2, collective_timeout=5)
    assert error == (
        "rank 1 did not call attach() within 5 s, the timeout of the process group: call it on "
        "all ranks"
    )


def test_what_a_dead_process_left_in_the_store_is_no_answer():
    assert run_ranks(work.stale_entries, 2, collective_timeout=10) == [True, True]


class CountingStore:
    """A rank's way to a store that all share."""

    def __init__(self, store):
        self.store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self.store, name)


def test_requests_grow_with_the_number_of_ranks():
    shared, size = dist.HashStore(), 32
    stores = [CountingStore(shared) for _ in range(size)]

    def agree(rank):
        if rank == size // 2:
            time.sleep(1.0)  # the others wait
        world = SimpleNamespace(
            rank=rank, size=size, store=lambda: stores[rank], timeout=lambda: timedelta(seconds=60)
        )
        RankAgreement(world).compare({"seed": 1})

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(agree, range(size)))
    # About 40 for each that asks, and 40 to each that is asked for.
    assert sum(store.requests for store in stores) < 150 * size


def test_settings_read_the_same_in_all_processes():
    ranks = run_ranks(work.readable, 2)
    assert ranks[0] == ranks[1]
    assert "score=<function" in ranks[0][1]


def test_equal_settings():
    assert [found[0] for found in run_ranks(work.differing, 2, [SAME])] == ["", ""]


def test_a_model_of_some_ranks_with_a_sampler_of_all():
    for rank, error in enumerate(run_ranks(work.subgroup_gradients, 4, False)):
        ranks = "[0, 1]" if rank < 2 else "[2, 3]"
        assert "order was made for ranks [0, 1, 2, 3], but the model averages" in error
        assert f"over ranks {ranks}" in error


def test_models_of_some_ranks_average_over_their_own_group():
    ranks = run_ranks(work.subgroup_gradients, 4, True)
    for worst, orders in ranks:
        assert worst < 1e-12
        assert orders == ranks[0][1], "both groups see the same examples"
        assert orders[0] == orders[1], "attached twice"


def test_a_sampler_takes_over_the_group_of_the_model():
    assert run_ranks(work.other_group_of_the_same_ranks, 2) == [True, True]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("part", "parameter '2.weight' is not sharded, so FSDP does not average its gradient"),
        ("fsdp1", "model is wrapped in FullyShardedDataParallel"),
        ("both", "parameter '0.weight' is split by tensor parallelism as well"),
        ("dtensor", "parameter '0.weight' is a DTensor"),
        ("zero3", "parameter '0.weight' has no elements, as under ZeRO stage 3"),
        ("zero3 in part", "parameter '2.weight' has no elements, as under ZeRO stage 3"),
        ("lazy", "parameter 'weight' has no shape yet: run a forward before attach()"),
    ],
)
def test_parameters_of_which_a_rank_holds_a_part_are_refused(kind, says):
    for found in run_ranks(work.sharded, 2, kind):
        assert len(found) == 2
        assert all(says in error for error in found)
