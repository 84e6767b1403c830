"""Products, signs and sums on a GPU against float64 on the CPU; how: see `test_triton_kernels`."""

from functools import partial

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from gradherd.gpu import launch
from gradherd.ordering import balance as forms
from gradherd.ordering import triton_gram
from gradherd.ordering.balance import balance, blocks, sequential, signs_from_products
from gradherd.ordering.sign_rules import Greedy, Kernel, Walk
from tests.gpu import DEVICE, GPU, MARKS, only_gpu
from tests.ordering.helpers import begun, signed

pytestmark = [
    *MARKS,
    # The interpreter computes in numpy, which tells what a GPU does in silence.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def columns(streams, count, dim, offset=0, whole=False):
    """(W, P, D) vectors and (W, D) sums within memory full of NaN."""
    memory = torch.full((streams, count + 1, dim + offset + 3), torch.nan)
    running = torch.full((streams, dim + offset + 3), torch.nan)
    drawn = torch.randn(streams, count + 1, dim) + 0.3
    drawn = (3 * drawn).round() if whole else drawn
    memory[:, :count, offset : offset + dim] = drawn[:, :count]
    running[:, offset : offset + dim] = drawn[:, count]
    there = memory.to(DEVICE)[:, :count, offset : offset + dim]
    return there, running.to(DEVICE)[:, offset : offset + dim]


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    monkeypatch.setattr(forms, "KERNEL_DEVICES", {DEVICE})


def by_form(form, vectors, running):
    draws, nothing = np.zeros(vectors.shape[:2]), np.empty((0, len(vectors)))
    return signed(form, (vectors, running, Greedy(), draws, nothing))


def by_blocks(vectors, running):
    return by_form(partial(blocks, block=64), vectors, running)


def loop(vectors, running):
    """The signs of the loop over vectors in float64, and its sums in float32."""
    exact = by_form(sequential, vectors.cpu().double(), running.cpu().double())
    total = running.cpu().clone()
    for p in range(vectors.shape[1]):
        total += exact.signs[:, p, None] * vectors[:, p].cpu()
    return exact.signs, total


SHAPES = [
    (1, 1, 1, 0),
    (1, 2, 63, 1),
    (2, 5, 64, 0),
    (1, 16, 300, 0),
    (3, 17, 129, 3),
    (1, 33, 200, 2),
    (1, 64, 257, 0),
    *([(1, 64, 1_000_003, 1), (2, 16, 300_000, 0), (1, 3, 5_000_000, 3)] if GPU else []),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_those_of_float64(shape):
    z, running = columns(*shape)
    both = triton_gram.products(z, running).cpu()
    wide, sums = z.double().cpu(), running.double().cpu().unsqueeze(-1)
    wanted = torch.cat([wide @ sums, wide @ wide.mT], -1)
    lengths = wide.norm(dim=-1)
    scale = lengths[:, :, None] * torch.cat([sums.norm(dim=1), lengths], -1)[:, None]
    assert both.dtype == torch.float64
    # Of TF32 alone the error would be 3e-4 and more, of long sums in tensor cores 2e-5.
    assert float(((both - wanted).abs() / scale).max()) < 2e-6


@pytest.mark.parametrize("shape", [*SHAPES, (1, 100, 20, 0)], ids=str)
def test_signs_and_sums_are_those_of_the_loop(shape):
    z, running = columns(*shape, whole=True)
    signs, total, _ = by_blocks(z, running)
    wanted, sums = loop(z, running)
    assert signs.dtype == torch.int8 and torch.equal(signs.cpu(), wanted)
    assert torch.equal(total.cpu(), sums)


def test_signed_vectors_are_added_in_place():
    z, running = columns(2, 11, 1500, 1)
    signs = torch.randint(-1, 2, (2, 11), dtype=torch.int8, device=DEVICE)
    wanted = running + (signs.double().unsqueeze(1) @ z.double()).squeeze(1)
    triton_gram.add_signed(z, signs, running)
    torch.testing.assert_close(running.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_vector_that_is_not_finite_is_left_out(bad):
    z, running = columns(1, 6, 100, whole=True)
    z[0, 0, 99] = z[0, 3, 7] = bad  # the square of the last one is not finite
    signs, total, _ = by_blocks(z, running)
    others = [1, 2, 4, 5]
    wanted, sums = loop(z[:, others], running)
    assert signs.cpu()[0, [0, 3]].tolist() == [0, 0]
    assert torch.equal(signs.cpu()[:, others], wanted) and torch.equal(total.cpu(), sums)


def test_the_recursion_is_that_of_the_host():
    both = torch.randn(3, 40, 41, dtype=torch.float64)
    both[..., 1:] = both[..., 1:] + both[..., 1:].mT
    both[0, :, 0] = 0  # ties
    both[0, :, 1:] = 0
    taken = torch.empty(3, 40, dtype=torch.int8, device=DEVICE)
    launch(triton_gram._greedy_kernel, (3,), both.to(DEVICE), taken, 40, 40, P=64, num_warps=1)
    inner, gram = both[..., 0].numpy().copy(), both[..., 1:].numpy()
    wanted = signs_from_products(inner, gram, Greedy(), np.zeros((3, 40)), np.empty((0, 3)))
    assert np.array_equal(taken.cpu().numpy(), wanted)


@only_gpu
@pytest.mark.parametrize("rule", [Greedy(), Walk(), Kernel()], ids=str)
def test_every_rule_whole_and_sharded_on_a_gpu(rule):
    z, running = columns(2, 70, 3000, 1, whole=True)
    draws = np.random.RandomState(1).uniform(-1, 1, (2, 70))

    for form in (balance, partial(balance, step=5)):
        results = []
        for device in ("cpu", "cuda"):
            carry = begun(rule, 2, 70, 0)
            results.append(signed(form, (z.to(device), running.to(device), rule, draws, carry)))
        cpu, gpu = results
        assert torch.equal(cpu.signs, gpu.signs)
        assert torch.equal(cpu.running, gpu.running.cpu())
        np.testing.assert_allclose(cpu.carry, gpu.carry, rtol=1e-5)
