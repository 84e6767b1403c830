"""A program whose ranks fail in several ways; prints the seconds until every process has ended.

Run as `python -m tests.attach.fault_work TIMEOUT KIND...`. Each rank is a fork of this process
that runs to the end of the program, as a user's would: a thread that keeps an interpreter from
exiting shows here, but not in a process of multiprocessing, which leaves by os._exit.
"""

import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
import time

import torch
import torch._dynamo  # DDP imports it; once is enough for all forks
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import gradherd as gh
from tests.attach.attach_work import examples, network

SPARSE = gh.Sparsify(method=gh.ExDyna(density=0.05), dense_below=8)


def train(kind: str, rank: int, fault_file: str) -> None:
    """Train on two ranks; something happens to rank 1 in its third step."""
    ddp, data = DDP(network()), examples(48)
    if kind in ("alone", "differing"):
        open(fault_file, "w").close()
    batch = 8 if kind == "differing" and rank else 4
    sampler = gh.OrderedSampler(data, "cd-grab", batch_size=batch, unit=4)
    if kind != "alone" or rank == 0:
        gh.attach(ddp, order=sampler, sparsify=SPARSE if "sparse" in kind else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, indices in enumerate(torch.tensor(list(sampler)).split(batch)):
        x, y = data[indices]
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        if rank == 1 and step == 2:
            open(fault_file, "w").close()
            if "after" in kind:
                loss.backward()  # rank 0 goes on, and its thread waits for rank 1's products
            if "stalled" in kind:
                time.sleep(600)
            elif "killed" in kind:
                os.kill(os.getpid(), signal.SIGKILL)
            elif "raising" in kind:
                raise RuntimeError("a fault on rank 1")
        loss.backward()
        optimizer.step()


def start(kind: str, rank: int, folder: str, timeout: float) -> int | None:
    """Fork; return the child's process id, or None in the child."""
    if pid := os.fork():
        return pid
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{kind}", 2)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    train(kind, rank, f"{folder}/{kind}.fault")
    return None


def watch(children: dict[int, tuple[str, int]], folder: str) -> dict[str, float]:
    """Return the seconds from each fault until the last process that could end has ended."""
    begun: dict[str, float] = {}
    seconds: dict[str, float] = {}
    waiting = dict(children)
    while any("stalled" not in kind or rank == 0 for kind, rank in waiting.values()):
        now = time.monotonic()
        for kind, _ in children.values():
            if kind not in begun and os.path.exists(f"{folder}/{kind}.fault"):
                begun[kind] = now
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if pid:
            kind, _ = waiting.pop(pid)
            seconds[kind] = now - begun.get(kind, now)
        time.sleep(0.01)
    for pid in waiting:  # the stalled ones themselves
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return seconds


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout, kinds = float(sys.argv[1]), sys.argv[2:]
    folder = tempfile.mkdtemp()
    children: dict[int, tuple[str, int]] = {}
    for kind in kinds:
        for rank in range(2):
            pid = start(kind, rank, folder, timeout)
            if pid is None:
                return  # a rank that has come to its end
            children[pid] = kind, rank
    print(json.dumps(watch(children, folder)))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
