"""One rank of slow_network.py, alone in its network namespace.

Reads jobs from stdin, one JSON object per line, does each together with the other ranks, and
answers with one line on stdout. When stdin ends, so does the rank: it never outlives its parent.
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
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as low_rank
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.comm.collectives import all_gather, all_reduce, all_reduce_bytes, all_to_all_start
from gradherd.lab.bench.calibrate import ring_seconds, wide_model
from gradherd.ordering.coordination import BATCHES_PER_GATHER

_STATISTICS = Path("/sys/class/net")
_PAIR = 2  # steps measured together: cd-grab computes signs at every second one
_EPOCH_STEPS = 64
_WARMUP_STEPS = 6  # until DDP has rebuilt its buckets and residuals have some size
# The small training of `train_digits`.
_DIGITS_HIDDEN, _DIGITS_BATCH, _DIGITS_LR = 512, 16, 0.02


def counters(interface: str) -> dict[str, int]:
    """Return the kernel's byte and packet counters of this namespace's interface."""
    folder = _STATISTICS / interface / "statistics"
    names = ("tx_bytes", "rx_bytes", "tx_packets")
    return {name: int((folder / name).read_text()) for name in names}


def bf16_hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket in bf16, as torch's `bf16_compress_hook`, which refuses gloo."""
    half = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(half, async_op=True)
    assert done is not None
    return done.get_future().then(lambda _: bucket.buffer().copy_(half))


class ExchangeCase:
    """One training: a model, the exchange of its gradients, and the order of its examples."""

    def __init__(self, job: dict[str, Any], world: gh.World) -> None:
        self.world, self.exchange = world, job["exchange"]
        batch, cap = job["batch"], {}
        torch.manual_seed(0)
        net = wide_model(job["params"])
        side = net[0].in_features
        self.shapes = [tuple(p.shape) for p in net.parameters()]
        self.rank = job["rank"]
        if self.exchange == "powersgd":
            # One bucket: the order of second all-reduces of several ones differs between ranks.
            cap = {"bucket_cap_mb": 1 + 4 * sum(p.numel() for p in net.parameters()) // 2**20}
        method, _, detail = self.exchange.partition("-")
        local = method == "local"
        self.model = net if local else DDP(net, **cap)
        data = TensorDataset(
            torch.randn(_EPOCH_STEPS * batch * world.size, side),
            torch.randint(side, (_EPOCH_STEPS * batch * world.size,)),
        )
        sampler = gh.OrderedSampler(data, job["order"], batch_size=batch, unit=batch)
        self._hook()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if local:
            settings = gh.LocalSteps(every=int(detail))
            self.herd = gh.attach(net, order=sampler, optimizer=self.optimizer, local=settings)
        else:
            sparsify = {"topk": gh.TopK, "exdyna": gh.ExDyna}.get(method)
            self.herd = gh.attach(
                self.model,
                order=sampler,
                sparsify=None
                if sparsify is None
                else gh.Sparsify(method=sparsify(density=job["density"]), values=detail or "fp32"),
            )
        self.batches = self._endless_batches(DataLoader(data, batch_size=batch, sampler=sampler))
        # Whole rounds of gathered rows; local steps from one exchange to the next.
        gathered = job["order"] == "cd-grab" and self.exchange != "dense"
        self.block = BATCHES_PER_GATHER if gathered else _PAIR
        self.block = settings.every if local else self.block
        # A whole phase of local steps.
        self.warmup = self.block if local else _WARMUP_STEPS
        self.backward, self.steps_done = 0.0, 0
        self.steps(self.warmup)

    def _hook(self) -> None:
        if self.exchange == "none":
            self.model.register_comm_hook(None, debugging_hooks.noop_hook)
        if self.exchange == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        if self.exchange == "bf16":
            self.model.register_comm_hook(None, bf16_hook)
        if self.exchange == "powersgd":
            state = low_rank.PowerSGDState(
                None, matrix_approximation_rank=self.rank, start_powerSGD_iter=2
            )
            self.model.register_comm_hook(state, low_rank.powerSGD_hook)

    @staticmethod
    def _endless_batches(loader: DataLoader[Any]) -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    def steps(self, count: int) -> None:
        """Train for `count` steps."""
        self.steps_done += count
        for _ in range(count):
            x, y = next(self.batches)
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(x), y)
            begin = time.perf_counter()
            loss.backward()
            self.backward += time.perf_counter() - begin
            self.optimizer.step()

    def counted(self) -> int:
        """Return the bytes this rank has sent: counted by gradherd, computed for torch's hooks."""
        if self.exchange == "none":
            return 0
        metrics = self.herd.metrics()
        sent = int(metrics["bytes_for_ordering"])
        if "total_bytes" in metrics:
            return sent + int(metrics["total_bytes"])
        elements = sum(p.numel() for p in self.model.parameters())
        if self.exchange == "powersgd":
            matrices = sum(self.rank * sum(shape) for shape in self.shapes if len(shape) > 1)
            elements = matrices + sum(shape[0] for shape in self.shapes if len(shape) == 1)
        half = self.exchange in ("fp16", "bf16")
        like = torch.empty(elements, dtype=torch.half if half else torch.float)
        return sent + self.steps_done * all_reduce_bytes(like.to("meta"), self.world.size)

    def close(self) -> None:
        """Detach, to make room for the next case."""
        self.herd.detach()


class DigitsTraining:
    """A small training: scikit-learn's digits, an MLP of 301,066 parameters, SGD with momentum."""

    def __init__(self, job: dict[str, Any]) -> None:
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        self.data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
        torch.manual_seed(job["seed"])
        layers = (
            nn.Linear(64, _DIGITS_HIDDEN),
            nn.ReLU(),
            nn.Linear(_DIGITS_HIDDEN, _DIGITS_HIDDEN),
            nn.ReLU(),
        )
        self.model = DDP(nn.Sequential(*layers, nn.Linear(_DIGITS_HIDDEN, 10)))
        if job["exchange"] == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        methods = {"topk": gh.TopK, "exdyna": gh.ExDyna}
        sparse = methods.get(job["exchange"])
        self.sampler = gh.OrderedSampler(
            self.data, job["order"], batch_size=_DIGITS_BATCH, unit=_DIGITS_BATCH, seed=job["seed"]
        )
        method = None if sparse is None else sparse(density=job["density"])
        self.herd = gh.attach(self.model, order=self.sampler, sparsify=method)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=_DIGITS_LR, momentum=0.9)
        self.loader = DataLoader(self.data, batch_size=_DIGITS_BATCH, sampler=self.sampler)

    def epoch(self, number: int, world: gh.World) -> float:
        """Train for an epoch; return its seconds."""
        self.sampler.set_epoch(number)
        all_reduce(torch.zeros(1), world)
        begin = time.perf_counter()
        for x, y in self.loader:
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
        all_reduce(torch.zeros(1), world)
        return time.perf_counter() - begin

    def loss(self) -> float:
        """Return the mean loss over all data; it is the same on all ranks."""
        with torch.no_grad():
            x, y = self.data.tensors
            return float(nn.functional.cross_entropy(self.model.module(x), y))


def train_digits(job: dict[str, Any], world: gh.World) -> dict[str, Any]:
    """Train until the loss over all data reaches the target; measuring it is not timed."""
    training = DigitsTraining(job)
    seconds, losses = [], [training.loss()]
    while losses[-1] > job["target"] and len(seconds) < job["epochs"]:
        seconds.append(training.epoch(len(seconds), world))
        losses.append(training.loss())
    training.herd.detach()
    return {
        "epochs": len(seconds),
        "seconds": sum(seconds),
        "losses": losses,
        "reached": losses[-1] <= job["target"],
    }


class RankServer:
    """The jobs that this rank can do; each method takes the job and returns the answer."""

    def __init__(self) -> None:
        self.world = gh.World.detect()
        self.case: ExchangeCase | None = None
        self.baseline: ExchangeCase | None = None  # the step without exchange, kept for all cases

    def link(self, job: dict[str, Any]) -> dict[str, float]:
        """Measure latency and goodput while every rank sends to the next one."""
        short = ring_seconds(4, job["repeats"], self.world)
        size = int(job["bytes"])
        long = ring_seconds(size, 7, self.world, fastest=True)
        return {
            "latency": short,
            "goodput": 8 * size / max(1e-9, long - short),
            "deal": min(1.0, long / self._all_to_all_seconds(size)),
        }

    def _all_to_all_seconds(self, sent: int) -> float:
        """Return the fewest seconds of an all-to-all in which each rank sends `sent` bytes."""
        rows = torch.zeros(self.world.size, sent // (self.world.size - 1), dtype=torch.uint8)
        out, times = torch.empty_like(rows), []
        for _ in range(8):
            self._barrier()
            begin = time.perf_counter()
            all_to_all_start(rows, self.world, out=out).wait()
            times.append(time.perf_counter() - begin)
        return float(all_gather(torch.tensor(times[1:]), self.world).value.amax(0).min())

    def make(self, job: dict[str, Any]) -> dict[str, Any]:
        """Set up a training and take its first steps."""
        if job["exchange"] == "none":
            made = self.baseline = ExchangeCase(job, self.world)
        else:
            if self.case is not None:
                self.case.close()
            self.case = None
            made = self.case = ExchangeCase(job, self.world)
        count = sum(p.numel() for p in made.model.parameters())
        return {"parameters": count, "side": made.shapes[0][0]}

    def measure(self, job: dict[str, Any]) -> dict[str, Any]:
        """Measure blocks of steps for some seconds; a block takes as long as its slowest rank."""
        case = self.baseline if job.get("baseline") else self.case
        assert case is not None
        cpu_before = time.process_time()
        empty = [self._block(lambda: None)[1] for _ in range(5)]
        idle = {name: sorted(one[name] for one in empty)[2] for name in empty[0]}
        seconds: list[float] = []
        backwards: list[float] = []
        moved = {"tx_bytes": 0, "rx_bytes": 0, "tx_packets": 0}
        before = case.counted()
        while not seconds or case.block * sum(seconds) < job["seconds"]:
            case.backward = 0.0
            seconds_here, moved_here = self._block(lambda: case.steps(case.block))
            times = torch.tensor([seconds_here, case.backward]) / case.block
            slowest = all_gather(times, self.world).value
            seconds.append(float(slowest[:, 0].max()))
            backwards.append(float(slowest[:, 1].mean()))
            for name in moved:
                moved[name] += moved_here[name] - idle[name]
        steps = len(seconds) * case.block
        last_step = case.herd.last_step()
        return {
            "seconds": seconds,
            "backward": backwards,
            "steps": steps,
            "counted_bytes": (case.counted() - before) / steps,
            "kernel_tx_bytes": moved["tx_bytes"] / steps,
            "kernel_rx_bytes": moved["rx_bytes"] / steps,
            "packets": moved["tx_packets"] / steps,
            "cpu_seconds": (time.process_time() - cpu_before) / steps,
            "selected": last_step.get("selected"),
        }

    def train(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train a small task until its loss reaches the target."""
        if self.case is not None:
            self.case.close()
            self.case = None
        before = counters(INTERFACE)["tx_bytes"]
        result = train_digits(job, self.world)
        return result | {"kernel_tx_bytes": counters(INTERFACE)["tx_bytes"] - before}

    def _block(self, fn: Callable[[], object]) -> tuple[float, dict[str, int]]:
        """Call `fn` between two barriers; return its seconds and what the kernel counted."""
        self._barrier()
        before = counters(INTERFACE)
        begin = time.perf_counter()
        fn()
        own = time.perf_counter() - begin
        self._barrier()
        after = counters(INTERFACE)
        return own, {name: after[name] - before[name] for name in after}

    def _barrier(self) -> None:
        all_reduce(torch.zeros(1), self.world)


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
    server = RankServer()
    answers = os.dup(1)
    # Redirect stdout to stderr: whatever else is printed must not mix with the answers.
    os.dup2(2, 1)
    with contextlib.suppress(KeyboardInterrupt), os.fdopen(answers, "w") as out:
        while True:
            job = json.loads(jobs.get())
            print(json.dumps(getattr(server, job["do"])(job)), file=out, flush=True)


def _listen(jobs: "queue.Queue[str]") -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(1)


if __name__ == "__main__":
    main()
