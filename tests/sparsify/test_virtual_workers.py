"""Workers of one process that agree once do what workers do that agree each on their own."""

import dataclasses
import math

import pytest
import torch

from gradherd import ExDyna, Micro, TopK
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.gpu import only_gpu
from tests.sparsify.rank_work import METHODS, normal

LAYERS, ALWAYS = [3000, 90, 10, 1300, 1300], 300
SPARSE = sum(LAYERS)
DIM = SPARSE + ALWAYS


def pair(settings, size, dim=DIM, **more):
    """The same workers twice: each agrees on its own, and one agrees for all."""
    given = {"sparse": SPARSE, "layers": LAYERS} if dim == DIM else {}
    kind = type(settings.method)
    # In the same module, where methods of one's own and built-in ones are told apart.
    changed = {"agrees_alone": False, "__module__": kind.__module__}
    each = type(kind.__name__, (kind,), changed)(**vars(settings.method))
    both = (dataclasses.replace(settings, method=each), settings)
    return [VirtualWorkers(one, dim, size, **given, **more) for one in both]


def gradients(step, size):
    """Shared and own parts; layers of different scales, which partitions must follow."""
    scales = torch.repeat_interleave(
        torch.tensor([1.0, 30.0, 0.1, 0.003, 2.0, 1.0]), torch.tensor([*LAYERS, ALWAYS])
    )
    return (normal(step, 1, DIM) + normal(100 + step, size, DIM)) * scales


def equal(mine, theirs):
    if isinstance(theirs, torch.Tensor):
        return torch.equal(mine, theirs)
    return mine == theirs


def check_step(each, once, grads):
    mine, expected = once.step(grads), each.step(grads.clone())
    assert (mine.isnan().all() and expected.isnan().all()) or torch.equal(mine, expected)
    assert torch.equal(once.residuals(), each.residuals())
    assert once.metrics == each.metrics
    for mine, theirs in zip(once.workers, each.workers, strict=True):
        assert (mine.step, mine.skipped) == (theirs.step, theirs.skipped)
        if theirs.state is not None:
            for key, value in vars(theirs.state).items():
                assert equal(vars(mine.state)[key], value), key


def settings_of(name, **more):
    method = METHODS[name](density=1.0 if name == "dense" else 0.01)
    return Sparsify(method=method, **more)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", ["dense", "exdyna", "micro"])
def test_one_agrees_for_all(name, size):
    both = pair(settings_of(name), size)
    for step in range(6):
        check_step(*both, gradients(step, size))
    # The search has to begin anew, and all borders to move.
    for step in range(3):
        check_step(*both, 1e-3 * gradients(step, size).flip(1))


class OwnMethod(ExDyna):
    """A method of one's own, whose selections workers compare."""


def test_a_method_of_ones_own_is_compared_alike():
    both = pair(Sparsify(method=OwnMethod(0.01)), 4)
    built_in = pair(settings_of("exdyna"), 4)[0]
    for step in range(4):
        check_step(*both, gradients(step, 4))
        built_in.step(gradients(step, 4))
        assert both[0].bytes - built_in.bytes == (48 if step < 3 else 0)


@pytest.mark.parametrize(
    "method",
    [
        ExDyna(0.01, threshold="online", balance="diffusive"),
        ExDyna(0.02, rotate=False, capacity=math.inf),
        Micro(0.01, threshold="online"),
        Micro(0.3),
    ],
)
def test_variants_of_exclusive_partitions(method):
    both = pair(Sparsify(method=method), 3)
    for step in range(6):
        check_step(*both, gradients(step, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"clip": 5.0},
        {"values": "bf16"},
        {"values": "int2"},
        {"values": "int1"},
        {"warmup_steps": 3, "warmup_from": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_settings_apply_to_both(options):
    for name in ("exdyna", "topk", *(["dense"] if options.get("values") == "bf16" else [])):
        both = pair(settings_of(name, **options), 3)
        for step in range(4):
            check_step(*both, gradients(step, 3))


def test_partitions_shorter_than_a_fair_share():
    """A worker whose partition has fewer coordinates than the others may offer."""
    both = pair(Sparsify(method=ExDyna(0.5, blocks=5)), 4, dim=9)
    for step in range(12):
        check_step(*both, normal(step, 4, 9))


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_a_step_that_is_called_off_leaves_no_trace(poison):
    """Of one worker's gradient, or of the sum over workers, which overflows."""
    for method in (ExDyna(0.01), TopK(0.01)):
        both = pair(Sparsify(method=method), 2)
        for step in range(4):
            grads = gradients(step, 2)
            if step == 2:
                grads[:, 7] = poison
            before = both[1].residuals()
            check_step(*both, grads)
            if step == 2:
                assert torch.equal(both[1].residuals(), before)
                assert [one.metrics for one in both] == [{}, {}]


def test_gradients_of_zeros():
    for name in ("exdyna", "micro", "topk"):
        workers = VirtualWorkers(settings_of(name), DIM, 3, sparse=SPARSE, layers=LAYERS)
        total = torch.zeros(DIM)
        for step in range(5):
            grads = torch.zeros(3, DIM) if step in (0, 2, 3) else gradients(step, 3)
            total += grads.sum(0) - 3 * workers.step(grads)
        torch.testing.assert_close(workers.residuals().sum(0), total, rtol=1e-5, atol=1e-4)


def test_norms_need_not_be_measured():
    for one in pair(settings_of("exdyna"), 2):
        one.measure_norms = False
        one.step(gradients(0, 2))
        assert one.metrics["bytes"] > 0 and "residual_norm" not in one.metrics


@only_gpu
@pytest.mark.parametrize("name", ["dense", "exdyna", "micro"])
def test_one_agrees_for_all_on_a_gpu(name):
    both = pair(settings_of(name), 4, device="cuda")
    for step in range(6):
        check_step(*both, gradients(step, 4).cuda())
