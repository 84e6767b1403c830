"""The benchmark of few bytes at several sizes: its arms are what they say."""

import math

import pytest
import torch
from benchmarks.few_bytes_size import (
    Padded,
    Rounding,
    Run,
    arm_of,
    bytes_of,
    dense_steps,
    exchanges_of,
    fast_functions,
    levels_of,
    muon,
    rounded,
    train,
)
from torch import nn

from gradherd.comm.packing import decode_values, encode_values

CPU = torch.device("cpu")
SHAPE = Padded(16, 2, 8, 24, 8)


def run_of(text, steps=8, workers=4):
    torch.manual_seed(0)
    blocks = torch.randint(1, 3, (160, 8)).cumsum(1).remainder(24).int()
    run = Run(arm_of(text), SHAPE, steps, workers, CPU, compiled=False)
    record = train(run, (blocks[:128], blocks[128:]), 2, math.inf, text)
    return run, record


def test_a_step_of_all_with_a_shared_second_moment_is_a_step_of_the_mean():
    dense, record = run_of("dense:lr=3e-3")
    assert record["fewer"] == 1 and len(record["curve"]) == 8
    for text in ("local:H=1:oracle=1:lr=3e-3", "grads:lr=3e-3"):
        run, _ = run_of(text)
        torch.testing.assert_close(run.shared, dense.shared, atol=2e-5, rtol=0)
    own, _ = run_of("local:H=1:lr=3e-3")
    assert (own.shared - dense.shared).abs().max() > 1e-3


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_rounding_loses_nothing(bits):
    torch.manual_seed(1)
    rounding = Rounding(512, 3, bits, fast_functions(SHAPE, False), CPU)
    waiting, given, got = torch.zeros(3, 512), torch.zeros(512), torch.zeros(512)
    for _ in range(5):
        values = torch.randn(3, 512)
        waiting, given = waiting + values, given + values.mean(0)
        got += rounding.mean(waiting)
    torch.testing.assert_close(got + waiting.mean(0) + rounding.owner_error[0], given)


def test_levels_are_those_of_messages():
    torch.manual_seed(2)
    values = torch.randn(1, 2560)
    for bits in (1, 2, 4):
        ours = rounded(values, *levels_of(values, bits), bits)
        sent = decode_values(encode_values(values, bits), 2560, bits)
        if bits == 2:  # near the best two levels
            assert (ours - values).norm() < 1.01 * (sent - values).norm()
        else:
            assert torch.equal(ours, sent)


@pytest.mark.parametrize(
    "text",
    [
        "local:H=4:bits=1:mom=0.3:olr=0.7",
        "local:H=4:bits=1:keep=0:clip=1:early=0.25",
        "local:H=4:bits=2:grow=0.5:rho=1",
        "local:H=4:opt=muon:bits=4",
        "dense:opt=muon:clip=0.1",
        "dense:accum=2",
        "grads:bits=1:accum=2:clip=0.5",
    ],
)
def test_arms_train(text):
    _, record = run_of(text + ":lr=1e-2", steps=16)
    assert record["loss"] < record["curve"][0][1]
    assert record["fewer"] > 1 or text.startswith("dense:opt")


def test_phases():
    def at(text):
        return [i for i, due in enumerate(exchanges_of(arm_of(text), 20), 1) if due]

    assert at("local:H=8") == [8, 16, 20]
    assert at("local:H=8:early=0.2") == [1, 2, 3, 4, 12, 20]
    assert at("local:H=4:grow=0.5") == [1, 3, 5, 8, 12, 16, 20]
    assert at("dense:accum=8") == [8, 16, 20]
    assert bytes_of(2560, 2, 32) / bytes_of(2560, 2, 1) == pytest.approx(32 / 1.0625, rel=1e-2)


def test_the_outer_step_is_sgd():
    run = Run(arm_of("local:mom=0.6:olr=0.7"), SHAPE, 8, 2, CPU, compiled=False)
    weights = nn.Parameter(run.shared.clone())
    sgd = torch.optim.SGD([weights], lr=0.7, momentum=0.6, nesterov=True)
    for _ in range(3):
        run.step, weights.grad = run.step + 1, torch.randn(SHAPE.dim)
        sgd.step()
        run._outer_step(weights.grad)
    torch.testing.assert_close(run.shared, weights.detach())


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon is from 2.9 on")
@pytest.mark.parametrize("size", [(16, 48), (48, 16)])
def test_muon_is_that_of_torch(size):
    torch.manual_seed(3)
    weights = nn.Parameter(torch.randn(size))
    settings = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
    theirs = torch.optim.Muon([weights], adjust_lr_fn="match_rms_adamw", **settings)
    ours = weights.detach().clone().expand(2, 3, *size).contiguous()
    m = torch.zeros_like(ours)
    k = torch.tensor([0.02, 0, 0, 0, 0, 0.1, 0.05, 0])
    for _ in range(3):
        weights.grad = torch.randn(size)
        theirs.step()
        muon(ours, weights.grad.expand(2, 3, *size), m, k, torch.ones(2, 1))
    torch.testing.assert_close(ours[1, 2], weights.detach(), atol=2e-3, rtol=0)


def test_steps_of_dense_training_for_a_loss():
    runs = [(100, 4.0), (400, 3.0), (400, 3.5), (1600, 2.5)]
    assert dense_steps(runs, 3.5) == pytest.approx(200)
    assert dense_steps(runs, 2.75) == pytest.approx(800)
    assert dense_steps(runs, 2.0) == pytest.approx(6400)
    assert dense_steps(runs, 5.0) == pytest.approx(25)
