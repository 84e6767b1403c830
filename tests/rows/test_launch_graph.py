"""Groups of layers and their addresses, with kernels that only note what they are given."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradherd.rows import launch_group
from gradherd.rows.launch_graph import LaunchPlan
from gradherd.rows.launch_group import MOST, LaunchGroup


@pytest.fixture
def group(monkeypatch):
    """A group whose plans note the addresses of layers and of scratch memory at each launch."""
    launched = []

    def make_plan(layers, device, room):
        places = np.arange(2, 5 * len(layers), 5)  # one piece of scratch memory for each layer
        plan = LaunchPlan(
            [lambda pointers: launched.append(pointers.tolist()[: 5 * len(layers)])],
            room, device, places, 128 * np.arange(len(layers)), 128 * len(layers),
        )  # fmt: skip
        made.append(plan)
        return plan

    made = []
    monkeypatch.setattr(launch_group, "make_plan", make_plan)
    made_group = LaunchGroup(torch.device("cpu"))
    made_group.launched, made_group.made = launched, made
    return made_group


def step(group, tensors, scratch=0):
    group.begin()
    for at, (inputs, grads) in enumerate(tensors):
        made = SimpleNamespace(scratch=scratch)
        group.add((at, scratch), lambda made=made: made, (inputs, grads), out=1000 + at)
    group.flush()


def memory(count):
    return [(torch.empty(4), torch.empty(4)) for _ in range(count)]


def test_addresses_are_copied_if_they_are_new(group):
    steps = [memory(3) for _ in range(3)]
    for which in (0, 1, 0, 1, 2, 2, 0, 1):
        step(group, steps[which])
        given = group.launched[-1]
        for at, (inputs, grads) in enumerate(steps[which]):
            found = given[5 * at : 5 * at + 5]
            assert [found[0], found[1], found[4]] == [
                inputs.data_ptr(), grads.data_ptr(), 1000 + at,
            ]  # fmt: skip
        # All pieces lie in the same scratch memory.
        assert np.diff(given[2::5]).tolist() == [128, 128]
    assert len(group.made) == 1 and len(group.made[0].placed) == 2


def test_memory_of_two_steps_in_turn_is_known():
    plan = LaunchPlan([], 4, torch.device("cpu"), np.zeros(0), np.zeros(0), 1)
    first, second, third = [1, 2], [3, 4], [5, 6]
    kept = {}
    for addresses, is_new in ((first, 1), (second, 1), (first, 0), (second, 0), (first, 0)):
        placed, copied = plan.place(addresses)
        assert copied == is_new and kept.setdefault(tuple(addresses), placed) is placed
    # The one that was used longest ago makes room.
    assert plan.place(third) == (kept[tuple(second)], True)
    assert plan.place(first) == (kept[tuple(first)], False)


def test_a_step_takes_few_launches(group):
    step(group, memory(2 * MOST + 1))
    assert len(group.launched) == 3
    group._budget = 4 * 32 - 1  # bytes: the fourth layer does not fit any more
    step(group, memory(10))
    # Half of these four are inputs, which the backward lets go of: room for two layers more.
    assert [len(one) // 5 for one in group.launched[3:]] == [4, 6]
    step(group, memory(5), scratch=64)
    assert [len(one) // 5 for one in group.launched[5:]] == [2, 2, 1]


def test_scratch_memory_is_shared_and_grows(group):
    tensors = memory(3)
    for count in (1, 3, 2, 1, 3):
        step(group, tensors[:count])
        (scratch,) = group._scratch.values()
        assert group.launched[-1][2] == scratch.data_ptr()
        # Of the largest plan so far, so that plans find their addresses again.
        assert scratch.nbytes == (128 if len(group.launched) == 1 else 3 * 128)
    assert group.launched[1] == group.launched[4]
