"""Numbers at the edge of what their types hold."""

import torch

from gradherd import Sparsify, TopK
from gradherd.sparsify.workers import VirtualWorkers


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
