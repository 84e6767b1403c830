"""What the ranks of the tests do, and what one process does in their stead."""

import io
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from gradherd.comm.message_sizes import VALUE_BITS
from gradherd.comm.script import ScriptResult, run, run_together
from gradherd.comm.world import World
from gradherd.sparsify.registry import SPARSIFIERS
from gradherd.sparsify.selecting import gather_indices
from gradherd.sparsify.selector import StepContext
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.value_sums import sum_values
from gradherd.sparsify.worker import Worker
from studies.methods import METHODS as STUDIED
from tests.sparsify.example_sparsifier import EveryNth

# What contracts hold for: the registry, what studies bring along, and a method of a user's own.
METHODS = {**SPARSIFIERS, **STUDIED, "every-nth": EveryNth}


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# --- Exchanges ---------------------------------------------------------------------------------

SUMS = [
    (length, dtype, wire)
    for length in (0, 1, 5, 256, 257, 513, 8193, 20_001)
    for dtype in (torch.float32, torch.float64)
    for wire in (torch.float32, torch.bfloat16)
]


def sum_as(values, context, wire):
    """The sum of values that are sent in their own dtype, or as bf16."""
    return sum_values(values, 0, context, "bf16" if wire == torch.bfloat16 else "fp32")


def sum_script(case, rank, size):
    length, dtype, wire = case
    return sum_as(normal(7 * rank + length, length, dtype=dtype), StepContext(0, rank, size), wire)


def sums_in_few_bits(count):
    """On every rank: the bytes of a sum of values in each format of few bits."""
    world = World.detect()
    context, values = StepContext(0, world.rank, world.size), normal(world.rank, count)
    scripts = {form: sum_values(values, 0, context, form) for form in VALUE_BITS}
    return {form: run(script, world).bytes for form, script in scripts.items()}


DIM = 200_000
BORDERS = {1: [0, DIM], 2: [0, 50_000, DIM], 4: [0, 65_536, 65_536, 140_000, DIM]}


def index_script(density, rank, size):
    """Of R spans, one is a single page, one is empty, others go over pages."""
    spans = list(pairwise(BORDERS[size]))
    selections = []
    for number, (begin, end) in enumerate(spans):
        draws = torch.rand(end - begin, generator=torch.Generator().manual_seed(number))
        selections.append(begin + (draws < density).nonzero().view(-1))
    counts = [len(own) for own in selections]
    return gather_indices(selections[rank], counts, spans, StepContext(0, rank, size))


def exchanges():
    """On every rank: of every sum and of every gather of indices, the answer and the bytes."""
    world = World.detect()
    sums = [run(sum_script(case, world.rank, world.size), world) for case in SUMS]
    actual = [run(index_script(d, world.rank, world.size), world) for d in (0.0, 1e-5, 0.01)]
    return [tuple(results) for results in sums], [tuple(results) for results in actual]


# --- Whole methods -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A method and what it has to do."""

    name: str
    dim: int
    density: float | None = None
    dtype: torch.dtype = torch.float64
    values: str = "fp32"
    steps: int = 8
    poisoned: tuple[int, float] | None = None
    """Before this step there is another one, in which the last rank has this number."""
    resumed: int | None = None
    """Before this step all is saved, and loaded by new workers."""

    def __str__(self):
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {self.dim} {self.density} {kind} {self.values}"

    @property
    def settings(self):
        make = METHODS[self.name]
        method = make() if self.density is None else make(density=self.density)
        return Sparsify(method=method, values=self.values)

    @property
    def layers(self):
        """Lengths of tensors, uneven, in all at most four."""
        first, second = self.dim * 3 // 5, self.dim // 50
        rest = self.dim - first - second
        lengths = [first, second, rest // 3, rest - rest // 3]
        return [length for length in lengths if length]

    def grads(self, size):
        """(T, R, D): layers of different scales, half shared by all ranks and half of their own."""
        grads = normal(1, self.steps, 1, self.dim) + normal(2, self.steps, size, self.dim)
        scales = torch.repeat_interleave(
            torch.tensor([1.0, 30.0, 0.1, 0.003])[: len(self.layers)], torch.tensor(self.layers)
        )
        return (grads * scales).to(self.dtype)

    def worker(self, rank, size):
        return Worker(
            self.settings, self.dim, rank=rank, size=size, layers=self.layers, dtype=self.dtype
        )


@dataclass(frozen=True)
class Step:
    """What a rank saw of one step."""

    indices: torch.Tensor
    mean: torch.Tensor
    counts: list[int]
    threshold: float | None
    bytes: int


@dataclass(frozen=True)
class Trace:
    """What a rank saw of all steps."""

    steps: list[Step]
    residual: torch.Tensor
    state: dict[str, Any]
    called_off: list[bool]
    """Of steps that were spoilt: whether nothing came of it and nothing changed."""

    @property
    def sent(self):
        """(D,) what the optimizer has seen in all."""
        total = torch.zeros_like(self.residual)
        for step in self.steps:
            total[step.indices] += step.mean
        return total


def through_disk(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def snapshot(worker):
    kept = {"residual": worker.feedback.residual, "worker": worker.state_dict()}
    return through_disk(kept | {"step": worker.step})


def same(a, b):
    """Equality of nested states, tensors to the bit (and NaN equal to NaN)."""
    if isinstance(a, torch.Tensor):
        bits = a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        return bits and a.dtype == b.dtype and a.shape == b.shape
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def run_case(case, size, ranks, exchange):
    """Run a case and return the results of `ranks`, of `size`; `exchange` runs the scripts."""
    workers = [case.worker(rank, size) for rank in ranks]
    steps, called_off = [[] for _ in ranks], [[] for _ in ranks]

    def add(grads):
        for worker, rank in zip(workers, ranks, strict=True):
            worker.begin(1.0)
            worker.add(0, grads[rank].clone())
        return exchange([worker.script() for worker in workers])

    for number, grads in enumerate(case.grads(size)):
        if case.poisoned is not None and number == case.poisoned[0]:
            bad = 3 * grads
            bad[size - 1, case.dim // 2] = case.poisoned[1]
            before = [snapshot(worker) for worker in workers]
            for own, results, worker, old in zip(
                called_off, add(bad), workers, before, strict=True
            ):
                worker.commit(results.value)
                old["worker"]["skipped"] += 1  # the only trace
                own.append(results.value is None and same(old, snapshot(worker)))
        if number == case.resumed:
            saved = [snapshot(worker) for worker in workers]
            workers = [case.worker(rank, size) for rank in ranks]
            for worker, state in zip(workers, saved, strict=True):
                worker.load_state_dict(state["worker"])
                worker.feedback.residual.copy_(state["residual"])
        for own, results, worker in zip(steps, add(grads), workers, strict=True):
            outcome = results.value
            mean = worker.mean_of(outcome)
            worker.commit(outcome)
            chosen = outcome.selection
            own.append(
                Step(
                    outcome.coordinates(),
                    mean,
                    list(chosen.counts),
                    chosen.threshold,
                    results.bytes,
                )
            )
    return [
        Trace(own, worker.feedback.residual, through_disk(worker.state_dict()), off)
        for own, worker, off in zip(steps, workers, called_off, strict=True)
    ]


def trace_virtual(case, size):
    """Stories of all ranks, in one process, with one thread as ranks have: sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_case(case, size, range(size), run_together)
    finally:
        torch.set_num_threads(threads)


def trace_real(cases):
    """Return the results of this rank for every case."""
    world = World.detect()

    def exchange(scripts) -> list[ScriptResult]:
        return [run(scripts[0], world)]

    return [run_case(case, world.size, [world.rank], exchange)[0] for case in cases]


def undisturbed(case):
    return replace(case, poisoned=None, resumed=None)
