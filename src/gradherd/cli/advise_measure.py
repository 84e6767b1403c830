"""The part of `gradherd advise --measure` that runs on workers."""

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradherd.advise.measure import Measured, measure
from gradherd.cli.bench_show import usable_device
from gradherd.cli.local import on_ranks
from gradherd.cli.train_options import under_torchrun
from gradherd.cli.usage import Failed, UsageError
from gradherd.comm.ranks import RankError
from gradherd.comm.world import World, join_torchrun_group

# Numbers of a model that is made to be measured: parameters and gradients take 8 bytes each.
_MOST_PARAMS = 4_000_000_000


class Found(NamedTuple):
    """What the workers have measured."""

    workers: int
    values: dict[str, float]


def measured(params: float, workers: int, device: str) -> Found | None:
    """Measure on the ranks of torchrun, or on local ones; None on all ranks but the first."""
    if params > _MOST_PARAMS:
        raise UsageError(f"--measure makes a model of {params:.3g} parameters: at most 4e9")
    if not under_torchrun():
        if device != "cpu":
            raise UsageError("--measure on a GPU needs torchrun: one worker for each GPU; or cpu")
        try:
            return _found(workers, on_ranks(measure, workers, int(params), device))
        except RankError as error:
            raise Failed(error.reason) from None
    usable_device(device)
    if device == "cpu":
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_torchrun_group("nccl" if device == "cuda" else "gloo")
    try:
        world = World.detect()
        found = measure(int(params), device)
        return _found(world.size, found) if world.rank == 0 else None
    finally:
        dist.destroy_process_group()


def _found(workers: int, measured: Measured) -> Found:
    # What has been measured is data that arrived: no headers are to be taken off.
    values = {**measured._asdict(), "goodput": 1.0}
    if math.isinf(measured.bandwidth):
        values["latency"] = 0.0
    return Found(workers, values)
