import pytest

from gradherd.ordering.walks import Places, Walk, Walks, calling_loader


class Held:
    pass


def held(begin: int, handed: int) -> tuple[Walk, Held]:
    owner = Held()
    return Walk(begin, handed, True, lambda: owner), owner


def test_batches_follow_each_other_up_to_the_short_last_one():
    walks = Walks(epoch=0, length=10, start=0)
    walks.begin(Walk(0, 10))
    taken = []
    for _ in range(3):
        _, first, count = walks.next_batch(4)
        walks.position += count
        taken.append((first, count))
    assert taken == [(0, 4), (4, 4), (8, 2)]
    with pytest.raises(RuntimeError, match="after those of 10"):
        walks.next_batch(4)


def test_nothing_is_fed_before_it_was_handed_out():
    walks = Walks(epoch=3, length=10, start=0)
    with pytest.raises(RuntimeError, match="in epoch 3 before the sampler handed out"):
        walks.next_batch(4)
    walks.begin(Walk(0, 3))
    with pytest.raises(RuntimeError, match="handed out only 3 of 10 in epoch 3"):
        walks.next_batch(4)


def test_a_new_loop_starts_over_and_a_look_does_not():
    walks = Walks(epoch=0, length=10, start=0)
    loop, owner = held(0, 8)
    walks.begin(loop)
    walks.next_batch(4)
    walks.position += 4
    walks.begin(Walk(0, 10))  # a look: its iterator is gone
    assert walks.next_batch(4)[1:] == (4, 4)
    loop.iterator = lambda: None
    fresh, _ = held(0, 4)
    walks.begin(fresh)
    assert walks.next_batch(4)[1:] == (0, 4)
    assert owner is not None


def test_a_resumed_epoch_goes_on_where_it_was():
    walks = Walks(epoch=0, length=10, start=6)
    walks.begin(Walk(6, 10))
    assert walks.next_batch(4)[1:] == (6, 4)


@pytest.mark.parametrize(("fed", "over"), [(4, False), (8, True), (10, False)])
def test_an_epoch_ends_short_if_less_than_a_batch_is_missing(fed, over):
    walks = Walks(epoch=0, length=10, start=0)
    walks.begin(Walk(0, 10))
    walks.next_batch(4)
    walks.position = fed
    assert walks.ended_short(4) is over


def test_a_loader_that_begins_anew_has_left_its_walk():
    walks, (walk, owner) = Walks(epoch=0, length=10, start=0), held(0, 10)
    walks.begin(walk)
    walks.leave(Held())
    assert walk.held
    walks.leave(owner)
    assert not walk.held


def test_batches_are_found_by_their_examples():
    places = Places([4, 5, 0, 1, 2, 3, 4, 5])
    assert places.of([0, 1], unit=2) == 2
    assert places.of([4, 5, 0, 1], unit=2) == 0
    for wrong in ([5, 0], [0, 2], [0], [9, 1], []):
        with pytest.raises(ValueError, match="do not stand one after the other"):
            places.of(wrong, unit=2)


def test_no_loader_is_calling_here():
    assert calling_loader() is None
