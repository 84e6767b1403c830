"""What the sparse hook adds to a DDP step on this GPU, and where the time goes.

    python benchmarks/hook_step.py --sizes 5e6,22e6,268e6 --profile

One process, one nccl rank, which sends nothing: what a step takes beyond the dense one is what the
hook itself costs: adding to residuals, selecting, writing the mean back, and waiting for the host
where that happens. Needs torch and Triton only. Prints one JSON line per case. With
`--profile`, also the kernels of a step, and the first place at which a step waits for the device.

    python benchmarks/hook_step.py --local-steps --sizes 100e6 --batch 2048

compares steps of a model without any exchange ("alone") with local steps, which exchange after
every step or every second one: before the next ("local-1", "local-2") or beside it ("overlap-1",
"overlap-2"). Under torchrun the ranks do exchange (bytes are not counted), also those that share a
GPU if each sets another NCCL_HOSTID, with NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1.
"""

import argparse
import contextlib
import json
import math
import os
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gradherd.cli.launch import join_torchrun_group
from gradherd.hooks.attach import attach
from gradherd.lab.bench.timing import (
    Rows,
    elapsed_seconds,
    make_rows,
    medians_in_turns,
    peak_memory,
)
from gradherd.local.settings import LocalSteps
from gradherd.sparsify.settings import make_settings

_LAYERS = 7
_BLOCK = 10  # steps timed together: one alone is shorter than the host's own jitter
_LOCAL_ARMS = ("local-1", "overlap-1", "local-2", "overlap-2")
_WARMUP_STEPS = 25  # until kernels are compiled, graphs captured and residuals filled


@contextlib.contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """Be a process group of one rank, or torchrun's: nccl on a GPU, otherwise gloo."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)  # "cuda" alone has no index
    if "WORLD_SIZE" in os.environ:
        join_torchrun_group(backend)
    else:
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
    *,
    base: str = "dense",
    batch: int = 32,
) -> Rows:
    """Measure steps of an MLP: without a hook, and with that of each arm.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train; there must be a process group of one rank.
        repeats: Blocks of steps measured of each arm; the median counts.
        arms: Names of sparsifiers, or of local steps as in `training_step`.
        base: What they are compared with.
        batch: Examples of a step.

    Returns:
        A row for each arm, with the ratio to `base` and the difference in seconds; `sync_free`
        says whether a step never waited for the device (on a GPU; None for local steps).
    """
    steps = {
        f"step {name}": training_step(params, density, device, name, batch)
        for name in (base, *arms)
    }
    peaks: dict[str, int | None] = {}
    blocks: dict[str, Callable[[], float]] = {}
    for name, step in steps.items():
        peaks[name] = peak_memory(partial(_repeat, step, _WARMUP_STEPS), device)
        blocks[name] = partial(elapsed_seconds, partial(_repeat, step, _BLOCK), device)
    seconds = {name: took / _BLOCK for name, took in medians_in_turns(blocks, repeats).items()}
    workers = dist.get_world_size()
    rows = make_rows(seconds, peaks, workers=workers, dim=params, sent=dict.fromkeys(steps, 0))
    for row in rows:
        row["added_seconds"] = row["seconds"] - rows[0]["seconds"]
        # A thread may wait, and torch would not tell which one does.
        may_tell = base == "dense"
        row["sync_free"] = _is_sync_free(steps[row["case"]], device) if may_tell else None
    return rows


def training_step(
    params: int, density: float, device: torch.device, name: str, batch: int = 32
) -> Callable[[], None]:
    """Return one training step of a model of its own.

    Args:
        params: Approximate number of parameters.
        density: Share of them that is sent.
        device: Where to train.
        name: "dense" for DDP's own exchange, or that of a sparsifier; "alone" without DDP,
            "local-2" with local steps every second of which exchanges, "overlap-2" beside the next.
        batch: Examples of a step.
    """
    torch.manual_seed(0)
    width = max(8, round(math.sqrt(params / _LAYERS) / 8) * 8)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(width, width, device=device), nn.ReLU()]
    model: nn.Module = nn.Sequential(*layers)
    kind, _, every = name.partition("-")
    is_local = kind in ("alone", "local", "overlap")
    if not is_local:
        model = DDP(model)
    # Stepping all parameters in one launch: the optimizer is not what is measured.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    if is_local and every:
        local = LocalSteps(every=int(every), overlap=kind == "overlap")
        attach(model, optimizer=optimizer, local=local)
    elif name not in ("alone", "dense"):
        attach(model, sparsify=make_settings(name, density))
    # A few inputs in rotation: the same gradient every time would pile up in the residuals.
    inputs = [torch.randn(batch, width, device=device) for _ in range(5)]
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        model(inputs[taken % len(inputs)]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _repeat(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()


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


def profile(params: int, density: float, device: torch.device, steps: int = 10) -> None:
    """Print the kernels of steps with exdyna, and whether a step waits."""
    step = training_step(params, density, device, "exdyna")
    for _ in range(25):
        step()
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
        print("no step waited for the device")
    except RuntimeError:
        traceback.print_exc()
    finally:
        torch.cuda.set_sync_debug_mode(0)
    torch.cuda.synchronize(device)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize(device)
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        print(found.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=60))


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="5e6,22e6,268e6")
    parser.add_argument("--density", type=float, default=1e-3)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--local-steps", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = [round(float(size)) for size in options.sizes.split(",")]
    with one_rank(device):
        for size in sizes:
            try:
                given = (size, options.density, device, options.repeats)
                if options.local_steps:
                    rows = bench_hook(*given, _LOCAL_ARMS, base="alone", batch=options.batch)
                else:
                    rows = bench_hook(*given, batch=options.batch)
                for row in rows if dist.get_rank() == 0 else []:
                    print(json.dumps(row), flush=True)
            except Exception:
                traceback.print_exc()
        for size in sizes[1:] if options.profile else []:
            print(f"--- {size:,} parameters", flush=True)
            try:
                profile(size, options.density, device)
            except Exception:
                traceback.print_exc()


if __name__ == "__main__":
    main()
