"""Numbers at the edge of what their types hold."""

import math

import pytest
import torch

from gradherd import Sparsify, TopK
from gradherd.sparsify.virtual_workers import VirtualWorkers
from gradherd.sparsify.worker import clip_together


def test_values_beyond_bf16_leave_finite_residuals():
    workers = VirtualWorkers(Sparsify(method=TopK(0.25), values="bf16"), 4, 2)
    first = workers.step(torch.tensor([[3.4e38, 0.1, 0.2, 0.3], [0.0, 0.0, 0.0, 0.0]]))
    assert bool(first.isfinite().all())
    assert bool(workers.residuals().isfinite().all())
    assert bool(workers.step(torch.zeros(2, 4)).isfinite().all())


def test_a_sum_that_overflows_calls_the_step_off():
    workers = VirtualWorkers(Sparsify(method=TopK(0.25)), 4, 2)
    workers.step(torch.ones(2, 4))
    before = workers.residuals()
    huge = torch.tensor([[3e38, 0.0, 0.0, 0.0]] * 2)
    assert bool(workers.step(huge).isnan().all())
    assert torch.equal(workers.residuals(), before)
    assert all(worker.skipped == 1 for worker in workers.workers)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_simulated_workers_clip_their_own_gradients(bad):
    grads = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.1, 0.0, 0.2, 0.0]])
    workers = VirtualWorkers(Sparsify(method=TopK(density=0.25), clip=1.0, dense_below=0), 4, 2)
    sent = workers.step(grads.clone())
    computed = torch.tensor([[0.6, 0.8, 0.0, 0.0], [0.1, 0.0, 0.2, 0.0]])  # the second is short
    torch.testing.assert_close(2 * sent + workers.residuals().sum(0), computed.sum(0))
    before = workers.residuals()
    grads[0, 3] = bad
    assert workers.step(grads).isnan().all() and torch.equal(workers.residuals(), before)


def test_clipping_does_not_depend_on_how_a_gradient_is_divided():
    """DDP has other buckets after a restart, and a resumed run has the same bits."""
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        whole = torch.randn(1000, dtype=torch.float64, generator=draw) * 10.0 ** (seed - 25)
        parts = [part.clone() for part in whole.split([400, 1, 350, 249])]
        norm = float(whole.norm())
        clip_together(parts[::-1], 0.3 * norm)
        clip_together([whole], 0.3 * norm)
        assert torch.equal(torch.cat(parts), whole)
        if norm > 1:
            assert float(whole.norm()) == pytest.approx(0.3 * norm, rel=1e-6)


def test_steps_that_were_called_off_are_saved():
    saved, loaded = (VirtualWorkers(Sparsify(method="topk"), 4, 2) for _ in range(2))
    for value in (1.0, torch.nan, torch.nan):
        saved.step(torch.full((2, 4), value))
    for worker, other in zip(loaded.workers, saved.workers, strict=True):
        worker.load_state_dict(other.state_dict())
        assert (worker.step, worker.skipped) == (1, 2)
