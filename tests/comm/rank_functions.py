"""Functions that test ranks run. They live in a module so that ranks can unpickle them."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gradherd.comm.background_thread import BackgroundThread
from gradherd.comm.collectives import all_gather, all_reduce, all_to_all, broadcast
from gradherd.comm.script import AllReduceSmall
from gradherd.comm.world import World


def nothing():
    return None


def rank_and_args(*args):
    return dist.get_rank(), dist.get_world_size(), args


def detected():
    world = World.detect()
    return world.rank, world.size


def error_of(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def all_collectives():
    world = World.detect()
    rank, size = world.rank, world.size
    summed = torch.arange(6.0).view(2, 3) + 10 * rank
    by_rank = torch.arange(size * 2).view(size, 2) + 100 * rank
    source = torch.full((3,), float(rank), dtype=torch.float64)
    return {
        "all_reduce": tuple(all_reduce(summed, world)),
        "in_place": summed,
        "all_gather": tuple(all_gather(torch.arange(4.0).view(2, 2) + 10 * rank, world)),
        "all_gather_0d": tuple(all_gather(torch.tensor(rank), world)),
        "all_gather_strided": tuple(all_gather(torch.arange(6.0).view(2, 3).T + rank, world)),
        "all_to_all": tuple(all_to_all(by_rank, world)),
        "all_to_all_strided": tuple(all_to_all(by_rank.T.contiguous().T, world)),
        "broadcast": tuple(broadcast(source, world, src=size - 1)),
        "broadcast_in_place": source,
        "wrong_rows": error_of(all_to_all, torch.zeros(size + 1, 2), world),
        "wrong_src": error_of(broadcast, torch.zeros(1), world, src=size),
    }


def in_a_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    world = World(rank=dist.get_rank(group), size=2, group=group)
    own = torch.tensor([float(dist.get_rank())])
    return (
        all_gather(own, world).value.flatten().tolist(),
        all_reduce(own.clone(), world).value.tolist(),
        broadcast(own.clone(), world, src=1).value.tolist(),
        all_to_all(torch.stack([own, own + 10]), world).value.flatten().tolist(),
    )


def beside_the_loop():
    """Return which devices a side channel exchanges, and a gather through it, of all and of two."""
    pair, gpu = dist.new_group([0, 2]), torch.device("cuda", 0)
    worlds = [World.detect()] if dist.get_rank() == 1 else [World.detect(), World.of(pair)]
    found = []
    for world in worlds:
        for device in (None, gpu):
            side = world.side_channel(device)
            assert side.group is not world.group and side.rank == world.rank
            own = torch.tensor([float(dist.get_rank())])
            found.append((side.exchanges(gpu), all_gather(own, side).value.flatten().tolist()))
            side.close_side_channel()
    return found


def raise_on(bad):
    if dist.get_rank() == bad:
        raise ValueError(f"no luck on {bad}")
    dist.barrier()  # The others wait for a peer that has gone.


def raise_late_on(bad):
    dist.barrier()
    if dist.get_rank() == bad:
        raise ValueError(f"no luck on {bad}")


def hang_on(bad, folder):
    (Path(folder) / f"{dist.get_rank()}.pid").write_text(str(os.getpid()))
    if dist.get_rank() == bad:
        time.sleep(600)


def exit_on(bad, code):
    if dist.get_rank() == bad:
        os._exit(code)
    dist.barrier()


def kill_on(bad):
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def fault_on(bad):
    if dist.get_rank() == bad:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def unpicklable():
    return lambda: None


def sum_small():
    world = World.detect()
    request = AllReduceSmall(torch.arange(3.0).double() + world.rank / 3)
    return request.start(world).finished()


def signalled(folder):
    """Return whether SIGUSR1 arrived."""
    received = []
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    (Path(folder) / str(dist.get_rank())).touch()
    end = time.monotonic() + 20
    while not received and time.monotonic() < end:
        time.sleep(0.02)
    return bool(received)


def in_the_background():
    """Return the sums of what a job gathers: little, and more than gloo copies."""
    found, thread = [], BackgroundThread("test")

    def job():
        world = World.detect()
        for count in (3, 2**20):
            found.append(float(all_gather(torch.ones(count), world).value.sum()) / count)

    thread.submit(job)
    thread.wait()
    thread.close()
    return found
