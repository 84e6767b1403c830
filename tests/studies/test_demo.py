"""DeMo, against scipy's cosine transform and one chunk after the other."""

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from studies.methods.demo import DeMo, cosine_matrix, inverse, transform
from tests.sparsify.reference_error_feedback import (
    actual,
    assert_conserved,
    assert_same,
    expected,
    gradients,
    number,
)


def _chooser(k, block):
    """What each worker sends: (R, D) and the step -> (R, D)."""

    def choose(acc, step):
        dim = acc.shape[1]
        if k >= dim:
            return acc
        side = min(block, int(np.ceil(np.sqrt(dim))))
        chunks = -(-dim // side**2)
        each, more = divmod(k, chunks)
        turn = {(step * more + at) % chunks for at in range(more)}
        sent = np.zeros((len(acc), chunks * side**2))
        for row, values in zip(sent, acc, strict=True):
            padded = np.zeros(chunks * side**2)
            padded[:dim] = values
            for at in range(chunks):
                own = slice(at * side**2, (at + 1) * side**2)
                found = scipy.fft.dctn(padded[own].reshape(side, side), norm="ortho").ravel()
                keep = np.argsort(-np.abs(found), kind="stable")[: each + (at in turn)]
                only = np.zeros_like(found)
                only[keep] = found[keep]
                row[own] = scipy.fft.idctn(only.reshape(side, side), norm="ortho").ravel()
        return sent[:, :dim]

    return choose


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize(
    ("dim", "density", "block"),
    [(1, 1.0, 64), (2, 0.5, 64), (31, 0.1, 3), (31, 0.97, 64), (31, 1.0, 4), (500, 0.004, 4)],
)
def test_it_is_the_transform_of_every_chunk(size, dim, density, block):
    grads = gradients(size, dim)
    means, residual, metrics = actual(grads, DeMo(density, block=block))
    k = number(density, dim)
    assert_same((means, residual), expected(grads, _chooser(k, block)))
    assert_conserved(grads, means, residual)
    assert metrics[-1]["per_rank"] == [k] * size
    # Coefficients count, not the coordinates that they are spread over.
    assert all(k <= one["selected"] <= k * size for one in metrics)


@given(st.integers(1, 40))
@settings(max_examples=20, deadline=None)
def test_the_transform_is_orthonormal(size):
    matrix = cosine_matrix(size, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64))
    values = torch.randn(3 * size**2, dtype=torch.float64)
    coefficients = transform(values, size)
    torch.testing.assert_close(coefficients.norm(), values.norm())
    torch.testing.assert_close(inverse(coefficients.flatten(), size), values)


def test_a_smooth_vector_is_a_few_numbers():
    slow = torch.cos(torch.arange(4096) * torch.pi / 4096)
    workers = VirtualWorkers(Sparsify(method=DeMo(0.002)), 4096, 2)
    found = workers.step(torch.stack([slow, slow]))
    # Top-k keeps 8 of 4096 such values; 8 frequencies keep nearly all.
    assert (found - slow).norm() < 0.05 * slow.norm()


def test_every_chunk_has_its_turn():
    workers = VirtualWorkers(Sparsify(method=DeMo(1 / 16, block=2)), 16, 1)
    changed = [workers.step(torch.ones(1, 16)).view(4, 4).any(1).nonzero() for _ in range(4)]
    assert sorted(int(chunk) for chunk in torch.cat(changed)) == [0, 1, 2, 3]


def test_what_is_kept_decays():
    grads = gradients(2, 20, steps=1)
    _, all_of_it, _ = actual(grads, DeMo(0.2, block=2))
    _, residual, _ = actual(grads, DeMo(0.2, block=2, decay=0.5))
    np.testing.assert_allclose(residual, 0.5 * all_of_it, rtol=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"block": 0}, "block must be an integer of at least 1, got 0"),
        ({"block": 2.5}, "block must be an integer of at least 1, got 2.5"),
        ({"decay": 1.5}, r"decay must be in \[0, 1\], got 1.5"),
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
    ],
)
def test_bad_settings(given, message):
    with pytest.raises(ValueError, match=message):
        DeMo(**given)
