"""Joining the processes that torchrun started, also after it has started them again."""

import os

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous


def join(backend: str) -> None:
    """Make the default process group of a process that torchrun started.

    After a restart torchrun hands out the store it had before, and in it the addresses of the
    dead: gloo finds those first and is refused (pytorch issue 135712 tells of the same with NCCL).
    On one machine the number of the attempt keeps them apart. Agents on several machines count
    their attempts each for itself, so there the keys stay torch's own;
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is torch's way out.
    """
    if os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        dist.init_process_group(backend)
        return
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend, store=dist.PrefixStore(f"attempt-{attempt}", store), rank=rank, world_size=size
    )
