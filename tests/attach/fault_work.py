"""A program whose ranks fail in several ways; prints the seconds until every process has ended.

Run as `python -m tests.attach.fault_work TIMEOUT KIND...`. Each rank is a fork of this process
that runs to the end of the program, as a user's would: a thread that keeps an interpreter from
exiting shows here, but not in a process of multiprocessing, which leaves by os._exit.
"""

import datetime
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from itertools import chain

import torch
import torch._dynamo  # DDP imports it; once is enough for all forks
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

import gradherd as gh
from tests.attach.attach_work import examples, network

SPARSE = gh.Sparsify(method=gh.ExDyna(density=0.05), dense_below=8)


DIFFERENT = {
    "batch_size": {"batch_size": 8},
    "policy": {"policy": "id-grab"},
    "unit": {"unit": 2},
    "seed": {"seed": 1},
    "length": {"dataset": examples(40)},
}


def train(kind: str, rank: int, fault_file: str) -> None:
    """Train on two ranks; something happens to rank 1 in its third step, or earlier.

    Kinds with "rows" order single examples, others whole batches.
    """
    ddp = DDP(network())
    settings = {"dataset": examples(48), "policy": "cd-grab", "batch_size": 4, "unit": 4, "seed": 0}
    if "rows" in kind:
        settings["unit"] = 1
    fault, _, setting = kind.partition(": ")
    if fault in ("alone", "differing"):
        open(fault_file, "w").close()
    if fault == "differing" and rank:
        settings |= DIFFERENT[setting]
    data = settings["dataset"]
    sampler = gh.OrderedSampler(**settings)
    if kind != "alone" or rank == 0:
        gh.attach(ddp, order=sampler, sparsify=SPARSE if "sparse" in kind else None)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=settings["batch_size"], sampler=sampler)
    last = len(loader) - 1
    for step, (x, y) in enumerate(chain(loader, loader)):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(x), y)
        if rank == 1 and step == (last if "after" in kind else 2):
            open(fault_file, "w").close()
            if "after" in kind or "check" in kind:
                # Rank 0 needs the order of the next epoch, and its thread waits for rank 1; or it
                # waits for the result of rank 1's check.
                loss.backward()
            if "stalled" in kind:
                time.sleep(600)
            elif "killed" in kind:
                os.kill(os.getpid(), signal.SIGKILL)
            elif "check" in kind:
                x.zero_()
                optimizer.step()
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


class Watched:
    """Both ranks of one kind, and when they failed and ended."""

    def __init__(self, kind: str, fault_file: str) -> None:
        self.kind, self.fault_file = kind, fault_file
        self.running: dict[int, int] = {}  # process id -> rank
        self.begin: float | None = None
        self.seconds: float | None = None

    def look(self) -> None:
        """Note a fault, and the seconds from it to the end of the last process that can end."""
        if self.begin is None and os.path.exists(self.fault_file):
            self.begin = time.monotonic()
        for pid in list(self.running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del self.running[pid]
        left = [rank for rank in self.running.values() if "stalled" not in self.kind or rank == 0]
        if self.seconds is None and not left:
            self.seconds = time.monotonic() - (self.begin or 0.0)
            for pid in self.running:  # the stalled one itself
                os.kill(pid, signal.SIGKILL)


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout, folder = float(sys.argv[1]), tempfile.mkdtemp()
    # The interpreter of a rank ends as any other does, but without a search through all of torch's
    # objects, which takes a second and copies the memory that the ranks share.
    gc.collect()
    gc.freeze()
    every: list[Watched] = []

    def look() -> None:
        time.sleep(0.01)
        for one in every:
            one.look()

    for kind in sys.argv[2:]:
        every.append(Watched(kind, f"{folder}/{kind}.fault"))
        for rank in range(2):
            pid = start(kind, rank, folder, timeout)
            if pid is None:
                return  # a rank that has come to its end
            every[-1].running[pid] = rank
        # Those that wait for a timeout need no core: the next ones can start.
        while every[-1].begin is None and every[-1].seconds is None:
            look()
    while any(one.seconds is None for one in every):
        look()
    print(json.dumps({one.kind: one.seconds for one in every}))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
