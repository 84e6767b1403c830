"""The plain DDP loop that all frameworks are compared with."""

from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from tests.integrations.task import (
    BATCH,
    EPOCHS,
    Plan,
    Points,
    Trace,
    checkpoint_file,
    make,
    make_loader,
    record_credits,
)

NAME, PACKAGE, TORCHRUN = "torch DDP", "torch", True


def train(plan: Plan, kind: type = DataLoader) -> Trace:
    """Train; a loader of a kind that has a state saves it, too."""
    model, optimizer = make()
    trace = Trace()
    record_credits(trace, model)
    options = dict(plan.options)
    unit = options.pop("unit", BATCH)
    sampler = gh.OrderedSampler(Points(), options.pop("order"), batch_size=BATCH, unit=unit)
    loader = make_loader(kind, sampler=sampler, num_workers=plan.workers)
    # Local steps need no DDP: what frameworks do with it is compared with a plain module.
    ddp = model if "local" in options else DDP(model)
    steps = {"optimizer": optimizer} if "local" in options else {}
    herd = gh.attach(ddp, order=sampler, **steps, **options)
    herd.scalars(rows=True)  # has rows measured from now on
    epoch, step = 0, 0
    if plan.resume:
        loaded = torch.load(checkpoint_file(plan), weights_only=False)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        herd.load_state_dict(loaded["herd"])
        epoch, step = loaded["epoch"], loaded["step"]
        if "loader" in loaded:
            loader.load_state_dict(loaded["loader"])
    since = 0
    for current in range(epoch, EPOCHS):
        sampler.set_epoch(current)
        for batch in islice(herd.batches(loader), plan.limit):
            since += 1
            if since < plan.accumulate:
                with ddp.no_sync():
                    (ddp(**batch)["loss"] / plan.accumulate).backward()
                continue
            (ddp(**batch)["loss"] / plan.accumulate).backward()
            optimizer.step()
            optimizer.zero_grad()
            step, since = step + 1, 0
            if step == plan.stop:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "herd": herd.state_dict(),
                    "epoch": current,
                    "step": step,
                }
                if hasattr(loader, "state_dict"):
                    state["loader"] = loader.state_dict()
                if dist.get_rank() == 0:
                    torch.save(state, checkpoint_file(plan))
                trace.finish(model, herd)
                herd.detach()
                dist.barrier()
                return trace
    trace.logged = herd.scalars(rows=True)
    trace.finish(model, herd)
    herd.detach()
    return trace


def shuffled():
    make_loader(shuffle=True, sampler=gh.OrderedSampler(Points(), "cd-grab", batch_size=BATCH))


def not_wrapped():
    gh.attach(make()[0], sparsify=gh.ExDyna(density=0.1))


WRONG = {"shuffle=True": shuffled, "a sparsifier without DDP": not_wrapped}
