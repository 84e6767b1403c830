import math

import numpy as np
import pytest
import torch

from gradherd.sparsify.basics import Dense
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from studies.methods.thresholds import Sage, SageState
from tests.sparsify.one_step import propose

SIZES = [1, 2, 3]
DIMS = [1, 2, 31, 5000]
# Sizes of the gradients of a run: alpha is far from 1, and undefined in between.
SCALES = np.array([1.0, 1.0, 0.02, 0.02, 5.0, 40.0, 0.0, 0.0, 1.0, 1.0])


class Slow:
    """One worker's threshold, element by element."""

    def __init__(self):
        self.threshold = self.mean = None
        self.gammas = set()

    def select(self, acc, k):
        dim, target = len(acc), k / len(acc)
        count = max(1, int(dim / (1 + 0.0025 * dim)))
        now = sum(abs(acc[i * dim // count]) for i in range(count)) / count
        if self.threshold is None:
            self.threshold = 1 / (2 * math.sqrt(k))
        else:
            self.threshold *= now / self.mean if now > 0 and self.mean else 1
            examined = sum(abs(x) >= self.threshold for x in acc) / dim
            gamma = 0.95 if examined < 0.1 * target else 1.05 if examined > 10 * target else 1
            self.gammas.add(gamma)
            self.threshold *= 2 / (1 + math.exp(target - examined)) * gamma
        if now > 0:
            self.mean = now
        return {i for i in range(dim) if abs(acc[i]) >= self.threshold}


def workers(method, dim, size, dtype=torch.float64, **settings):
    return VirtualWorkers(Sparsify(method=method, **settings), dim, size, dtype=dtype)


def gradients(scales, size, dim, seed=0):
    draw = np.random.RandomState(seed)
    # Workers have gradients of different sizes, so thresholds of their own.
    sizes = np.arange(1.0, size + 1).reshape(size, 1)
    return np.stack([scale * sizes * draw.standard_cauchy((size, dim)) for scale in scales])


def exchange(accs, union):
    """Mean of the union, and what each worker keeps."""
    out, residual = np.zeros(len(accs[0])), [acc.copy() for acc in accs]
    for acc, left in zip(accs, residual, strict=True):
        for i in union:
            out[i] += acc[i]
            left[i] = 0
    return out / len(accs), residual


# The first threshold is too high, about right, and too low.
@pytest.mark.parametrize(("unit", "gamma"), [(1e-4, 0.95), (1e-2, 1), (1.0, 1.05)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_it_is_what_the_slow_one_is(dim, size, unit, gamma):
    k = max(1, dim // 50)
    run, slow = workers(Sage(0.02), dim, size), [Slow() for _ in range(size)]
    residual = [np.zeros(dim)] * size
    for step in gradients(unit * SCALES, size, dim, seed=dim):
        accs = [old + new for old, new in zip(residual, step, strict=True)]
        selections = [
            set(range(dim)) if k == dim else one.select(acc, k)
            for one, acc in zip(slow, accs, strict=True)
        ]
        out, residual = exchange(accs, sorted(set().union(*selections)))
        np.testing.assert_array_equal(run.step(torch.from_numpy(step)).numpy(), out)
        np.testing.assert_array_equal(run.residuals().numpy(), np.stack(residual))
        assert run.metrics["per_rank"] == [len(own) for own in selections]
        for worker, one in zip(run.workers, slow, strict=True):
            if one.threshold is None:
                assert worker.state == SageState(None, None)
                continue
            assert worker.state.threshold == pytest.approx(one.threshold, rel=1e-12)
            assert worker.state.mean == pytest.approx(one.mean, rel=1e-12)
    if dim == 5000:
        assert all(gamma in one.gammas for one in slow)
        assert len({worker.state.threshold for worker in run.workers}) == size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_nothing_is_lost(dim, size):
    run, grads = workers(Sage(0.02), dim, size), gradients(SCALES, size, dim)
    sent = sum(run.step(torch.from_numpy(step)).numpy() for step in grads)
    total, largest = size * sent + run.residuals().sum(0).numpy(), np.abs(grads).sum((0, 1))
    assert np.all(np.abs(total - grads.sum((0, 1))) <= 1e-12 * largest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_density_one_is_dense(dim, size):
    grads = torch.from_numpy(gradients([1.0, 1e-9, 1e9], size, dim)).float()
    run = workers(Sage(1.0), dim, size, torch.float32)
    dense = workers(Dense(), dim, size, torch.float32)
    for step in grads:
        assert torch.equal(run.step(step), dense.step(step))
        assert not run.residuals().any()


def test_a_sample_without_a_mean_moves_nothing_by_it():
    method = Sage(0.1, low=0, high=1e9)
    acc = torch.zeros(100, dtype=torch.float64)
    acc[7] = 3.0
    for state, values in [
        (SageState(2.0, 0.5), torch.zeros_like(acc)),
        (SageState(2.0, None), acc),
        (SageState(2.0, 0.0), acc),
    ]:
        examined = 0.01 if values[7] else 0.0
        after = propose(method, values, 10, state).own[1]
        want = 2.0 * 2 / (1 + math.exp(0.1 - examined))
        assert after.threshold == pytest.approx(want, rel=1e-14)
    # What was measured last is not forgotten over a zero.
    assert propose(method, torch.zeros_like(acc), 10, SageState(2.0, 0.5)).own[1].mean == 0.5


def test_the_threshold_follows_the_scale_at_once():
    draw = np.random.RandomState(0)
    acc = torch.from_numpy(draw.randn(4000))
    method = Sage(0.01)
    threshold = float(acc.abs().sort().values[-60])
    before = propose(method, acc, 40, SageState(threshold, None)).own[1]
    after = propose(method, 1000 * acc, 40, before)
    assert after.own[2] == pytest.approx(1000 * threshold, rel=0.02)
    assert 50 <= int(after.header[0]) <= 60


def test_it_nears_the_target_from_far_off_and_stays_within_the_band():
    draw = torch.Generator().manual_seed(0)
    for first in (1e-4, 1e4):
        method, state, counts = Sage(0.01, first=first), SageState(None, None), []
        for _ in range(400):
            acc = torch.randn(20_000, generator=draw)
            proposal = propose(method, acc, 200, state)
            state = proposal.own[1]
            counts.append(int(proposal.header[0]) / 200)
        assert not 0.05 < counts[0] < 20
        assert all(0.05 < count < 20 for count in counts[-50:])


@pytest.mark.parametrize("size", SIZES)
def test_the_first_threshold_may_be_the_kth_largest(size):
    run = workers(Sage(0.1, first="topk"), 30, size)
    grads = torch.from_numpy(gradients([0.0, 1.0], size, 30))
    assert not run.step(grads[0]).any()  # nothing to go by: the next step is the first again
    assert [worker.state.threshold for worker in run.workers] == [None] * size
    run.step(grads[1])
    assert run.metrics["per_rank"] == [3] * size
    for worker, own in zip(run.workers, grads[1], strict=True):
        assert worker.state.threshold == float(own.abs().sort().values[-3])


def test_the_first_threshold_may_be_given():
    run = workers(Sage(0.4, first=2.0), 5, 1)
    assert run.step(torch.tensor([[1.0, -2.0, 3.0, 0.0, 1.9]])).tolist() == [0, -2, 3, 0, 0]


def test_zeros_are_not_sent_and_a_lost_threshold_starts_again():
    method = Sage(0.25)
    acc = torch.tensor([1e-30, 0.0, 0.0, 1e-30, 0.0, 0.0, 0.0, 0.0])
    selections, after, _ = propose(method, acc, 2, SageState(1e-20, 1.0)).own
    assert selections.tolist() == [0, 3]
    assert after.threshold is None
    selections, after, _ = propose(method, 8 * acc, 2, after).own
    assert (selections.tolist(), after.threshold) == ([], 1 / (2 * math.sqrt(2)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 0.0}, r"density must be in \(0, 1\], got 0.0"),
        ({"first": "sample"}, "first must be formula, topk or a positive number, got sample"),
        ({"first": 0.0}, "first must be formula, topk or a positive number, got 0.0"),
        ({"first": math.nan}, "first must be formula, topk or a positive number, got nan"),
        ({"error": -0.1}, r"error must be in \[0, 1\], got -0.1"),
        ({"low": 2.0}, r"low must be in \[0, 1\], got 2.0"),
        ({"high": 0.5}, "high must be at least 1, got 0.5"),
        ({"shrink": 0.0}, r"shrink must be in \(0, 1\], got 0.0"),
        ({"grow": 0.9}, "grow must be at least 1 and finite, got 0.9"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sage(**arguments)
