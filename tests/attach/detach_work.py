"""What the ranks of test_detach.py do."""

import gc
import itertools
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from tests.attach.agreement_work import SPARSE
from tests.attach.attach_work import examples, network

CASES = {
    "batches": (4, None, {}),
    "examples": (1, None, {}),
    "sparse": (None, SPARSE, {"find_unused_parameters": True}),
    "both": (4, SPARSE, {}),
}


def attached(ddp, unit, sparsify, data):
    sampler = None
    if unit is not None:
        rows = "sketch" if unit == 4 and sparsify else "auto"
        sampler = gh.OrderedSampler(data, "cd-grab", batch_size=4, unit=unit)
        return gh.attach(ddp, order=sampler, sparsify=sparsify, rows=rows)
    return gh.attach(ddp, sparsify=sparsify)


def train(ddp, herd, data, steps=3):
    """Take a few steps with a learning rate of 0; return the last gradient."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    if herd is not None and herd._feedback is not None:
        sampler = herd.sampler
    else:
        rank = dist.get_rank() if dist.is_initialized() else 0
        sampler = range(rank, len(data), 2)
    for x, y in itertools.islice(DataLoader(data, batch_size=4, sampler=sampler), steps):
        optimizer.zero_grad()
        F.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return torch.cat([p.grad.flatten() for p in ddp.parameters()])


def resources():
    gc.collect()
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
    )


def attach_and_detach(name, times, detaches=True):
    """Return threads and files after each time, and how many of the objects are still there."""
    unit, sparsify, options = CASES[name]
    counts = []
    for _ in range(times):
        data = examples(24)
        ddp = DDP(network(), **options)
        herd = attached(ddp, unit, sparsify, data)
        train(ddp, herd, data)
        objects = [ddp, ddp.module, herd, data, *ddp.parameters()]
        objects += [herd.sampler] if unit is not None else []
        alive = [weakref.ref(one) for one in objects]
        if detaches:
            herd.detach()
        del ddp, herd, data, objects
        deadline = time.monotonic() + 5  # a thread may still be signing the last batch
        while any(ref() is not None for ref in alive) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.05)
        # Threads and sockets of what is gone end a moment later; those of a leak never do.
        while counts and time.monotonic() < deadline:
            if all(now <= before for now, before in zip(resources(), counts[-1], strict=False)):
                break
            time.sleep(0.05)
        counts.append((*resources(), sum(ref() is not None for ref in alive)))
        dist.barrier()
    return counts


def attach_again(name):
    """Return gradients of plain DDP and of one that was attached twice, and its second metrics."""
    unit, sparsify, options = CASES[name]
    data, plain = examples(24), DDP(network())
    ddp = DDP(network(), **options)
    fresh = DDP(network(), **options)
    herd = attached(ddp, unit, sparsify, data)
    train(ddp, herd, data)
    herd.detach()
    between = train(ddp, None, data), train(plain, None, data)
    again = attached(ddp, unit, sparsify, data)
    first = attached(fresh, unit, sparsify, data)
    gradients = train(ddp, again, data), train(fresh, first, data)
    taken = ""
    try:
        gh.attach(ddp, sparsify="topk")
    except ValueError as error:
        taken = str(error)
    return between, gradients, again.metrics(), first.metrics(), taken


def group_outlives_its_model(file, name):
    """Is the group alive after its model, and is it freed once another model is attached?"""
    alive = []
    for turn in range(2):
        if turn:
            store = dist.FileStore(file, 1)
            dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group = weakref.ref(dist.group.WORLD)
        ddp = DDP(network())
        unit, sparsify, _ = CASES[name]
        attached(ddp, unit, sparsify, examples(8))
        if turn == 0:
            first = group
            dist.destroy_process_group()
        del ddp
        gc.collect()
        alive += [first() is not None, group() is not None]
    return alive
