"""Steps in fixed shapes do what steps with the host's help do: same choice, same sums.

They run on CPU tensors here, through the torch code of `kernels`; `tests/sparsify/test_gpu.py` runs
them on a GPU.
"""

import itertools
import math

import numpy as np
import pytest
import torch

from gradherd.comm.script import run_together
from gradherd.sparsify.gpu_worker import GpuSteps, has_fixed_shapes
from gradherd.sparsify.marks import TILE
from gradherd.sparsify.partitioned import ExDyna, Micro
from gradherd.sparsify.partitions import apart, recut
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from gradherd.sparsify.worker import Placement, Worker
from tests.gpu import DEVICE
from tests.sparsify.rank_work import normal, same

DIM, SPARSE = 30_000, 29_900


class DeviceWorkers:
    """All workers of a world in one process, each with two buckets in another order."""

    def __init__(self, settings, size, *, dim=DIM, sparse=SPARSE, dtype=torch.float32):
        # Parameters of the flat vector, as (begin, elements); the last bucket arrives first.
        half = sparse // 2 + 17
        self.buckets = [[(half, sparse - half), (sparse, dim - sparse)], [(0, half)]]
        self.buckets = [[one for one in bucket if one[1]] for bucket in self.buckets]
        self.settings, self.sparse, self.dim, self.size = settings, sparse, dim, size
        self.dtype = dtype
        self.workers = [
            Worker(settings, dim, rank=rank, size=size, sparse=sparse, device=DEVICE)
            for rank in range(size)
        ]
        assert all(has_fixed_shapes(worker) for worker in self.workers)
        self.steps = [GpuSteps(worker) for worker in self.workers]
        self.place()

    def place(self):
        placement = Placement(self.buckets, self.sparse, torch.device(DEVICE))
        for steps in self.steps:
            steps.place(placement)

    def step(self, grads, scale=None, lay_out_after=None):
        flats = []
        for steps, grad in zip(self.steps, grads, strict=True):
            steps.begin(scale)
            own = [
                torch.cat([grad[b : b + n] for b, n in bucket]).to(DEVICE, self.dtype)
                for bucket in self.buckets
            ]
            for number, flat in enumerate(own):
                steps.add(number, flat)
                assert not flat.any()
                if number == lay_out_after:
                    steps.place(Placement(self.buckets, self.sparse, torch.device(DEVICE)))
            flats.append(own)
        k = target_count(self.settings.method.density, self.sparse)
        run_together([one.script(k, own) for one, own in zip(self.steps, flats, strict=True)])
        for steps in self.steps:
            steps.commit()
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
            feedback = worker.feedback
            for begin, count in itertools.chain(*self.buckets):
                row[begin : begin + count] = feedback.part(feedback.residual, begin, count).cpu()
        return rows


METHODS = [ExDyna(0.01), ExDyna(0.01, balance="none", rotate=False), Micro(0.02)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("values", ["fp32", "int4"])
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
        metrics = ours.steps[0].metrics()
        for key in ("selected", "per_rank", "padding"):
            assert metrics[key] == theirs.metrics[key]
        assert metrics["threshold"] == pytest.approx(theirs.metrics["threshold"])
    mine, wanted = (one.workers[0].state_dict() for one in (ours, theirs))
    assert mine["step"] == wanted["step"] == 8
    torch.testing.assert_close(mine["method"]["start"], wanted["method"]["start"])
    assert torch.equal(mine["method"]["cuts"], wanted["method"]["cuts"])
    loads = (one["method"]["loads"] for one in (mine, wanted))
    torch.testing.assert_close(*loads, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("after", [1.0, 1e-6])
def test_the_search_finds_its_start_whatever_the_pattern(after):
    """Large values in one of 64 columns, which an evenly spaced sample might miss, then a jump."""
    dim, settings = 1 << 17, Sparsify(method=ExDyna(0.001))
    ours = DeviceWorkers(settings, 2, dim=dim, sparse=dim)
    theirs = VirtualWorkers(settings, dim, 2)
    columns = torch.where(torch.arange(dim) % 64 == 1, 30.0, 1.0)
    for step in range(6):
        grads = normal(step, 2, dim) * columns * (after if step > 2 else 1)
        assert torch.equal(ours.step(grads) != 0, theirs.step(grads) != 0), step


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
            assert ours.steps[0].metrics() == {}
        assert torch.equal(ours.step(grads), straight.step(grads))
    assert torch.equal(ours.residuals(), straight.residuals())
    assert ours.workers[0].skipped == 2
    for mine, wanted in zip(ours.workers, straight.workers, strict=True):
        assert same(mine.state_dict() | {"skipped": 0}, wanted.state_dict())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("live", [0.003, 0.02])
def test_a_gradient_that_is_mostly_zero_is_sent(live, size):
    """A large embedding of which few rows are used: fewer are not zero than are searched."""
    settings = Sparsify(method=ExDyna(0.01))
    ours, theirs = DeviceWorkers(settings, size), VirtualWorkers(settings, DIM, size, sparse=SPARSE)
    places = torch.randperm(DIM, generator=torch.Generator().manual_seed(0))[: int(live * DIM)]
    whole, sent, wanted = torch.zeros(DIM), torch.zeros(DIM), torch.zeros(DIM)
    for step in range(12):
        grads = torch.zeros(size, DIM)
        grads[:, places] = 1 + normal(step, size, len(places)).abs()
        whole += grads.mean(0)
        sent += ours.step(grads)
        wanted += theirs.step(grads)
    shares = [float(one.sum() / whole.sum()) for one in (sent, wanted)]
    assert shares[0] > 0.9 * shares[1] > 0.6


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
        assert workers.steps[0].metrics()["selected"] == k
        assert sum(workers.steps[0].metrics()["per_rank"]) == k
    assert conserved(workers, grads, outs, size) < 1e-5


def test_narrow_gradients_and_loss_scales_lose_nothing():
    """bf16 buckets round the mean, a loss scale divides gradients: the rest stays."""
    workers = DeviceWorkers(Sparsify(method=ExDyna(0.02)), 2, dtype=torch.bfloat16)
    sent, computed = torch.zeros(DIM).double(), torch.zeros(DIM).double()
    for step in range(6):
        grads, scale = normal(step, 2, DIM).bfloat16(), 128.0 if step % 2 else 64.0
        computed += grads.double().sum(0) / scale
        sent += 2 * workers.step(grads, torch.tensor(scale, device=DEVICE)).double() / scale
    left = workers.residuals().double().sum(0)
    assert float((sent + left - computed).abs().max()) < 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_partitions_keep_room_for_all_offers(seed):
    generator = np.random.default_rng(seed)
    blocks, parts = int(generator.integers(8, 200)), int(generator.integers(2, 8))
    loads = generator.exponential(size=blocks) * (generator.random(blocks) < generator.random())
    cuts = recut(torch.from_numpy(loads) * (seed > 0), parts)
    wide = apart(cuts, blocks // parts).diff()
    assert int(wide.min()) >= blocks // parts and int(wide.sum()) == blocks


def test_a_worker_goes_on_when_its_residual_is_laid_out_anew():
    """As when DDP rebuilds its buckets: between steps, and between two buckets of one."""
    settings = Sparsify(method=ExDyna(0.02))
    ours, straight = DeviceWorkers(settings, 2), DeviceWorkers(settings, 2)
    for step in range(6):
        grads = normal(step, 2, DIM)
        if step == 3:
            ours.buckets = ours.buckets[::-1]
            ours.place()
        mine = ours.step(grads, lay_out_after=0 if step == 4 else None)
        assert torch.equal(mine, straight.step(grads))
    assert torch.equal(ours.residuals(), straight.residuals())


def test_coordinates_and_positions_are_each_others_inverse():
    placement = Placement([[(50, 30), (0, 0), (200, 7)], [(0, 50)], [(80, 120)]], 80, DEVICE)
    indices = torch.arange(207, device=DEVICE)
    positions = placement.positions(indices)
    assert torch.equal(placement.coordinates(positions), indices)
    assert placement.size == 3 * TILE
    assert int(placement.coordinates(torch.tensor([40], device=DEVICE))) == -1
    assert placement.coordinates(placement.always).tolist() == list(range(80, 207))
    flats = [torch.zeros(count, device=DEVICE) for count in (37, 50, 120)]
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
    written = placement.write(flats, positions[[50, 200, 0, 199]], values)
    assert torch.equal(written, values)
    assert [flat.nonzero().view(-1).tolist() for flat in flats] == [[0, 30], [0], [119]]
    assert [float(flat.sum()) for flat in flats] == [3.0, 3.0, 4.0]


def test_a_parameter_that_is_not_exchanged_keeps_its_room_in_a_bucket():
    placement = Placement([[(None, 5), (2, 3)], [(0, 2)]], 5, torch.device(DEVICE))
    flats = [torch.zeros(8, device=DEVICE), torch.zeros(2, device=DEVICE)]
    at = placement.positions(torch.arange(5, device=DEVICE))
    placement.write(flats, at, torch.arange(1.0, 6.0, device=DEVICE))
    assert [flat.tolist() for flat in flats] == [[0, 0, 0, 0, 0, 3, 4, 5], [1, 2]]
