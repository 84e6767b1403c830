"""Exchanges of local steps without a model: on ranks, and of workers in one process."""

from dataclasses import dataclass

import torch

from gradherd.comm.world import World
from gradherd.local.exchange import SharedWeights
from gradherd.local.settings import LocalSteps


@dataclass(frozen=True)
class Case:
    """What is exchanged, and how."""

    dim: int
    small: int = 7
    buffers: int = 5
    values: str = "int1"
    keep: bool | None = None
    momentum: float = 0.0
    dtype: torch.dtype = torch.float32
    rounds: int = 6
    sync_at: int = 3

    @property
    def settings(self):
        return LocalSteps(
            every=1, values=self.values, keep_residual=self.keep, outer_momentum=self.momentum
        )

    def draw(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(count, generator=generator).to(self.dtype)

    def moves(self, at, worker):
        """Return what the steps of a phase change of (dim,) and of small parameters."""
        scale = torch.ones(self.dim + self.small, dtype=self.dtype)
        scale[: self.dim // 3] = 30.0  # layers of different sizes
        return self.draw(100 * at + worker, self.dim + self.small) * scale

    def seen(self, at, worker):
        """Return the buffers of a worker: some equal everywhere, also what is not finite."""
        own = self.draw(7000 + 100 * at + worker, self.buffers)
        own[:2] = torch.tensor([0.1, -torch.inf])[: len(own)]
        return own


class Workers:
    """Workers in this process, or this rank, that take steps and exchange."""

    def __init__(self, case, world):
        self.case = case
        here = range(world) if isinstance(world, int) else [world.rank]
        self.numbers = list(here)
        make = SharedWeights.simulate if isinstance(world, int) else SharedWeights
        self.shared = make(
            case.settings, case.dim, case.small, case.buffers, world, dtype=case.dtype
        )
        self.gap = self.shared.length - case.dim
        self.begin = self.padded(case.draw(99, case.dim + case.small))
        self.shared.start(self.begin.clone())
        self.own = [self.begin.clone() for _ in self.numbers]

    def padded(self, real):
        dim = self.case.dim
        return torch.cat([real[:dim], real.new_zeros(self.gap), real[dim:]])

    def real(self, vector):
        dim = self.case.dim
        return torch.cat([vector[:dim], vector[dim + self.gap :]])

    def learn(self, at):
        for own, worker in zip(self.own, self.numbers, strict=True):
            own += self.padded(self.case.moves(at, worker))

    def exchange(self, at, *, synced=False, delta=False):
        """Exchange and go on; return the mean of the buffers."""
        buffers = [self.case.seen(at, worker) for worker in self.numbers]
        read = [own.clone() for own in self.own]
        arrival = self.shared.exchange(read, buffers, (at, int(synced)), delta=delta)
        self.own = [own.clone() for own in arrival.weights]
        return arrival.buffers

    def kept(self, at):
        """Return what worker number `at` here goes on with, and owes."""
        error = self.shared.means[at].error
        return [self.own[at], self.shared.residuals()[at], *([] if error is None else [error])]


def run(case, world):
    """Return, of each worker here, all that it has after each exchange."""
    workers = Workers(case, world)
    found = [[] for _ in workers.numbers]
    for at in range(case.rounds):
        workers.learn(at)
        buffers = workers.exchange(at, synced=at == case.sync_at)
        for number, trace in enumerate(found):
            kept = [one.clone() for one in workers.kept(number)]
            shared = workers.shared.outer.shared.clone()
            trace.append(([*kept, shared, buffers], workers.shared.bytes))
    return found


def on_ranks(cases):
    """Run all cases on this rank."""
    world = World.detect()
    return [run(case, world)[0] for case in cases]
