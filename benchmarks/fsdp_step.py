"""Time a training step of a sharded transformer with and without gradherd, on one rank.

One process is enough to see what ordering and the exchange cost besides communication. Steps of the
variants alternate, so that all see the same clocks; figures are medians and their ratio to plain.

    python benchmarks/fsdp_step.py                                  # 350 M parameters on a GPU
    python benchmarks/fsdp_step.py --width 64 --layers 2 --length 32 --tokens 500 --steps 5
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import gradherd as gh
from gradherd.lab.tasks.registry import import_file

Step = Callable[[], None]
gpt2 = import_file(Path(__file__).parents[1] / "studies" / "tasks" / "gpt2.py", "benchmark")


class LanguageModel(nn.Module):
    """A GPT with an output layer of its own."""

    def __init__(self, tokens: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        heads = max(1, width // 64)
        self.body = gpt2.Transformer(tokens, length, width, heads, layers, causal=True)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) token ids to (B, T, V) logits."""
        out: Tensor = self.head(self.body(tokens))
        return out


def variant(
    name: str, args: argparse.Namespace, device: torch.device
) -> tuple[Step, gh.Herd | None]:
    """Return a function that takes one step, and the herd."""
    mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = LanguageModel(args.tokens, args.length, args.width, args.layers).to(device)
    half = torch.bfloat16 if device.type == "cuda" else None
    policy = MixedPrecisionPolicy(half, reduce_dtype=torch.float32)
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=mesh["shard"], mp_policy=policy)
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(args.tokens, (args.batch * 10_000, args.length + 1), generator=draw)
    data = TensorDataset(text)
    unit = 1 if name.startswith("examples") else args.batch
    order = None
    if "batches" in name or "examples" in name:
        order = gh.OrderedSampler(data, "cd-grab", batch_size=args.batch, unit=unit)
    sparsify = gh.ExDyna(1e-3) if "exdyna" in name else None
    rows = "sketch" if "sketch" in name else "auto"
    herd = None
    if order is not None or sparsify is not None:
        # Without a sparsifier FSDP averages alone, and attach takes no mesh.
        herd = gh.attach(model, order=order, sparsify=sparsify, rows=rows,
                         mesh=mesh if sparsify else None)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    loader = iter(DataLoader(data, batch_size=args.batch, sampler=order))

    def step() -> None:
        (batch,) = next(loader)
        batch = batch.to(device)
        optimizer.zero_grad()
        logits = model(batch[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        optimizer.step()

    return step, herd


def measure(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time all variants, two at a time: each of them beside the plain step."""
    results: dict[str, Any] = {}
    for name in args.variants.split(","):
        gc.collect()
        plain, _ = variant("plain", args, device)
        peaks: dict[str, float] = {}
        times: dict[str, list[float]] = {"plain": [], name: []}
        for _ in range(2):
            plain()
        peaks["plain"] = _peak(plain, device)
        step, herd = variant(name, args, device)
        for _ in range(5):  # the first batches are checked
            step()
        # Both models are in memory by now, so only what a step adds is compared.
        peaks[name] = _peak(step, device)
        for _ in range(args.steps):
            for which, one in (("plain", plain), (name, step)):
                times[which].append(_seconds(one, device))
        medians = {which: statistics.median(own) for which, own in times.items()}
        ratios = [b / a for a, b in zip(times["plain"], times[name], strict=True)]
        results[name] = {
            "plain_ms": round(1e3 * medians["plain"], 2),
            "ms": round(1e3 * medians[name], 2),
            "ratio": round(statistics.median(ratios), 3),
            "step_memory_plain_gb": peaks["plain"],
            "step_memory_gb": peaks[name],
            "metrics": {} if herd is None else _small(herd.metrics()),
        }
        print(json.dumps({name: results[name]}), flush=True)
        if herd is not None:
            herd.detach()
        del plain, step, herd
    return results


def _seconds(step: Step, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak(step: Step, device: torch.device) -> float:
    """Return the GB that a step takes beyond what was allocated before."""
    if device.type != "cuda":
        return 0.0
    _synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    _synchronize(device)
    return round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)


def _small(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float | str)}


def main() -> None:
    """Measure and print one line of JSON for each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=50_257)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", default="batches,batches sketch,examples sketch,exdyna")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for key, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511"), ("RANK", "0"),
                       ("WORLD_SIZE", "1")):  # fmt: skip
        os.environ.setdefault(key, value)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    size = sum(p.numel() for p in LanguageModel(args.tokens, args.length, args.width,
                                                args.layers).parameters())  # fmt: skip
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(json.dumps({"parameters": size, "device": where, "torch": torch.__version__,
                      "batch": args.batch, "length": args.length}), flush=True)  # fmt: skip
    measure(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
