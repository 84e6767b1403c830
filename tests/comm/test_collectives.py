import pytest
import torch

from gradherd.comm.collectives import CollectiveError, all_gather, all_reduce, all_to_all, broadcast
from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from tests.comm import rank_functions

FLOAT, LONG, DOUBLE, INT = 4, 8, 8, 4  # bytes


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request):
    return run_ranks(rank_functions.all_collectives, request.param)


def test_all_reduce_sums_in_place(ranks):
    size = len(ranks)
    expected = size * torch.arange(6.0).view(2, 3) + 10 * sum(range(size))
    for rank in ranks:
        value, sent = rank["all_reduce"]
        assert torch.equal(value, expected)
        assert torch.equal(rank["in_place"], expected)
        assert sent == 2 * 6 * FLOAT * (size - 1) // size


def test_all_gather_stacks_by_rank(ranks):
    size = len(ranks)
    expected = torch.stack([torch.arange(4.0).view(2, 2) + 10 * r for r in range(size)])
    for rank in ranks:
        value, sent = rank["all_gather"]
        assert torch.equal(value, expected)
        assert sent == 4 * FLOAT * (size - 1)


def test_all_gather_of_scalars(ranks):
    for rank in ranks:
        value, sent = rank["all_gather_0d"]
        assert value.tolist() == list(range(len(ranks)))
        assert sent == LONG * (len(ranks) - 1)


def test_all_gather_of_a_strided_tensor(ranks):
    expected = torch.stack([torch.arange(6.0).view(2, 3).T + r for r in range(len(ranks))])
    for rank in ranks:
        assert torch.equal(rank["all_gather_strided"][0], expected)


@pytest.mark.parametrize("layout", ["all_to_all", "all_to_all_strided"])
def test_all_to_all_transposes_rows_and_ranks(ranks, layout):
    size = len(ranks)
    for me, rank in enumerate(ranks):
        value, sent = rank[layout]
        assert value.tolist() == [[2 * me + 100 * r, 2 * me + 1 + 100 * r] for r in range(size)]
        assert sent == size * 2 * LONG * (size - 1) // size


def test_broadcast_from_the_last_rank_overwrites(ranks):
    size = len(ranks)
    for rank in ranks:
        value, sent = rank["broadcast"]
        assert value.tolist() == [size - 1.0] * 3
        assert rank["broadcast_in_place"].tolist() == [size - 1.0] * 3
        assert sent == (0 if size == 1 else 3 * DOUBLE)


def test_all_to_all_wants_one_row_per_rank(ranks):
    size = len(ranks)
    for rank in ranks:
        assert rank["wrong_rows"] == (
            f"ValueError: tensor must have one row per rank ({size}), got {size + 1}"
        )


def test_broadcast_wants_a_src_in_the_world(ranks):
    size = len(ranks)
    for rank in ranks:
        assert rank["wrong_src"] == f"ValueError: src must be in [0, {size}), got {size}"


def test_one_rank_needs_no_process_group():
    world, tensor = World.single(), torch.arange(3.0).view(1, 3)
    for collective in (all_reduce, all_to_all, broadcast):
        value, sent = collective(tensor.clone(), world)
        assert torch.equal(value, tensor)
        assert sent == 0
    assert torch.equal(all_gather(tensor, world).value, tensor.unsqueeze(0))
    with pytest.raises(ValueError, match=r"one row per rank \(1\), got 2"):
        all_to_all(torch.zeros(2, 3), world)
    with pytest.raises(ValueError, match=r"src must be in \[0, 1\), got -1"):
        broadcast(tensor, world, src=-1)


def test_a_group_counts_its_own_ranks():
    results = run_ranks(rank_functions.in_a_subgroup, 4)
    assert results[0] is None and results[2] is None
    assert results[1] == ([1.0, 3.0], [4.0], [3.0], [1.0, 3.0])
    assert results[3] == ([1.0, 3.0], [4.0], [3.0], [11.0, 13.0])


def test_a_side_channel_is_gloos_where_gloo_exchanges_or_not_all_ranks_do():
    first, second, third = run_ranks(rank_functions.beside_the_loop, 3)
    assert first == third == [(False, [0.0, 1.0, 2.0])] * 2 + [(False, [0.0, 2.0])] * 2
    assert second == [(False, [0.0, 1.0, 2.0])] * 2


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_small_all_reduce_has_the_same_bits_on_all_ranks(size):
    sums = [value for value, _ in run_ranks(rank_functions.sum_small, size)]
    assert all(torch.equal(sums[0], other) for other in sums)
    torch.testing.assert_close(sums[0], torch.arange(3.0).double() * size + sum(range(size)) / 3)


def test_a_thread_beside_the_loop_waits_for_collectives_of_any_size():
    assert run_ranks(rank_functions.in_the_background, 2) == [[2.0, 2.0]] * 2


def test_what_a_backend_says_becomes_a_sentence():
    error = CollectiveError("[pair.cc:553]\n  Connection closed by peer")
    assert error.reason == "[pair.cc:553] Connection closed by peer"
    assert (
        str(error) == f"ranks did not meet: one has died, is late or out of reach ({error.reason})"
    )
