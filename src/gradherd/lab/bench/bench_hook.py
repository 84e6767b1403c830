"""Time a whole DDP step with the sparse hook, on one rank: what it adds to a dense step.

One rank sends nothing, so this is what the hook itself costs: adding to residuals, selecting,
writing the mean back, and waiting for the host where that happens. Steps of all arms alternate, so
that noise hits all alike.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.hooks.attach import attach
from gradherd.lab.bench.timing import PeakMemory
from gradherd.sparsify.registry import make_sparsifier

_LAYERS = 7
_BLOCK = 10  # steps timed together: one alone is shorter than the host's own jitter
_WARMUP_STEPS = 25  # until kernels are compiled, graphs captured and residuals filled


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be a process group of one rank: nccl on a GPU, otherwise gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # "cuda" alone has no index
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def bench_hook(
    params: int,
    density: float,
    device: torch.device,
    repeats: int,
    arms: tuple[str, ...] = ("exdyna", "topk"),
) -> list[dict[str, Any]]:
    """Measure steps of an MLP: dense, and with the hook of each arm.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train; there must be a process group of one rank.
        repeats: Blocks of steps measured of each arm; the median counts.
        arms: Names of sparsifiers.

    Returns:
        A row for each arm, with the ratio to `dense` and the difference in seconds; `sync_free`
        says whether a step never waited for the device (on a GPU).
    """
    steps = {name: training_step(params, density, device, name) for name in ("dense", *arms)}
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = {}
    for name, step in steps.items():
        with PeakMemory(device) as peak:
            for _ in range(_WARMUP_STEPS):
                step()
        peaks[name] = peak.bytes
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(_block_seconds(step, device))
    seconds = {name: statistics.median(blocks) for name, blocks in times.items()}
    return [
        {
            "case": f"step {name}",
            "workers": 1,
            "dim": params,
            "seconds": seconds[name],
            "added_seconds": seconds[name] - seconds["dense"],
            "bytes": 0,
            "peak_bytes": peaks[name],
            "ratio": seconds[name] / seconds["dense"],
            "bytes_ratio": 0.0,
            "sync_free": _is_sync_free(step, device),
        }
        for name, step in steps.items()
    ]


def training_step(
    params: int, density: float, device: torch.device, name: str
) -> Callable[[], None]:
    """Return one training step of a model of its own.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train.
        name: "dense" for DDP's own exchange, or that of a sparsifier.
    """
    torch.manual_seed(0)
    width = max(8, round(math.sqrt(params / _LAYERS) / 8) * 8)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(width, width, device=device), nn.ReLU()]
    model = DDP(nn.Sequential(*layers))
    if name != "dense":
        attach(model, sparsify=make_sparsifier(name, density))
    # Stepping all parameters in one launch: the optimizer is not what is measured.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    # A few inputs in rotation: the same gradient every time would pile up in the residuals.
    inputs = [torch.randn(32, width, device=device) for _ in range(5)]
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        model(inputs[taken % len(inputs)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _block_seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(_BLOCK):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin) / _BLOCK


def _is_sync_free(step: Callable[[], None], device: torch.device) -> bool | None:
    """Return whether torch notices no wait for the device in a few steps; None on a CPU."""
    if device.type != "cuda":
        return None
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
    except RuntimeError:
        return False
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize(device)
    return True
