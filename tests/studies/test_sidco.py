import math

import numpy as np
import pytest
import torch

from gradherd.sparsify.basics import Dense
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from studies.methods.thresholds import SIDCo, SIDCoState, gamma, gamma_quantile, pareto
from tests.sparsify import one_step

SIZES = [1, 2, 3]
DIMS = [1, 2, 31, 5000]
DISTRIBUTIONS = ["exponential", "gamma", "pareto"]


def slow_fit(distribution, values, ratio):
    mean = np.mean(values)
    if distribution == "exponential":
        return -mean * math.log(ratio)
    if distribution == "pareto":
        square = mean**2 / np.var(values, ddof=1)
        kappa, alpha = (square - 1) / 2, mean * (square + 1) / 2
        return alpha * (1 - ratio**kappa) / kappa
    special = pytest.importorskip("scipy.special")
    q = math.log(mean) - np.mean(np.log(values + 2.0**-52))
    shape = (3 - q + math.sqrt((q - 3) ** 2 + 24 * q)) / (12 * q)
    return mean / shape * special.gammaincinv(shape, 1 - ratio)


class Slow:
    """One worker's stages, as published, with what it lacks: what to do where nothing is left."""

    def __init__(self, distribution, stages):
        self.distribution, self.stages, self.shares = distribution, stages, []

    def select(self, acc, k):
        target, sizes = k / len(acc), np.abs(acc) / np.sqrt(np.sum(acc**2))
        several = self.stages > 1 and target < 0.25
        threshold = slow_fit(self.distribution, sizes, 0.25 if several else target)
        for _ in range(self.stages - 1 if several else 0):
            left = sizes[sizes > threshold]
            if len(set(left)) < 2:
                break
            ratio = (target / 0.25) ** (1 / (self.stages - 1))
            later = "exponential" if self.distribution == "exponential" else "pareto"
            threshold = left.min() + slow_fit(later, left - left.min(), ratio)
        selections = {i for i in range(len(acc)) if sizes[i] > threshold} or {int(np.argmax(sizes))}
        self.adapt(len(selections) / len(acc) / target, target)
        return selections

    def adapt(self, share, target):
        self.shares.append(share)
        if len(self.shares) == 5:
            mean = sum(self.shares) / 5
            self.stages += 1 if mean < 0.8 else -1 if mean > 1.2 else 0
            self.stages = max(1, min(self.stages, math.ceil(math.log2(1 / target))))
            self.shares = []


def workers(method, dim, size, dtype=torch.float64, **settings):
    return VirtualWorkers(Sparsify(method=method, **settings), dim, size, dtype=dtype)


def gradients(steps, size, dim, seed=0):
    """Light tails for the first worker, heavy ones for the others."""
    draw = np.random.RandomState(seed)
    powers = np.array([0.5, 2.0, 3.0])[:size].reshape(size, 1)
    normal = draw.randn(steps, size, dim)
    return np.sign(normal) * np.abs(normal) ** powers


def exchange(accs, union):
    """Mean of the union, and what each worker keeps."""
    out, residual = np.zeros(len(accs[0])), [acc.copy() for acc in accs]
    for acc, left in zip(accs, residual, strict=True):
        for i in union:
            out[i] += acc[i]
            left[i] = 0
    return out / len(accs), residual


def propose(method, acc, k, stages=1):
    proposal = one_step.propose(method, acc, k, SIDCoState(stages))
    selections, after, threshold = proposal.own
    assert proposal.header.tolist() == [len(selections)]
    return selections.tolist(), after, threshold


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_it_is_what_the_slow_one_is(dim, size, distribution, stages):
    k = max(1, dim // 100)
    run = workers(SIDCo(0.01, distribution, stages=stages), dim, size)
    slow = [Slow(distribution, stages) for _ in range(size)]
    residual, seen = [np.zeros(dim)] * size, set()
    for step in gradients(11, size, dim, seed=dim):
        accs = [old + new for old, new in zip(residual, step, strict=True)]
        selections = [
            set(range(dim)) if k == dim else one.select(acc, k)
            for one, acc in zip(slow, accs, strict=True)
        ]
        out, residual = exchange(accs, sorted(set().union(*selections)))
        np.testing.assert_array_equal(run.step(torch.from_numpy(step)).numpy(), out)
        np.testing.assert_array_equal(run.residuals().numpy(), np.stack(residual))
        assert run.metrics["per_rank"] == [len(own) for own in selections]
        assert [worker.state.stages for worker in run.workers] == [one.stages for one in slow]
        seen |= {one.stages for one in slow}
    if dim == 5000 and distribution == "exponential":
        assert len(seen) > 1


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_nothing_is_lost(dim, size, distribution):
    run, grads = workers(SIDCo(0.01, distribution), dim, size), gradients(12, size, dim)
    sent = sum(run.step(torch.from_numpy(step)).numpy() for step in grads)
    total, largest = size * sent + run.residuals().sum(0).numpy(), np.abs(grads).sum((0, 1))
    assert np.all(np.abs(total - grads.sum((0, 1))) <= 1e-12 * largest)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", DIMS)
def test_density_one_is_dense(dim, size, distribution):
    grads = torch.from_numpy(gradients(3, size, dim)).float()
    run = workers(SIDCo(1.0, distribution), dim, size, torch.float32)
    dense = workers(Dense(), dim, size, torch.float32)
    for step in grads:
        assert torch.equal(run.step(step), dense.step(step))
        assert not run.residuals().any()
        assert {worker.state for worker in run.workers} == {SIDCoState(1)}


def drawn(distribution, count=200_000):
    """Symmetric draws whose magnitudes have the distribution."""
    draw = np.random.RandomState(3)
    sizes = {
        "exponential": lambda: draw.exponential(0.3, count),
        "gamma": lambda: draw.gamma(0.6, 0.3, count),
        # Inverse of the distribution function; the tail falls as the fifth power.
        "pareto": lambda: 0.3 * (draw.uniform(size=count) ** -0.2 - 1) / 0.2,
    }[distribution]()
    return torch.from_numpy(sizes * draw.choice([-1, 1], count))


@pytest.mark.parametrize("density", [0.25, 0.5])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_one_stage_finds_a_quantile_of_its_own_distribution(distribution, density):
    acc = drawn(distribution)
    selections, _, _ = propose(SIDCo(density, distribution), acc, int(density * len(acc)))
    assert len(selections) == pytest.approx(density * len(acc), rel=0.03)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_stages_find_a_far_quantile_of_their_own_distribution(distribution, stages):
    acc = drawn(distribution)
    selections, _, threshold = propose(SIDCo(0.001, distribution), acc, 200, stages)
    assert len(selections) == pytest.approx(200, rel=0.25)
    assert selections == (acc.abs() >= threshold).nonzero().view(-1).tolist()


def test_stages_mend_a_fit_of_another_distribution():
    acc = drawn("pareto")
    counts = [len(propose(SIDCo(0.001), acc, 200, stages)[0]) for stages in (1, 2, 4)]
    assert counts[0] > 800  # an exponential has no such tail
    assert abs(counts[0] - 200) > abs(counts[1] - 200) > abs(counts[2] - 200)


def test_stages_are_found_by_themselves():
    draw = np.random.RandomState(0)
    method, state, counts = SIDCo(0.001), SIDCoState(1), []
    for _ in range(60):
        acc = torch.from_numpy(draw.randn(50_000))
        proposal = one_step.propose(method, acc, 50, state)
        state = proposal.own[1]
        counts.append(int(proposal.header[0]))
    assert np.mean(counts[:5]) < 0.5 * 50  # a normal distribution ends sooner
    assert np.mean(counts[-30:]) == pytest.approx(50, rel=0.4)
    assert state.stages > 1


@pytest.mark.parametrize(
    ("shares", "stages", "after"),
    [
        ([1.3] * 5, 3, 2),
        ([0.7] * 5, 3, 4),
        ([1.19, 0.81, 1.0, 1.0, 1.0], 3, 3),
        ([2.0, 0.5, 0.5, 0.5, 0.4], 3, 4),  # mean 0.78
        ([9.0] * 4, 3, 3),  # not yet
        ([9.0] * 5, 1, 1),
        ([0.0] * 5, 10, 10),  # two to the tenth is over a thousand
        ([0.0] * 5, 9, 10),
    ],
)
def test_stages_follow_what_was_picked(shares, stages, after):
    state = SIDCoState(stages)
    for share in shares:
        state = SIDCo(0.001).adapt(state, share * 0.001, 0.001)
    assert state.stages == after
    assert state.steps == len(shares) % 5


def test_the_constants_are_settings():
    method = SIDCo(0.001, every=2, tolerance=0.5, stage_ratio=0.1, stages=2)
    state = method.begin(10, 1, [10])
    assert state == SIDCoState(2)
    for share, stages in ((0.6, 2), (0.6, 2), (0.4, 2), (0.4, 3), (0.4, 3), (0.4, 3)):
        state = method.adapt(state, share * 0.001, 0.001)
        assert state.stages == stages  # three at most: a tenth of a tenth of a tenth
    acc = drawn("exponential")
    half = SIDCo(0.05, first_ratio=0.5)
    assert propose(half, acc, 10_000, 3)[0] != propose(SIDCo(0.05), acc, 10_000, 3)[0]


@pytest.mark.parametrize("stages", [1, 2, 6])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_hard_vectors(distribution, stages):
    method = SIDCo(0.1, distribution)
    assert propose(method, torch.zeros(30), 3, stages) == ([], SIDCoState(stages), None)
    one = torch.zeros(30)
    one[17] = -4.0
    assert propose(method, one, 3, stages)[0] == [17]
    signs = torch.tensor([0.1, -0.1] * 15)
    assert len(propose(method, signs, 3, stages)[0]) == 3
    assert len(propose(method, signs.double(), 3, stages)[0]) == 3
    two = torch.tensor([1.0, -5.0])
    assert propose(method, two, 1, stages)[0] == [1]
    level = torch.ones(1000, dtype=torch.float64)
    level[500] = 1 + 2.0**-52
    assert len(propose(method, level, 100, stages)[0]) >= 1
    # Half of them zero: those are never sent.
    half = torch.cat([torch.zeros(50), torch.linspace(1, 2, 50)])
    assert min(propose(method, half, 10, stages)[0]) >= 50


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_zeros_are_fitted_like_anything_else(distribution, stages):
    acc = np.random.RandomState(0).randn(2000) ** 3
    acc[::2] = 0
    selections = propose(SIDCo(0.05, distribution), torch.from_numpy(acc), 100, stages)[0]
    assert set(selections) == Slow(distribution, stages).select(acc, 100)
    assert 1 < len(selections) < 1000


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_zeros_are_not_sent_unless_everything_is(distribution):
    acc = torch.zeros(1000)
    acc[:990:99] = torch.linspace(-1, 1.5, 10)
    selections = propose(SIDCo(0.95, distribution), acc, 950)[0]
    assert selections
    assert set(selections) <= set(range(0, 990, 99))


def test_the_largest_is_sent_where_the_fit_leaves_none():
    acc = torch.linspace(1, 1.1, 100)[torch.randperm(100, generator=torch.Generator())]
    selections, _, threshold = propose(SIDCo(0.01), acc, 1)
    assert selections == [int(acc.argmax())]
    assert threshold == float(acc.max())


@pytest.mark.parametrize("factor", [2.0**90, 2.0**-90])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_scale_plays_no_part(distribution, factor):
    acc, method = drawn(distribution, 2000).float(), SIDCo(0.02, distribution)
    selections, after, threshold = propose(method, acc, 40, 2)
    assert propose(method, factor * acc, 40, 2) == (selections, after, threshold * factor)


def test_pareto_is_exponential_where_kappa_is_zero():
    values = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)  # mean 1, variance 1
    assert pareto(values, 0.25) == pytest.approx(math.log(4), rel=1e-15)
    for shift in (1e-12, -1e-12, 1e-7, -1e-7):
        assert pareto(values + shift, 0.25) == pytest.approx(math.log(4), rel=1e-6)


def test_fits_of_equal_values_are_that_value():
    values = torch.full((4,), 0.5)
    assert pareto(values, 0.25) == 0.5
    # Rounding may take the gap of the means for a very narrow distribution.
    assert gamma(values, 0.25) == pytest.approx(0.5, rel=1e-3)
    assert gamma(2 * values, 0.25) == 1


@pytest.mark.parametrize("shape", [0.02, 0.3, 1.0, 2.5, 30.0, 1e3, 1e6, 1e9])
@pytest.mark.parametrize("ratio", [0.9, 0.5, 0.25, 1e-3, 1e-8])
def test_quantiles_of_the_gamma_distribution(shape, ratio):
    special = pytest.importorskip("scipy.special")
    want = float(special.gammainccinv(shape, ratio))
    assert gamma_quantile(shape, ratio) == pytest.approx(want, rel=1e-9)
    if ratio > 1e-4:
        want = float(special.gammaincinv(shape, 1 - ratio))
        assert gamma_quantile(shape, ratio) == pytest.approx(want, rel=1e-9)


def test_workers_have_stages_of_their_own():
    run = workers(SIDCo(0.01), 3000, 2)
    draw = np.random.RandomState(0)
    for _ in range(5):
        light, heavy = draw.uniform(-1, 1, 3000), draw.standard_cauchy(3000)
        run.step(torch.from_numpy(np.stack([light, heavy])))
    first, second = (worker.state.stages for worker in run.workers)
    assert first == 2
    assert second == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"density": 1.1}, r"density must be in \(0, 1\], got 1.1"),
        ({"distribution": "normal"}, "one of exponential, gamma, pareto, got 'normal'"),
        ({"first_ratio": 1.0}, r"first_ratio must be in \(0, 1\), got 1.0"),
        ({"tolerance": 0.0}, r"tolerance must be in \(0, 1\), got 0.0"),
        ({"stage_ratio": math.nan}, r"stage_ratio must be in \(0, 1\), got nan"),
        ({"stages": 0}, "stages must be at least 1, got 0"),
        ({"every": 0}, "every must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        SIDCo(**arguments)
