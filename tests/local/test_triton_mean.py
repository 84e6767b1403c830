"""One bit by kernels against the blocks that a CPU takes: odd lengths, several slices, all ways.

Without a GPU they run through Triton's interpreter (`tests/test_interpreted.py`).
"""

import pytest
import torch

pytest.importorskip("triton")

from gradherd.comm.packing import decode_values
from gradherd.local import triton_mean
from gradherd.local.exchange import SharedWeights
from gradherd.local.mean import FewBitMean
from gradherd.local.outer import OuterOptimizer
from gradherd.local.settings import LocalSteps
from tests.gpu import DEVICE, GPU, MARKS

pytestmark = MARKS
DIMS = [0, 257, 1500] + ([1_000_003, 3 * 2**20] if GPU else [])


def normal(seed, count):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def made(dim, size):
    """Return what each worker sends, by kernels and in blocks."""
    both = [[FewBitMean(dim, exact=3, rank=rank, size=size, device=where) for rank in range(size)]
            for where in (DEVICE, "cpu")]  # fmt: skip
    for few in both[0]:
        few.kernels = triton_mean if size > 1 else None
    return both


def read(messages, row, few):
    """Return the values of a message, as the reference of packing reads them."""
    levels, codes = messages.levels[row].view(torch.uint8).cpu(), messages.codes[row].cpu()
    return decode_values(torch.cat([levels, codes]), few.slice, 1)


def alike(found, wanted):
    """Check two messages: a level may be rounded the other way, as its sum has another order."""
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)


def travel(workers):
    for owner in workers:
        for one in workers:
            owner.received.raw[one.rank] = one.sent.raw[owner.rank].to(DEVICE)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("owes", [False, True])
def test_what_is_sent(dim, size, owes):
    kernels, blocks = made(dim, size)
    length = kernels[0].length
    own, shared, owed = normal(1, length), normal(2, length), normal(3, length)
    exact = torch.zeros(3, device=DEVICE)
    there = kernels[0].send(own, shared, owed if owes else None, exact, (7, 0))
    cpu = [one.cpu() for one in (own, shared, owed)]
    here = blocks[0].send(*cpu[:2], cpu[2] if owes else None, exact.cpu(), (7, 0))
    assert torch.equal(there.header.cpu(), here.header)
    assert torch.equal(there.codes.cpu(), here.codes)
    for owner in range(size):
        alike(read(there, owner, kernels[0]), read(here, owner, blocks[0]))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e35])
def test_what_is_not_finite_is_told(bad):
    few, _ = made(5000, 3)
    own, shared = normal(1, few[0].length), normal(2, few[0].length)
    exact = torch.zeros(3, device=DEVICE)
    own[4999] = bad
    assert not few[0].send(own, shared, None, exact, (7, 0)).header[:, 2].any()
    own[4999] = 1.0
    own[5000:] = bad  # padding: whatever lies there
    assert few[0].send(own, shared, None, exact, (7, 0)).header[:, 2].all()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("ok", [None, 1, 0])
def test_sums(dim, size, ok):
    for few, reference in zip(*made(dim, size), strict=True):
        exact, length = torch.zeros(3, device=DEVICE), few.length
        senders, _ = made(dim, size)
        for one in senders:
            one.send(normal(one.rank, length), normal(9, length), None, exact, (0, 0))
            few.received.raw[one.rank] = one.sent.raw[few.rank]
        before = normal(4, few.slice)
        before[few._real :] = 0
        few.error.copy_(before)
        reference.error.copy_(before)
        reference.received.raw.copy_(few.received.raw)
        flags = None if ok is None else torch.tensor([ok, 1], dtype=torch.int32, device=DEVICE)
        few.own(flags)
        reference.own()
        alike(read(few.sum, 0, few), read(reference.sum, 0, reference))
        if ok == 0:
            assert torch.equal(few.error, before), "nothing is kept of a sum that does not count"
            continue
        # Exactly what was not sent, of levels as they were sent.
        total = before.cpu()
        for row in range(size):
            total += read(few.received, row, few)
        left = (total - read(few.sum, 0, few))[: few._real]
        assert torch.equal(few.error[: few._real].cpu(), left)
        assert not few.error[few._real :].any()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("momentum", [0.0, 0.3])
@pytest.mark.parametrize("owes", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("ok", [(1, 1), (0, 1), (0, 0)])
def test_what_comes_of_it(dim, momentum, owes, keeps, delta, ok):
    """Shared weights, momentum, own weights and what is owed: the bits of plain operations."""
    size = 3
    workers, _ = made(dim, size)
    length, exact = workers[0].length, torch.zeros(3, device=DEVICE)
    shared, owed, vectors = normal(9, length), normal(8, length), []
    for one in workers:
        vectors.append(normal(one.rank, length))
        debts = owed if owes and one.rank == 0 else None
        one.send(vectors[-1], shared, debts, exact, (0, 0))
    travel(workers)
    few = workers[0]
    for owner in workers:
        owner.own()
        for one in workers:
            one.gathered.raw[owner.rank] = owner.sum.raw[0]
    settings = LocalSteps(outer_momentum=momentum, outer_lr=0.7)
    outer = OuterOptimizer(settings, shared.clone())
    if momentum:
        outer.momentum.copy_(normal(7, length))
    speed = None if outer.momentum is None else outer.momentum.clone()
    own = vectors[0].clone()
    room = owed.clone() if owes else (None if keeps else torch.full_like(owed, 5.0))
    squares = triton_mean.apply(
        few, few.gathered, outer, own, room, torch.tensor(ok, dtype=torch.int32, device=DEVICE),
        owes=owes, keeps=keeps, delta=delta, last=True,
    )  # fmt: skip

    # The same with plain operations.
    sent = torch.cat([read(few.sent, owner, few) for owner in range(size)]).to(DEVICE)
    mean = torch.cat([read(few.gathered, owner, few) for owner in range(size)]).to(DEVICE) / size
    unsent = shared - vectors[0] + (owed if owes else 0) - sent
    plain = OuterOptimizer(settings, shared.clone())
    if momentum:
        plain.momentum.copy_(speed)
    plain.step(mean)
    good, finite = ok
    start = plain.shared - unsent if keeps else plain.shared
    if delta:
        wanted = start - vectors[0] if good else torch.zeros_like(start)
    else:
        wanted = start if good else vectors[0] if finite else shared
    real = slice(0, dim)
    assert torch.equal(own[real], wanted[real])
    assert torch.equal(outer.shared[real], (plain.shared if good else shared)[real])
    if momentum:
        assert torch.equal(outer.momentum[real], (plain.momentum if good else speed)[real])
    if not keeps:
        waits = owed if owes else torch.zeros_like(owed)
        assert torch.equal(room[real], (unsent if good else waits)[real])
    torch.testing.assert_close(
        float(squares), float(unsent[real].square().sum()), rtol=1e-4, atol=0
    )


@pytest.mark.parametrize("keep", [True, False])
def test_workers_in_one_process_all_go_on(keep):
    """They share one copy of the shared weights, which a kernel would move once for each."""
    settings = LocalSteps(every=1, keep_residual=keep, outer_momentum=0)
    shared = SharedWeights.simulate(settings, 5000, 0, 0, 3, device=DEVICE)
    for few in shared.means:
        few.kernels = triton_mean
    shared.start(torch.zeros(shared.numel, device=DEVICE))
    own, learned = [torch.zeros(shared.numel, device=DEVICE) for _ in range(3)], 0
    for at in range(3):
        moves = [normal(10 * at + rank, shared.numel) for rank in range(3)]
        own = [one + move for one, move in zip(own, moves, strict=True)]
        learned = learned + torch.stack(moves).mean(0)
        own = [one.clone() for one in shared.exchange(own, position=(at, 0)).weights]
        have = torch.stack(own).mean(0) - torch.stack(shared.residuals()).mean(0)
        have -= sum(few.spread_error() for few in shared.means) / 3
        torch.testing.assert_close(have[:5000], learned[:5000], rtol=1e-5, atol=1e-5)
    assert torch.equal(own[0][:5000], own[1][:5000]) != keep
