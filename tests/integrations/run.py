"""Run frameworks through all plans, on each rank: python -m tests.integrations.run NAMES FOLDER."""

import importlib
import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.integrations.conformance import LOCAL, SPARSE
from tests.integrations.task import Trace, plans, use_forkserver


def main(names: str, root: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the frameworks' own
    use_forkserver()
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for name in names.split(","):
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        run(importlib.import_module(f"tests.integrations.{name}_run"), folder, rank)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(module, folder: str, rank: int) -> None:
    if module.TORCHRUN:
        refused = getattr(module, "REFUSED", ())
        for plan in plans(folder):
            if ("sparsify" in plan.options and SPARSE in refused) or (
                "local" in plan.options and LOCAL in refused
            ):
                continue
            save(folder, plan.name, rank, module.train(plan))
        refused = {name: sentence(attempt) for name, attempt in module.WRONG.items()}
    else:
        # Ray starts its workers itself, and runs all plans in one job.
        for name, traces in module.train_all(plans(folder)).items():
            for own, trace in traces.items():
                save(folder, name, own, trace)
        refused = module.refusals(folder)
    if rank == 0:
        torch.save(refused, os.path.join(folder, "refused.pt"))


def save(folder: str, name: str, rank: int, trace: Trace) -> None:
    torch.save(vars(trace), os.path.join(folder, f"{name}-rank{rank}.pt"))


def sentence(attempt: Callable[[], object]) -> str | None:
    """Return the error of a wrong set-up; None if it was not refused."""
    try:
        attempt()
    except Exception as error:
        return str(error)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
