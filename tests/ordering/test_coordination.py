import pytest
import torch

from gradherd import CDGraB, OrderedSampler, World
from gradherd.comm.script import RankRunner, SharedRunner, run_together
from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.ranks import run_ranks
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.coordination import RowGatherer, observe_gathered, observe_slices
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import ShardedRows
from gradherd.ordering.registry import make_policy
from tests.attach import attach_work
from tests.ordering.helpers import lists


def sampler_of(units, batch=2):
    return OrderedSampler(range(units), "pair-grab", batch_size=batch, world=World.single())


def test_how_many_are_gathered_at_once_does_not_matter():
    vectors = torch.randn(3, 7, 6, generator=torch.Generator().manual_seed(0))
    ordering = Ordering(CDGraB(), [7] * 3, seed=5)
    want = []
    for _ in range(3):
        visits = torch.stack(ordering.orders, dim=1)
        ordering.observe(vectors[torch.arange(3), visits])
        ordering.end_epoch()
        want.append(lists(ordering.orders))
    for found in run_ranks(attach_work.gathered_every, 3, (1, 3, 1000)):
        for history, sent in found:
            assert history == want
            assert sent == 3 * 7 * 6 * 4 * 2  # epochs, units, numbers, bytes, other ranks


@pytest.mark.parametrize("name", ["cd-grab", "id-pair-grab", "grab"])
def test_scattered_columns_give_the_orders_of_whole_rows(name):
    """Workers that share a process, and workers with a script each, one of 7 columns of 3."""
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(3, 11, 7, dtype=torch.float64, generator=generator)
    want, together = (Ordering(make_policy(name), [11] * 3, seed=5) for _ in range(2))
    apart = [Ordering(make_policy(name), [11] * 3, seed=5) for _ in range(3)]
    runner, sent = SharedRunner(3), 0
    for _ in range(3):
        rows = vectors[torch.arange(3).unsqueeze(1), torch.stack(want.orders)]
        # The second batch is not finite in one column of one worker: all leave it out.
        rows[1, 5, 6] = torch.nan
        seen = torch.ones(11, 3, dtype=torch.bool)
        seen[4:8] = False
        want.observe(rows.transpose(0, 1), seen)
        runner.start(observe_gathered(together, rows, [4, 4, 3], scatters=True))
        results = run_together(
            [
                observe_gathered(one, own, [4, 4, 3], scatters=True)
                for one, own in zip(apart, rows, strict=True)
            ]
        )
        sent += results[0].bytes
        for ordering in (want, together, *apart):
            ordering.end_epoch()
            assert ordering.version == want.version
    assert runner.bytes == sent


def test_scattered_columns_take_a_third_of_the_step_of_16_workers():
    """LeNet, 16 workers with 4 examples each: three times the bytes of d-rr, not 33 times."""
    gradient = 62_006
    averaged = mean_bytes(gradient, 16)
    rows, factors = torch.zeros(1).expand(16, 128, gradient), []
    for scatters in (False, True):
        # What is sent depends on shapes alone; the values of these rows are never read.
        ordering, runner = Ordering(CDGraB(), [128] * 16), SharedRunner(16)
        runner.start(observe_gathered(_Counted(ordering), rows, [4] * 32, scatters=scatters))
        factors.append(1 + runner.bytes / 32 / averaged)
    assert factors == pytest.approx([33, 3.02], rel=1e-3)


class _Counted:
    """Learns from the first column of rows alone."""

    def __init__(self, ordering):
        self._ordering, self.epoch = ordering, 0

    def note_finite(self, finite):
        assert finite.all()

    def observe(self, rows, seen=None, *, first=None):
        pass

    def learn(self, rows, seen=None, *, first=None):
        if isinstance(rows, ShardedRows):
            rows = ShardedRows((rows.columns[..., :1],))
            yield from self._ordering.learn(rows, seen, first=first)


def test_rows_wait_until_enough_are_together():
    sampler = sampler_of(11)
    gather = RowGatherer(sampler, RankRunner(World.single()), every=2)
    rows = torch.randn(11, 4)
    steps = []
    for step in range(0, 8, 2):
        gather.add(rows[step : step + 2], BatchClaim(0, step, 2, 2))
        steps.append(sampler.ordering.steps)
    assert steps == [0, 0, 0, 4]  # sent after the second, landed when the next two are sent
    gather.flush()
    assert sampler.ordering.steps == 8
    gather.add(rows[8:10], BatchClaim(0, 8, 2, 2))
    gather.add(rows[10:], BatchClaim(0, 10, 1, 1))
    gather.flush()
    assert sampler.ordering.epoch == 1


def test_a_batch_that_is_not_finite_is_left_out_as_a_whole():
    rows = torch.randn(9, 4)
    rows[2, 1] = float("nan")
    sampler, want = sampler_of(9), sampler_of(9)
    gather = RowGatherer(sampler, RankRunner(World.single()))
    for step in range(0, 9, 2):
        units = len(rows[step : step + 2])
        gather.add(rows[step : step + 2], BatchClaim(0, step, units, units))
    gather.flush()
    seen = torch.ones(9, 1, dtype=torch.bool)
    seen[2:4] = False
    want.observe(rows.unsqueeze(1), seen)
    assert lists(sampler.ordering.orders) == lists(want.ordering.orders)
    before = sampler_of(9).ordering.orders[0]
    assert sampler.ordering.orders[0][2:4].tolist() == before[2:4].tolist()


@pytest.mark.parametrize("flushed", [False, True])
def test_a_pass_that_starts_over_replaces_what_came_before(flushed):
    rows = torch.randn(8, 4)
    sampler, want = sampler_of(8), sampler_of(8)
    gather = RowGatherer(sampler, RankRunner(World.single()))
    for step in (0, 2):
        gather.add(5 * rows[:2], BatchClaim(0, step, 2, 2))
    if flushed:
        gather.flush()
    for step in range(0, 8, 2):
        gather.add(rows[step : step + 2], BatchClaim(0, step, 2, 2))
    gather.flush()
    want.observe(rows.unsqueeze(1))
    assert lists(sampler.ordering.orders) == lists(want.ordering.orders)
    assert sampler.ordering.epoch == 1


def test_rows_of_an_epoch_that_is_over_are_dropped():
    sampler = sampler_of(8)
    gather = RowGatherer(sampler, RankRunner(World.single()))
    gather.add(torch.randn(2, 4), BatchClaim(0, 0, 2, 2))
    sampler.end_epoch()
    gather.flush()
    assert (sampler.ordering.epoch, sampler.ordering.steps) == (1, 0)


def test_slices_of_an_epoch_that_is_over_are_dropped():
    sampler = sampler_of(8, batch=1)
    script = observe_slices(sampler, (torch.randn(1, 4),), BatchClaim(0, 0, 1, 1))
    sampler.end_epoch()
    run_together([script])
    assert (sampler.ordering.epoch, sampler.ordering.steps) == (1, 0)


@pytest.mark.parametrize("missed", [None, 1, 2])
def test_half_a_pair_is_kept_where_it_is_for_memory_that_is_free(missed):
    rows = torch.randn(8, 1, 4, generator=torch.Generator().manual_seed(0))
    ordering, want = (Ordering(CDGraB(), [8], start="identity") for _ in range(2))
    memory, places = torch.empty(1, 4), set()
    for step, row in enumerate(rows):
        if step == missed:
            continue
        released, claim = [], BatchClaim(0, step, 1, 1)
        memory.copy_(row)  # what the exchange writes into its only memory
        run_together([observe_slices(ordering, (memory,), claim, release=released.append)])
        memory = memory if released[0] is None else released[0]
        pending = ordering._state.pending
        assert pending is None or pending.data_ptr() != memory.data_ptr()
        places.add(memory.data_ptr())
        want.observe(row.unsqueeze(0), first=step)
    assert len(places) == 2 and torch.equal(ordering._state.running, want._state.running)
    for one in (ordering, want):
        one.end_epoch()
    assert lists(ordering.orders) == lists(want.orders)
