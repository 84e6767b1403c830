"""What few bytes cost language models of several sizes on text seen once.

A GPT-2 (`few_bytes.Shape`), blocks of 512 tokens of Linux' sources, R workers of 16 blocks: 65,536
tokens a step with eight. All workers are rows of the same tensors; what they exchange is rounded
as gradherd rounds it, both ways, with what rounding takes kept. Usage:

    python -m benchmarks.few_bytes_size --text FOLDER --size 98m --steps 560 --out size.jsonl
        dense:lr=1e-3 local:H=4:bits=1:lr=5e-4 grads:bits=1:lr=5e-4 [--limit-s 570]

FOLDER has cut.txt.xz and tok.json; tokens are made once, into --tokens. An arm is a name and
settings of `Arm`. Names that begin with `dense` average the gradients of all workers at every step
(one set of weights); with `grads` they do so in few bits; others take H steps alone. A finished
arm is a line of JSON in --out, and is not run again. After --limit-s seconds a running arm stops,
marked unfinished; an arm that would not end by then is not begun. Loss is in nats, of the shared
weights on held-out text, at each eighth of the steps (128 blocks) and at the end (512).

Letters: R workers, D coordinates, G groups of 256 of them.
"""

import argparse
import functools
import itertools
import json
import lzma
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.few_bytes import Shape
from torch import Tensor

from gradherd.comm.message_sizes import GROUP
from gradherd.comm.sliced_mean import mean_bytes

SIZES = {"11m": (256, 8, 64), "33m": (512, 8, 64), "98m": (768, 12, 64)}
"""Width, layers, width of a head; with 16,384 words."""
EPSILON = 1e-8
MATRICES = ("qkv", "out", "up", "down")
"""What Muon takes, of each layer."""
POINTS = 8
"""How often a run is evaluated."""


@dataclass(frozen=True)
class Arm:
    """A method and its settings."""

    H: int = 4
    """Steps of a phase; 0 averages gradients at every step."""
    lr: float = 1e-3
    mom: float = 0.0
    """Nesterov momentum of the outer step."""
    olr: float = 1.0
    """Rate of the outer step."""
    bits: int = 32
    """32, 4, 2 or 1 for each coordinate, both ways."""
    keep: bool | None = None
    """Whether what rounding takes stays in the worker's own weights; None is yes, if it rounds."""
    early: float = 0.0
    """Share of the steps, at the beginning, with an exchange after each of them."""
    earlymom: bool = False
    """Whether `mom` and `olr` hold in that time, too; else it averages."""
    grow: float = 0.0
    """Share of the steps, after `early`, in which phases grow from 1 to H."""
    b1: float = 0.9
    b2: float = 0.999
    wu: float = 0.05
    """Warm-up: a share of the steps, or steps if at least 1."""
    clip: float = 0.0
    """Norm to clip the gradient of each worker to, or the mean of dense training."""
    wd: float = 0.01
    grads: bool = False
    """Exchange gradients; one AdamW on their mean."""
    accum: int = 1
    """Batches of gradients to a step."""
    oracle: bool = False
    """AdamW of each worker divides by the second moment of the mean gradient."""
    opt: str = "adamw"
    """adamw, or muon for hidden matrices."""
    mu: float = 0.95
    """Momentum of Muon."""
    rho: bool = False
    """Also record the median of sqrt(own second moment / that of the mean gradient)."""
    steps: int = 0
    """None of --steps, if positive."""
    seed: int = 5

    @property
    def kind(self) -> str:
        """Dense, grads or local."""
        return "grads" if self.grads else "local" if self.H else "dense"

    @property
    def keeps(self) -> bool:
        """Whether workers go on with what rounding took."""
        return self.bits < 32 and self.kind == "local" and self.keep is not False


def arm_of(text: str, **defaults: Any) -> Arm:
    """Return the arm of a text such as local:H=4:bits=1."""
    name, *changes = text.split(":")
    given: dict[str, Any] = dict(defaults)
    if name.startswith("dense"):
        given["H"] = 0
    if name.startswith("grads"):
        given |= {"H": 0, "grads": True}
    for change in changes:
        key, value = change.split("=")
        if key in ("keep", "earlymom", "grads", "oracle", "rho"):
            given[key] = bool(int(value))
        elif key in ("H", "bits", "accum", "steps", "seed"):
            given[key] = int(value)
        else:
            given[key] = value if key == "opt" else float(value)
    arm = Arm(**given)
    if arm.bits not in (1, 2, 4, 32) or arm.opt not in ("adamw", "muon"):
        raise ValueError(f"no such arm: {text}")
    if (arm.oracle or arm.rho) and (arm.opt == "muon" or arm.kind != "local"):
        raise ValueError(f"oracle and rho are for local AdamW: {text}")
    if (arm.bits < 32 and arm.kind == "dense") or (arm.accum > 1 and arm.kind == "local"):
        raise ValueError(f"bits go with grads or H, accum with dense or grads: {text}")
    return arm


@dataclass(frozen=True)
class Padded(Shape):
    """A model whose weights are padded to whole groups."""

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter; the last one is not used."""
        sizes = super().sizes()
        missing = -sum(map(math.prod, sizes.values())) % GROUP
        return sizes | {"padding_bias": (missing,)} if missing else sizes

    @property
    def dim(self) -> int:
        """D."""
        return sum(map(math.prod, self.sizes().values()))

    def matrices(self, flat: Tensor) -> list[Tensor]:
        """Return views of (R, D) as (R, layers, rows, columns), one for each of `MATRICES`."""
        begins, at = {}, 0
        for name, size in self.sizes().items():
            begins[name] = at
            at += math.prod(size)
        first = begins["0.norm1"]
        each = (begins["norm"] - first) // self.layers
        layers = flat[:, first : first + each * self.layers].unflatten(1, (self.layers, each))
        views = []
        for name in MATRICES:
            size, begin = self.sizes()[f"0.{name}"], begins[f"0.{name}"] - first
            views.append(layers[:, :, begin : begin + math.prod(size)].unflatten(2, size))
        return views


# --- Steps, all workers at once ----------------------------------------------------------------
# `k`: rate, 1 - b1 ** t, 1 - b2 ** t, 1 - b1, b2, wd, 1 - mu, clip. `scale`: (R, 1) of clipping.


def clip_scale(grads: Tensor, k: Tensor) -> Tensor:
    """Return (R, 1) factors that clip the norm of each row."""
    norms = grads.square().sum(1, keepdim=True).sqrt()
    return (k[7] / (norms + 1e-6)).clamp(max=1.0)


def adamw(w: Tensor, grads: Tensor, m: Tensor, v: Tensor, k: Tensor, scale: Tensor) -> None:
    """One step in place."""
    grads = grads * scale
    m.lerp_(grads, k[3])
    v.mul_(k[4]).add_(grads * grads * (1 - k[4]))
    w.mul_(1 - k[0] * k[5]).sub_(k[0] * (m / k[1]) / ((v / k[2]).sqrt() + EPSILON))


def adamw_where(
    w: Tensor, grads: Tensor, m: Tensor, v: Tensor, k: Tensor, scale: Tensor, mine: Tensor
) -> None:
    """One step in place of the coordinates that (D,) flags name."""
    grads = grads * scale
    new_m = torch.where(mine, torch.lerp(m, grads, k[3]), m)
    new_v = torch.where(mine, v * k[4] + grads * grads * (1 - k[4]), v)
    step = k[0] * (new_m / k[1]) / ((new_v / k[2]).sqrt() + EPSILON)
    w.copy_(torch.where(mine, w * (1 - k[0] * k[5]) - step, w))
    m.copy_(new_m)
    v.copy_(new_v)


def oracle(w: Tensor, grads: Tensor, m: Tensor, v: Tensor, k: Tensor, scale: Tensor) -> None:
    """One step of AdamW in place, with (1, D) second moments of the mean gradient."""
    grads = grads * scale
    second_moment(v, grads, k)
    m.lerp_(grads, k[3])
    w.mul_(1 - k[0] * k[5]).sub_(k[0] * (m / k[1]) / ((v / k[2]).sqrt() + EPSILON))


def second_moment(v: Tensor, grads: Tensor, k: Tensor) -> None:
    """Update (1, D) second moments of the mean of (R, D) gradients."""
    mean = grads.mean(0, keepdim=True)
    v.mul_(k[4]).add_(mean * mean * (1 - k[4]))


def muon(w: Tensor, grads: Tensor, m: Tensor, k: Tensor, scale: Tensor) -> None:
    """One step in place of (R, layers, rows, columns); the rate is AdamW's (torch.optim.Muon)."""
    grads = grads * scale[:, :, None, None]
    m.lerp_(grads, k[6])
    update = torch.lerp(grads, m, 1 - k[6])
    rate = k[0] * 0.2 * math.sqrt(max(w.shape[2:]))
    w.mul_(1 - k[0] * k[5]).sub_(rate * orthogonal(update.flatten(0, 1)).view(w.shape).float())


def orthogonal(matrices: Tensor) -> Tensor:
    """Bring singular values of (n, rows, columns) near 1, in bfloat16, by Newton-Schulz."""
    x = (matrices / matrices.square().sum((1, 2), keepdim=True).sqrt().clamp(min=1e-7)).bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        gram = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, gram, x, beta=3.4445)
    return x.mT if tall else x


# --- Exchanges ---------------------------------------------------------------------------------


def levels_of(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest magnitude of each group: (R, D) -> (R, G) twice."""
    groups = x.view(len(x), -1, GROUP).abs()
    if bits == 1:
        low = high = groups.mean(2)
    elif bits == 4:
        low, high = groups.amin(2), groups.amax(2)
    else:  # near those that lose the least squares, which packing.py finds by sorting
        total = groups.sum(2)
        cut = total / GROUP
        for _ in range(4):
            above = (groups > cut[:, :, None]).float()
            count, sum_above = above.sum(2), (groups * above).sum(2)
            low = (total - sum_above) / (GROUP - count).clamp(min=1)
            high = torch.where(count > 0, sum_above / count.clamp(min=1), low)
            cut = (low + high) / 2
    return low.bfloat16().float(), high.bfloat16().float()


def rounded(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return (R, D) values at the levels of their groups."""
    groups, low, high = x.view(len(x), -1, GROUP), low[:, :, None], high[:, :, None]
    if bits == 1:
        return torch.where(groups < 0, -low, low).view(x.shape)
    last = 2 ** (bits - 1) - 1
    step = (high - low) / last
    code = ((groups.abs() - low) / step.clamp(min=1e-30)).round().clamp(0, last)
    magnitudes = low + code * step
    return torch.where(groups < 0, -magnitudes, magnitudes).view(x.shape)


def send(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the levels of (R, D) values, and the (D,) mean of what arrives."""
    low, high = levels_of(x, bits)
    return low, high, rounded(x, low, high, bits).mean(0)


def take_sent(x: Tensor, low: Tensor, high: Tensor, bits: int) -> None:
    """Leave in (R, D) values what rounding took."""
    x.sub_(rounded(x, low, high, bits))


def mean_difference(shared: Tensor, w: Tensor) -> Tensor:
    """Return the (D,) mean of (weights before - weights after), in float32."""
    return (shared - w).mean(0)


@functools.cache
def fast_functions(shape: Padded, compiled: bool) -> dict[str, Callable[..., Any]]:
    """Return the functions above, compiled once for all arms."""
    plain = (
        clip_scale, adamw, adamw_where, oracle, second_moment, muon, send, take_sent,
        mean_difference,
    )  # fmt: skip
    functions: dict[str, Callable[..., Any]] = {f.__name__: f for f in plain}
    functions["losses"] = shape.losses
    if not compiled:
        return functions
    for limit in ("recompile_limit", "cache_size_limit"):
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    return {name: torch.compile(f, dynamic=False) for name, f in functions.items()}


class Rounding:
    """The mean of R workers' values in few bits, both ways; the owner of a slice rounds again."""

    def __init__(self, dim: int, workers: int, bits: int, functions: dict[str, Any], device: Any):
        self._bits, self._f = bits, functions
        self.owner_error = torch.zeros(1, dim, device=device)

    def mean(self, waiting: Tensor) -> Tensor:
        """Return the (D,) mean of (R, D) values, of which what was not sent stays in them."""
        low, high, mean = self._f["send"](waiting, self._bits)
        self._f["take_sent"](waiting, low, high, self._bits)
        error = self.owner_error.add_(mean)
        low, high, mean = self._f["send"](error, self._bits)
        self._f["take_sent"](error, low, high, self._bits)
        return mean


def bytes_of(dim: int, workers: int, bits: int) -> int:
    """Return what a worker sends in one exchange."""
    whole = mean_bytes(dim, workers)
    if bits == 32:
        return whole
    return round(whole * (bits + (1 if bits == 1 else 2) * 16 / GROUP) / 32)


# --- A run -------------------------------------------------------------------------------------


def rate_at(step: int, steps: int, warm_up: float) -> float:
    """Return the factor of the learning rate: warm-up, then cosine to zero."""
    warm = max(1, int(warm_up if warm_up >= 1 else warm_up * steps))
    if step <= warm:
        return step / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def exchanges_of(arm: Arm, steps: int) -> list[bool]:
    """Return for each step whether an exchange follows it."""
    due, last, early = [], 0, arm.early * steps
    for step in range(1, steps + 1):
        phase: float = arm.H if arm.kind == "local" else arm.accum
        if arm.kind == "local" and step <= early:
            phase = 1
        elif arm.kind == "local" and arm.grow:
            phase = round(1 + (arm.H - 1) * min(1.0, (step - early) / (arm.grow * steps)))
        due.append(step - last >= phase or step == steps)
        last = step if due[-1] else last
    return due


class Run:
    """One arm."""

    def __init__(
        self, arm: Arm, shape: Padded, steps: int, workers: int, device: torch.device,
        *, compiled: bool,
    ) -> None:  # fmt: skip
        self.arm, self.shape, self.steps, self.workers = arm, shape, steps, workers
        self._f = fast_functions(shape, compiled)
        self.shared = shape.start(arm.seed, device)
        dim = len(self.shared)
        rows = workers if arm.kind == "local" else 1
        # With one set of weights, they are the shared ones.
        self.weights = self.shared.repeat(rows, 1) if rows > 1 else self.shared[None]
        self._m = torch.zeros_like(self.weights)
        self._v = torch.zeros(1 if arm.oracle else rows, dim, device=device)
        self._mean_v = torch.zeros(1, dim, device=device) if arm.rho else None
        self._momentum = torch.zeros(dim, device=device) if arm.mom else None
        self._wide = torch.zeros(workers, dim, device=device) if arm.kind == "grads" else None
        self._rounding = None
        if arm.bits < 32:
            self._rounding = Rounding(dim, workers, arm.bits, self._f, device)
        needs = arm.bits < 32 and not arm.keeps
        # (R, D): what rounding took, and gradients that wait for their step.
        self.residual = torch.zeros(workers, dim, device=device) if needs else None
        self._sum = None
        if self.residual is None and arm.kind != "local" and arm.accum > 1:
            self._sum = torch.zeros(1, dim, device=device)
        self._rest = None
        if arm.opt == "muon":
            flags = torch.ones(1, dim, dtype=torch.bool, device=device)
            for view in shape.matrices(flags):
                view.fill_(False)
            self._rest = flags[0]
        self._due = exchanges_of(arm, steps)
        # A step reads a row on the device: making one there would wait for the device.
        self._plan = torch.tensor(self._schedule(), dtype=torch.float32).to(device)
        self._k = torch.zeros(8, device=device)
        self._ones = torch.ones(max(rows, workers), 1, device=device)
        self.step, self.bytes = 0, 0
        self._bytes_each = bytes_of(dim, workers, arm.bits)
        self._dense_bytes = bytes_of(dim, workers, 32)

    def _schedule(self) -> list[list[float]]:
        arm, taken, plan = self.arm, 0, []
        for step in range(1, self.steps + 1):
            taken += arm.kind == "local" or self._due[step - 1]
            t = max(1, taken)
            rate = arm.lr * rate_at(step, self.steps, arm.wu)
            corrections = 1 - arm.b1**t, 1 - arm.b2**t
            plan.append([rate, *corrections, 1 - arm.b1, arm.b2, arm.wd, 1 - arm.mu, arm.clip])
        return plan

    @property
    def fewer(self) -> float:
        """How many times fewer bytes than an all-reduce of every step."""
        return self._dense_bytes * self.step / max(1, self.bytes)

    def take_step(self, blocks: Tensor) -> None:
        """Train on (R, b, T) tokens."""
        arm = self.arm
        self._k.copy_(self._plan[self.step])
        due = self._due[self.step]
        self.step += 1
        self.bytes += due * self._bytes_each
        if arm.kind == "dense":
            blocks = blocks.view(1, -1, blocks.shape[2])
            weights = self.weights
        elif arm.kind == "grads":
            weights = self._wide.copy_(self.weights)
        else:
            weights = self.weights
        leaf = weights.detach().requires_grad_()
        (grads,) = torch.autograd.grad(self._f["losses"](leaf, blocks).sum(), leaf)
        del leaf, weights
        with torch.no_grad():
            if arm.kind == "local":
                self._update(grads)
                del grads
                if due:
                    self._exchange()
            else:
                self._step_on_mean(grads, due)

    def _scale(self, grads: Tensor) -> Tensor:
        if self.arm.clip:
            return self._f["clip_scale"](grads, self._k)
        return self._ones[: len(grads)]

    def _step_on_mean(self, grads: Tensor, due: bool) -> None:
        """One set of weights; its gradient is the mean of all."""
        arm = self.arm
        if self.residual is not None:
            scale = self._scale(grads) / arm.accum
            self.residual.addcmul_(grads, scale)
            del grads
            if due:
                self._update(self._rounding.mean(self.residual)[None], clip=False)
            return
        if len(grads) > 1:
            grads = (grads * self._scale(grads)).mean(0, keepdim=True)
        if self._sum is not None:
            grads = self._sum.add_(grads, alpha=1 / arm.accum)
        if due:
            self._update(grads, clip=arm.kind == "dense")
            if self._sum is not None:
                self._sum.zero_()

    def _update(self, grads: Tensor, clip: bool = True) -> None:
        """Take a step with every row of the weights."""
        arm, k = self.arm, self._k
        scale = self._scale(grads) if clip else self._ones[: len(grads)]
        state = (self.weights, grads, self._m, self._v, k, scale)
        if self._mean_v is not None:
            self._f["second_moment"](self._mean_v, grads * scale if arm.clip else grads, k)
        if self._rest is not None:
            self._f["adamw_where"](*state, self._rest)
            parts = (self.shape.matrices(x) for x in (self.weights, grads, self._m))
            for w, g, m in zip(*parts, strict=True):
                self._f["muon"](w, g, m, k, scale)
        else:
            self._f["oracle" if arm.oracle else "adamw"](*state)

    def _exchange(self) -> None:
        """Move the shared weights by the mean of what workers changed."""
        arm = self.arm
        if arm.keeps:
            # What a worker kept is in its weights, so this is all that waits to be sent.
            torch.sub(self.shared, self.weights, out=self.weights)
            self._outer_step(self._rounding.mean(self.weights))
            torch.sub(self.shared, self.weights, out=self.weights)
            return
        if self.residual is not None:
            self.residual.add_(self.shared).sub_(self.weights)
            mean = self._rounding.mean(self.residual)
        else:
            mean = self._f["mean_difference"](self.shared, self.weights)
        self._outer_step(mean)
        self.weights.copy_(self.shared)

    def _outer_step(self, mean: Tensor) -> None:
        arm = self.arm
        if self.step <= arm.early * self.steps and not arm.earlymom:
            self.shared.sub_(mean)
            return
        if self._momentum is not None:
            self._momentum.mul_(arm.mom).add_(mean)
            mean = mean.add(self._momentum, alpha=arm.mom)
        self.shared.sub_(mean, alpha=arm.olr)

    @torch.no_grad()
    def loss(self, blocks: Tensor) -> float:
        """Return the mean loss of the shared weights in nats."""
        total = torch.zeros((), device=blocks.device)
        for part in blocks.split(64):
            total += self.shape.losses(self.shared[None], part[None].long()).sum() * len(part)
        return float(total) / len(blocks)

    @torch.no_grad()
    def rho(self) -> float | None:
        """Return the median of sqrt(own second moment / that of the mean gradient)."""
        if self._mean_v is None:
            return None
        every = max(1, self._v.shape[1] // 1_000_000)
        own, mean = self._v[:, ::every], self._mean_v[:, ::every]
        return float((own / mean).sqrt()[:, mean[0] > 0].median())


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def train(
    run: Run, blocks: tuple[Tensor, Tensor], per_worker: int, until: float, name: str
) -> dict[str, Any]:
    """Return the curve of a run and what it cost; it stops at `until` of `time.perf_counter`."""
    train, test = blocks
    device, steps, workers = train.device, run.steps, run.workers
    generator = torch.Generator().manual_seed(1000 + run.arm.seed)
    order = torch.randperm(len(train), generator=generator)[: steps * workers * per_worker]
    order = order.view(steps, workers, per_worker).to(device)
    points = {round(steps * i / POINTS) for i in range(1, POINTS + 1)}
    curve: list[list[float]] = []
    rhos: list[tuple[int, float | None]] = []
    laps: list[float] = []
    begin, spent, last, diverged = time.perf_counter(), 0.0, 0, False
    for step, chosen in enumerate(order, 1):
        run.take_step(train[chosen].long())
        late = time.perf_counter() > until
        if step in points or late:
            synchronize(device)
            lap = time.perf_counter() - begin
            laps.append(lap / (step - last))
            spent, last = spent + lap, step
            loss = run.loss(test if step == steps else test[:: max(1, len(test) // 128)])
            curve.append([step, round(loss, 4), round(spent, 1)])
            if run.arm.rho and (len(curve) % 2 == 0 or step == steps):
                rhos.append((step, run.rho()))
            print(f"  {name}: {curve[-1]}", file=sys.stderr, flush=True)
            diverged = not math.isfinite(loss)
            synchronize(device)
            begin = time.perf_counter()
        if late or diverged:
            break
    record = {
        "loss": None if diverged else curve[-1][1], "steps": steps, "curve": curve,
        "bytes": run.bytes, "fewer": round(run.fewer, 1),
        # The first lap compiles.
        "step_s": round(sorted(laps)[len(laps) // 2], 4), "seconds": round(spent, 1),
    }  # fmt: skip
    if rhos:
        record["rho"] = rhos
    if diverged:
        record["diverged"] = True
    elif run.step < steps:
        record["unfinished"] = True
    return record


# --- Text --------------------------------------------------------------------------------------


def make_tokens(folder: Path, out: Path) -> None:
    """Write the tokens of FOLDER/cut.txt.xz; files are divided by token 0."""
    from tokenizers import Tokenizer

    begin = time.perf_counter()
    bpe = Tokenizer.from_file(str(folder / "tok.json"))
    text = lzma.open(folder / "cut.txt.xz").read().decode("utf-8", "ignore")
    files = text.split("\x00")
    parts = [
        np.array([0, *encoded.ids], np.uint16)
        for i in range(0, len(files), 2000)
        for encoded in bpe.encode_batch(files[i : i + 2000])
    ]
    tokens = np.concatenate(parts)
    part = out.with_name(f"{out.stem}.{os.getpid()}.npy")
    np.save(part, tokens)
    part.replace(out)
    took = time.perf_counter() - begin
    print(f"{len(tokens)} tokens in {took:.0f} s", file=sys.stderr, flush=True)


def blocks_of(path: Path, length: int, device: torch.device, held_out: int) -> tuple[Tensor, ...]:
    """Return training and held-out blocks, (n, T) int32."""
    tokens = torch.from_numpy(np.load(path).astype(np.int32))
    blocks = tokens[: len(tokens) // length * length].view(-1, length).to(device)
    return blocks[held_out:], blocks[:held_out]


# --- What came out -----------------------------------------------------------------------------


def dense_steps(finals: Iterable[tuple[int, float]], loss: float) -> float:
    """Return the steps after which dense training would end with a loss.

    Takes (steps, final loss) of dense runs, at least two lengths, each with a schedule of its own.
    Loss is linear in the logarithm of steps between two of them, and beyond the outer ones.

    >>> round(dense_steps([(100, 4.0), (400, 3.0), (400, 3.2)], 3.5))
    200
    """
    best: dict[int, float] = {}
    for steps, final in finals:
        best[steps] = min(final, best.get(steps, math.inf))
    lengths = sorted(best)
    if len(lengths) < 2:
        raise ValueError("at least two lengths of dense runs are needed")
    pairs = list(itertools.pairwise(lengths))
    a, b = next((pair for pair in pairs if loss >= best[pair[1]]), pairs[-1])
    share = (best[a] - loss) / (best[a] - best[b])
    return a * (b / a) ** share


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a line for each run; `ratio` is its steps over those of dense for the same loss."""
    dense = [(r["steps"], r["loss"]) for r in rows if r["dense"] and r["loss"] and done(r)]
    heads = f"{'steps':>6} {'nats':>7} {'fewer':>7} {'s/step':>7} {'GB':>4} {'ratio':>6}"
    lines = [f"{'arm':60} {heads}"]
    for row in rows:
        ratio = ""
        if len({steps for steps, _ in dense}) > 1 and row["loss"] and done(row):
            ratio = f"{row['steps'] / dense_steps(dense, row['loss']):.2f}"
        name = row["arm"] + ("" if done(row) else " (unfinished)")
        nats = f"{row['loss']:.4f}" if row["loss"] else "nan"
        lines.append(
            f"{name:60} {row['steps']:6} {nats:>7} {row['fewer']:7.1f} {row['step_s']:7.4f} "
            f"{row['GB']:4} {ratio:>6}"
        )
    return "\n".join(lines)


def cost_key(arm: Arm) -> tuple[Any, ...]:
    """Return what arms have in common whose steps take about as long."""
    return arm.kind, arm.opt


def done(row: dict[str, Any]) -> bool:
    """Whether a run came to its end."""
    return not row.get("unfinished")


def read_rows(paths: Iterable[Path], setting: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of files that have the same setting, each once."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            key = row["arm"], row["steps"]
            if all(row.get(k) == value for k, value in setting.items()) and (
                key not in rows or not done(rows[key])
            ):
                rows[key] = row
    return list(rows.values())


def main() -> None:
    """Run the arms that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arms", nargs="*", help="such as local:H=4:bits=1:lr=5e-4")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--done", type=Path, action="append", default=[], help="other such files")
    parser.add_argument("--text", type=Path, help="folder with cut.txt.xz and tok.json")
    parser.add_argument("--tokens", type=Path, default=Path("/tmp/few_bytes_size.npy"))
    parser.add_argument("--size", choices=SIZES, default="98m")
    parser.add_argument("--width", type=int)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--head", type=int)
    parser.add_argument("--words", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=512, help="tokens of a block")
    parser.add_argument("--held-out", type=int, default=512, help="blocks")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=16, help="of a worker's batch")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the text has")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=math.inf)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    options = parser.parse_args()
    until = time.perf_counter() + options.limit_s
    width, layers, head = SIZES[options.size]
    shape = Padded(
        options.width or width, options.layers or layers, options.head or head, options.words,
        options.length,
    )  # fmt: skip
    arms = {text: arm_of(text, seed=options.seed) for text in options.arms}
    if not options.tokens.exists():
        make_tokens(options.text, options.tokens)
    torch.set_float32_matmul_precision("high")
    # cuDNN's attention returns NaN for some shapes (pytorch/pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    blocks = blocks_of(options.tokens, shape.length, device, options.held_out)
    batch = options.workers * options.blocks
    most = len(blocks[0]) // batch
    print(f"{shape.dim} coordinates, text for {most} steps", file=sys.stderr, flush=True)
    setting = {
        "parameters": shape.dim, "layers": shape.layers, "workers": options.workers,
        "blocks": options.blocks, "length": shape.length,
    }  # fmt: skip
    files = [*options.done, options.out]
    for text, arm in arms.items():
        steps = arm.steps or options.steps or most
        if steps > most:
            raise ValueError(f"{text}: {steps} steps, but the text has {most}")
        setting["seed"] = arm.seed
        rows = read_rows(files, setting)
        if any(r["arm"] == text and r["steps"] == steps and done(r) for r in rows):
            continue
        costs = {cost_key(arm_of(r["arm"])): r["step_s"] for r in rows}
        cost = costs.get(cost_key(arm), max(costs.values(), default=0.0)) * steps
        if time.perf_counter() + cost > until:
            print(f"  {text}: not begun, no time", file=sys.stderr, flush=True)
            continue
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        run = Run(arm, shape, steps, options.workers, device, compiled=not options.eager)
        plain = arm.kind == "dense" and arm.accum == 1 and arm.opt == "adamw"
        record = {"arm": text, "dense": plain, **setting}
        record |= train(run, blocks, options.blocks, until, text)
        record["GB"] = round(torch.cuda.max_memory_allocated() / 1e9) if on_gpu else 0
        with options.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        del run
        if on_gpu:
            torch.cuda.empty_cache()
    for seed in sorted({arm.seed for arm in arms.values()} or {options.seed}):
        print(table(read_rows(files, setting | {"seed": seed})), flush=True)


if __name__ == "__main__":
    main()
