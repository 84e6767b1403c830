import weakref

import pytest

from gradherd.ordering.iterators import EpochProgress, IteratorProgress, PositionIndex


class Iterator:
    """Stands for an iterator: only whether it is alive matters."""


def alive(begin: int, handed_out: int) -> tuple[IteratorProgress, Iterator]:
    iterator = Iterator()
    return IteratorProgress(begin, handed_out, weakref.ref(iterator)), iterator


def test_batches_follow_each_other_up_to_the_short_last_one():
    progress = EpochProgress(epoch=0, length=10, start=0)
    progress.add(IteratorProgress(0, 10))
    taken = []
    for _ in range(3):
        _, first, count = progress.next_batch(4)
        progress.position += count
        taken.append((first, count))
    assert taken == [(0, 4), (4, 4), (8, 2)]
    with pytest.raises(RuntimeError, match="after those of 10"):
        progress.next_batch(4)


def test_nothing_is_fed_before_it_was_handed_out():
    progress = EpochProgress(epoch=3, length=10, start=0)
    with pytest.raises(RuntimeError, match="in epoch 3 before the sampler handed out"):
        progress.next_batch(4)
    progress.add(IteratorProgress(0, 3))
    with pytest.raises(RuntimeError, match="handed out only 3 of 10 in epoch 3"):
        progress.next_batch(4)


def test_a_new_loop_starts_over_and_a_look_does_not():
    progress = EpochProgress(epoch=0, length=10, start=0)
    loop, owner = alive(0, 8)
    progress.add(loop)
    progress.next_batch(4)
    progress.position += 4
    progress.add(IteratorProgress(0, 10))  # a look: its iterator is gone
    assert progress.next_batch(4)[1:] == (4, 4)
    loop.iterator = None
    fresh, new = alive(0, 4)
    progress.add(fresh)
    assert progress.next_batch(4)[1:] == (0, 4)
    assert owner is not None and new is not None


def test_a_resumed_epoch_goes_on_where_it_was():
    progress = EpochProgress(epoch=0, length=10, start=6)
    progress.add(IteratorProgress(6, 10))
    assert progress.next_batch(4)[1:] == (6, 4)


@pytest.mark.parametrize(("fed", "over"), [(4, False), (8, True), (10, False)])
def test_an_epoch_ends_short_if_less_than_a_batch_is_missing(fed, over):
    progress = EpochProgress(epoch=0, length=10, start=0)
    progress.add(IteratorProgress(0, 10))
    progress.next_batch(4)
    progress.position = fed
    assert progress.ended_short(4) is over


def test_batches_are_found_by_their_examples():
    positions = PositionIndex([4, 5, 0, 1, 2, 3, 4, 5])
    assert positions.find([0, 1], unit=2) == 2
    assert positions.find([4, 5, 0, 1], unit=2) == 0
    for wrong in ([5, 0], [0, 2], [0], [9, 1], []):
        with pytest.raises(ValueError, match="are not consecutive"):
            positions.find(wrong, unit=2)
