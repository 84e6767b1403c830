import copy
import itertools
import pickle
import threading
import weakref

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset

from gradherd import OrderedSampler, World
from gradherd.ordering.batches import Batches, EpochPass, FollowedLoader, LoopCount


class Iterator:
    """Stands for an iterator: only whether it is alive matters."""


def running(batches, length=10, begin=0):
    """Return a pass whose loop goes on, and what keeps it alive."""
    iterator = Iterator()
    one = EpochPass(begin, length, "v", iterator=weakref.ref(iterator))
    batches.begin_pass(one)
    return one, iterator


def number(batches):
    return batches.current().number


def test_a_forward_is_for_the_batch_that_was_received_last():
    batches = Batches(4)
    assert batches.current() is None
    one, alive = running(batches)
    for batch, handed_out in enumerate((4, 8, 10)):
        one.handed_out = handed_out
        assert number(batches) == batch
        assert number(batches) == batch  # again, without another batch
    assert alive


def test_batches_that_were_skipped_are_not_credited():
    batches = Batches(2)
    one, alive = running(batches)
    one.handed_out = 2
    assert number(batches) == 0
    one.handed_out = 8
    assert number(batches) == 3
    assert alive


@pytest.mark.parametrize("passes", [0, 1])
def test_several_batches_before_the_first_forward_are_refused_unless_explained(passes):
    """Also in a later pass: the loader may be another."""
    for skips in (True, False):
        batches = Batches(2, skips=skips)
        for _ in range(passes):
            one, alive = running(batches)
            for one.handed_out in (2, 4, 6, 8):
                number(batches)
            del alive
        one, alive = running(batches)
        one.handed_out = 6
        if skips:
            assert number(batches) == 2
        else:
            with pytest.raises(RuntimeError, match="received 3 batches before the first forward"):
                batches.current()
        assert alive


def test_a_look_at_the_data_is_not_the_loop():
    batches = Batches(2)
    one, alive = running(batches)
    one.handed_out = 2
    assert number(batches) == 0
    look, iterator = running(batches)
    look.handed_out = 10
    del iterator  # the look is over
    assert batches.current().epoch_pass is one and number(batches) == 0
    one.handed_out = 4
    assert batches.current().epoch_pass is one and number(batches) == 1
    assert alive


def test_a_loop_that_starts_over_follows_one_that_was_broken_off():
    batches = Batches(2)
    one, alive = running(batches)
    one.handed_out = 6
    assert batches.newest is one
    del alive
    again, alive = running(batches)
    again.handed_out = 2
    assert batches.current() == (again, 0)
    assert alive


def test_two_loops_at_once_are_refused():
    batches = Batches(2)
    (one, first), (other, second) = running(batches), running(batches)
    one.handed_out = other.handed_out = 2
    with pytest.raises(RuntimeError, match="two iterators over this sampler"):
        batches.current()
    assert first and second


class Numbers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index


def make(**kwargs):
    return OrderedSampler(Numbers(), "cd-grab", batch_size=4, world=World.single(), **kwargs)


def loader_of(sampler, workers=0, **options):
    context = "fork" if workers else None
    return DataLoader(
        Numbers(), 4, sampler=sampler, num_workers=workers, multiprocessing_context=context,
        **options,
    )  # fmt: skip


def test_a_loader_without_workers_need_not_be_named():
    sampler = make()
    for batch, _ in enumerate(loader_of(sampler)):
        assert sampler.current_batch().number == batch
    assert batch == 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_named_loader_tells_what_its_loop_has_received(workers, persistent):
    sampler = make()
    options = {"prefetch_factor": 4, "persistent_workers": persistent} if workers else {}
    loader = FollowedLoader(loader_of(sampler, workers, **options), sampler)
    for _ in range(2):
        for batch, _ in enumerate(loader):
            assert sampler.current_batch().number == batch
            if batch == 2:
                next(iter(loader_of(sampler)))  # a look at the data
        assert batch == 5 == len(loader) - 1


def one_ahead(loader):
    """Fetch the next batch before the one at hand is trained on, as copies to a GPU do."""
    batches = iter(loader)
    following = next(batches)
    for fetched in batches:
        yield following
        following = fetched
    yield following


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_that_fetches_ahead_is_named(workers):
    sampler = make()
    for _ in range(2):
        loader = FollowedLoader(one_ahead(loader_of(sampler, workers)), sampler)
        for batch, _ in enumerate(loader):
            assert sampler.current_batch().number == batch
        assert batch == 5


def test_a_loop_that_fetches_ahead_of_a_named_loader_is_refused():
    sampler = make()
    batches = one_ahead(FollowedLoader(loader_of(sampler), sampler))
    next(batches)
    with pytest.raises(RuntimeError, match="in a generator and iterate over herd"):
        sampler.current_batch()


def test_a_named_loop_that_is_looked_into():
    sampler = make()
    loader = FollowedLoader(loader_of(sampler), sampler)
    running = iter(loader)
    next(running)
    assert sampler.current_batch().number == 0
    for _ in range(2):
        looking = iter(loader)
        next(looking)
        next(looking)
        del looking
        next(running)
    assert sampler.current_batch().number == 2


@pytest.mark.parametrize("named", [False, True])
def test_a_loop_is_not_forgotten_while_somebody_looks(named):
    sampler = make()
    loader = loader_of(sampler)
    for batch, _ in enumerate(FollowedLoader(loader, sampler) if named else loader):
        assert sampler.current_batch().number == batch
        for _ in range(5):
            next(iter(loader))
            assert sampler.current_batch().number == batch


@pytest.mark.parametrize("skips", [False, True])
def test_a_loader_that_prefetches_without_a_name_is_refused(skips):
    sampler = make(skips=skips)
    running = iter(loader_of(sampler, 2))
    next(running)
    with pytest.raises(RuntimeError, match=r"for batch in herd\.batches\(loader\)"):
        sampler.current_batch()


def test_a_thread_that_prefetches_without_a_name_is_refused():
    sampler, received = make(), []

    def fetch():
        received.append(iter(loader_of(sampler)))
        next(received[0])

    thread = threading.Thread(target=fetch)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=r"for batch in herd\.batches\(loader\)"):
        sampler.current_batch()


def test_a_batch_that_could_not_be_made_was_received():
    class Broken(Numbers):
        def __getitem__(self, index):
            if index in broken:
                raise OSError
            return index

    sampler = make(skips=True)
    broken = sampler.indices()[4:8]
    running = iter(FollowedLoader(DataLoader(Broken(), 4, sampler=sampler), sampler))
    next(running)
    with pytest.raises(OSError):
        next(running)
    assert next(running).tolist() == sampler.indices()[8:12]
    assert sampler.current_batch().number == 2


def test_a_framework_counts_by_itself():
    sampler, count = make(skips=True), LoopCount()
    sampler.follow(count)
    running = iter(loader_of(sampler))
    for _ in range(3):  # all batches of an update before the first is trained on
        next(running)
    for batch in range(3):
        count.delivered += 1
        assert sampler.current_batch().number == batch


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("size", [3, 8])
def test_a_loader_with_another_batch_size_is_refused(size, named):
    sampler = make()
    loader = DataLoader(Numbers(), size, sampler=sampler)
    if named:
        with pytest.raises(ValueError, match=f"batches of {size}, .* batch_size=4"):
            FollowedLoader(loader, sampler)
        return
    batches = iter(loader)
    next(batches)
    with pytest.raises((ValueError, RuntimeError), match=r"batch_size=4|of 4 examples each"):
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
    loader = DataLoader(Numbers(), batch_sampler=shard)
    with pytest.raises(ValueError, match="BatchSamplerShard shards the batches"):
        FollowedLoader(loader, sampler)
    batches = iter(loader)
    next(batches)
    sampler.current_batch()
    next(batches)
    assert sampler.current_batch().number == 2


def test_batches_are_found_by_their_examples():
    batches, order = Batches(2, unit=2), [4, 5, 0, 1, 2, 3, 4, 5]
    batches.begin_epoch(epoch=0, version="v", start=0, length=8)
    assert batches.claim_examples([0, 1], lambda: order).step == 1
    assert batches.claim_examples([4, 5, 0, 1], lambda: order).step == 0
    for wrong in ([5, 0], [0, 2], [0], [9, 1], []):
        with pytest.raises(ValueError, match="are not consecutive"):
            batches.claim_examples(wrong, lambda: order)


def test_the_order_is_listed_once_an_epoch_for_batches_by_index(monkeypatch):
    sampler, listed = make(skips=True), []
    indices = OrderedSampler.indices
    monkeypatch.setattr(OrderedSampler, "indices", lambda one: listed.append(1) or indices(one))
    order = indices(sampler)
    claims = [sampler.claim(indices=order[at : at + 2]) for at in range(0, len(order), 2)]
    assert [claim.step for claim in claims] == list(range(0, len(order), 2))
    assert len(listed) == 1  # a list of a million examples for each batch takes longer than a step
    sampler.end_epoch()
    assert sampler.claim(indices=indices(sampler)[:2]).step == 0 and len(listed) == 2


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
)
def test_a_followed_loader_can_be_copied(copied):
    sampler = make(skips=True)
    loader = loader_of(sampler)
    assert len(list(copied(FollowedLoader(loader, sampler)))) == len(loader)
    with pytest.raises(AttributeError):
        _ = FollowedLoader(loader, sampler).nothing
