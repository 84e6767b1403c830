"""ExDyna: the online form against a slow reference, the consensus form against sorting."""

import gc
import math
import os
import sys
import weakref
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from gradherd.comm.script import run_together
from gradherd.sparsify.consensus import leading_bits, smallest_magnitude
from gradherd.sparsify.partitioned import ExDyna, Micro
from gradherd.sparsify.selector import target_count
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.virtual_workers import VirtualWorkers
from gradherd.sparsify.worker import Worker
from tests.sparsify.rank_work import normal, same
from tests.sparsify.reference import OnlineExDyna, bounds


def fair(factor, k, size):
    """A share of k times a factor, by whole numbers: 1.1 times 50 is 55."""
    return math.ceil(Fraction(str(factor)) * k / size)


class World:
    """R workers whose steps can be looked into: `acc` is what each had, `outcome` what came."""

    def __init__(self, method, dim, size, **settings):
        sparsify = Sparsify(method=method, **settings)
        self.method, self.dim, self.size = method, dim, size
        self.workers = [Worker(sparsify, dim, rank=rank, size=size) for rank in range(size)]

    def step(self, grads):
        for worker, grad in zip(self.workers, grads, strict=True):
            worker.begin(1.0)
            worker.add(0, grad.clone())
        self.acc = torch.stack([worker.feedback.acc.clone() for worker in self.workers])
        self.number = self.workers[0].step
        count = 1
        if self.method.threshold == "consensus":
            k = target_count(self.method.density, self.dim)
            count = max(1, self.method.rule(self.dim, self.size).offers(k))
        self.bounds = self.bounds_for(count)
        results = run_together([worker.script() for worker in self.workers])
        for worker, one in zip(self.workers, results, strict=True):
            worker.commit(one.value)
            assert same(one.value.indices, results[0].value.indices)
            assert same(one.value.mean, results[0].value.mean)
            assert one.value.selection.counts == results[0].value.selection.counts
            first = self.workers[0].state_dict() | {"rank": worker.state_dict()["rank"]}
            assert same(worker.state_dict(), first)
        self.outcome = results[0].value
        return self.outcome

    def bounds_for(self, count):
        rule = self.method.rule(self.dim, self.size)
        return bounds(rule.blocks, rule.borders(self.workers[0].state.cuts, count).tolist())

    @property
    def residual(self):
        return torch.stack([worker.feedback.residual for worker in self.workers])

    @property
    def selections(self):
        """Of each worker: its partition and what it selected."""
        actual = torch.split(self.outcome.selection.indices, self.outcome.selection.counts)
        for rank, own in enumerate(actual):
            part = (self.number + rank) % self.size if self.method.rotate else rank
            yield rank, (self.bounds[part], self.bounds[part + 1]), own

    def check_partitions(self):
        assert len(self.bounds) == self.size + 1
        assert (self.bounds[0], self.bounds[-1]) == (0, self.dim)
        assert self.bounds == sorted(self.bounds)

    def check_consensus(self, k):
        """Exactly k, the largest of each partition, down to the bin of the k-th largest of all."""
        chosen, most = self.outcome.selection, self.most(k)
        if not most:
            assert sorted(chosen.indices.tolist()) == list(range(self.dim))
            assert chosen.threshold == 0 and sum(chosen.counts) == self.dim
            return
        assert len(chosen.indices) == sum(chosen.counts) == k
        assert len(chosen.indices.unique()) == k
        pool = []
        for rank, (begin, end), own in self.selections:
            assert bool(((own >= begin) & (own < end)).all())
            sizes = self.acc[rank].abs()
            rest = torch.ones(self.dim, dtype=torch.bool)
            rest[own] = False
            unpicked = sizes[begin:end][rest[begin:end]]
            if len(own) and len(unpicked):
                # Among those with the same leading bits, any may be sent.
                assert sizes[own].min() >= unpicked.max() * (1 - 2**-8)
            pool.append(sizes[begin:end])
        assert max(chosen.counts) <= most
        top = [part.sort(descending=True).values[:most] for part in pool]
        kth = float(torch.cat(top).sort(descending=True).values[k - 1])
        assert chosen.threshold == float(smallest_magnitude(leading_bits(torch.tensor(kth))))

    def most(self, k):
        """The fair share times the capacity, or 0 where partitions have no room for k offers."""
        rule, factor = self.method.rule(self.dim, self.size), self.method.capacity
        wanted = k if math.isinf(factor) else min(k, fair(factor, k, self.size))
        offers = rule.offers(k)
        if not offers:
            # Borders are between blocks, and the last one may be short.
            assert k > self.dim - self.size * 2 * rule.blocks.size
        else:
            assert offers == wanted or (offers < wanted and offers * self.size >= k)
            assert min(b - a for a, b in pairwise(self.bounds)) >= offers
        return offers

    def check_residuals(self):
        """All workers clear what was sent, whoever selected it, and keep the rest."""
        wanted = self.acc.clone()
        wanted[:, self.outcome.indices] = 0
        assert same(self.residual, wanted)
        total = self.acc[0]
        for row in self.acc[1:]:
            total = total + row
        assert same(self.outcome.mean, (total / self.size)[self.outcome.indices])


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dim", [2, 31, 1000, 32_767, 33_000])
@pytest.mark.parametrize("scale", [1.0, 0.002], ids=["large", "small"])
@pytest.mark.parametrize("rotate", [True, False], ids=["rotating", "still"])
def test_the_online_form_is_that_of_the_reference(dim, size, scale, rotate):
    world = World(ExDyna(0.02, threshold="online", balance="none", rotate=rotate), dim, size)
    slow = OnlineExDyna(size, dim, 0.02, rotate=rotate)
    shape = torch.linspace(0.05, 0.3, dim) * scale
    forced = 0
    for step in range(30 if dim < 10_000 else 12):  # the reference takes a while over long vectors
        grads = (normal(2 * step, 1, dim) + normal(2 * step + 1, size, dim)) * shape
        outcome = world.step(grads)
        indices, counts, mean = slow.reduce(grads.numpy())
        assert world.bounds == slow.borders
        assert outcome.selection.threshold == slow.tau
        assert outcome.indices.tolist() == indices
        assert outcome.selection.counts == counts
        assert outcome.mean.numpy().tobytes() == mean[indices].tobytes()
        assert world.residual.numpy().tobytes() == slow.residuals.tobytes()
        forced += sum(
            bool(n == 1 and abs(world.acc[r, own[0]]) < slow.tau)
            for (r, _, own), n in zip(world.selections, counts, strict=True)
        )
    assert forced > 0 or scale == 1.0


def test_the_threshold_does_not_depend_on_the_number_of_workers():
    tens = {w: World(ExDyna(0.05, threshold="online", balance="none"), 500, w) for w in (1, 4)}
    grads = normal(0, 500)
    actual = {w: world.step(grads.expand(w, 500)) for w, world in tens.items()}
    assert actual[1].indices.sort().values.tolist() == actual[4].indices.sort().values.tolist()


BALANCES = ["recut", "diffusive", "none"]


@pytest.mark.parametrize(
    ("balance", "capacity"),
    [("recut", math.inf), ("recut", 1.1), ("diffusive", math.inf), ("none", math.inf), ("none", 1)],
)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 2, 31, 1000, 33_000])
def test_consensus_sends_exactly_k_from_the_first_step_on(dim, size, balance, capacity):
    world = World(ExDyna(0.01, balance=balance, capacity=capacity), dim, size)
    shape = torch.exp(torch.linspace(0, 4, dim))
    for step in range(6):
        world.step(normal(step, size, dim) * shape)
        world.check_partitions()
        world.check_consensus(max(1, int(0.01 * dim)))
        world.check_residuals()


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("factor", [20, 1 / 20, 1000, 1 / 1000, 1e30, 1e-38])
def test_a_jump_of_the_scale_changes_no_count(size, factor):
    world = World(ExDyna(0.02), 3000, size)
    for step in range(10):
        scale = factor if step in (3, 4, 7) else 1.0
        world.step(normal(step, size, 3000) * scale)
        world.check_partitions()
        world.check_consensus(60)
        world.check_residuals()


@pytest.mark.parametrize("balance", BALANCES)
def test_every_worker_owns_every_partition_once_in_r_steps(balance):
    world = World(ExDyna(0.05, balance=balance), 2000, 4)
    owned = [[] for _ in range(4)]
    for step in range(8):
        world.step(normal(step, 4, 2000))
        for rank, (begin, end), own in world.selections:
            assert len(own) and begin <= int(own.min()) and int(own.max()) < end
            owned[rank].append(world.bounds.index(begin))
    for visits in owned:
        assert sorted(visits[:4]) == sorted(visits[4:]) == [0, 1, 2, 3]
    assert all(len(set(column)) == 4 for column in zip(*owned, strict=True))


@pytest.mark.parametrize("balance", BALANCES)
def test_without_rotation_every_worker_keeps_its_place(balance):
    """Borders still move, and exactly k are still sent."""
    world = World(ExDyna(0.05, balance=balance, rotate=False), 2000, 4)
    for step in range(8):
        world.step(one_layer(step, 4, 2000))
        world.check_partitions()
        world.check_consensus(100)
        world.check_residuals()
        for rank, (begin, _), own in world.selections:
            assert begin == world.bounds[rank] and len(own)


def test_without_rotation_the_heavy_neighbour_gives_away():
    """Loads are those of the workers that keep their partitions: the border moves to the left."""
    world = World(ExDyna(0.05, balance="diffusive", capacity=math.inf, rotate=False), 4096, 2)
    shape = torch.linspace(3, 0.3, 4096)
    for step in range(9):
        world.step(normal(step, 2, 4096) * shape)
    assert world.bounds[1] < 2048


def test_rotation_is_what_lets_a_worker_send_what_others_do_not_see():
    """All that worker 0 has lies in the part of worker 1: without rotation it is never sent."""
    for rotate in (True, False):
        world = World(ExDyna(0.05, balance="none", rotate=rotate), 100, 2)
        grads = normal(0, 2, 100) * 0.01
        grads[0, 60] = 5.0
        sent = [60 in world.step(grads).indices.tolist() for _ in range(2)]
        assert any(sent) == rotate


def test_a_worker_without_rotation_resumes_to_the_bit():
    method = ExDyna(0.05, threshold="online", balance="diffusive", rotate=False)
    whole, again = (World(method, 500, 2) for _ in range(2))
    for step in range(3):
        whole.step(normal(step, 2, 500))
    for there, here in zip(whole.workers, again.workers, strict=True):
        here.load_state_dict(there.state_dict())
        here.feedback.residual.copy_(there.feedback.residual)
    for step in range(3, 6):
        grads = normal(step, 2, 500)
        assert same(whole.step(grads).indices, again.step(grads).indices)
        assert same(whole.residual, again.residual)


@pytest.mark.parametrize("rule", ["consensus", "online"])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dim", [1, 5, 700])
def test_density_one_sends_everything_at_every_step(dim, size, rule):
    world = World(ExDyna(1.0, threshold=rule), dim, size)
    for step in range(4):
        outcome = world.step(normal(step, size, dim))
        assert outcome.indices.sort().values.tolist() == list(range(dim))
        assert sum(outcome.selection.counts) == dim
        world.check_residuals()
        assert not world.residual.any()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dim", [1, 2, 50, 3000])
def test_gradients_of_zero_send_k_zeros(dim, size):
    world = World(ExDyna(0.1), dim, size)
    k = max(1, dim // 10)
    for step in range(6):
        grads = torch.zeros(size, dim) if step != 3 else normal(step, size, dim)
        world.step(grads)
        world.check_consensus(k)
        world.check_residuals()


@pytest.mark.parametrize("value", [1.0, -0.3])
def test_equal_gradients_send_k_of_them(value):
    world = World(ExDyna(0.05), 1000, 4)
    for _ in range(5):
        world.step(torch.full((4, 1000), value))
        world.check_consensus(50)
        world.check_residuals()


def one_layer(step, size, dim):
    """90 % of the mass, and nearly all large values, in a twentieth of the coordinates."""
    grads = normal(step, size, dim)
    begin, end = dim // 2, dim // 2 + dim // 20
    grads[:, begin:end] *= (9 * (dim - dim // 20) / (dim // 20)) ** 0.5
    return grads


def test_partitions_follow_a_layer_with_most_of_the_mass():
    # The layer has room for four partitions of k coordinates, which a worker may all offer.
    dim, size, k = 48_000, 4, 240
    padding = {}
    for balance in BALANCES:
        world = World(ExDyna(0.005, balance=balance, capacity=math.inf), dim, size)
        seen = []
        for step in range(20):
            world.step(one_layer(step, size, dim))
            world.check_partitions()
            world.check_consensus(k)
            seen.append(size * max(world.outcome.selection.counts) / k)
        padding[balance] = np.mean(seen[-8:])
    assert padding["none"] > 3
    assert padding["recut"] < 1.3
    assert padding["diffusive"] < 0.6 * padding["none"]


@pytest.mark.parametrize("capacity", [1, 1.1, 2])
def test_no_worker_sends_more_than_its_capacity(capacity):
    dim, size, k = 4_000, 4, 200
    world = World(ExDyna(0.05, balance="none", capacity=capacity), dim, size)
    for step in range(8):
        world.step(one_layer(step, size, dim))
        world.check_consensus(k)
        world.check_residuals()
        assert max(world.outcome.selection.counts) == fair(capacity, k, size)
        if capacity == 1:
            assert world.outcome.selection.counts == [50] * 4


def test_more_workers_than_coordinates_send_all_of_them():
    world = World(ExDyna(0.5), 3, 5)
    for step in range(10):
        world.step(normal(step, 5, 3))
        assert world.outcome.indices.tolist() == [0, 1, 2]
        world.check_residuals()


@pytest.mark.parametrize("size", [1, 2])
def test_values_just_below_the_edge_of_a_bin_count_where_they_lie(size):
    # As a float32 this is one, and one is where a bin begins.
    grads = torch.zeros(size, 8, dtype=torch.float64)
    grads[:, [1, 6]] = 1 - 2.0**-53
    workers = VirtualWorkers(Sparsify(method=ExDyna(0.25)), 8, size, dtype=torch.float64)
    for _ in range(3):
        out = workers.step(grads)
        assert out.nonzero().view(-1).tolist() == [1, 6]
        assert workers.metrics["selected"] == 2


def test_micro_is_exdyna_whose_partitions_stay_even():
    settings = {"density": 0.02, "threshold": "consensus", "capacity": math.inf}
    micro = VirtualWorkers(Sparsify(method=Micro(**settings)), 2048, 4)
    exdyna = VirtualWorkers(
        Sparsify(method=ExDyna(**settings, balance="none", blocks=2048)), 2048, 4
    )
    for step in range(8):
        grads = normal(step, 4, 2048) * torch.linspace(0.1, 3, 2048)
        assert same(micro.step(grads), exdyna.step(grads))
        assert micro.metrics == exdyna.metrics


@pytest.mark.parametrize("dim", [7, 1000, 33_000])
def test_the_paper_starts_from_even_blocks(dim):
    bounds = World(ExDyna(balance="none"), dim, 4)
    bounds.step(normal(0, 4, dim))
    widths = [end - begin for begin, end in pairwise(bounds.bounds)]
    size = max(1, dim // 1024 // 32 * 32 or dim // 1024)
    assert max(widths) - min(widths) <= 2 * size


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_loads_of_older_steps_weigh_less(memory):
    # With room for all of k no selection is cut short: loads are the counts.
    world = World(ExDyna(0.05, memory=memory, blocks=100, capacity=2.0), 1000, 2)
    wanted = np.zeros(100)
    for step in range(5):
        outcome = world.step(normal(step, 2, 1000))
        wanted = memory * wanted + np.bincount(outcome.indices.numpy() // 10, minlength=100)
        np.testing.assert_allclose(world.workers[0].state.loads.numpy(), wanted, rtol=1e-6)


def requests_of(script):
    """Run a script of a world of one; return its result and the number of its requests."""
    asked, answer = 0, None
    while True:
        try:
            request = script.send(answer)
        except StopIteration as end:
            return end.value, asked
        asked, answer = asked + 1, request.tensor.unsqueeze(0)


def test_a_worker_asks_once_whatever_the_scale_does():
    world = World(ExDyna(0.01), 20_000, 1)
    (worker,) = world.workers
    for step in range(25):
        worker.begin(1.0)
        worker.add(0, normal(step, 20_000) * (1000 if step == 20 else 1))
        outcome, count = requests_of(worker.script())
        worker.commit(outcome)
        assert count == 1
        assert len(outcome.indices) == 200


def test_runs_that_alternate_in_one_process_do_not_mix():
    """Workers of one process share what they all compute; other runs must not get it."""

    def steps(*names):
        made = {
            "slow": VirtualWorkers(Sparsify(method=ExDyna(density=0.05, memory=0.9)), 4000, 3),
            "fast": VirtualWorkers(Sparsify(method=ExDyna(density=0.05, memory=0.1)), 4000, 3),
        }
        found = {name: [] for name in names}
        for step in range(6):
            grads = torch.randn(3, 4000, generator=torch.Generator().manual_seed(step))
            grads[:, : 400 * step] *= 5
            for name in names:
                mean = made[name].step(grads)
                found[name].append((mean, made[name].workers[2].state.cuts))
        return found

    together, slow, fast = steps("slow", "fast"), steps("slow"), steps("fast")
    for name, alone in (("slow", slow), ("fast", fast)):
        for (mean, cuts), (other, others) in zip(together[name], alone[name], strict=True):
            assert torch.equal(mean, other) and torch.equal(cuts, others)
    assert not torch.equal(slow["slow"][-1][1], fast["fast"][-1][1])  # else the test could not fail


def interrupted(work, number, other):
    """Run `work`, and `other` before line `number` of those it comes to; return their number."""
    before, lines = sys.gettrace(), set()

    def trace(frame, event, _):
        if f"gradherd{os.sep}sparsify" not in frame.f_code.co_filename:
            return None
        at = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and at not in lines:
            lines.add(at)
            if len(lines) == number:
                other()
        return trace

    sys.settrace(trace)
    try:
        return work(), len(lines)
    finally:
        sys.settrace(before)


def test_exchanges_in_two_threads_do_not_mix():
    """Whatever another exchange of the process does between any two lines of a step."""
    grads, others = normal(0, 2, 60), normal(7, 2, 60)

    def step_beside_another(number):
        one, other = (World(ExDyna(0.1, blocks=5), 60, 2) for _ in range(2))
        outcome, lines = interrupted(lambda: one.step(grads), number, lambda: other.step(others))
        return (outcome.indices, one.workers[1].state.cuts), lines

    wanted, lines = step_beside_another(0)
    for number in range(1, lines + 1):
        assert same(step_beside_another(number)[0], wanted), number


def test_nothing_of_an_exchange_outlives_it():
    """A selection on a GPU would otherwise hold memory for as long as the process lives."""
    world = World(ExDyna(0.05), 400, 2)
    selected = weakref.ref(world.step(normal(0, 2, 400)).selection.indices)
    assert selected() is not None
    del world
    gc.collect()
    assert selected() is None
