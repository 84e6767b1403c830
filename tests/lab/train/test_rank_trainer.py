"""The mean over ranks."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.comm.ranks import run_ranks
from gradherd.comm.sliced_mean import ONE_BUCKET_ELEMENTS as SMALL
from gradherd.comm.sliced_mean import mean_bytes
from gradherd.comm.world import World
from gradherd.lab.train.parallel_models import MeanHook
from gradherd.lab.train.virtual_exchange import mean_of


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
                assert torch.equal(rank[at][1], mean_of(grads))
            assert rank[at][2] == pytest.approx(mean_bytes(grads.shape[1], workers), rel=1e-6)
            assert rank[at][3] > 0, size
