"""What the sparse hook adds to a DDP step on this GPU, and where the time goes.

    python benchmarks/hook_step.py --sizes 5e6,22e6,268e6 --profile

One process, one nccl rank; needs torch and Triton only. Prints one JSON line per case. With
`--profile`, also the kernels of a step, and the first place at which a step waits for the device.
"""

import argparse
import json
import traceback

import torch

from gradherd.lab.bench.bench_sparsify import bench_hook, one_rank, training_step


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
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = [round(float(size)) for size in options.sizes.split(",")]
    with one_rank(device):
        for size in sizes:
            try:
                for row in bench_hook(size, options.density, device, options.repeats):
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
