"""States as bytes: they come back whole, and what is no state is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.hooks.state import pack, unpack

STATE = {"a": torch.arange(5), "b": [1, None, 2.5, "x"], 3: (True, {"c": torch.zeros(0)})}


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other and type(one) is type(other)


def test_states_come_back():
    assert same(unpack(pack(STATE)), STATE)
    shared = torch.randn(4)
    views = {
        "one": shared,
        "two": shared[1:],
        "turned": torch.randn(2, 3).T,
        "number": torch.tensor(3),
    }
    assert same(unpack(pack(views)), views)


@pytest.mark.parametrize("odd", [{1, 2}, {"a": object()}, {(1, 2): 3}])
def test_what_cannot_be_saved_is_refused(odd):
    with pytest.raises(TypeError, match="a state"):
        pack(odd)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_bytes_that_are_no_state_are_refused(data):
    good = pack(STATE)
    kind = data.draw(st.sampled_from(["cut", "flip", "any"]))
    if kind == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    else:
        bad = data.draw(st.binary(max_size=200))
    try:
        unpack(bad)  # A changed number cannot be noticed here: digests are for that.
    except ValueError:
        pass
