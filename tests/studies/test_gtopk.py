import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradherd.lab.ranks import run_ranks
from studies.methods.gtopk import GTopK
from tests.sparsify import one_step
from tests.sparsify.reference_error_feedback import (
    actual,
    assert_conserved,
    assert_same,
    expected,
    gradients,
    number,
)
from tests.studies import reference_gtopk as reference


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("dim", "density"), [(1, 1.0), (2, 0.5), (31, 0.1), (31, 0.97), (31, 1.0), (1000, 0.05)]
)
def test_it_is_the_tree(size, dim, density):
    grads = gradients(size, dim)
    means, residual, metrics = actual(grads, GTopK(density))
    k = number(density, dim)
    assert_same((means, residual), expected(grads, reference.chooser(k)))
    assert_conserved(grads, means, residual)
    assert {one["selected"] for one in metrics} == {k}  # it never builds up
    assert metrics[-1]["per_rank"] == [k] * size


def test_density_one_is_the_mean():
    grads = gradients(5, 31, steps=1)
    means, residual, _ = actual(grads, GTopK(1.0))
    np.testing.assert_allclose(means[0], grads[0].mean(0), rtol=1e-14)
    assert not residual.any()


def test_a_dropped_value_stays_though_its_index_is_sent():
    # Worker 1 loses to worker 0; workers 2 and 3 agree on the coordinate that worker 1 wanted.
    grads = np.array([[[5.0, 0, 0], [0, 3, 0], [0, 4, 0], [1, 4, 0]]])
    means, residual, _ = actual(grads, GTopK(1 / 3))
    assert means.tolist() == [[0, 2, 0]]
    assert residual.tolist() == [[5, 0, 0], [0, 3, 0], [0, 0, 0], [1, 0, 0]]


def test_values_that_cancel_are_sent_if_there_is_room():
    grads = np.array([[[2.0, 1, 0, 0], [-2, 0, 1, 0]]])
    means, residual, _ = actual(grads, GTopK(0.5))
    assert means.tolist() == [[0, 0.5, 0.5, 0]]
    assert residual.tolist() == [[2, 0, 0, 0], [-2, 0, 0, 0]]


@given(
    st.integers(1, 6).flatmap(
        lambda size: st.integers(1, 20).flatmap(
            lambda dim: st.tuples(
                st.lists(
                    st.lists(st.integers(-2, 2), min_size=dim, max_size=dim),
                    min_size=size,
                    max_size=size,
                ),
                st.integers(1, dim),
            )
        )
    )
)
def test_sums_are_of_what_is_marked_as_sent_whatever_is_equal_or_zero(case):
    rows, k = case
    accs = torch.tensor(rows, dtype=torch.float64)
    results = one_step.together(GTopK(0.5), accs, k)
    indices = results[0]["indices"]
    assert len(indices) == k and bool((indices.diff() > 0).all())
    for result in results:
        assert torch.equal(result["indices"], indices)
    if k == accs.shape[1]:
        return  # added up by whoever called
    sent = torch.stack([result["kept"] == 0 for result in results])
    assert sent.any(0).all()  # every index was selected by some worker
    for result in results:
        assert torch.equal(result["sums"], (accs[:, indices] * sent).sum(0))


def test_every_worker_but_the_first_hands_up_once_and_hears_once():
    k, dim = 21, 400
    accs = torch.from_numpy(gradients(7, dim)[0])
    entries, flags = k * (8 + 4), 3  # float64 and int32; 21 bits
    children = [3, 0, 1, 0, 2, 0, 0]  # of 7: 0 hears 1, 2, 4; 2 hears 3; 4 hears 5, 6
    want = [(rank > 0) * entries + n * (entries + flags) for rank, n in enumerate(children)]
    assert [result["bytes"] for result in one_step.together(GTopK(0.05), accs, k)] == want


@pytest.mark.parametrize("size", [3, 4])
def test_real_ranks_get_the_same_bits(size):
    cases = [
        (GTopK(0.01), torch.randn(size, dim, dtype=dtype), k, [dim], 0)
        for dim, k, dtype in [(1000, 13, torch.float32), (50, 7, torch.float64), (9, 9, None)]
    ]
    ranks = run_ranks(one_step.several, size, cases)
    for number_, (method, accs, k, layers, step) in enumerate(cases):
        want = one_step.together(method, accs, k, layers=layers, step=step)
        for rank in range(size):
            have = ranks[rank][number_]
            assert have["bytes"] == want[rank]["bytes"]
            for name in ("indices", "sums", "kept"):
                one, other = have[name], want[rank][name]
                assert (one is None and other is None) or torch.equal(one, other), name


def test_a_density_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 0"):
        GTopK(0)
