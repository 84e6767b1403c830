"""The mean over ranks, and what a run on ranks has cost."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS as SMALL
from gradherd.comm.sliced_mean import mean_bytes, mean_of_rows
from gradherd.comm.world import World
from gradherd.lab.ranks import run_ranks
from gradherd.lab.tasks.registry import find_task
from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.rank_trainer import MeanHook, RankTrainer


def averaged(sizes):
    """Return, for models of these sizes, the gradient of this rank, the mean and the bytes."""
    world, results = World.detect(), []
    for size in sizes:
        torch.manual_seed(0)
        model = nn.Linear(size, 1, bias=size % 2 == 1)
        ddp = DDP(model)
        hook = MeanHook(ddp, world)
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(world.rank))
        own = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
        ddp(x).square().mean().backward()
        flat = [torch.cat([g.flatten() for g in grads]) for grads in (own, [
            p.grad for p in model.parameters()])]  # fmt: skip
        results.append((*flat, hook.total_bytes, hook.stopwatch.seconds))
    return results


@pytest.mark.parametrize("workers", [1, 3, 4])
def test_the_mean_over_ranks(workers):
    sizes = [1, 2, 7, 650, SMALL + 2]
    ranks = run_ranks(averaged, workers, sizes)
    for at, size in enumerate(sizes):
        grads = torch.stack([rank[at][0] for rank in ranks])
        for rank in ranks:
            torch.testing.assert_close(rank[at][1], grads.mean(0))
            assert torch.equal(rank[at][1], ranks[0][at][1])
            if grads.shape[1] <= SMALL:
                assert torch.equal(rank[at][1], mean_of_rows(grads, out=torch.empty_like(grads[0])))
            assert rank[at][2] == pytest.approx(mean_bytes(grads.shape[1], workers), rel=1e-6)
            assert rank[at][3] > 0, size


class _Interrupt(Exception):
    pass


class _StopAfter:
    """Take the state after some steps, and stop there."""

    stopwatch = SimpleNamespace(seconds=0.0)

    def __init__(self, steps):
        self.left, self.found = steps, None

    def after_step(self, state):
        self.left -= 1
        if not self.left:
            shared, own = state()
            self.found = SimpleNamespace(shared=shared(), workers=2, step=3, part=lambda rank: own)
            raise _Interrupt


def costs_of_an_epoch():
    """Return steps and bytes of an epoch, and of the same one resumed after three steps."""
    task = find_task("digits")
    config = RunConfig.of("digits", task.defaults, workers=2, epochs=1, order="cd-grab")
    trainers = [RankTrainer(config, task, task.load(None, 64), World.detect()) for _ in range(3)]
    (whole,) = trainers[0].train_epoch(1, lambda steps=1: None)
    trainers[1].checkpointer = _StopAfter(3)
    with pytest.raises(_Interrupt):
        trainers[1].train_epoch(1, lambda steps=1: None)
    found = trainers[1].checkpointer.found
    trainers[2].load(found)
    (resumed,) = trainers[2].train_epoch(1, lambda steps=1: None)
    for parts in zip(trainers[0].model.parameters(), trainers[2].model.parameters(), strict=True):
        torch.testing.assert_close(*parts)
    for trainer in trainers:
        trainer.close()
    return [(one.steps, one.bytes, one.ordering_bytes) for one in (whole, resumed)]


def test_a_resumed_epoch_has_sent_as_much_as_one_in_a_piece():
    # Rows wait until there are many: those of the steps before a checkpoint are exchanged for it.
    for whole, resumed in run_ranks(costs_of_an_epoch, 2):
        assert whole == resumed and whole[2] > 0
