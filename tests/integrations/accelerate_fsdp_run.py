"""The suite's training in Accelerate, which shards the model by FSDP2."""

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

import gradherd as gh
from gradherd.integrations.accelerate import prepare
from tests.integrations import accelerate_run
from tests.integrations.conformance import LOCAL, SPARSE
from tests.integrations.task import Plan, Trace, make, make_loader

NAME, PACKAGE, TORCHRUN = "Accelerate, FSDP2", "accelerate", True
# One dimension of shards: there are no replicas to exchange between.
REFUSED = (SPARSE, LOCAL)


def sharding(version: int = 2, **options) -> Accelerator:
    """Return an accelerator that shards on the CPU, where Accelerate itself would use DDP."""
    accelerator = accelerate_run.fresh(**options)
    layers = dict(auto_wrap_policy="size_based_wrap", min_num_params=1)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=version, **layers)
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    return accelerator


def train(plan: Plan) -> Trace:
    try:
        return accelerate_run.train(plan, sharding)
    finally:
        back_to_ddp()


def back_to_ddp() -> None:
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU


def attempt(version: int = 2, **options) -> None:
    try:
        prepare(sharding(version), *make(), make_loader(), **options)
    finally:
        back_to_ddp()


WRONG = {
    "sparsify": lambda: attempt(sparsify=gh.ExDyna(density=0.1)),
    "local steps": lambda: attempt(local=gh.LocalSteps()),
    "FSDP1": lambda: attempt(1, order="cd-grab"),
}
