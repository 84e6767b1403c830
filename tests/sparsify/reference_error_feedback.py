"""Error feedback of all workers at once, in numpy, around any way to choose."""

import numpy as np
import torch

from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers


def number(density, dim):
    """How many coordinates are meant."""
    return max(1, int(round(density * dim, 6)))


def expected(grads, choose):
    """Means of all steps (T, D) and residuals after them (R, D).

    `choose(acc, step)` returns what each worker sends: (R, D) -> (R, D).
    """
    residual, means = np.zeros_like(grads[0]), []
    for step, grad in enumerate(grads):
        acc = residual + grad
        sent = choose(acc, step)
        means.append(sent.sum(0) / len(grad))
        residual = acc - sent
    return np.array(means), residual


def actual(grads, method, layers=None):
    """The same of the method itself, and its metrics of every step."""
    _, size, dim = grads.shape
    workers = VirtualWorkers(Sparsify(method=method), dim, size, layers=layers, dtype=torch.float64)
    means, metrics = [], []
    for grad in torch.from_numpy(grads):
        means.append(workers.step(grad))
        metrics.append(workers.metrics)
    return torch.stack(means).numpy(), workers.residuals().numpy(), metrics


def assert_same(have, want):
    for one, other in zip(have[:2], want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def assert_conserved(grads, means, residual):
    """What was computed is what was sent and what is kept."""
    computed = grads.sum((0, 1))
    error = np.abs(len(residual) * means.sum(0) + residual.sum(0) - computed).max()
    assert error <= 1e-12 * np.abs(grads).sum((0, 1)).max()


def gradients(size, dim, steps=5, seed=0):
    return np.random.default_rng(seed).standard_normal((steps, size, dim))
