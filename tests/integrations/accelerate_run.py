"""The suite's training in Accelerate."""

from collections.abc import Callable
from itertools import islice

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from torch.utils.data import DistributedSampler

from gradherd.integrations.accelerate import prepare
from tests.integrations.task import (
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

NAME, PACKAGE, TORCHRUN = "Accelerate", "accelerate", True


def train(plan: Plan, create: Callable[..., Accelerator] | None = None) -> Trace:
    model, optimizer = make()
    trace = Trace()
    record_credits(trace, model)
    accelerator = (create or fresh)(gradient_accumulation_steps=plan.accumulate)
    ddp, optimizer, loader, herd = prepare(
        accelerator, model, optimizer, make_loader(num_workers=plan.workers), **plan.options
    )
    folder, step, epoch = checkpoint_file(plan).with_suffix(""), 0, 0
    if plan.resume:
        accelerator.load_state(str(folder))
        epoch, step = divmod(torch.load(folder / "step.pt"), STEPS)
    for current in range(epoch, EPOCHS):
        batches = loader
        if plan.resume and current == epoch and plan.name.startswith("both"):
            # As Accelerate's own examples do; "whole" shows that it may be left out.
            batches = accelerator.skip_first_batches(loader, step)
        for batch in islice(batches, plan.limit):
            with accelerator.accumulate(ddp):
                loss = ddp(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step == plan.stop:
                accelerator.save_state(str(folder))
                if accelerator.is_main_process:
                    torch.save(step, folder / "step.pt")
                trace.finish(model, herd)
                herd.detach()
                dist.barrier()
                return trace
        trace.logged |= herd.scalars(rows=True)
    trace.finish(model, herd)
    herd.detach()
    return trace


def fresh(**options) -> Accelerator:
    """Return an accelerator as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def prepare_fresh(loader, accelerator=None):
    return prepare(accelerator or fresh(), *make(), loader, order="cd-grab")


def prepared_twice():
    accelerator = fresh()
    prepare_fresh(accelerator.prepare(make_loader()), accelerator)


def skipped_twice():
    accelerator = fresh()
    model, _, loader, herd = prepare_fresh(make_loader(), accelerator)
    try:
        for batch in skip_first_batches(loader, 2):
            model(**batch)
    finally:
        herd.detach()


def skipped_too_far():
    accelerator = fresh()
    *_, loader, herd = prepare_fresh(make_loader(), accelerator)
    herd.detach()
    accelerator.skip_first_batches(loader, 2)


WRONG = {
    "shuffle=True": lambda: prepare_fresh(make_loader(shuffle=True)),
    "a DistributedSampler": lambda: prepare_fresh(
        make_loader(sampler=DistributedSampler(Points()))
    ),
    "a prepared loader": prepared_twice,
    "skip_first_batches": skipped_twice,
    "other batches skipped": skipped_too_far,
    "split_batches": lambda: prepare_fresh(
        make_loader(), fresh(dataloader_config=DataLoaderConfiguration(split_batches=True))
    ),
    "nothing to do": lambda: prepare(fresh(), *make(), make_loader()),
}
