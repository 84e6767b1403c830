"""Scripts for the tests, one per collective, and functions that run them on ranks."""

import torch
import torch.distributed as dist

from gradherd.comm.collectives import all_gather, send_recv
from gradherd.comm.script import AllGather, AllToAll, run
from gradherd.comm.world import World
from studies.methods.cltk import Broadcast
from studies.methods.gtopk import SendRecv

KINDS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def values(rank, *shape, kind=torch.float32):
    """Return values distinct for every rank and position, small enough for every dtype."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).view(shape) % 23 + 31 * rank).to(kind)


def all_gathers(rank, size):
    results = []
    for kind in KINDS.values():
        results.append((yield AllGather(values(rank, 3, 2, kind=kind))))
    results.append((yield AllGather(torch.tensor(rank))))  # a scalar
    results.append((yield AllGather(values(rank, 4, 3).T)))  # strided
    results.append((yield AllGather(values(rank, 9)[::2])))
    results.append((yield AllGather(values(rank, 0))))
    return results


def all_to_alls(rank, size):
    results = []
    for kind in KINDS.values():
        results.append((yield AllToAll(values(rank, size, 3, kind=kind))))
    results.append((yield AllToAll(values(rank, 2, size).T)))  # strided
    results.append((yield AllToAll(values(rank, size))))  # one element for each
    return results


def broadcasts(rank, size):
    results = []
    for src in range(size):
        for kind in KINDS.values():
            own = values(rank, 2, 2, kind=kind)
            results.append((yield Broadcast(own, src)))
            assert torch.equal(own, values(rank, 2, 2, kind=kind)), "must not be written to"
    return results


def send_recvs(rank, size):
    """Rounds in which all, some and none of the ranks send."""
    own, like = values(rank, 5), torch.zeros(5)
    results = []
    if size > 1:  # Round the ring: every rank sends and receives.
        results.append((yield SendRecv(own, (rank + 1) % size, like, (rank - 1) % size)))
    # Odd ranks send to the left and receive nothing.
    if rank % 2:
        results.append((yield SendRecv(own, rank - 1)))
    elif rank + 1 < size:
        results.append((yield SendRecv(like=like, src=rank + 1)))
    else:
        results.append((yield SendRecv()))
    # From the first rank to the last, in another dtype.
    if size > 1 and rank == 0:
        results.append((yield SendRecv(own.bfloat16()[::2], size - 1)))
    elif size > 1 and rank == size - 1:
        results.append((yield SendRecv(like=like[:3].bfloat16(), src=0)))
    else:
        results.append((yield SendRecv()))
    results.append((yield SendRecv()))  # no rank sends
    return results


def mixed(rank, size):
    """Let requests depend on earlier results, as the real scripts do."""
    counts = yield AllGather(torch.tensor([rank + 1]))
    sizes = counts[:, 0].tolist()
    own = torch.nn.functional.pad(values(rank, sizes[rank]), (0, max(sizes) - sizes[rank]))
    rows = yield AllGather(own)
    joined = torch.cat([row[:count] for row, count in zip(rows, sizes, strict=True)])
    share = -(-len(joined) // size)
    padded = joined.new_zeros(share * size)
    padded[: len(joined)] = joined * (rank + 1)
    rows = yield AllToAll(padded.view(size, share))
    return [joined, (yield AllGather(rows.sum(0)))]


SCRIPTS = {f.__name__: f for f in (all_gathers, all_to_alls, broadcasts, send_recvs, mixed)}


def run_all():
    world = World.detect()
    return {n: tuple(run(f(world.rank, world.size), world)) for n, f in SCRIPTS.items()}


def fails(rank, bad):
    yield AllGather(torch.tensor([rank]))
    if rank == bad:
        raise ValueError(f"script of rank {rank} fails")
    yield AllGather(torch.tensor([rank]))


def run_one_that_fails(bad):
    world = World.detect()
    return run(fails(world.rank, bad), world)


def in_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    world = World(rank=dist.get_rank(group), size=2, group=group)
    own = torch.full((2,), float(dist.get_rank()))
    other = 1 - world.rank
    received = send_recv(torch.tensor([dist.get_rank()]), other, other, world)
    return all_gather(own, world).value.tolist(), received.tolist()
