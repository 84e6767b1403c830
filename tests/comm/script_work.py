"""Scripts of the tests, one per kind of request, and what ranks do with them."""

import torch
import torch.distributed as dist

from gradherd.comm import World
from gradherd.comm.collectives import all_gather_uneven, send_recv
from gradherd.comm.script import AllGather, AllGatherUneven, AllToAll, Broadcast, SendRecv, run
from tests.comm.work import error_of

KINDS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def numbers(rank, *shape, kind=torch.float32):
    """Distinct for every rank and place; small, so that every kind holds them."""
    count = torch.Size(shape).numel()
    return (torch.arange(count).view(shape) % 23 + 31 * rank).to(kind)


def gathers(rank, size):
    found = []
    for kind in KINDS.values():
        found.append((yield AllGather(numbers(rank, 3, 2, kind=kind))))
    found.append((yield AllGather(torch.tensor(rank))))  # one number
    found.append((yield AllGather(numbers(rank, 4, 3).T)))  # strided
    found.append((yield AllGather(numbers(rank, 9)[::2])))
    found.append((yield AllGather(numbers(rank, 0))))
    return found


def lengths(size, step):
    """Of the ranks' parts in an uneven gather; zeros among them, in step 0 all are."""
    return [step * (rank + step) % 4 for rank in range(size)]


def uneven_gathers(rank, size):
    found = []
    for step in range(6):
        for kind in KINDS.values():
            sizes = lengths(size, step)
            own = numbers(rank, 2 * sizes[rank], kind=kind)[::2]  # strided
            found.append((yield AllGatherUneven(own, sizes)))
    return found


def deals(rank, size):
    found = []
    for kind in KINDS.values():
        found.append((yield AllToAll(numbers(rank, size, 3, kind=kind))))
    found.append((yield AllToAll(numbers(rank, 2, size).T)))  # strided
    found.append((yield AllToAll(numbers(rank, size))))  # one number for each
    return found


def spreads(rank, size):
    found = []
    for source in range(size):
        for kind in KINDS.values():
            mine = numbers(rank, 2, 2, kind=kind)
            found.append((yield Broadcast(mine, source)))
            assert torch.equal(mine, numbers(rank, 2, 2, kind=kind)), "not to be written to"
    return found


def passes(rank, size):
    """Rounds in which all, some and none of the ranks do something."""
    mine, like = numbers(rank, 5), torch.zeros(5)
    found = []
    if size > 1:  # Round the ring, everybody gives and takes.
        found.append((yield SendRecv(mine, (rank + 1) % size, like, (rank - 1) % size)))
    # Odd ones give to the left and take nothing.
    if rank % 2:
        found.append((yield SendRecv(mine, rank - 1)))
    elif rank + 1 < size:
        found.append((yield SendRecv(like=like, src=rank + 1)))
    else:
        found.append((yield SendRecv()))
    # From the first to the last over the heads of the others, of another kind.
    if size > 1 and rank == 0:
        found.append((yield SendRecv(mine.bfloat16()[::2], size - 1)))
    elif size > 1 and rank == size - 1:
        found.append((yield SendRecv(like=like[:3].bfloat16(), src=0)))
    else:
        found.append((yield SendRecv()))
    found.append((yield SendRecv()))  # nobody
    return found


def mixed(rank, size):
    """Ask by what was answered, as the ranks' own scripts do."""
    counts = yield AllGather(torch.tensor([rank + 1]))
    sizes = counts[:, 0].tolist()
    joined = yield AllGatherUneven(numbers(rank, sizes[rank]), sizes)
    share = -(-len(joined) // size)
    padded = joined.new_zeros(share * size)
    padded[: len(joined)] = joined * (rank + 1)
    rows = yield AllToAll(padded.view(size, share))
    return [joined, (yield AllGather(rows.sum(0)))]


SCRIPTS = {f.__name__: f for f in (gathers, uneven_gathers, deals, spreads, passes, mixed)}


def run_all():
    world = World.detect()
    return {n: tuple(run(f(world.rank, world.size), world)) for n, f in SCRIPTS.items()}


def fails(rank, bad):
    yield AllGather(torch.tensor([rank]))
    if rank == bad:
        raise ValueError(f"script of {rank} has no more to say")
    yield AllGather(torch.tensor([rank]))


def run_one_that_fails(bad):
    world = World.detect()
    return run(fails(world.rank, bad), world)


def sized_in_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    world = World(rank=dist.get_rank(group), size=2, group=group)
    own = torch.full((world.rank + 1,), float(dist.get_rank()))
    other = 1 - world.rank
    taken, sent = send_recv(torch.tensor([dist.get_rank()]), other, torch.tensor([0]), other, world)
    return (
        all_gather_uneven(own, [1, 2], world).value.tolist(),
        taken.tolist(),
        sent,
        error_of(all_gather_uneven, own, [5, 5], world),
    )
