import threading

import pytest

from gradherd.ordering.sorter import Sorter


def fail():
    raise ValueError("no luck")


def test_jobs_run_in_turn_beside_the_caller():
    sorter, done = Sorter(), []
    for number in range(5):
        sorter.submit(lambda number=number: done.append((number, threading.get_ident())))
    sorter.wait()
    sorter.close()
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    assert threading.get_ident() not in {thread for _, thread in done}


def test_submit_does_not_wait_for_its_job():
    sorter, release, done = Sorter(), threading.Event(), []
    sorter.submit(lambda: done.append(release.wait(30)))
    assert not done
    release.set()
    sorter.wait()
    sorter.close()
    assert done == [True]


def test_an_error_comes_with_the_next_wait_and_only_once():
    sorter, done = Sorter(), []
    sorter.submit(fail)
    with pytest.raises(ValueError, match="no luck"):
        sorter.wait()
    sorter.wait()
    sorter.submit(fail)
    with pytest.raises(ValueError, match="no luck"):
        sorter.submit(lambda: done.append(1))
    sorter.submit(lambda: done.append(2))
    sorter.wait()
    sorter.close()
    assert done == [2]


def test_close_waits_for_the_last_job():
    sorter, done = Sorter(), []
    sorter.submit(lambda: done.append(1))
    sorter.close()
    assert done == [1]
