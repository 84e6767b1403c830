"""Scripts: real ranks and ranks in one process agree to the bit and to the byte."""

import pytest
import torch

from gradherd.comm.script import (
    AllGather,
    AllToAll,
    run,
    run_together,
)
from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from studies.methods.cltk import Broadcast
from studies.methods.gtopk import SendRecv
from tests.comm import script_functions

ITEM = [torch.empty(0, dtype=kind).element_size() for kind in script_functions.KINDS.values()]


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a is None and b is None


@pytest.fixture(scope="module", params=[1, 2, 4])
def ranks(request):
    """For every script, on every rank: the results and the bytes sent."""
    return run_ranks(script_functions.run_all, request.param)


def together(name, size):
    return run_together([script_functions.SCRIPTS[name](rank, size) for rank in range(size)])


@pytest.mark.parametrize("name", script_functions.SCRIPTS)
def test_real_ranks_equal_those_in_one_process(ranks, name):
    for real, virtual in zip(ranks, together(name, len(ranks)), strict=True):
        answers, sent = real[name]
        assert sent == virtual.bytes
        assert len(answers) == len(virtual.value) > 0
        assert all(same(a, b) for a, b in zip(answers, virtual.value, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_all_gather_stacks(size):
    for result in together("all_gathers", size):
        expected = [
            torch.stack([script_functions.values(r, 3, 2, kind=kind) for r in range(size)])
            for kind in script_functions.KINDS.values()
        ]
        expected.append(torch.arange(size))
        expected.append(torch.stack([script_functions.values(r, 4, 3).T for r in range(size)]))
        expected.append(torch.stack([script_functions.values(r, 9)[::2] for r in range(size)]))
        expected.append(torch.zeros(size, 0))
        assert all(same(a, b) for a, b in zip(result.value, expected, strict=True))
        assert result.bytes == (6 * sum(ITEM) + 8 + 12 * 4 + 5 * 4) * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_an_all_to_all_transposes(size):
    for me, result in enumerate(together("all_to_alls", size)):
        expected = [
            torch.stack([script_functions.values(r, size, 3, kind=kind)[me] for r in range(size)])
            for kind in script_functions.KINDS.values()
        ]
        expected.append(
            torch.stack([script_functions.values(r, 2, size).T[me] for r in range(size)])
        )
        expected.append(torch.stack([script_functions.values(r, size)[me] for r in range(size)]))
        assert all(same(a, b) for a, b in zip(result.value, expected, strict=True))
        assert result.bytes == (size - 1) * (3 * sum(ITEM) + 2 * 4 + 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_broadcast_gives_the_tensor_of_src(size):
    for result in together("broadcasts", size):
        expected = [
            script_functions.values(source, 2, 2, kind=kind)
            for source in range(size)
            for kind in script_functions.KINDS.values()
        ]
        assert all(same(a, b) for a, b in zip(result.value, expected, strict=True))
        assert result.bytes == (0 if size == 1 else size * 4 * sum(ITEM))


def test_rounds_of_send_recv():
    for size in (1, 2, 4):
        for rank, result in enumerate(together("send_recvs", size)):
            ring, left, last, none = result.value if size > 1 else [None, *result.value]
            assert same(ring, script_functions.values((rank - 1) % size, 5) if size > 1 else None)
            receives_left = rank % 2 == 0 and rank + 1 < size
            assert same(left, script_functions.values(rank + 1, 5) if receives_left else None)
            receives_last = size > 1 and rank == size - 1
            assert same(
                last, script_functions.values(0, 5).bfloat16()[::2] if receives_last else None
            )
            assert none is None
            sends = [size > 1, rank % 2 == 1]
            assert result.bytes == 20 * sum(sends) + (6 if size > 1 and rank == 0 else 0)


def test_one_rank_needs_no_process_group():
    for name, script in script_functions.SCRIPTS.items():
        alone, sent = run(script(0, 1), World.single())
        assert sent == 0
        assert all(same(a, b) for a, b in zip(alone, together(name, 1)[0].value, strict=True))


def requesting(*requests):
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


ONE = torch.zeros(1)


@pytest.mark.parametrize(
    ("scripts", "returned", "requested"),
    [
        ([requesting(AllGather(ONE)), requesting()], 1, ["AllGather"]),
        ([requesting(), requesting(), requesting(AllToAll(ONE))], 2, ["AllToAll"]),
        (
            [requesting(AllGather(ONE)), requesting(Broadcast(ONE, 0))],
            0,
            ["AllGather", "Broadcast"],
        ),
        (
            [
                requesting(AllGather(ONE), SendRecv()),
                requesting(AllGather(ONE), AllToAll(ONE)),
            ],
            0,
            ["SendRecv"],
        ),
    ],
)
def test_workers_out_of_step_raise(scripts, returned, requested):
    with pytest.raises(
        RuntimeError, match=f"out of step: {returned} of {len(scripts)} have returned"
    ) as caught:
        run_together(scripts)
    assert all(kind in str(caught.value) for kind in requested)


@pytest.mark.parametrize(
    "sender", [SendRecv(), SendRecv(ONE, 2), SendRecv(None, 0), SendRecv(like=ONE, src=0)], ids=str
)
def test_waiting_for_a_rank_that_does_not_send_raises(sender):
    receiver, third = SendRecv(like=ONE, src=1), SendRecv()
    with pytest.raises(
        RuntimeError, match="rank 0 receives from rank 1, which does not send to it"
    ):
        run_together([requesting(receiver), requesting(sender), requesting(third)])


def test_an_exception_in_a_script_is_the_callers():
    with pytest.raises(ValueError, match="script of rank 1 fails"):
        run_together([script_functions.fails(rank, 1) for rank in range(2)])
    with pytest.raises(ValueError, match="script of rank 0 fails"):
        run(script_functions.fails(0, 0), World.single())
    with pytest.raises(
        RuntimeError, match=r"rank 1 failed:[\s\S]*ValueError: script of rank 1 fails"
    ):
        run_ranks(script_functions.run_one_that_fails, 2, 1)


def test_scripts_that_request_nothing_return_at_once():
    assert [tuple(result) for result in run_together([requesting(), requesting()])] == [
        ([], 0),
        ([], 0),
    ]
    assert tuple(run(requesting(), World(rank=3, size=4))) == ([], 0)


def test_a_group_counts_its_own_ranks():
    results = run_ranks(script_functions.in_a_subgroup, 4)
    assert results[0] is None and results[2] is None
    for me, other in ((1, 3), (3, 1)):
        assert results[me] == ([[1.0, 1.0], [3.0, 3.0]], [other])
