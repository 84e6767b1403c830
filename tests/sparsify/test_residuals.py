"""Error feedback: what is sent and what is kept add up, and a step can be called off."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.hooks.state import merge_parts
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from gradherd.sparsify.worker import ErrorFeedback
from studies.methods.gtopk import GTopK
from tests.sparsify.rank_work import normal, same
from tests.sparsify.reference import MomentumCorrection

NOTHING = torch.zeros(0, dtype=torch.int64)
CPU = torch.device("cpu")


def make(dim, *, dtype=torch.float64, momentum=0.0):
    return ErrorFeedback(dim, dtype=dtype, device=CPU, momentum=momentum)


def some(dim, seed, share=0.3):
    draws = torch.rand(dim, generator=torch.Generator().manual_seed(seed))
    return (draws < share).nonzero().view(-1)


def memory(feedback):
    """Bits of all that must outlive a step."""
    velocity = feedback.velocity
    return [feedback.residual.clone(), None if velocity is None else velocity.clone()]


@given(
    seed=st.integers(0, 2**31),
    dim=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=3),
    rounded=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_sent_and_kept_add_up_to_what_was_computed(seed, dim, cuts, rounded):
    feedback = make(dim)
    borders = [0, *sorted(min(cut, dim) for cut in cuts), dim]
    computed, sent = torch.zeros(dim).double(), torch.zeros(dim).double()
    for step in range(6):
        grad = normal(seed + step, dim, dtype=torch.float64)
        computed += grad
        for begin, end in pairwise(borders):  # In parts, as buckets come.
            feedback.add(begin, grad[begin:end], 1.0)
        indices = some(dim, seed + step)
        values = feedback.acc[indices]
        left = values - values.bfloat16() if rounded else None
        sent[indices] += values if left is None else values - left
        assert feedback.finite()
        feedback.commit(indices, left)
        torch.testing.assert_close(sent + feedback.residual, computed, rtol=1e-12, atol=1e-12)
        if not rounded:
            assert not feedback.residual[indices].any()


def test_gradients_of_any_type_are_left_alone():
    for momentum in (0.0, 0.9):
        feedback = make(6, momentum=momentum)
        for begin, dtype in ((0, torch.float64), (3, torch.float16)):
            grad = torch.ones(3, dtype=dtype)
            feedback.add(begin, grad, 0.5)
            assert grad.tolist() == [1.0] * 3
        assert feedback.acc.tolist() == [0.5] * 6


@pytest.mark.parametrize("unit", [1.0, 0.1, 1 / 65_536, 3.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_are_multiplied_by_the_unit_once(unit, momentum):
    feedback, plain = make(9, momentum=momentum), make(9, momentum=momentum)
    for step in range(4):
        grad = normal(step, 9, dtype=torch.float64)
        feedback.add(0, grad.clone(), unit)
        plain.add(0, unit * grad, 1.0)
        indices = some(9, step)
        feedback.commit(indices, None)
        plain.commit(indices, None)
        torch.testing.assert_close(feedback.residual, plain.residual, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_narrow_gradients_are_added_in_full_precision(dtype, momentum):
    feedback, wide = (make(50, dtype=torch.float32, momentum=momentum) for _ in range(2))
    for step in range(5):
        grad = normal(step, 50).to(dtype)
        feedback.add(0, grad.clone(), 1 / 3)
        wide.add(0, grad.float(), 1 / 3)
        assert feedback.acc.dtype == torch.float32
        assert same(feedback.acc, wide.acc)
        feedback.commit(NOTHING, None)
        wide.commit(NOTHING, None)
    # What a sum in the narrow type would have lost is there.
    tiny = make(1, dtype=torch.float32)
    tiny.add(0, torch.ones(1, dtype=dtype), 1.0)
    tiny.commit(NOTHING, None)
    tiny.add(0, torch.full((1,), 2**-12, dtype=dtype), 1.0)
    assert tiny.acc.item() == 1 + 2**-12


def test_a_gradient_that_overflows_its_own_type_times_the_unit_does_not():
    feedback = make(1, dtype=torch.float32)
    feedback.add(0, torch.tensor([60_000.0], dtype=torch.float16), 10.0)
    assert feedback.acc.item() == 600_000.0
    feedback.add(0, torch.tensor([6e-8], dtype=torch.float16), 1e-3)
    assert feedback.acc.item() > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("at", [0, 4, 9])
def test_a_step_called_off_leaves_no_trace(bad, momentum, at):
    calm, troubled = (make(10, dtype=torch.float32, momentum=momentum) for _ in range(2))
    for step in range(6):
        grad = normal(step, 10)
        if step in (0, 3, 4):  # Before anything was kept, and twice in a row.
            before = memory(troubled)
            poisoned = 5 * normal(99, 10)
            poisoned[at] = bad
            troubled.add(0, poisoned[:4], 1.0)
            troubled.add(4, poisoned[4:], 1.0)
            assert not troubled.finite()
            assert same(memory(troubled), before)
        for feedback in (calm, troubled):
            feedback.add(0, grad.clone(), 1.0)
            assert feedback.finite()
            feedback.commit(some(10, step), None)
        assert same(memory(calm), memory(troubled))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_backward_that_broke_off_leaves_no_trace(momentum):
    calm, troubled = (make(8, momentum=momentum) for _ in range(2))
    for step in range(4):
        troubled.add(0, 7 * normal(50, 3, dtype=torch.float64), 1.0)  # the rest never came
        for feedback in (calm, troubled):
            feedback.add(0, normal(step, 8, dtype=torch.float64), 1.0)
            assert feedback.finite()
            feedback.commit(some(8, step), None)
        assert same(memory(calm), memory(troubled))


def test_terms_are_finite_where_only_their_sum_is_not():
    large = 3e38
    feedback = make(4, dtype=torch.float32)
    feedback.add(0, torch.tensor([large, large]), 1.0)
    feedback.add(2, torch.tensor([large, -large]), 1.0)
    assert feedback.finite()
    feedback.commit(torch.tensor([0, 1, 2, 3]), None)
    opposed = make(4, dtype=torch.float32)  # inf - inf is NaN, and still no term is
    opposed.add(0, torch.tensor([large, large]), 1.0)
    opposed.add(2, torch.tensor([-large, -large]), 1.0)
    assert opposed.finite()
    opposed.commit(NOTHING, None)
    opposed.add(0, torch.tensor([large, 0.0, 0.0, 0.0]), 1.0)  # Kept and new overflow together.
    assert not opposed.finite()
    assert opposed.residual.tolist() == torch.tensor([large, large, -large, -large]).tolist()


@given(
    seed=st.integers(0, 2**31),
    momentum=st.sampled_from([0.5, 0.9, 0.99]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_momentum_is_corrected_as_in_deep_gradient_compression(seed, momentum, share):
    feedback, slow = make(30, momentum=momentum), MomentumCorrection(30, momentum)
    for step in range(12):
        grad = normal(seed + step, 30, dtype=torch.float64)
        slow.add(grad.numpy())
        feedback.add(0, grad, 1.0)
        np.testing.assert_allclose(feedback.acc.numpy(), slow.v, rtol=1e-12, atol=1e-12)
        indices = some(30, seed + step, share)
        slow.send(indices.numpy())
        feedback.commit(indices, None, restarted=indices)
        np.testing.assert_allclose(feedback.residual.numpy(), slow.v, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(feedback.velocity.numpy(), slow.u, rtol=1e-12, atol=1e-12)


def test_velocity_goes_on_where_nothing_of_this_worker_was_sent():
    feedback = make(4, momentum=0.5)
    feedback.add(0, torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64), 1.0)
    indices, sent = torch.tensor([0, 2, 3]), torch.tensor([True, False, True])
    left = feedback.acc[indices].masked_fill(sent, 0)
    feedback.commit(indices, left, restarted=indices[sent])
    assert feedback.residual.tolist() == [0.0, 2.0, 3.0, 0.0]
    assert feedback.velocity.tolist() == [0.0, 2.0, 3.0, 0.0]


@pytest.mark.parametrize("method", ["dense", "topk", GTopK()])
def test_what_is_always_sent_has_heavy_ball_momentum(method):
    """The last three coordinates at every step; with dense, all of them."""
    workers = VirtualWorkers(Sparsify(method=method, momentum=0.9), 50, 2, sparse=47)
    velocity, always = torch.zeros(50), slice(0 if method == "dense" else 47, 50)
    for step in range(20):
        grads = normal(step, 2, 50)
        velocity = 0.9 * velocity + grads.mean(0)
        mean = workers.step(grads)
        torch.testing.assert_close(mean[always], velocity[always])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("zeros_added", [True, False], ids=["zeros", "nothing"])
def test_what_is_left_out_sends_nothing_and_stays_as_it_was(momentum, zeros_added):
    feedback = make(10, momentum=momentum)
    for step in range(6):
        before, grad = memory(feedback), normal(step, 10, dtype=torch.float64)
        if step not in (2, 3, 5):
            feedback.add(0, grad, 1.0)
            feedback.commit(some(10, step), None)
            continue
        feedback.add(0, grad[:4], 1.0)
        if zeros_added:  # Buckets hold zeros for what was not used.
            feedback.add(4, torch.zeros(3, dtype=torch.float64), 1.0)
        feedback.add(7, grad[7:], 1.0)
        feedback.exclude(4, 7)
        assert feedback.acc[4:7].tolist() == [0.0] * 3
        assert feedback.finite()
        # Another worker may have selected there.
        feedback.commit(torch.tensor([1, 5, 9]), None)
        for old, new in zip(before, memory(feedback), strict=True):
            assert old is None or same(new[4:7], old[4:7])


def test_what_is_left_out_after_a_step_called_off_is_as_before_it():
    feedback = make(6, momentum=0.9)
    for step in range(2):
        feedback.add(0, normal(step, 6, dtype=torch.float64), 1.0)
        feedback.commit(NOTHING, None)
    before = memory(feedback)
    feedback.add(0, torch.full((6,), math.nan, dtype=torch.float64), 1.0)
    assert not feedback.finite()
    feedback.add(0, normal(2, 4, dtype=torch.float64), 1.0)
    feedback.exclude(4, 6)
    assert feedback.finite()
    feedback.commit(NOTHING, None)
    after = memory(feedback)
    assert same([part[4:] for part in after], [part[4:] for part in before])


# --- Merged for another number of workers ------------------------------------------------------


def state(rank, workers=3, **more):
    torch.manual_seed(rank)
    named = {"weight": torch.randn(4, 5) * 10.0**rank, "bias": torch.randn(3)}
    return {
        "kind": "ExDyna", "rank": rank, "workers": workers, "dim": 23, "step": 9,
        "method": {"start": 1.0}, "residual": named,
    } | more  # fmt: skip


def test_the_mean_of_residuals_stays():
    states = [state(rank) for rank in range(3)]
    actual = merge_parts(iter(states))
    for name in ("weight", "bias"):
        exact = torch.stack([one["residual"][name].double() for one in states]).mean(0)
        assert torch.equal(actual["residual"][name], exact.float()), "rounded once"
    assert (actual["rank"], actual["method"], actual["step"]) == (None, None, 9)
    assert states[0]["rank"] == 0, "what was given is left alone"


def test_velocities_too():
    actual = merge_parts(
        [state(rank, velocity={"weight": torch.full((2,), rank)}) for rank in range(3)]
    )
    assert actual["velocity"]["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([], "of all ranks"),
        ([state(0), state(1)], "of all ranks of 3"),
        ([state(0), state(1), state(1)], r"got ranks \[0, 1, 1\]"),
        ([state(0), state(1), state(2, step=8)], "differ in step: 9 and 8"),
        ([state(0), state(1, kind="Micro"), state(2)], "differ in kind"),
    ],
)
def test_what_does_not_belong_together_is_refused(states, reason):
    with pytest.raises(ValueError, match=reason):
        merge_parts(states)
