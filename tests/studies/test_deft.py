import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradherd.comm.message_sizes import index_bytes
from gradherd.lab.ranks import run_ranks
from studies.methods.deft import Deft, allocate, assign, norms
from tests.sparsify import one_step
from tests.sparsify.reference_error_feedback import (
    actual,
    assert_conserved,
    assert_same,
    expected,
    gradients,
    number,
)
from tests.studies import reference_deft as reference

LAYERS = {1: [1], 2: [1, 1], 31: [7, 1, 20, 3], 1000: [300, 5, 1, 494, 100, 2, 98]}
SCALES = {1: [1], 2: [1, 1], 31: [1, 1, 0.5, 9], 1000: [0.1, 30, 1, 0.3, 0.1, 30, 1]}


def layered(size, dim, steps=5):
    """Gradients whose layers differ in scale, so that some have large shares of k."""
    return gradients(size, dim, steps) * np.repeat(SCALES[dim], LAYERS[dim])


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("dim", "density"), [(1, 1.0), (2, 0.5), (31, 0.1), (31, 0.6), (31, 1.0), (1000, 0.05)]
)
def test_it_is_the_published_rule(size, dim, density):
    grads, layers = layered(size, dim), LAYERS[dim]
    means, residual, metrics = actual(grads, Deft(density), layers)
    choose = reference.chooser(number(density, dim), layers)
    assert_same((means, residual), expected(grads, choose))
    assert_conserved(grads, means, residual)
    for one in metrics:
        assert sum(one["per_rank"]) == one["selected"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_counts_are_selections_and_whole_pieces_count_for_the_leader(size):
    grads, layers, k = layered(size, 1000, steps=1)[0], LAYERS[1000], 60
    pieces = reference.pieces_of(1000, size, layers)
    for step in range(size):
        common, selections = reference.selections_of(grads, k, pieces, step)
        assert len(common) >= 8  # those of three small layers, or this shows nothing
        want = [len(mine) for mine in selections]
        want[step % size] += len(common)
        accs = torch.from_numpy(grads)
        for result in one_step.together(Deft(0.05), accs, k, layers=layers, step=step):
            assert result["counts"] == want
            assert set(result["indices"].tolist()) == common.union(*selections)
            assert len(result["indices"]) == sum(want)


def test_whole_pieces_are_sent_without_indices():
    # Ten layers of a single number: each is whole, whatever its norm.
    accs = torch.from_numpy(gradients(3, 10)[0])
    results = one_step.together(Deft(0.5), accs, 5, layers=[1] * 10)
    assert [result["bytes"] for result in results] == [0, 0, 0]
    assert results[1]["indices"].tolist() == list(range(10))


def test_only_own_selections_are_sent_as_indices():
    accs = torch.from_numpy(layered(4, 1000)[0])
    results = one_step.together(Deft(0.05), accs, 50, layers=LAYERS[1000], step=2)
    common, selections = reference.selections_of(
        accs.numpy(), 50, reference.pieces_of(1000, 4, LAYERS[1000]), 2
    )
    longest = max(map(len, selections))
    assert [result["bytes"] for result in results] == [3 * index_bytes(longest, 1000)] * 4
    assert common


def test_density_one_is_the_mean_also_of_zeros():
    grads = gradients(3, 31, steps=1)
    grads[:, :, 8:20] = 0
    means, residual, _ = actual(grads, Deft(1.0), LAYERS[31])
    np.testing.assert_allclose(means[0], grads[0].mean(0), rtol=1e-14)
    assert not residual.any()


@given(
    st.integers(1, 6).flatmap(
        lambda size: (
            st.lists(st.integers(0, 6), min_size=1, max_size=6)
            .filter(sum)
            .flatmap(
                lambda layers: st.tuples(
                    st.just(layers),
                    st.lists(
                        st.lists(st.integers(-1, 1), min_size=sum(layers), max_size=sum(layers)),
                        min_size=size,
                        max_size=size,
                    ),
                    st.integers(1, sum(layers)),
                    st.integers(0, 7),
                )
            )
        )
    )
)
def test_ties_and_zeros_leave_all_workers_agreed(case):
    layers, rows, k, step = case
    accs = torch.tensor(rows, dtype=torch.float64)
    results = one_step.together(Deft(0.5), accs, k, layers=layers, step=step)
    indices = results[0]["indices"]
    assert len(indices.unique()) == len(indices) == sum(results[0]["counts"])
    for result in results:
        assert torch.equal(result["indices"], indices)
        assert result["counts"] == results[0]["counts"]
    pieces = reference.pieces_of(sum(layers), len(rows), layers)
    common, selections = reference.selections_of(accs.numpy(), k, pieces, step)
    if k < sum(layers):
        assert len(indices) == len(common) + sum(len(mine) for mine in selections)
        assert common <= set(indices.tolist())
    sent_indices = set(indices.tolist())
    assert all(sent_indices & set(piece) for piece in pieces)  # every piece sends something


@given(
    st.lists(
        # Sums of these are exact.
        st.tuples(st.sampled_from([0.0, 2**-10, 0.5, 1.0, 1.5, 2.0**20]), st.integers(1, 9)),
        min_size=1,
        max_size=60,
    ),
    st.integers(1, 200),
    st.integers(1, 5),
)
def test_shares_and_bins_are_the_obvious_ones(layers, k, workers):
    sizes = [size for _, size in layers]
    rows = torch.tensor([[norm for norm, _ in layers]])
    pieces = [[0] * size for size in sizes]
    shares = reference.shares_of(rows[0].tolist(), pieces, k)
    assert allocate(rows, sizes, k) == [shares]
    whole, bins = reference.bins_of(shares, pieces, workers)
    assert assign(shares, sizes, workers) == (sorted(whole), bins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_right_where_squares_overflow_or_vanish(dtype):
    values = [0.0, 1e-42, 1e-30, 1e-20, 1e-3, 1.0, 1e10, 1e25, 1e37]
    pieces = [torch.full((9,), value, dtype=dtype) for value in values]
    want = [3 * float(piece[0]) for piece in pieces]
    torch.testing.assert_close(
        norms(pieces), torch.tensor(want), rtol=1e-6, atol=1e-44, check_dtype=True
    )


def test_norms_too_large_for_float32_are_the_largest_there_is():
    most = torch.finfo(torch.float32).max
    assert norms([torch.full((9,), 2e38), torch.full((1,), 2e38)]).tolist() == [
        most,
        pytest.approx(2e38),
    ]
    assert norms([torch.full((2,), 1e200, dtype=torch.float64)]).tolist() == [most]


@pytest.mark.parametrize("scale", [1e-300, 1e-35, 1e35, 1e300])
def test_nothing_is_lost_at_any_scale(scale):
    grads = scale * layered(3, 1000)
    means, residual, metrics = actual(grads, Deft(0.05), LAYERS[1000])
    assert_conserved(grads / scale, means / scale, residual / scale)
    assert min(one["selected"] for one in metrics) >= len(LAYERS[1000])


def test_large_tensors_are_cut_and_small_ones_are_not():
    bounds = Deft().begin(100, 3, [10, 33, 40, 0, 17]).bounds
    assert bounds == [0, 10, 43, 57, 70, 83, 100]
    assert Deft().begin(2, 5, [2]).bounds == [0, 1, 2]


@pytest.mark.parametrize("size", [3, 4])
def test_real_ranks_get_the_same_bits(size):
    accs = torch.from_numpy(layered(size, 1000)[0])
    cases = [(Deft(0.05), accs, 50, LAYERS[1000], 5), (Deft(0.5), accs[:, :10], 5, [1] * 10, 1)]
    ranks = run_ranks(one_step.several, size, cases)
    for at, (method, rows, k, layers, step) in enumerate(cases):
        want = one_step.together(method, rows, k, layers=layers, step=step)
        for rank in range(size):
            have = ranks[rank][at]
            assert torch.equal(have["indices"], want[rank]["indices"])
            assert (have["counts"], have["bytes"]) == (want[rank]["counts"], want[rank]["bytes"])


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 2"):
        Deft(2)
    with pytest.raises(ValueError, match=r"layers must add up to dim \(10\), got 9"):
        Deft().begin(10, 2, [4, 5])
