"""The suite's training in Lightning Fabric: a loop of one's own, set up by Fabric."""

from itertools import islice

import torch.distributed as dist
from lightning.fabric import Fabric

import gradherd as gh
from gradherd.integrations.lightning import attach_fabric
from tests.integrations.task import (
    BATCH,
    EPOCHS,
    STEPS,
    Plan,
    Points,
    Trace,
    checkpoint_file,
    make,
    make_loader,
    record_credits,
)

NAME, PACKAGE, TORCHRUN = "Lightning Fabric", "lightning", True


def setup(model, optimizer):
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    return fabric, *fabric.setup(model, optimizer)


def train(plan: Plan) -> Trace:
    bare, optimizer = make()
    trace = Trace()
    record_credits(trace, bare)
    fabric, model, optimizer = setup(bare, optimizer)
    options = dict(plan.options)
    unit = options.pop("unit", BATCH)
    sampler = gh.OrderedSampler(Points(), options.pop("order"), batch_size=BATCH, unit=unit)
    loader = fabric.setup_dataloaders(make_loader(sampler=sampler, num_workers=plan.workers))
    if "local" in options:
        options["optimizer"] = optimizer
    herd = attach_fabric(model, order=sampler, **options)
    herd.scalars(rows=True)  # has rows measured from now on
    file, step = checkpoint_file(plan), 0
    state = {"model": model, "optimizer": optimizer, "herd": herd, "step": step}
    if plan.resume:
        step = fabric.load(file, state).get("step", 0) or state["step"]
    for _ in range(step // STEPS, EPOCHS):  # Fabric's loader names the epochs to the sampler
        for number, batch in enumerate(islice(herd.batches(loader), plan.limit)):
            accumulates = (number + 1) % plan.accumulate != 0
            with fabric.no_backward_sync(model, enabled=accumulates):
                fabric.backward(model(**batch)["loss"] / plan.accumulate)
            if accumulates:
                continue
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == plan.stop:
                fabric.save(file, state | {"step": step})
                trace.finish(bare, herd)
                herd.detach()
                dist.barrier()
                return trace
    trace.logged = herd.scalars(rows=True)
    trace.finish(bare, herd)
    herd.detach()
    return trace


def not_set_up():
    attach_fabric(make()[0], order=gh.OrderedSampler(Points(), "cd-grab", batch_size=BATCH))


def shuffled():
    sampler = gh.OrderedSampler(Points(), "cd-grab", batch_size=BATCH)
    make_loader(shuffle=True, sampler=sampler)


WRONG = {"a model that Fabric did not set up": not_set_up, "shuffle=True": shuffled}
