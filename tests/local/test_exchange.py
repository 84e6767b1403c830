"""Exchanges of local steps: nothing is lost, one bit is what its definition says, ranks agree."""

import pytest
import torch

from gradherd.comm.message_sizes import VALUE_FORMATS
from gradherd.lab.ranks import run_ranks
from gradherd.local.exchange import OutOfStep, SharedWeights
from gradherd.local.settings import LocalSteps
from tests.local import work
from tests.local.reference import Reference
from tests.local.work import Case, Workers

SIZES = (1, 2, 3, 5)
DIMS = (0, 1, 255, 256, 257, 3000)
forms = pytest.mark.parametrize("form", VALUE_FORMATS)
sizes = pytest.mark.parametrize("size", SIZES)


def accounted(workers):
    """Return what all workers have learned, wherever it is now: 64 bits."""
    shared = workers.shared
    total = torch.stack([own.double() for own in workers.own]).mean(0)
    total -= torch.stack([owed.double() for owed in shared.residuals()]).mean(0)
    for few in shared.means:
        if few.error is not None:
            total[: few.length] -= few.spread_error().double() / few.size
    return workers.real(total)


@forms
@sizes
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize(("small", "buffers"), [(0, 0), (7, 5)])
@pytest.mark.parametrize("keep", [None, False])
def test_nothing_is_lost(form, size, dim, small, buffers, keep):
    case = Case(dim, small, buffers, form, keep)
    workers = Workers(case, size)
    learned = workers.real(workers.begin.double())
    for at in range(case.rounds):
        workers.learn(at)
        learned += sum(case.moves(at, worker).double() for worker in range(size)) / size
        workers.exchange(at, synced=at == case.sync_at)
        torch.testing.assert_close(accounted(workers), learned, rtol=1e-5, atol=1e-5)
        shared = workers.shared.outer.shared
        if at == case.sync_at or not case.settings.keep_residual:
            assert all(torch.equal(own, shared) for own in workers.own)
    if size > 1 and dim and form != "fp32":
        assert workers.shared.squares > 0


@forms
@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("dim", [257, 3000, 100_001])
@pytest.mark.parametrize("keep", [None, False])
def test_it_is_what_the_definition_says_to_the_bit(form, size, dim, keep):
    """Also with several blocks in a slice, as the last of the lengths has."""
    case = Case(dim, 7, 0, form, keep, momentum=0.5)
    workers, reference = Workers(case, size), Reference(dim, size, form)
    shared = torch.nn.Parameter(workers.real(workers.begin))
    outer = torch.optim.SGD([shared], 1.0, momentum=0.5, nesterov=True)
    owed = torch.zeros(size, dim + 7)
    for at in range(case.rounds):
        workers.learn(at)
        synced = at == case.sync_at
        own = torch.stack([workers.real(own) for own in workers.own])
        difference = shared.detach() - own + owed
        few, unsent = reference.mean(difference[:, :dim])
        small = difference[0, dim:].clone()
        for row in difference[1:, dim:]:
            small += row
        shared.grad = torch.cat([few, small / size])
        outer.step()
        unsent = torch.cat([unsent, torch.zeros(size, 7)], 1)
        owes = synced or not case.settings.keep_residual
        starts = shared.detach() - (torch.zeros_like(unsent) if owes else unsent)
        owed = unsent if owes else torch.zeros_like(unsent)
        workers.exchange(at, synced=synced)
        assert torch.equal(workers.real(workers.shared.outer.shared), shared.detach())
        for rank, own in enumerate(workers.own):
            assert torch.equal(workers.real(own), starts[rank])
            assert torch.equal(workers.real(workers.shared.residuals()[rank]), owed[rank])
            if (error := workers.shared.means[rank].error) is not None:
                assert torch.equal(error, reference.lost[rank])


ON_RANKS = [
    *[Case(dim, values=form) for form in VALUE_FORMATS for dim in (0, 1, 257, 3000)],
    *[Case(3000, values=form, dtype=torch.float64) for form in VALUE_FORMATS],
    Case(100_001, momentum=0.3, rounds=4),
    Case(3000, keep=False),
    Case(0, small=0, buffers=0),
    Case(500, small=0, buffers=3),
    Case(500, small=2, buffers=0),
]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_have_the_bits_of_workers_in_one_process(size):
    ranks = run_ranks(work.on_ranks, size, ON_RANKS, timeout=300)
    for at, case in enumerate(ON_RANKS):
        for rank, there in enumerate(work.run(case, size)):
            for (here, sent), (found, bytes_there) in zip(there, ranks[rank][at], strict=True):
                assert all(map(torch.equal, here, found)), case
                assert sent == bytes_there, case


@sizes
def test_buffers_that_are_equal_everywhere_keep_their_bits(size):
    case = Case(300, buffers=5)
    workers = Workers(case, size)
    mean = workers.exchange(0)
    seen = torch.stack([case.seen(0, worker) for worker in range(size)])
    assert torch.equal(mean[:2], seen[0, :2])
    torch.testing.assert_close(mean[2:], seen[:, 2:].mean(0))


@forms
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -1e33])
@pytest.mark.parametrize("where", [5, 2999, 3003])
def test_an_exchange_that_is_called_off_leaves_no_trace(form, bad, where):
    """The difference of one worker is not finite, in the many parameters or in the small ones."""
    workers = Workers(Case(3000, values=form), 3)
    workers.learn(0)
    workers.exchange(0)
    workers.learn(1)
    before = [workers.shared.outer.shared.clone(), *workers.own]
    kept = [[one.clone() for one in workers.kept(at)] for at in range(3)]
    broken = [own.clone() for own in workers.own]
    broken[1][where if where < 3000 else where + workers.gap] = bad
    arrival = workers.shared.exchange(broken, [torch.zeros(5)] * 3, (1, 0))
    assert arrival.ok.tolist() == [0, 1]
    assert workers.shared.verdict(arrival) == [0, 1]
    assert torch.equal(workers.shared.outer.shared, before[0])
    for at in range(3):
        assert all(map(torch.equal, workers.kept(at), kept[at]))
    # As if it had never been.
    other = Workers(Case(3000, values=form), 3)
    other.learn(0)
    other.exchange(0)
    other.learn(1)
    for one in (workers, other):
        one.exchange(1)
    assert all(map(torch.equal, workers.own, other.own))


def test_buffers_may_be_infinite_but_small_parameters_may_not():
    workers = Workers(Case(300), 2)
    buffers = [torch.full((5,), torch.inf)] * 2
    assert workers.shared.exchange(workers.own, buffers, (0, 0)).ok.tolist() == [1, 1]
    own = [one.clone() for one in workers.own]
    own[0][-1] = torch.inf
    assert workers.shared.exchange(own, buffers, (0, 0)).ok.tolist() == [0, 0]


def test_workers_that_are_out_of_step_are_told():
    workers = Workers(Case(300), 2)
    arrival = workers.shared.exchange(workers.own, [torch.zeros(5)] * 2, (4, 0))
    arrival.headers[1, :2] = torch.tensor([5, 1], dtype=torch.int32)
    with pytest.raises(OutOfStep, match=r"\[\[4, 0\], \[5, 1\]\]"):
        workers.shared.verdict(arrival)
    arrival.headers[1, :2] = torch.tensor([4, 0], dtype=torch.int32)
    assert workers.shared.verdict(arrival) == [1, 1]
    arrival.headers[1, 3] += 1  # a model of another size
    with pytest.raises(OutOfStep):
        workers.shared.verdict(arrival)


@forms
def test_a_result_can_be_added_to_weights_that_have_moved_on(form):
    case = Case(3000, values=form)
    workers, other = Workers(case, 3), Workers(case, 3)
    for one in (workers, other):
        one.learn(0)
    before = [own.clone() for own in workers.own]
    workers.exchange(0)
    other.exchange(0, delta=True)
    for own, delta, was in zip(workers.own, other.own, before, strict=True):
        torch.testing.assert_close(was + delta, own, rtol=1e-6, atol=1e-5)
    assert torch.equal(workers.shared.outer.shared, other.shared.outer.shared)


def test_what_half_precision_cannot_hold_is_owed():
    shared = SharedWeights.simulate(LocalSteps(every=1, values="fp32"), 300, 0, 0, 1)
    shared.start(torch.zeros(shared.numel))
    exact = torch.linspace(0, 1, shared.numel)
    held = exact.bfloat16().float()
    shared.owe_rounding([exact], [held])
    assert torch.equal(shared.residuals()[0], held - exact)
    shared.exchange([held.clone()])
    # Shared weights have moved by what the worker has learned, not by what it could hold of it.
    torch.testing.assert_close(shared.outer.shared[:300], exact[:300], rtol=0, atol=1e-6)
    assert not shared.residuals()[0].any()


def test_models_of_more_than_two_thousand_million_elements_are_taken():
    """There are no indices that would have to hold where a coordinate lies."""
    few = SharedWeights.simulate(LocalSteps(), 2**31 + 5, 3, 0, 8, device="meta")
    assert few.length >= 2**31 + 5
    assert few.means[0].received.codes.shape[1] == few.means[0].slice // 8


@forms
def test_a_sum_that_nobody_has_received_leaves_no_trace(form, monkeypatch):
    workers = Workers(Case(3000, values=form), 3)
    workers.learn(0)
    workers.exchange(0)
    workers.learn(1)
    shared, own = workers.shared.outer.shared.clone(), [one.clone() for one in workers.own]
    errors = [few.error.clone() for few in workers.shared.means if few.error is not None]

    def fails():
        raise RuntimeError("a rank has died")

    with monkeypatch.context() as patch:
        patch.setattr(workers.shared, "_send_to_all", fails)
        with pytest.raises(RuntimeError, match="a rank has died"):
            workers.exchange(1)
    assert torch.equal(workers.shared.outer.shared, shared)
    assert all(map(torch.equal, workers.own, own))
    for few, error in zip(workers.shared.means, errors, strict=False):
        torch.testing.assert_close(few.error, error, rtol=1e-5, atol=1e-4)


def test_one_worker_has_one_message_and_exact_values_two():
    few = SharedWeights.simulate(LocalSteps(), 3000, 0, 0, 1).means[0]
    assert few.sent is few.received is few.gathered is few.sum
    few = SharedWeights.simulate(LocalSteps(values="fp32"), 3000, 0, 0, 2).means[0]
    assert few.gathered is few.sent is not few.received
