"""PowerSGD of simulated workers against its definition, and as an arm of a comparison."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradherd.lab.train.exchanges import LowRankWorkers, compresses, rank_for
from tests.lab.train.work import config_of

SHAPES = [(6, 5), (4, 1), (3, 8)]


def by_hand(matrices, q):
    """One matrix in numpy, with the projection that QR gives, whatever the signs of its basis."""
    p, _ = np.linalg.qr(np.mean([m @ q for m in matrices], axis=0))
    q = np.mean([m.T @ p for m in matrices], axis=0)
    return p @ q.T, q


def test_three_steps_are_those_of_the_paper():
    workers = LowRankWorkers(SHAPES, 0.01, size=3)
    assert workers.rank == 1
    factors = {at: q.numpy().copy() for at, q in workers._factors.items()}
    assert set(factors) == {0, 2}
    residuals = np.zeros((3, 58), dtype=np.float32)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        grads = torch.randn(3, 58, generator=generator)
        sums, begin, expected = residuals + grads.numpy(), 0, []
        for at, (m, n) in enumerate(SHAPES):
            part = sums[:, begin : begin + m * n].reshape(3, m, n)
            if at in factors:
                mean, factors[at] = by_hand(part, factors[at])
            else:
                mean = part.mean(0)
            expected.append(mean.ravel())
            begin += m * n
        out = workers.step(grads)
        np.testing.assert_allclose(out.numpy(), np.concatenate(expected), rtol=1e-4, atol=1e-5)
        residuals = sums - out.numpy()
        residuals[:, 30:34] = 0  # averaged whole: nothing is left
        np.testing.assert_allclose(workers.residuals().numpy(), residuals, rtol=1e-4, atol=1e-5)
    assert workers.metrics["density"] == (11 + 4 + 11) / 58


def test_a_gradient_that_is_not_finite_changes_nothing():
    workers = LowRankWorkers(SHAPES, 0.01, size=2)
    workers.step(torch.randn(2, 58))
    before = workers.residuals()
    grads = torch.randn(2, 58)
    grads[1, 7] = torch.inf
    assert workers.step(grads).isnan().all()
    assert torch.equal(workers.residuals(), before) and workers.metrics == {}


def test_enough_rank_is_an_exact_mean():
    grads = torch.randn(3, 40)
    workers = LowRankWorkers([(5, 8)], 0.98, size=3)
    # Rank 3 is the last that is smaller than the matrix; the mean of rank-1 gradients needs less.
    assert workers.rank == 3
    low = torch.einsum("ra,rb->rab", grads[:, :5], grads[:, 5:13]).flatten(1)
    for _ in range(30):  # Q turns towards the gradients, which stay the same
        workers._residuals.zero_()
        out = workers.step(low)
    torch.testing.assert_close(out, low.mean(0), rtol=1e-3, atol=1e-4)


@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    density=st.floats(0.001, 1),
)
@settings(max_examples=60, deadline=None)
def test_the_rank_is_the_largest_within_the_density(shapes, density):
    def elements(rank):
        return sum(rank * (m + n) if compresses((m, n), rank) else m * n for m, n in shapes)

    total, rank = sum(m * n for m, n in shapes), rank_for(shapes, density)
    assert rank == 1 or elements(rank) <= density * total
    assert rank == max(min(s) for s in shapes) or elements(rank + 1) > density * total


def test_it_is_an_arm_of_simulated_workers_only():
    for chosen in ({"virtual": False}, {"virtual": True, "local_steps": 5}):
        with pytest.raises(ValueError, match="powersgd is exchanged at every step"):
            config_of("digits", sparsify="powersgd", density=0.2, **chosen)
