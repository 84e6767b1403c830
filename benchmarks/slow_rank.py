"""One rank of slow_network.py, alone in its network namespace.

Reads jobs from stdin, one JSON object a line, does each together with the other ranks, and answers
with one line on stdout. When stdin ends, so does the rank: it never outlives who started it.
"""

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from netns import INTERFACE
from slow_train import train
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as low_rank
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.advise.measure import ring_seconds, wide_model
from gradherd.comm.collectives import all_gather, all_reduce, all_reduce_bytes, all_to_all_start
from gradherd.ordering.gather import EVERY

_STATISTICS = Path("/sys/class/net")
_PAIR = 2  # steps that are measured together: cd-grab does more in every second one
_EPOCH = 64  # steps of an epoch
_WARM = 6  # steps until DDP has its final buckets and residuals have some size
TORCH_HOOKS = ("none", "fp16", "powersgd")


def counters(interface: str) -> dict[str, int]:
    """Return what the kernel has counted on this namespace's interface so far."""
    folder = _STATISTICS / interface / "statistics"
    names = ("tx_bytes", "rx_bytes", "tx_packets")
    return {name: int((folder / name).read_text()) for name in names}


class Case:
    """One training: a model, how its gradients are exchanged, and the order of examples."""

    def __init__(self, job: dict[str, Any], world: gh.World) -> None:
        self.world, self.exchange = world, job["exchange"]
        batch, cap = job["batch"], {}
        torch.manual_seed(0)
        net = wide_model(job["params"])
        side = net[0].in_features
        self.shapes = [tuple(p.shape) for p in net.parameters()]
        self.rank = job["rank"]
        if self.exchange == "powersgd":
            # With several buckets its second all-reduces start in any order, and gloo would hang.
            cap = {"bucket_cap_mb": 1 + 4 * sum(p.numel() for p in net.parameters()) // 2**20}
        self.model = DDP(net, **cap)
        data = TensorDataset(
            torch.randn(_EPOCH * batch * world.size, side),
            torch.randint(side, (_EPOCH * batch * world.size,)),
        )
        sampler = gh.OrderedSampler(data, job["order"], batch_size=batch, unit=batch)
        self._hook()
        sparsify = {"topk": gh.TopK, "exdyna": gh.ExDyna}.get(self.exchange)
        method = None if sparsify is None else sparsify(density=job["density"])
        self.herd = gh.attach(self.model, order=sampler, sparsify=method)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.batches = self._forever(DataLoader(data, batch_size=batch, sampler=sampler))
        # Rows that are gathered travel together, after so many steps.
        gathered = job["order"] == "cd-grab" and self.exchange != "dense"
        self.block = EVERY if gathered else _PAIR
        self.backward = 0.0
        self.steps(_WARM)

    def _hook(self) -> None:
        if self.exchange == "none":
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        if self.exchange == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if self.exchange == "powersgd":
            state = low_rank.PowerSGDState(
                None, matrix_approximation_rank=self.rank, start_powerSGD_iter=2
            )
            self.model.register_comm_hook(state, low_rank.powerSGD_hook)

    @staticmethod
    def _forever(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    def steps(self, count: int) -> None:
        """Train."""
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            begin = time.perf_counter()
            loss.backward()
            self.backward += time.perf_counter() - begin
            self.optimizer.step()

    def counted(self, steps: int) -> int:
        """Return what gradherd says this rank has sent; torch's hooks do not say, so reckon."""
        if self.exchange == "none":
            return 0
        told = self.herd.metrics()
        sent = int(told["bytes_for_ordering"])
        if "total_bytes" in told:
            return sent + int(told["total_bytes"])
        numbers = sum(p.numel() for p in self.model.parameters())
        if self.exchange == "powersgd":
            matrices = sum(self.rank * sum(shape) for shape in self.shapes if len(shape) > 1)
            numbers = matrices + sum(shape[0] for shape in self.shapes if len(shape) == 1)
        like = torch.empty(numbers, dtype=torch.half if self.exchange == "fp16" else torch.float)
        return sent + steps * all_reduce_bytes(like.to("meta"), self.world.size)

    def close(self) -> None:
        """Make room for the next."""
        self.herd.detach()


class Rank:
    """What this rank can be asked for."""

    def __init__(self) -> None:
        self.world = gh.World.detect()
        self.case: Case | None = None
        self.taken = 0

    def link(self, job: dict[str, Any]) -> dict[str, float]:
        """Measure latency and goodput from each rank to the next, all of them at once."""
        short = ring_seconds(4, job["repeats"], self.world)
        numbers = int(job["bytes"])
        long = ring_seconds(numbers, 7, self.world)
        dealt = self._deal(numbers)
        return {
            "latency": short,
            "goodput": 8 * numbers / max(1e-9, long - short),
            "deal": min(1.0, long / dealt),
        }

    def _deal(self, sent: int) -> float:
        """Return the seconds of an all-to-all in which each rank sends so many bytes."""
        rows = torch.zeros(self.world.size, sent // (self.world.size - 1), dtype=torch.uint8)
        out, times = torch.empty_like(rows), []
        for _ in range(8):
            self._together()
            begin = time.perf_counter()
            all_to_all_start(rows, self.world, out=out).wait()
            times.append(time.perf_counter() - begin)
        return float(all_gather(torch.tensor(times[1:]), self.world).value.amax(0).median())

    def make(self, job: dict[str, Any]) -> dict[str, Any]:
        """Set up a training, and take the first steps of it."""
        if self.case is not None:
            self.case.close()
        self.case = None
        self.case, self.taken = Case(job, self.world), _WARM
        count = sum(p.numel() for p in self.case.model.parameters())
        return {"parameters": count, "side": self.case.shapes[0][0]}

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Take blocks of steps for some seconds; the slowest rank counts."""
        case = self.case
        assert case is not None
        worked = time.process_time()
        empty = [self._block(lambda: None)[1] for _ in range(5)]
        idle = {name: sorted(one[name] for one in empty)[2] for name in empty[0]}
        seconds: list[float] = []
        backwards: list[float] = []
        moved = {"tx_bytes": 0, "rx_bytes": 0, "tx_packets": 0}
        before = case.counted(self.taken)
        while not _enough([case.block * one for one in seconds], job["seconds"]):
            case.backward = 0.0
            own, found = self._block(lambda: case.steps(case.block))
            figures = torch.tensor([own, case.backward]) / case.block
            slowest = all_gather(figures, self.world).value
            seconds.append(float(slowest[:, 0].max()))
            backwards.append(float(slowest[:, 1].mean()))
            self.taken += case.block
            for name in moved:
                moved[name] += found[name] - idle[name]
        steps = len(seconds) * case.block
        figures_of = case.herd.last_step()
        return {
            "seconds": seconds,
            "backward": backwards,
            "steps": steps,
            "counted_bytes": (case.counted(self.taken) - before) / steps,
            "kernel_tx_bytes": moved["tx_bytes"] / steps,
            "kernel_rx_bytes": moved["rx_bytes"] / steps,
            "packets": moved["tx_packets"] / steps,
            "cpu_seconds": (time.process_time() - worked) / steps,
            "selected": figures_of.get("selected"),
        }

    def train(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train a small task until its loss is low enough."""
        if self.case is not None:
            self.case.close()
            self.case = None
        before = counters(INTERFACE)["tx_bytes"]
        found = train(job, self.world)
        return found | {"kernel_tx_bytes": counters(INTERFACE)["tx_bytes"] - before}

    def _block(self, do: Callable[[], object]) -> tuple[float, dict[str, int]]:
        """Do something between two moments at which all ranks are there."""
        self._together()
        before = counters(INTERFACE)
        begin = time.perf_counter()
        do()
        own = time.perf_counter() - begin
        self._together()
        after = counters(INTERFACE)
        return own, {name: after[name] - before[name] for name in after}

    def _together(self) -> None:
        all_reduce(torch.zeros(1), self.world)


def _enough(blocks: list[float], seconds: float) -> bool:
    """Tell whether these are enough: so many seconds, and three blocks unless they are long."""
    return sum(blocks) >= seconds and (len(blocks) >= 3 or sum(blocks) >= 3 * seconds)


def main() -> None:
    """Serve until stdin ends."""
    rank, size, store = sys.argv[1:]
    torch.set_num_threads(1)
    jobs: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, int(size)),
        rank=int(rank),
        world_size=int(size),
        timeout=timedelta(seconds=300),
    )
    here = Rank()
    answers = os.dup(1)
    # Whatever else is printed must not get among the answers.
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt), os.fdopen(answers, "w") as out:
        while True:
            job = json.loads(jobs.get())
            print(json.dumps(getattr(here, job["do"])(job)), file=out, flush=True)


def _listen(jobs: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(1)


if __name__ == "__main__":
    main()
