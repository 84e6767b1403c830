"""What few bytes cost a language model that is trained with AdamW: every method in one program.

A GPT-2 on WikiText-2; R workers of 8 blocks of 128 tokens each, warm-up and cosine, bf16 passes,
float32 weights. All workers are rows of the same tensors, so a run takes half a minute on an H200.
`--bytes 256` trains on blocks of 256 bytes of the same text instead of GPT-2's tokens.
Exchanges are gradherd's own (`VirtualWorkers`, `SharedWeights`), with the bytes that ranks would
send; peers that gradherd does not have are in `few_bytes_peers.py`. Usage:

    python -m benchmarks.few_bytes --out few-bytes.jsonl [--arms dense,local-4] [--seeds 0,1,2]
        [--epochs 10] [--workers 8] [--blocks 8] [--width 192] [--layers 4] [--head 32]
        [--bytes 256] [--limit 24000] [--data tokens.npz] [--part 0/4]

Arms are names of `ARMS`, with settings after a colon if they differ: local-4:lr=2e-3:outer_lr=0.9.
Writes one line of JSON per run: test perplexity after each epoch, bytes sent by a worker, and how
many times fewer that is than the float32 all-reduce of every step.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from benchmarks.few_bytes_peers import DeMo, FewBitGradients, SparseLoCo, TopK, frozen_root
from torch import Tensor

from gradherd.comm.sliced_mean import mean_bytes
from gradherd.lab.train.exchanges import LowRankWorkers
from gradherd.local.exchange import SharedWeights
from gradherd.local.outer import OuterOptimizer
from gradherd.local.settings import LocalSteps
from gradherd.sparsify.settings import make_settings
from gradherd.sparsify.virtual_workers import VirtualWorkers

TOKENS, LENGTH = 50_257, 128
"""Words of GPT-2's vocabulary, tokens of a block."""
BETAS, DECAY, WARMUP, DENSE_LR = (0.9, 0.999), 0.01, 0.05, 1e-3


# --- The model, of all workers at once ---------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """A GPT-2 with its head tied to its embedding."""

    width: int
    layers: int
    head: int = 32
    """Width of an attention head."""
    vocabulary: int = TOKENS
    length: int = LENGTH
    """T, tokens of a block."""

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter."""
        c = self.width
        sizes: dict[str, tuple[int, ...]] = {
            "tokens": (self.vocabulary, c), "places": (self.length, c),
        }  # fmt: skip
        for layer in range(self.layers):
            block = {
                "norm1": (c,), "norm1_bias": (c,), "qkv": (c, 3 * c), "qkv_bias": (3 * c,),
                "out": (c, c), "out_bias": (c,), "norm2": (c,), "norm2_bias": (c,),
                "up": (c, 4 * c), "up_bias": (4 * c,), "down": (4 * c, c), "down_bias": (c,),
            }  # fmt: skip
            sizes |= {f"{layer}.{name}": size for name, size in block.items()}
        return sizes | {"norm": (c,), "norm_bias": (c,)}

    def start(self, seed: int, device: torch.device) -> Tensor:
        """Return (D,) weights as GPT-2 draws them."""
        generator = torch.Generator(device=device).manual_seed(seed)
        parts = []
        for name, size in self.sizes().items():
            leaf = name.split(".")[-1]
            if leaf.startswith("norm") and not leaf.endswith("bias"):
                parts.append(torch.ones(math.prod(size), device=device))
            elif leaf.endswith("bias"):
                parts.append(torch.zeros(math.prod(size), device=device))
            else:
                std = 0.02 / math.sqrt(2 * self.layers) if leaf in ("out", "down") else 0.02
                draw = torch.randn(math.prod(size), device=device, generator=generator)
                parts.append(draw * std)
        return torch.cat(parts)

    def losses(self, flat: Tensor, blocks: Tensor) -> Tensor:
        """Return (R,) mean losses of (R, D) weights on (R, b, T) blocks of tokens."""
        workers, count = blocks.shape[:2]
        sizes = self.sizes()
        # Split, not sliced: the gradient of a split is one concatenation.
        parts = flat.split([math.prod(size) for size in sizes.values()], dim=1)
        named = zip(sizes.items(), parts, strict=True)
        p = {name: part.view(workers, *size) for (name, size), part in named}
        width, length, words = self.width, self.length, self.vocabulary
        low = torch.bfloat16 if flat.is_cuda else flat.dtype  # a CPU may only emulate it

        def norm(x: Tensor, name: str) -> Tensor:
            return F.layer_norm(x, (width,)) * p[name][:, None] + p[f"{name}_bias"][:, None]

        def linear(x: Tensor, name: str) -> Tensor:
            bias, weight = p[f"{name}_bias"][:, None].to(low), p[name].to(low)
            return torch.baddbmm(bias, x.to(low), weight)

        shift = words * torch.arange(workers, device=blocks.device)[:, None, None]
        table = p["tokens"].reshape(workers * words, width)
        x = F.embedding((blocks + shift).view(-1), table).view(workers, count, length, width)
        x = (x + p["places"][:, None]).view(workers, count * length, width)
        for layer in range(self.layers):
            heads = linear(norm(x, f"{layer}.norm1"), f"{layer}.qkv")
            heads = heads.view(workers * count, length, 3, width // self.head, self.head)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            mixed = mixed.reshape(workers, count * length, width)
            x = x + linear(mixed, f"{layer}.out").float()
            inner = linear(norm(x, f"{layer}.norm2"), f"{layer}.up")
            x = x + linear(F.gelu(inner, approximate="tanh"), f"{layer}.down").float()
        x = norm(x, "norm").to(low).view(workers, count, length, width)[:, :, :-1]
        logits = torch.bmm(x.reshape(workers, -1, width), p["tokens"].to(low).transpose(1, 2))
        targets = blocks[:, :, 1:].reshape(-1)
        loss = F.cross_entropy(logits.view(-1, words).float(), targets, reduction="none")
        return loss.view(workers, -1).mean(1)


def adamw(w: Tensor, grad: Tensor, m: Tensor, v: Tensor, rate: Tensor, corrections: Tensor) -> None:
    """One step of AdamW in place; `corrections` are 1 - beta ** step."""
    m.lerp_(grad, 1 - BETAS[0])
    v.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
    denominator = (v / corrections[1]).sqrt() + 1e-8
    w.mul_(1 - rate * DECAY).sub_(rate * (m / corrections[0]) / denominator)


# --- Methods -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """A method and its settings."""

    kind: str
    """dense, gradients (exchanged at every step), preconditioned (the same, each divided by a
    second moment of all workers first), local, or a peer: sparseloco, demo, onebit-adam."""
    method: str = "dense"
    density: float | None = None
    values: str = "fp32"
    every: int = 1
    """Steps between two exchanges."""
    lr: float | None = None
    """None is 1e-3 for dense training, times `LocalSteps.lr_factor` of local steps."""
    outer_lr: float = 1.0
    outer_momentum: float | None = None
    """None is the default of `LocalSteps`."""
    decay: float = 1.0
    senders: bool = False
    """SparseLoCo: divide by how many workers have sent a coordinate instead of by all."""
    k: int = 5
    """DeMo: coefficients of a chunk."""
    warm: float = 0.15
    """1-bit Adam: share of the steps before its second moment is frozen."""
    floor: float = 0.1
    """1-bit Adam: `frozen_root`."""

    def local_steps(self) -> LocalSteps:
        """Return the settings of the outer step, and of what is sent."""
        given: dict[str, Any] = {"values": self.values, "outer_lr": self.outer_lr}
        if self.outer_momentum is not None:
            given["outer_momentum"] = self.outer_momentum
        return LocalSteps(every=self.every, **given)


LOCAL = Arm("local", values="int1")
ARMS = {
    "dense": Arm("dense"),
    "local-2": replace(LOCAL, every=2),
    "local-4": replace(LOCAL, every=4),
    "local-8": replace(LOCAL, every=8),
    "local-16": replace(LOCAL, every=16),
    "local-4-fp32": replace(LOCAL, every=4, values="fp32"),
    "bits-2": Arm("gradients", values="int2"),
    "bits-1": Arm("gradients", values="int1"),
    "exdyna-0.01": Arm("gradients", "exdyna", 0.01),
    "exdyna-0.05-int4": Arm("gradients", "exdyna", 0.05, "int4"),
    "exdyna-0.1-int2": Arm("gradients", "exdyna", 0.1, "int2"),
    "preconditioned-0.01": Arm("preconditioned", "exdyna", 0.01),
    "preconditioned-0.05-int4": Arm("preconditioned", "exdyna", 0.05, "int4"),
    "topk": Arm("gradients", "own-topk", 0.002),
    "demo": Arm("demo", lr=3e-4),
    "powersgd": Arm("gradients", "powersgd", 0.015),
    "diloco": Arm("local", every=15, lr=1e-3, outer_lr=0.7, outer_momentum=0.9),
    "diloco-int4": Arm("local", values="int4", every=15, lr=1e-3, outer_lr=0.7,
                       outer_momentum=0.9),
    "sparseloco": Arm("sparseloco", density=0.03, every=15, lr=2.8e-3, outer_momentum=0.0,
                      decay=0.95),
    "sparseloco-senders": Arm("sparseloco", density=0.03, every=15, lr=2.8e-3, outer_momentum=0.0,
                              decay=0.95, senders=True),
    "onebit-adam": Arm("onebit-adam", values="int1"),
}  # fmt: skip


def rate_at(step: int, steps: int) -> float:
    """Return the factor of the learning rate: warm-up, then cosine."""
    warm = int(WARMUP * steps)
    if step <= warm:
        return step / max(1, warm)
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def exchange_of(arm: Arm, shape: Shape, workers: int, device: torch.device) -> Any:
    """Return what averages (R, D) tensors, with the bytes of each worker in its metrics."""
    sizes = shape.sizes()
    dim = sum(map(math.prod, sizes.values()))
    if arm.kind == "sparseloco":
        return SparseLoCo(arm.density or 0, arm.decay, dim, workers, device, senders=arm.senders)
    if arm.kind == "demo":
        return DeMo(arm.k, sizes.values(), workers, device)
    if arm.method == "own-topk":
        return TopK(arm.density or 0, dim, workers, device)
    if arm.method == "powersgd":
        shapes = [size if len(size) == 2 else (1, *size) for size in sizes.values()]
        return LowRankWorkers(shapes, arm.density or 0, workers, device)  # type: ignore[arg-type]
    if arm.method == "dense":
        return FewBitGradients(arm.values, dim, workers, device)
    settings = make_settings(arm.method, arm.density, values=arm.values, dense_below=0)
    exchange = VirtualWorkers(settings, dim, workers, device=device)
    exchange.measure_norms = False
    return exchange


@functools.cache
def fast_functions(shape: Shape, device: str) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Return losses and AdamW, compiled once for all runs on a GPU."""
    if device != "cuda":
        return shape.losses, adamw
    return torch.compile(shape.losses, dynamic=False), torch.compile(adamw, dynamic=False)


# --- A run -------------------------------------------------------------------------------------


class Run:
    """One arm with one seed."""

    def __init__(
        self, arm: Arm, shape: Shape, workers: int, blocks: int, seed: int,
        tokens: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        self._arm, self._shape, self._workers, self._blocks = arm, shape, workers, blocks
        self._train, self._test = tokens
        device = self._train.device
        self._generator = torch.Generator(device=device).manual_seed(1000 + seed)
        self._shared = shape.start(seed, device)
        dim = len(self._shared)
        own = workers if arm.kind in ("local", "sparseloco") else 1
        local = self._local = arm.local_steps()
        self._exchange: Any = None
        if arm.kind == "local":
            # Rows are padded as vectors of an exchange are; `_weights` is what counts of them.
            self._exchange = SharedWeights.simulate(local, dim, 0, 0, workers, device=device)
            self._rows = torch.zeros(workers, self._exchange.numel, device=device)
            self._rows[:, :dim] = self._shared
            self._exchange.start(self._rows[0].clone())
            self._shared, self._weights = self._exchange.outer.shared[:dim], self._rows[:, :dim]
        else:
            self._weights = self._shared.repeat(own, 1)
            if arm.kind != "dense":
                self._exchange = exchange_of(arm, shape, workers, device)
            self._outer = OuterOptimizer(local, self._shared)
            self._starts = self._weights.clone()
        self._m, self._v = torch.zeros_like(self._weights), torch.zeros_like(self._weights)
        factor = local.lr_factor(workers) if arm.kind == "local" else 1.0
        self.lr = DENSE_LR * factor if arm.lr is None else arm.lr
        self._dense_bytes = mean_bytes(dim, workers)
        self.bytes, self._step = 0, 0
        self._losses, self._adamw = fast_functions(shape, device.type)

    def train(self, epochs: int, name: str = "") -> dict[str, Any]:
        """Return perplexities and bytes, and print what there is of them after each epoch."""
        batch = self._workers * self._blocks
        each = len(self._train) // batch
        self._steps = epochs * each
        curve, begin = [], time.perf_counter()
        for _ in range(epochs):
            order = torch.randperm(
                len(self._train), generator=self._generator, device=self._train.device
            )
            for chosen in order[: each * batch].view(each, self._workers, self._blocks):
                self._step += 1
                self._take_step(self._train[chosen])
            curve.append(round(self._perplexity(), 3))
            print(f"  {name}: {curve}", file=sys.stderr, flush=True)
        dense = self._dense_bytes * self._steps
        return {
            "perplexity": curve, "best": min(curve), "last": curve[-1], "steps": self._steps,
            "bytes": self.bytes, "fewer": round(dense / self.bytes, 1),
            "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip

    def _grads(self, weights: Tensor, blocks: Tensor) -> Tensor:
        leaf = weights.detach().requires_grad_()
        (grad,) = torch.autograd.grad(self._losses(leaf, blocks).sum(), leaf)
        return grad

    def _take_step(self, blocks: Tensor) -> None:
        arm, exchange = self._arm, self._exchange
        device = blocks.device
        rate = torch.tensor(self.lr * rate_at(self._step, self._steps), device=device)
        corrections = torch.tensor([1 - beta**self._step for beta in BETAS], device=device)
        if arm.kind == "onebit-adam":
            self._onebit_adam(blocks, rate, corrections)
            return
        if arm.kind == "preconditioned":
            self._preconditioned(blocks, rate, corrections)
            return
        if arm.kind == "demo":
            grads = self._grads(self._weights.expand(self._workers, -1), blocks)
            self._weights.mul_(1 - rate * DECAY).sub_(rate * exchange.step(grads).sign())
            self.bytes += exchange.metrics["bytes"]
            return
        if arm.kind == "dense":
            grad = self._grads(self._weights, blocks.view(1, -1, self._shape.length))
            self.bytes += self._dense_bytes
        elif arm.kind == "gradients":
            grads = self._grads(self._weights.expand(self._workers, -1), blocks)
            grad = exchange.step(grads)[None]
            self.bytes += exchange.metrics["bytes"]
        else:
            grad = self._grads(self._weights, blocks)
        self._adamw(self._weights, grad, self._m, self._v, rate, corrections)
        due = self._step % arm.every == 0 or self._step == self._steps
        if arm.kind == "local" and due:
            exchange.exchange(list(self._rows))  # in place
            self.bytes += exchange.bytes
        elif arm.kind == "sparseloco" and due:
            self._outer.step(exchange.step(self._starts - self._weights))
            self.bytes += exchange.metrics["bytes"]
            self._weights.copy_(self._shared.expand_as(self._weights))
            self._starts.copy_(self._weights)

    def _onebit_adam(self, blocks: Tensor, rate: Tensor, corrections: Tensor) -> None:
        """Adam at first; then its second moment is frozen, and workers send momenta in one bit.

        Tang et al., "1-bit Adam", arXiv:2102.02888.
        """
        grads = self._grads(self._weights.expand(self._workers, -1), blocks)
        if self._step <= max(1, self._arm.warm * self._steps):
            self._adamw(self._weights, grads.mean(0)[None], self._m, self._v, rate, corrections)
            self.bytes += self._dense_bytes
            self._frozen = frozen_root(self._v / corrections[1], self._arm.floor)
            return
        momenta = torch.lerp(self._m.expand_as(grads), grads, 1 - BETAS[0])
        self._m = self._exchange.step(momenta)[None]
        self.bytes += self._exchange.metrics["bytes"]
        self._weights.mul_(1 - rate * DECAY).sub_(rate * self._m / self._frozen)

    def _preconditioned(self, blocks: Tensor, rate: Tensor, corrections: Tensor) -> None:
        """Residuals of what would move weights: gradients over a root that all workers share.

        The rate enters before the residual, so what waits is not scaled by a later one; momentum
        follows the exchange. The mean of squares is up to date at every step, and paid for as an
        all-reduce in bf16 of every 50th: more than that would hardly change it.
        """
        grads = self._grads(self._weights.expand(self._workers, -1), blocks)
        self._v.mul_(BETAS[1]).add_(grads.square().mean(0), alpha=1 - BETAS[1])
        mean = self._exchange.step(grads.div_((self._v / corrections[1]).sqrt() + 1e-8).mul_(rate))
        self._m.lerp_(mean[None], 1 - BETAS[0])
        self._weights.mul_(1 - rate * DECAY).sub_(self._m)
        self.bytes += self._exchange.metrics["bytes"] + self._dense_bytes // (2 * 50)

    @torch.no_grad()
    def _perplexity(self) -> float:
        local = self._arm.kind in ("local", "sparseloco")
        weights = self._shared[None] if local else self._weights[:1]
        total = 0.0
        for blocks in self._test.split(64):
            total += float(self._shape.losses(weights, blocks[None])) * len(blocks)
        return math.exp(min(50.0, total / len(self._test)))


def read_tokens(path: Path | None, length: int, device: torch.device) -> tuple[Tensor, ...]:
    """Return training and test blocks, (n, 128) each of tokens, or (n, length) of bytes."""
    if length:
        from gradherd.lab.tasks.data_files import find_dataset

        folder = find_dataset("wikitext-2", None)
        streams = (folder.text(f"{part}.txt").encode() for part in ("train", "test"))
        parts = (np.frombuffer(text, np.uint8).astype(np.int64) for text in streams)
        cut = (part[: len(part) // length * length].reshape(-1, length) for part in parts)
        return tuple(torch.from_numpy(blocks).to(device) for blocks in cut)
    if path is None:
        from studies.tasks.gpt2 import WikiText2GPT2

        split = WikiText2GPT2().load()
        return split.train[0].to(device), split.test[0].to(device)
    data = np.load(path, allow_pickle=False)
    return tuple(torch.from_numpy(data[k].astype(np.int64)).to(device) for k in ("train", "test"))


def arm_of(text: str) -> tuple[str, Arm]:
    """Return an arm and its label, such as local-4:lr=2e-3."""
    name, *changes = text.split(":")
    arm = ARMS[name]
    for change in changes:
        key, value = change.split("=")
        kind = {"every": int, "k": int, "method": str, "values": str, "kind": str}.get(key, float)
        arm = replace(arm, **{key: kind(value)})
    return text, arm


def main() -> None:
    """Run all arms with all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=8, help="of a worker's batch")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--head", type=int, default=32)
    parser.add_argument("--bytes", type=int, default=0, help="length of blocks of bytes")
    parser.add_argument("--limit", type=int, help="train on so many blocks")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--part", default="0/1", help="which runs of how many shares")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention returns NaN for some shapes (pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    train, test = read_tokens(options.data, options.bytes, torch.device(options.device))
    tokens = train[: options.limit], test
    sizes = (256, options.bytes) if options.bytes else (TOKENS, LENGTH)
    shape = Shape(options.width, options.layers, options.head, *sizes)
    runs = [
        (text, int(seed)) for seed in options.seeds.split(",") for text in options.arms.split(",")
    ]
    part, parts = map(int, options.part.split("/"))
    for text, seed in runs[part::parts]:
        label, arm = arm_of(text)
        torch.manual_seed(seed)
        record = {"arm": label, "seed": seed, "workers": options.workers, "epochs": options.epochs}
        run = Run(arm, shape, options.workers, options.blocks, seed, tokens)
        record |= {"blocks": options.blocks, "length": shape.length, "lr": run.lr}
        record |= {"parameters": sum(map(math.prod, shape.sizes().values()))}
        record |= run.train(options.epochs, f"{label}, seed {seed}")
        line = json.dumps(record)
        print(line, flush=True)
        with options.out.open("a") as file:
            file.write(line + "\n")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
