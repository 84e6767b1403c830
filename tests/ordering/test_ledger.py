import gc
import itertools
import weakref

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset

from gradherd import OrderedSampler, World
from gradherd.ordering import iterators
from gradherd.ordering.iterators import EpochPass, LoaderRegistry
from gradherd.ordering.ledger import UNKNOWN, BatchLedger, PositionIndex


class Iterator:
    """Stands for an iterator: only whether it is alive matters."""


def running(ledger, length=10, begin=0):
    """Return a pass whose loop goes on, and what keeps it alive."""
    iterator = Iterator()
    one = EpochPass(begin, length, "v", iterator=weakref.ref(iterator))
    ledger.begin(one)
    return one, iterator


def number(ledger):
    return ledger.current().number


def test_a_forward_is_for_the_batch_that_was_received_last():
    ledger = BatchLedger(4)
    assert ledger.current() is None
    one, alive = running(ledger)
    for batch, handed_out in enumerate((4, 8, 10)):
        one.handed_out = handed_out
        assert number(ledger) == batch
        assert number(ledger) == batch  # again, without another batch
    assert alive


def test_batches_that_were_skipped_are_not_credited():
    ledger = BatchLedger(2)
    one, alive = running(ledger)
    one.handed_out = 2
    assert number(ledger) == 0
    one.handed_out = 8
    assert number(ledger) == 3
    assert alive


def test_several_batches_before_the_first_forward_are_refused_unless_explained():
    for ahead, wanted in ((0, 2), (1, 1), (2, 0)):
        ledger = BatchLedger(2, ahead)
        one, alive = running(ledger)
        one.handed_out = 6
        assert number(ledger) == wanted
    ledger = BatchLedger(2)
    one, alive = running(ledger)
    one.handed_out = 4
    with pytest.raises(RuntimeError, match="received 2 batches before the first forward"):
        ledger.current()
    assert alive


def test_a_look_at_the_data_is_not_the_loop():
    ledger = BatchLedger(2)
    one, alive = running(ledger)
    one.handed_out = 2
    assert number(ledger) == 0
    look, iterator = running(ledger)
    look.handed_out = 10
    del iterator  # the look is over
    assert ledger.current().epoch_pass is one and number(ledger) == 0
    one.handed_out = 4
    assert ledger.current().epoch_pass is one and number(ledger) == 1
    assert alive


def test_a_loop_that_starts_over_follows_one_that_was_broken_off():
    ledger = BatchLedger(2)
    one, alive = running(ledger)
    one.handed_out = 6
    assert ledger.newest is one
    del alive
    again, alive = running(ledger)
    again.handed_out = 2
    assert ledger.current() == (again, 0)
    assert alive


def test_two_loops_at_once_are_refused():
    ledger = BatchLedger(2)
    (one, first), (other, second) = running(ledger), running(ledger)
    one.handed_out = other.handed_out = 2
    with pytest.raises(RuntimeError, match="two iterators over this sampler"):
        ledger.current()
    assert first and second


def test_the_end_of_a_loop_that_fetches_ahead():
    ledger = BatchLedger(2, ahead=1)
    one, alive = running(ledger, length=6)
    found = []
    for handed_out, ended in ((4, False), (6, False), (6, False), (6, True), (6, True)):
        one.handed_out, one.ended = handed_out, ended
        found.append(number(ledger))
    assert found == [0, 1, 1, 2, 2]
    ledger = BatchLedger(4, ahead=1)
    one, alive = running(ledger, length=6)  # the last batch is short: its end is not seen
    one.handed_out = 6
    assert number(ledger) == UNKNOWN
    assert alive


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


def make(**kwargs):
    return OrderedSampler(Numbers(), "cd-grab", batch_size=4, world=World.single(), **kwargs)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_tells_what_its_loop_has_received(workers):
    sampler = make()
    context = "fork" if workers else None
    loader = DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=workers, multiprocessing_context=context
    )
    for batch, _ in enumerate(loader):
        assert sampler.current_batch().number == batch
    assert batch == 5


def test_a_loader_with_another_batch_size_is_refused():
    sampler = make()
    batches = iter(DataLoader(Numbers(), 8, sampler=sampler))
    next(batches)
    with pytest.raises(ValueError, match=r"batches of 8, .* batch_size=4"):
        sampler.current_batch()


class BatchSamplerShard:
    """Takes every second batch, as Accelerate does on two ranks."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __iter__(self):
        return itertools.islice(iter(self.batch_sampler), 0, None, 2)


def test_sharding_once_more_is_refused():
    sampler = make()
    shard = BatchSamplerShard(BatchSampler(sampler, 4, False))
    batches = iter(DataLoader(Numbers(), batch_sampler=shard))
    next(batches)
    next(batches)
    with pytest.raises(ValueError, match="BatchSamplerShard shards the batches"):
        sampler.current_batch()


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_that_prefetches_is_found_without_searching_all_objects(persistent, monkeypatch):
    searched = []
    search = iterators._loader_iterators
    monkeypatch.setattr(
        iterators, "_loader_iterators", lambda ages: searched.extend(ages) or search(ages)
    )
    sampler = make()
    loader = DataLoader(  # fetches the whole epoch, and releases the sampler's iterator, at once
        Numbers(),
        4,
        sampler=sampler,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    gc.disable()  # Collected at the wrong moment, a new iterator is an old object and searched for.
    try:
        for _ in range(2):
            for batch, _ in enumerate(loader):
                assert sampler.current_batch().number == batch
            gc.collect()  # makes a persistent iterator an old object
    finally:
        gc.enable()
    assert set(searched) <= set(iterators._YOUNG)


def test_two_loaders_that_have_fetched_everything_are_told_apart():
    sampler = make(ahead=0)
    passes = []
    for _ in range(2):
        loader = DataLoader(
            Numbers(),
            4,
            sampler=sampler,
            num_workers=1,
            prefetch_factor=8,
            multiprocessing_context="fork",
        )
        passes.append(iter(loader))
    next(passes[1])
    ticket = sampler.current_batch()
    assert ticket == (sampler._ledger.newest, 0)


def test_no_loader_is_running():
    assert LoaderRegistry().find_pass(make(), None) is None


def test_batches_are_found_by_their_examples():
    positions = PositionIndex([4, 5, 0, 1, 2, 3, 4, 5])
    assert positions.find([0, 1], unit=2) == 2
    assert positions.find([4, 5, 0, 1], unit=2) == 0
    for wrong in ([5, 0], [0, 2], [0], [9, 1], []):
        with pytest.raises(ValueError, match="are not consecutive"):
            positions.find(wrong, unit=2)
