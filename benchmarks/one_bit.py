"""What a rank computes to exchange local steps: time in copies of the vector, and memory.

On a CPU real gloo ranks exchange after a step, through the public API; beside it an all-reduce of
the same vector. Counted are the CPU seconds of a rank, with those of gloo's threads: reading the
weights, the mean, the outer step, writing the weights.

    python -m benchmarks.one_bit [--sizes 10e6] [--ranks 2,4] [--values int1,fp32]

On a GPU one process is rank 0 of several and answers its collectives with copies of its own
messages, so everything but the network is there.

    python -m benchmarks.one_bit --device cuda [--sizes 124e6,1e9] [--ranks 2,8]
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradherd as gh
from gradherd.comm.collectives import all_reduce
from gradherd.comm.world import World
from gradherd.hooks.flat_weights import FlatWeights
from gradherd.lab.ranks import run_ranks
from gradherd.local.exchange import SharedWeights


class IdleOptimizer(torch.optim.Optimizer):
    """Takes no step, so that its hooks are all that is measured."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


def layers(size: int, device: torch.device) -> nn.Module:
    """Return a module of `size` parameters, most of them in large matrices."""
    width = 1024 if device.type == "cpu" else 4096
    parts = [torch.randn(width, width, device=device) for _ in range(size // width**2)]
    rest = torch.randn(size - width**2 * len(parts), device=device)
    return nn.ParameterList([nn.Parameter(one) for one in (*parts, rest)])  # type: ignore[return-value]


def on_cpu(size: int, values: Any, repeats: int) -> dict[str, float]:
    """Return this rank's CPU milliseconds of an exchange, an all-reduce and a copy."""
    net = layers(size, torch.device("cpu"))
    optimizer = IdleOptimizer(net.parameters(), {})
    herd = gh.attach(net, optimizer=optimizer, local=gh.LocalSteps(every=1, values=values))
    vector, other = torch.zeros(size), torch.zeros(size)

    def change() -> None:
        for parameter in net.parameters():
            parameter.data.add_(torch.randn(parameter.shape[-1:]), alpha=1e-3)

    optimizer.step()  # weights must not change between attach and the first step
    found: dict[str, list[float]] = {"exchange": [], "all-reduce": [], "copy": []}
    works: dict[str, Callable[[], Any]] = {
        "exchange": optimizer.step,
        "all-reduce": lambda: all_reduce(vector, World.detect()),
        "copy": lambda: other.copy_(vector),
    }
    for _ in range(repeats):
        change()
        for name, work in works.items():
            begin = time.process_time()
            work()
            found[name].append(1e3 * (time.process_time() - begin))
    herd.detach()
    return {name: sorted(times)[len(times) // 2] for name, times in found.items()}


class Answered(SharedWeights):
    """One of several ranks, which all send what this one does."""

    def _send_to_owners(self) -> None:
        self.means[0].received.raw.copy_(self.means[0].sent.raw)

    def _send_to_all(self) -> None:
        self.means[0].gathered.raw.copy_(self.means[0].sum.raw)


def milliseconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the median of several calls."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


@torch.no_grad()
def on_gpu(size: int, values: Any, ranks: int, repeats: int) -> dict[str, Any]:
    """Return milliseconds and memory of an exchange, and whether the host waits in it."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    settings = gh.LocalSteps(every=4, values=values)
    net = layers(size, device)
    copy = milliseconds(torch.empty(size, device=device).clone, repeats)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    weights = FlatWeights(net, settings.dense_below, device)
    sparse, small = weights.layout.sparse, weights.layout.whole
    shared = Answered(settings, sparse, small, 0, World(0, ranks), device=device)
    weights.gap = shared.length - sparse
    shared.start(weights.read())

    def exchange() -> None:
        arrival = shared.exchange([weights.read(*shared.room())], defers=True)
        weights.write(*arrival.weights)

    exchange()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    took = milliseconds(exchange, repeats)
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.set_sync_debug_mode("error")
    try:
        exchange()
        waits = False
    except RuntimeError:
        waits = True
    torch.cuda.set_sync_debug_mode("default")
    return {
        "ms": round(took, 2), "copy_ms": round(copy, 3), "copies": round(took / copy, 1),
        "kept_vectors": round(kept / 4 / size, 2), "peak_vectors": round(peak / 4 / size, 2),
        "waits": waits,
    }  # fmt: skip


def main() -> None:
    """Print one line of JSON for each size, number of ranks and format."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--values", default="int1")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    cpu = options.device == "cpu"
    sizes = (options.sizes or ("10e6" if cpu else "124e6,1e9")).split(",")
    for size in (int(float(text)) for text in sizes):
        for ranks in map(int, options.ranks.split(",")):
            for values in options.values.split(","):
                about: dict[str, Any] = {"coordinates": size, "ranks": ranks, "values": values}
                if cpu:
                    each = run_ranks(on_cpu, ranks, size, values, options.repeats, timeout=600)
                    copy = min(one["copy"] for one in each)
                    about |= {name: round(max(one[name] for one in each), 1) for name in each[0]}
                    about["copies"] = round(max(one["exchange"] for one in each) / copy, 1)
                else:
                    about |= on_gpu(size, values, ranks, options.repeats)
                print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main()
