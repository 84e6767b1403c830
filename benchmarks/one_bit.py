"""What a rank computes to exchange local steps in one bit, on a GPU: milliseconds and memory.

Drives the parts of a `LocalExchange` as rank 0 of 8 would, and answers its collectives with copies
of its own messages, so everything but the network is there: reading the weights, the difference,
both roundings, the outer step, writing the weights back. Beside it, a copy of one vector.

    python benchmarks/one_bit.py [--sizes 124e6,1e9] [--values int1,int2,fp32] [--repeats 10]
"""

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradherd.comm.script import AllGather, AllToAll
from gradherd.hooks.local_steps import FlatWeights
from gradherd.sparsify.local import LocalSteps, OuterOptimizer
from gradherd.sparsify.worker import Worker

RANKS = 8


def answer(request: AllGather | AllToAll) -> Tensor:
    """Return what a rank receives if all ranks send the same."""
    if isinstance(request, AllToAll):
        return request.tensor.clone()
    return request.tensor.expand(RANKS, *request.tensor.shape).clone()


class Rank:
    """One rank's weights and exchange."""

    def __init__(self, size: int, settings: LocalSteps, device: torch.device) -> None:
        width = 4096
        layers = [torch.randn(width, width, device=device) for _ in range(size // width**2)]
        rest = torch.randn(size - width**2 * len(layers), device=device)
        module = nn.ParameterList([nn.Parameter(one) for one in (*layers, rest)])
        self._weights = FlatWeights(module, settings.dense_below, device)
        self._worker = Worker(
            settings.sent,
            size,
            rank=0,
            size=RANKS,
            sparse=self._weights.layout.sparse,
            device=device,
        )
        self._outer = OuterOptimizer(settings, self._weights.read())
        self._keeps = settings.keep_residual

    def _start(self) -> Tensor:
        """Return the weights with which a phase begins."""
        shared = self._outer.shared
        if self._keeps:
            shared = shared - self._worker.feedback.residual
        return self._weights.rounded(shared)

    @torch.no_grad()
    def exchange(self) -> None:
        """As `LocalExchange` does at the end of a phase."""
        start, weights = self._start(), self._weights.read()
        self._worker.begin(1.0)
        self._worker.add(0, torch.sub(start, weights, out=weights))
        del start, weights
        script = self._worker.script()
        reply: Tensor | None = None
        while True:
            try:
                reply = answer(script.send(reply))  # type: ignore[arg-type]
            except StopIteration as stop:
                outcome = stop.value
                break
        self._worker.commit(outcome)
        self._outer.step(outcome.whole_mean(self._weights.layout.size))
        self._weights.write(self._start())


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


def main() -> None:
    """Print one line of JSON for each size and format."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="124e6,1e9")
    parser.add_argument("--values", default="int1,int2,fp32")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    device = torch.device("cuda")
    for size in (int(float(text)) for text in options.sizes.split(",")):
        vector = torch.zeros(size, device=device)
        copy = milliseconds(vector.clone, options.repeats)
        del vector
        for values in options.values.split(","):
            settings = LocalSteps(every=4, method="dense", values=values, decay=1.0)  # type: ignore[arg-type]
            torch.cuda.empty_cache()
            rank = Rank(size, settings, device)
            rank.exchange()
            torch.cuda.synchronize()
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            took = milliseconds(rank.exchange, options.repeats)
            peak = torch.cuda.max_memory_allocated()
            record = {
                "coordinates": size, "values": values, "ms": round(took, 2),
                "copy_ms": round(copy, 2), "copies": round(took / copy, 1),
                "kept_vectors": round(resting / 4 / size - 1, 2),
                "peak_vectors": round(peak / 4 / size - 1, 2),
            }  # fmt: skip
            print(json.dumps(record), flush=True)
            del rank


if __name__ == "__main__":
    main()
