import threading
from types import SimpleNamespace

import pytest
import torch

from gradherd.comm import sliced_mean
from gradherd.comm.sliced_mean import SlicedMean
from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from tests.attach import attach_work

LENGTHS = [1, 7, 2, 64, 3]  # odd ones, and some shorter than the number of ranks
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def by_setting(size, *settings):
    """Return the result of every rank, for each setting."""
    return zip(*run_ranks(attach_work.shards, size, *settings), strict=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_column_is_at_one_rank_and_all_get_the_mean(size):
    results = by_setting(size, *((LENGTHS, dtype) for dtype in DTYPES))
    for dtype, ranks in zip(DTYPES, results, strict=True):
        own = torch.stack([rank["own"] for rank in ranks])
        wide = torch.promote_types(dtype, torch.float32)
        mean = own.to(wide).mean(0).to(dtype)
        for rank in ranks:
            assert rank["mean"].dtype == dtype
            torch.testing.assert_close(rank["mean"], mean)
            assert torch.equal(rank["mean"], ranks[0]["mean"])
            assert rank["rows"].dtype == wide
            assert torch.equal(rank["whole"], own.to(wide))
            assert torch.equal(rank["columns"], rank["rows"])
        columns = torch.cat([rank["rows"] for rank in ranks], dim=1)
        # Ranks without an element of what is left of a bucket have a zero.
        padded = torch.nn.functional.pad(own.to(wide), (0, columns.shape[1] - own.shape[1]))
        assert torch.equal(columns.sort(1).values, padded.sort(1).values)


def test_one_bucket_or_none_that_divides():
    every = [[6], [5], [1], [2, 2]]
    results = by_setting(3, *((lengths, torch.float32) for lengths in every))
    for lengths, ranks in zip(every, results, strict=True):
        own = torch.stack([rank["own"] for rank in ranks])
        for rank in ranks:
            torch.testing.assert_close(rank["mean"], own.mean(0))
            assert torch.equal(rank["whole"], own)
        assert all(rank["rows"].shape[1] == sum(-(-n // 3) for n in lengths) for rank in ranks)


def test_bytes_are_those_of_an_all_reduce_and_rests():
    lengths, size = [10, 64, 2], 3
    [ranks] = by_setting(size, (lengths, torch.float32))
    for rank in ranks:
        slices = 2 * sum(length // size * (size - 1) for length in lengths)
        rests = sum(length % size * (size - 1) for length in lengths)
        assert rank["bytes"] == 4 * (slices + rests)


def test_columns_that_are_lent_are_not_overwritten_until_they_are_released():
    mean = SlicedMean(World.single())
    first, second = torch.zeros(6), torch.ones(6)
    mean.start(first)
    [rows] = mean.finish()
    late = mean.lend()
    late(None)
    mean.start(first)
    [rows] = mean.finish()
    release = mean.lend()
    late(None)  # of earlier columns: these are still being read
    thread = threading.Thread(target=mean.start, args=(second,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and torch.equal(rows, torch.zeros(1, 6))
    release(None)
    thread.join()
    [again] = mean.finish()
    # The same memory: a second set of buffers would take another gradient.
    assert again.data_ptr() == rows.data_ptr() and torch.equal(rows, torch.ones(1, 6))
    mean.lend()(torch.empty(1, 6))  # who keeps them gives other memory instead
    mean.start(first)
    assert torch.equal(*mean.finish(), torch.zeros(1, 6))
    assert torch.equal(rows, torch.ones(1, 6))


def test_columns_of_several_buckets_are_not_copied():
    mean, places = SlicedMean(World.single()), []
    for _ in range(2):
        mean.start(torch.zeros(6))
        mean.start(torch.ones(4))
        blocks = mean.finish()
        mean.lend()(None)
        assert [block.shape for block in blocks] == [(1, 6), (1, 4)]
        places.append([block.data_ptr() for block in blocks])
    assert places[0] == places[1]


def test_what_another_thread_reads_is_waited_for_on_the_device_of_the_columns(monkeypatch):
    """A thread begins with cuda:0 as its device, wherever the model is."""
    recorded, waited = [], []

    class Stream:
        def __init__(self, device):
            self.device = device

        def wait_event(self, event):
            waited.append((self.device, event))

    class Event:
        def record(self, stream=None):
            recorded.append((stream or current_stream()).device)

    def current_stream(device=None):
        return Stream(torch.device(device or "cuda:0"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    where = torch.device("cuda:1")
    loan = sliced_mean._Loan({0: SimpleNamespace(device=where)})
    loan.end(None)
    loan.wait()
    assert recorded == [where] and [device for device, _ in waited] == [where]
