"""Run a function on ranks over gloo, or over nccl: there all ranks share one GPU."""

import os
import tempfile
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from gradherd.lab.ranks import run_ranks
from tests.gpu import only_gpu

BACKENDS = ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, only_gpu])]

# NCCL refuses ranks of one host that have the same GPU. Ranks that name hosts of their own talk
# through sockets, as between machines.
_HOSTS = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}


def device():
    """Return where this rank computes."""
    return torch.device("cuda", 0) if dist.get_backend() == "nccl" else torch.device("cpu")


def run_over(backend, fn, size, *args, timeout=400):
    """Return what `fn(*args)` returns on each rank; on the CPU, whatever the ranks computed on.

    Skips the test if nccl takes no ranks that share a GPU.
    """
    if backend == "gloo":
        return run_ranks(fn, size, *args, timeout=timeout)
    if (reason := _refusal()) is not None:
        pytest.skip(f"nccl takes no ranks that share a GPU: {reason}")
    return _spawned(backend, fn, size, args, timeout)


@cache
def _refusal():
    """Say why two ranks cannot share the GPU; None if they can."""
    try:
        _spawned("nccl", _sum_of_ones, 2, (), 120)
    except Exception as error:  # whatever it is, nothing here can run
        return " ".join(str(error).split())[-600:]
    return None


def _sum_of_ones():
    ones = torch.ones(1, device=device())
    dist.all_reduce(ones)
    assert int(ones) == dist.get_world_size()


def _spawned(backend, fn, size, args, timeout):
    """As `run_ranks`, in fresh interpreters: a fork may have a CUDA that its parent has used."""
    with tempfile.TemporaryDirectory() as name:
        folder, deadline = Path(name), time.monotonic() + timeout
        ranks = mp.start_processes(
            _rank_main, (backend, fn, size, folder, args), size, join=False, start_method="spawn"
        )
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{fn.__name__} on {size} ranks: over {timeout} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def share_gpu(rank):
    """Let this process be a rank on the GPU of all others; before it joins a group."""
    os.environ |= _HOSTS | {"NCCL_HOSTID": f"host-{rank}", "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)


def _rank_main(rank, backend, fn, size, folder, args):
    torch.set_num_threads(1)
    if backend == "nccl":
        share_gpu(rank)
    store = dist.FileStore(str(folder / "store"), size)
    wait = timedelta(seconds=120)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
    torch.save(_on_cpu(fn(*args)), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _on_cpu(value):
    """Return nested results with tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_on_cpu, value))
    return value
