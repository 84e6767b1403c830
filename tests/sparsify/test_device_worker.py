"""Steps in fixed shapes do what steps with the host's help do: same choice, same sums.

They run on CPU tensors here, through the torch code of `kernels`; `tests/sparsify/test_gpu.py` runs
them on a GPU.
"""

import math

import numpy as np
import pytest
import torch

from gradherd.comm.script import run_together
from gradherd.sparsify import consensus, device_consensus, kernels, partitions
from gradherd.sparsify.device_worker import DeviceWorker, Placement
from gradherd.sparsify.exdyna import ExDyna
from gradherd.sparsify.micro import Micro
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from tests.gpu import DEVICE
from tests.sparsify.rank_work import normal

DIM, SPARSE = 30_000, 29_900


class DeviceWorkers:
    """All workers of a world in one process, each with two buckets in another order."""

    def __init__(self, settings, size, *, dim=DIM, sparse=SPARSE, dtype=torch.float32):
        # Parameters of the flat vector, as (begin, elements); the last bucket arrives first.
        half = sparse // 2 + 17
        self.buckets = [[(half, sparse - half), (sparse, dim - sparse)], [(0, half)]]
        self.buckets = [[one for one in bucket if one[1]] for bucket in self.buckets]
        placement = Placement(self.buckets, sparse, torch.device(DEVICE))
        method = settings.method
        self.settings, self.sparse, self.dim, self.size = settings, sparse, dim, size
        self.dtype = dtype
        self.workers = [
            DeviceWorker(
                method.device_rule(sparse, method.begin(sparse, size, [sparse])),
                placement,
                torch.zeros(placement.size, device=DEVICE),
                rank=rank,
                size=size,
                sparse=sparse,
                values=settings.values,
            )
            for rank in range(size)
        ]

    def step(self, grads, unit=1.0):
        flats = []
        for worker, grad in zip(self.workers, grads, strict=True):
            worker.begin(unit)
            own = [
                torch.cat([grad[b : b + n] for b, n in bucket]).to(DEVICE, self.dtype)
                for bucket in self.buckets
            ]
            for number, flat in enumerate(own):
                worker.add(number, flat)
                assert not flat.any()
            flats.append(own)
        k = target_count(self.settings.method.density, self.sparse)
        scripts = [w.script(k, own) for w, own in zip(self.workers, flats, strict=True)]
        run_together(scripts)
        for worker in self.workers:
            worker.commit()
        outs = [self.flat(own) for own in flats]
        assert all(torch.equal(out.nan_to_num(7), outs[0].nan_to_num(7)) for out in outs)
        return outs[0]

    def flat(self, own):
        out = torch.zeros(self.dim, dtype=self.dtype)
        for bucket, values in zip(self.buckets, own, strict=True):
            at = 0
            for begin, count in bucket:
                out[begin : begin + count] = values[at : at + count].cpu()
                at += count
        return out

    def residuals(self):
        rows = torch.zeros(self.size, self.dim)
        for row, worker in zip(rows, self.workers, strict=True):
            for begin, position, count in worker.placement.pieces:
                row[begin : begin + count] = worker.residual[position : position + count].cpu()
        return rows


METHODS = [ExDyna(0.01), ExDyna(0.01, balance="none", rotate=False), Micro(0.02)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("values", ["fp32", "int8"])
def test_they_choose_and_send_what_workers_with_a_host_do(method, size, values):
    settings = Sparsify(method=method, values=values)
    ours = DeviceWorkers(settings, size)
    theirs = VirtualWorkers(settings, DIM, size, sparse=SPARSE)
    # Different scales by coordinate, so that borders have to move; the same at every step.
    scales = torch.exp(0.5 * normal(5, DIM)) * torch.linspace(1, 1.15, DIM)
    for step in range(8):
        grads = normal(step, size, DIM) * scales
        mine, wanted = ours.step(grads), theirs.step(grads)
        assert torch.equal(mine != 0, wanted != 0), step
        # Levels and steps of few-bit values may round in another order on a GPU.
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(ours.residuals(), theirs.residuals(), rtol=1e-6, atol=1e-5)
        metrics = ours.workers[0].metrics()
        for key in ("selected", "per_rank", "padding"):
            assert metrics[key] == theirs.metrics[key]
        assert metrics["threshold"] == pytest.approx(theirs.metrics["threshold"])
    state = theirs.workers[0].state
    after = method.after(state, ours.workers[0].state.read(ours.workers[0].rule))
    assert after.start == pytest.approx(state.start)
    if isinstance(method, ExDyna):
        assert after.cuts == state.cuts
        np.testing.assert_allclose(after.loads, state.loads, rtol=1e-4, atol=1e-3)
    assert int(ours.workers[0].state.step) == 8


def conserved(workers, grads, outs, size):
    total = workers.residuals().double().sum(0) + size * sum(out.double() for out in outs)
    error = (total - sum(g.double().sum(0) for g in grads)).abs().max()
    return float(error / max(float(g.abs().max()) for g in grads))


@pytest.mark.parametrize("size", [1, 3])
def test_a_step_that_is_called_off_leaves_no_trace(size):
    settings = Sparsify(method=ExDyna(0.01))
    ours, straight = DeviceWorkers(settings, size), DeviceWorkers(settings, size)
    for step in range(6):
        grads = normal(step, size, DIM)
        if step in (0, 3):  # also before there is any start to search from
            bad = grads.clone()
            bad[-1, 12_345] = math.nan if step else -math.inf
            before = ours.residuals()
            assert ours.step(bad).isnan().all()
            assert torch.equal(ours.residuals(), before)
            assert ours.workers[0].metrics() == {}
        assert torch.equal(ours.step(grads), straight.step(grads))
    assert torch.equal(ours.residuals(), straight.residuals())
    assert int(ours.workers[0].state.skipped) == 2
    for mine, wanted in zip(ours.workers[0].state[2:], straight.workers[0].state[2:], strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("method", [ExDyna(0.02), ExDyna(0.3), Micro(0.01)], ids=str)
def test_exactly_k_are_sent_whatever_gradients_do(method, size):
    """All zero, of one magnitude, a thousand times larger or smaller, a few elements only."""
    workers = DeviceWorkers(Sparsify(method=method), size)
    k = target_count(method.density, SPARSE)
    grads, outs = [], []
    kinds = [0, 1, "same", 1e3, 1e-3, "few", 1, 0, 1e-6, 1]
    for step, kind in enumerate(kinds):
        grad = normal(step, size, DIM)
        if kind == "same":
            grad = grad.sign()
        elif kind == "few":
            grad[:, 50:] = 0
        else:
            grad *= kind
        outs.append(workers.step(grad.clone()))
        grads.append(grad)
        assert workers.workers[0].metrics()["selected"] == k
        assert sum(workers.workers[0].metrics()["per_rank"]) == k
    assert conserved(workers, grads, outs, size) < 1e-5


def test_narrow_gradients_and_units_lose_nothing():
    """bf16 buckets round the mean, a unit of a hundredth scales it: the rest stays."""
    workers = DeviceWorkers(Sparsify(method=ExDyna(0.02)), 2, dtype=torch.bfloat16)
    sent, computed = torch.zeros(DIM).double(), torch.zeros(DIM).double()
    for step in range(6):
        grads = normal(step, 2, DIM).bfloat16()
        computed += 0.01 * grads.double().sum(0)
        unit = torch.tensor(0.01, device=DEVICE) if step % 2 else 0.01
        sent += 0.01 * 2 * workers.step(grads, unit).double()
    left = workers.residuals().double().sum(0)
    assert float((sent + left - computed).abs().max()) < 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_offers_are_those_that_a_host_takes(seed):
    generator = np.random.default_rng(seed)
    workers, count = int(generator.integers(1, 5)), int(generator.integers(3, 60))
    k = int(generator.integers(1, workers * count))
    bits = generator.integers(0, 9, (workers, count)).astype(np.uint16)  # many ties
    indices = generator.permutation(workers * count).reshape(workers, count)
    wanted = consensus.accept_largest(list(zip(indices, bits, strict=True)), k)
    actual = device_consensus.accept_largest(
        torch.from_numpy(indices), torch.from_numpy(bits.astype(np.int32)), k
    )
    assert actual.indices.tolist() == wanted.indices.tolist()
    assert actual.counts.tolist() == wanted.counts
    assert float(actual.threshold) == wanted.threshold


@pytest.mark.parametrize("seed", range(20))
def test_borders_are_those_that_a_host_cuts(seed):
    generator = np.random.default_rng(seed)
    blocks, parts = int(generator.integers(8, 200)), int(generator.integers(2, 8))
    loads = generator.exponential(size=blocks) * (generator.random(blocks) < generator.random())
    loads = torch.from_numpy(loads) * (seed > 0)
    cuts = device_consensus.recut(loads, parts, 1)
    assert cuts.tolist() == partitions.recut(loads, parts)
    wide = device_consensus.recut(loads, parts, blocks // parts).diff()
    assert int(wide.min()) >= blocks // parts and int(wide.sum()) == blocks


def test_coordinates_and_positions_are_each_others_inverse():
    placement = Placement([[(50, 30), (0, 0), (200, 7)], [(0, 50)], [(80, 120)]], 80, DEVICE)
    indices = torch.arange(207, device=DEVICE)
    positions = placement.positions(indices)
    assert torch.equal(placement.coordinates(positions), indices)
    assert placement.size == 3 * kernels.TILE
    assert int(placement.coordinates(torch.tensor([40], device=DEVICE))) == -1
    assert placement.coordinates(placement.always).tolist() == list(range(80, 207))
    numbers, offsets = placement.in_buckets(positions[[50, 200, 0, 199]])
    assert numbers.tolist() == [0, 0, 1, 2] and offsets.tolist() == [0, 30, 0, 119]
