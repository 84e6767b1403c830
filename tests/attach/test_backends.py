"""Exchanges over gloo on the CPU, and over nccl on a GPU that all ranks share: the same results."""

from functools import cache

import pytest
import torch
from torch import nn

from tests.attach import backend_work as work
from tests.local.reference import Reference
from tests.nccl import BACKENDS, run_over

SIZES = (2, 3)


@cache
def results(backend, fn, size):
    return run_over(backend, fn, size)


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def assert_equal_but_for_rounding(found, expected):
    """Sums of other orders round a few levels and signs the other way."""
    close = torch.isclose(found, expected, rtol=1e-5, atol=1e-6)
    assert float(close.float().mean()) > 0.99


def reference(settings, size):
    """Return (R, steps + 1, D) weights of all ranks, by the definition: exchange, then wait."""
    nets = [work.model() for _ in range(size)]
    optimizers = [work.optimizer_of(net) for net in nets]
    targets = [work.targets_of(net, rank) for rank, net in enumerate(nets)]
    small = torch.cat([torch.full((p.numel(),), p.numel() < 256) for p in nets[0].parameters()])
    few = Reference(int((~small).sum()), size, settings.values)
    shared = nn.Parameter(work.vector(nets[0]))
    momentum = settings.outer_momentum
    outer = torch.optim.SGD([shared], settings.outer_lr, momentum, nesterov=momentum > 0)
    starts, pending = shared.detach().repeat(size, 1), None
    residuals = torch.zeros(size, len(small))
    path = []

    def own():
        return torch.stack([work.vector(net) for net in nets])

    def begin():
        now = own()
        given = starts - now + residuals
        mean = given.mean(0)
        mean[~small], residuals[:, ~small] = few.mean(given[:, ~small])
        return now, mean

    def apply(before, mean, keep):
        nonlocal starts
        shared.grad = mean
        outer.step()
        starts = shared.detach() - (residuals if keep else torch.zeros_like(residuals))
        for net, new in zip(nets, starts + (own() - before), strict=True):
            nn.utils.vector_to_parameters(new.clone(), net.parameters())

    for at in range(work.STEPS):
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            work.take_step(net, optimizer, rank, targets[rank][at])
        taken = at % settings.every + 1
        if pending is not None and taken == settings.steps_until_applied:
            apply(*pending, settings.keep_residual)
            pending = None
        if taken == settings.every:
            pending = begin()
            if not settings.overlap:
                apply(*pending, settings.keep_residual)
                pending = None
        path.append(own())
    if pending is not None:
        apply(*pending, settings.keep_residual)
    apply(*begin(), keep=False)
    return torch.stack([*path, own()], dim=1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", work.CASES)
def test_local_steps_are_what_the_definition_says(backend, size, case):
    expected = reference(work.CASES[case], size)
    for rank, result in enumerate(results(backend, work.local_steps, size)):
        found = result["paths"][case]
        assert_equal_but_for_rounding(found["path"], expected[rank])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", work.CASES)
def test_local_steps_are_those_of_gloo_ranks(backend, size, case):
    found, expected = (
        results(name, work.local_steps, size)[0]["paths"][case] for name in (backend, "gloo")
    )
    for key in ("path", "residual", "shared", "buffer"):
        assert_equal_but_for_rounding(found[key], expected[key])
    assert found["bytes"] == expected["bytes"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", work.CASES)
def test_ranks_are_equal_to_the_bit_after_sync(backend, size, case):
    first, *others = (rank["paths"][case] for rank in results(backend, work.local_steps, size))
    for other in others:
        assert torch.equal(first["path"][-1], other["path"][-1])
        assert torch.equal(first["shared"], other["shared"])
        assert torch.equal(first["buffer"], other["buffer"])
        assert not torch.equal(first["path"][-2], other["path"][-2])


@pytest.mark.parametrize("size", SIZES)
def test_vectors_are_where_the_model_is(backend, size):
    place = {"gloo": "cpu", "nccl": "cuda"}[backend]
    for rank in results(backend, work.local_steps, size):
        for case in work.CASES:
            assert rank["paths"][case]["places"] == {"residual": place, "shared": place}


@pytest.mark.parametrize("size", SIZES)
def test_a_resumed_run_has_the_same_bits(backend, size):
    for rank in results(backend, work.local_steps, size):
        for (case, stop), found in rank["resumed"].items():
            straight = rank["paths"][case]
            assert torch.equal(found["path"], straight["path"]), (case, stop)
            for key in ("residual", "shared", "buffer"):
                assert torch.equal(found[key], straight[key]), (case, stop, key)


@pytest.mark.parametrize("size", SIZES)
def test_weights_that_are_not_finite_call_an_exchange_off(backend, size):
    (skipped, first), *others = (
        rank["not finite"] for rank in results(backend, work.local_steps, size)
    )
    assert skipped == 1 and first.isfinite().all()
    assert all(torch.equal(first, end) for _, end in others)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_steps_beside_an_exchange_never_wait_for_the_device(backend):
    ranks = [rank["busy"] for rank in results(backend, work.local_steps, 2)]
    for took, still_busy, end in ranks:
        assert still_busy and max(took) < 0.1, took
        assert torch.equal(end, ranks[0][2])


@pytest.mark.parametrize("size", SIZES)
def test_exdyna_in_ddp_loses_nothing(backend, size):
    ranks = [rank["sparse"] for rank in results(backend, work.in_ddp, size)]
    own, kept = (torch.stack([rank[at] for rank in ranks]).mean(0) for at in (0, 2))
    for _, given, _, weights, steps in ranks:
        assert steps == 16
        assert torch.equal(weights, ranks[0][3]) and torch.equal(given, ranks[0][1])
        error = (given + kept - own).abs().max() / own.abs().max()
        assert float(error) < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_a_model_in_ddp_takes_the_same_local_steps(backend, size):
    ranks = [rank["local"] for rank in results(backend, work.in_ddp, size)]
    for plain, wrapped in ranks:
        assert torch.equal(plain[0], wrapped[0]) and torch.equal(plain[1], wrapped[1])
        assert torch.equal(plain[1], ranks[0][0][1])
        assert plain[2] == wrapped[2] > 0
    assert not torch.equal(ranks[0][0][0], ranks[1][0][0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("unit", [1, 4])
def test_orders_in_ddp_are_those_of_gloo_ranks(backend, size, unit):
    ranks = [rank["ordered"][unit] for rank in results(backend, work.in_ddp, size)]
    expected, _ = results("gloo", work.in_ddp, size)[0]["ordered"][unit]
    for orders, weights in ranks:
        assert all(map(torch.equal, orders, expected))
        assert torch.equal(weights, ranks[0][1])
    assert not torch.equal(expected[0], expected[0].sort().values)


@pytest.mark.parametrize("case", ["one bit", "exact"])
def test_replicas_of_shards_take_local_steps(backend, case):
    ranks = [rank[case] for rank in results(backend, work.replicas, 4)]
    like_gloo = [rank[case] for rank in results("gloo", work.replicas, 4)]
    for rank, (within, synced, exchanges) in enumerate(ranks):
        assert exchanges == 3
        assert torch.equal(synced, ranks[0][1])
        assert torch.equal(within, ranks[rank // 2 * 2][0])
        torch.testing.assert_close(within, like_gloo[rank][0], rtol=1e-3, atol=1e-3)
    assert not torch.equal(ranks[0][0], ranks[2][0])
