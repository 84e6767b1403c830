import math

import numpy as np
import pytest
import torch

from gradherd.sparsify.basics import Dense
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from studies.methods.thresholds import Threshold

SIZES = [1, 2, 3]
DIMS = [1, 2, 31, 5000]


def workers(method, dim, size, dtype=torch.float64, **settings):
    return VirtualWorkers(Sparsify(method=method, **settings), dim, size, dtype=dtype)


def gradients(steps, size, dim, scale=1.0, seed=0):
    draw = np.random.RandomState(seed)
    return scale * draw.randn(steps, size, dim)


def exchange(accs, union):
    """Mean of the union, and what each worker keeps."""
    out, residual = np.zeros(len(accs[0])), [acc.copy() for acc in accs]
    for acc, left in zip(accs, residual, strict=True):
        for i in union:
            out[i] += acc[i]
            left[i] = 0
    return out / len(accs), residual


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_it_is_what_the_slow_one_is(dim, size):
    density = 0.05
    threshold = 1 / (2 * math.sqrt(max(1, int(density * dim))))
    run = workers(Threshold(density), dim, size)
    residual, selected = [np.zeros(dim)] * size, set()
    for step in gradients(7, size, dim, scale=0.6 * threshold):
        accs = [old + new for old, new in zip(residual, step, strict=True)]
        selections = [
            {i for i in range(dim) if dim == 1 or abs(acc[i]) >= threshold} for acc in accs
        ]
        out, residual = exchange(accs, sorted(set().union(*selections)))
        np.testing.assert_array_equal(run.step(torch.from_numpy(step)).numpy(), out)
        np.testing.assert_array_equal(run.residuals().numpy(), np.stack(residual))
        assert run.metrics["per_rank"] == [len(own) for own in selections]
        selected.add(run.metrics["selected"])
    assert dim < 5000 or (len(selected) > 3 and 0 < min(selected) and max(selected) < dim)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_nothing_is_lost(dim, size):
    run, grads = workers(Threshold(0.05), dim, size), gradients(9, size, dim, scale=0.1)
    sent = sum(run.step(torch.from_numpy(step)).numpy() for step in grads)
    total = size * sent + run.residuals().sum(0).numpy()
    np.testing.assert_allclose(total, grads.sum((0, 1)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_sent_where_nothing_reaches_it(size):
    run, grads = workers(Threshold(0.1, value=100.0), 40, size), gradients(5, size, 40)
    for number, step in enumerate(grads):
        assert not run.step(torch.from_numpy(step)).any()
        # The header alone: whether all is finite, and how many were selected. Of a method that is
        # not gradherd's own, workers compare what they have selected, in the first three steps.
        assert run.metrics["bytes"] == (8 + 16 * (number < 3)) * (size - 1)
        assert run.metrics["per_rank"] == [0] * size
    np.testing.assert_allclose(run.residuals().numpy(), grads.sum(0), rtol=1e-14, atol=1e-14)


def test_the_residual_is_sent_when_it_has_grown():
    run = workers(Threshold(0.5, value=1.0), 3, 1)
    step = torch.tensor([[0.375, 0.0, -0.5]], dtype=torch.float64)
    assert [run.step(step).tolist() for _ in range(3)] == [
        [0, 0, 0],
        [0, 0, -1],  # reaching the threshold is enough
        [1.125, 0, 0],
    ]


def test_one_worker_may_pick_nothing():
    run = workers(Threshold(0.4, value=1.0), 4, 2)
    out = run.step(torch.tensor([[0.5, 0, 0, 0.25], [2.0, 0, -3.0, 0]], dtype=torch.float64))
    assert out.tolist() == [1.25, 0, -1.5, 0]
    assert run.metrics["per_rank"] == [0, 2]
    assert run.residuals().tolist() == [[0, 0, 0, 0.25], [0, 0, 0, 0]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_density_one_is_dense(dim, size):
    grads = torch.from_numpy(gradients(3, size, dim, scale=1e-9)).float()
    run = workers(Threshold(1.0), dim, size, torch.float32)
    dense = workers(Dense(), dim, size, torch.float32)
    for step in grads:
        assert torch.equal(run.step(step), dense.step(step))
        assert not run.residuals().any()


def test_a_falling_density_is_followed_unless_the_value_is_given():
    for value in (None, 0.125):
        run = workers(Threshold(0.01, value), 2500, 1, warmup_steps=2, warmup_from=0.16)
        for density in (0.16, 0.04, 0.01, 0.01):
            run.step(torch.zeros(1, 2500, dtype=torch.float64))
            want = value or 1 / (2 * math.sqrt(density * 2500))
            assert run.metrics["threshold"] == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(("value", "want"), [(1e-60, [0, 2.0]), (1e60, [0, 0])])
def test_a_value_may_be_beyond_the_type_of_the_gradients(value, want):
    run = workers(Threshold(0.5, value), 2, 1, torch.float32)
    assert run.step(torch.tensor([[0.0, 2.0]])).tolist() == want
    assert run.metrics["selected"] == sum(x > 0 for x in want)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_it_wants_a_positive_value(value):
    with pytest.raises(ValueError, match=f"value must be a positive number or None, got {value}"):
        Threshold(value=value)


@pytest.mark.parametrize("density", [0.0, 1.5, math.nan])
def test_it_wants_a_density(density):
    with pytest.raises(ValueError, match="density must be in"):
        Threshold(density)
