"""Loops on two ranks that end in every way a program can end: how do the processes die?

    python -m tests.comm.ends [--runs 5] [--kinds order,local] [--ends destroyed,raised] [--seed 0]
        [--backend nccl]

Ranks are forks that end as a script does, through the interpreter's own shutdown. Those of
`run_ranks` do not: multiprocessing leaves by `os._exit`. Every run must end with the exit code of
its kind of end, within its time, with the user's own message last, and without a word of C++.
nccl's ranks share a GPU, and may say more: torch warns of groups that nobody has destroyed.
"""

import argparse
import collections
import faulthandler
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 2
TIMEOUT = 30
"""Seconds that a rank waits for its peer."""
LONGEST = 100
"""Seconds after which a process counts as hanging."""

KINDS = (
    "order",
    "rows",
    "sparse",
    "local",
    "overlap",
    "sharded",
    "sharded-sparse",
    "sharded-local",
)

# What each rank's exit code is, and what its stderr must hold.
LUCK, LOST, GONE = "ValueError: no luck", "Error: ", "the process group is gone"
ENDS: dict[str, tuple[tuple[int, int], tuple[str, str]]] = {
    "destroyed": ((0, 0), ("", "")),
    "detached": ((0, 0), ("", "")),
    # What was under way is said to be lost, if something was.
    "destroyed-detached": ((0, 0), (GONE, GONE)),
    "left": ((0, 0), ("", "")),
    "broken-off": ((0, 0), ("", "")),
    "cell-twice": ((0, 0), ("", "")),
    "spawned": ((0, 0), ("", "")),
    "exited": ((3, 3), ("", "")),
    "raised": ((1, 1), (LUCK, LUCK)),
    "raised-in-forward": ((1, 1), (LUCK, LUCK)),
    "raised-destroyed": ((1, 1), (LUCK, LUCK)),
    "raised-alone": ((1, 1), (LOST, LUCK)),
    "interrupted": ((-2, -2), ("KeyboardInterrupt", "KeyboardInterrupt")),
    "terminated": ((-15, -15), ("", "")),
    "terminated-gently": ((4, 4), ("", "")),
}
SIGNALS = {
    "interrupted": signal.SIGINT,
    "terminated": signal.SIGTERM,
    "terminated-gently": signal.SIGTERM,
}


def unexpected(runs: int, *options: str) -> dict[str, int]:
    """Return what went otherwise than it should, and how often."""
    command = [sys.executable, "-m", "tests.comm.ends", "--runs", str(runs), *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert ended.returncode in (0, 1), ended.stderr
    found: dict[str, int] = json.loads(ended.stdout.strip().splitlines()[-1])["unexpected"]
    return found


class Loop:
    """README's loop, or one of its relatives."""

    def __init__(self, kind: str) -> None:
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DataLoader, TensorDataset

        import gradherd as gh

        draw = torch.Generator().manual_seed(0)
        data = TensorDataset(torch.randn(128, 64, generator=draw), torch.arange(128) % 10)
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        net: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(self.device)
        settings: dict[str, Any] = {}
        if kind in ("order", "rows", "sharded"):
            unit = 1 if kind == "rows" else 8
            settings["order"] = gh.OrderedSampler(data, "cd-grab", batch_size=8, unit=unit)
        sampler: Any = settings.get("order") or torch.utils.data.DistributedSampler(data)
        if kind.startswith("sharded"):
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            shape = (1, RANKS) if kind == "sharded" else (RANKS, 1)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
            fully_shard(net[0], mesh=mesh["shard"])
            fully_shard(net, mesh=mesh["shard"])
            if kind != "sharded":
                settings["mesh"] = mesh
        elif kind in ("order", "rows", "sparse"):
            net = DDP(net)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1)
        if "sparse" in kind:
            settings["sparsify"] = gh.ExDyna(density=0.01)
        if "local" in kind or kind == "overlap":
            settings["local"] = gh.LocalSteps(every=2, overlap=kind == "overlap")
            settings["optimizer"] = self.optimizer
        self.net, self.settings = net, settings
        self.loader = DataLoader(data, batch_size=8, sampler=sampler)
        self.herd = gh.attach(net, **settings)
        self.destroy = dist.destroy_process_group
        self.loss = nn.functional.cross_entropy

    def epoch(self, stop: int = -1, raises: bool = False) -> None:
        """Train for an epoch, or until step `stop`."""
        for step, (x, y) in enumerate(self.loader):
            loss = self.loss(self.net(x.to(self.device)), y.to(self.device))
            if step == stop and not raises:
                break
            loss.backward()
            if step == stop:
                raise ValueError("no luck")
            self.optimizer.step()
            self.optimizer.zero_grad()


def join(rank: int, file: str, backend: str) -> None:
    """Join the group of both ranks."""
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        from tests.nccl import share_gpu

        share_gpu(rank)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, limit = dist.FileStore(file, RANKS), timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)


def train(kind: str, end: str, rank: int, file: str, backend: str) -> None:
    """Be one rank, and end."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    # Python leaves out its handler in a process that was started in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if end == "terminated-gently":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    join(rank, file, backend)
    loop = Loop(kind)
    if end in SIGNALS:
        loop.epoch()
        Path(f"{file}.{rank}").touch()  # from now on the signal may come
        while True:
            loop.epoch()
    if end == "cell-twice":
        loop.epoch(stop=2)
        loop = Loop(kind)
    if end == "raised-in-forward":
        loop.epoch()
        loop.net.register_forward_hook(lambda *_: fail())
    if end == "raised-destroyed":
        try:
            loop.epoch(stop=2, raises=True)
        finally:
            loop.destroy()
    loop.epoch(stop={"broken-off": 2, "raised": 2, "raised-alone": 2 if rank else -1}.get(end, -1),
               raises="raised" in end)  # fmt: skip
    if end == "raised-alone":
        while True:
            loop.epoch()
    if end == "exited":
        sys.exit(3)
    if end == "detached":
        loop.herd.detach()
    if end not in ("left", "broken-off"):
        loop.destroy()
    if end == "destroyed-detached":
        loop.herd.detach()


def fail() -> None:
    raise ValueError("no luck")


def spawned(rank: int, kind: str, file: str, backend: str) -> None:
    """Be one rank that torch.multiprocessing has spawned."""
    train(kind, "destroyed", rank, file, backend)


def fork(kind: str, end: str, rank: int, file: str, backend: str) -> int:
    """Start a rank; return its process id, or 0 in the rank once its loop has ended."""
    if pid := os.fork():
        return pid
    out = os.open(f"{file}.stderr.{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 2)
    if end == "spawned":
        import torch.multiprocessing as mp

        # A parent of its own for each: they meet in the file.
        child = mp.get_context("spawn").Process(target=spawned, args=(rank, kind, file, backend))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    train(kind, end, rank, file, backend)
    return 0


def judge(end: str, codes: list[int], file: str, backend: str) -> list[str]:
    """Return what is not as it should be."""
    wrong = []
    wanted, said = ENDS[end]
    for rank, code in enumerate(codes):
        text = Path(f"{file}.stderr.{rank}").read_text()
        last = text.strip().splitlines()[-1] if text.strip() else ""
        if code != wanted[rank]:
            wrong.append(f"rank {rank} ended with {code}, not {wanted[rank]}: {last}")
        elif backend == "nccl":
            if said[rank] != GONE and said[rank] not in text:
                wrong.append(f"rank {rank} did not say {said[rank]!r}")
        elif said[rank] not in last and (last or said[rank] != GONE):
            wrong.append(f"rank {rank} said {last!r}, not {said[rank]!r}")
        elif last and not said[rank]:
            wrong.append(f"rank {rank} said {last!r}, not {said[rank]!r}")
        for bad in ("terminate called", "Fatal Python", "Exception ignored", "Segmentation"):
            if bad in text:
                wrong.append(f"rank {rank}: {bad}")
        if wrong and "--verbose" in sys.argv:
            print(f"--- rank {rank}, {end}\n{text}", file=sys.stderr)
    return wrong


def main() -> int:
    """Run every kind of loop to every end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--ends", default=",".join(ENDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--verbose", action="store_true", help="print what failing ranks say")
    args = parser.parse_args()
    # Once, before the forks. Neither starts a thread.
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401

    import gradherd.hooks.attach  # noqa: F401

    chance = random.Random(args.seed)
    found: collections.Counter[str] = collections.Counter()
    folder, total = tempfile.mkdtemp(), 0
    for run in range(args.runs):
        for kind in args.kinds.split(","):
            for end in args.ends.split(","):
                file, pids = f"{folder}/{run}-{kind}-{end}", []
                for rank in range(RANKS):
                    pids.append(fork(kind, end, rank, file, args.backend))
                    if pids[-1] == 0:
                        return 0
                if end in SIGNALS:
                    signal_all(pids, SIGNALS[end], file, chance)
                statuses = [os.waitpid(pid, 0)[1] for pid in pids]
                codes = [os.waitstatus_to_exitcode(status) for status in statuses]
                found.update(
                    f"{kind}, {end}: {one}" for one in judge(end, codes, file, args.backend)
                )
                total += 1
    shutil.rmtree(folder)
    for what, count in sorted(found.items()):
        print(f"{count} x {what}")
    print(json.dumps({"runs": total, "unexpected": found}))
    return 1 if found else 0


def signal_all(pids: list[int], number: signal.Signals, file: str, chance: random.Random) -> None:
    """Send a signal to all ranks at once at a random moment of their loops, as a terminal does."""
    end = time.monotonic() + LONGEST
    while not all(os.path.exists(f"{file}.{rank}") for rank in range(RANKS)):
        time.sleep(0.01)
        if time.monotonic() > end:
            break
    time.sleep(chance.uniform(0, 0.3))
    for pid in pids:
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main())
