"""`gradherd bench`: time gradherd's parts against what a user would do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from gradherd.cli.arguments import (
    MaybeInt,
    MaybeStr,
    check_at_least,
    check_density,
    json_help,
    parse_counts,
    parse_names,
)
from gradherd.cli.errors import UsageError
from gradherd.cli.options import usable_device
from gradherd.cli.tables import print_bench
from gradherd.lab.bench import STEP_EXCHANGES

# Benchmarks are imported by the command that runs them: they import torch, and --help must not
# wait for it.
if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BenchSignsCommand:
    """Time how long computing the signs of one step takes.

    sequential is the loop of the published CD-GraB code, block-gram takes all signs of a step from
    one Gram matrix, and balance is the form that gradherd chooses for this device and size.

    Example: gradherd bench signs --workers 4,64 --dim 1e4,1e6 --json
    """

    workers: str = "4,16,64"
    """Numbers of workers, separated by commas; each worker contributes one vector per step."""
    dim: str = "10000,1000000"
    """Gradient sizes, separated by commas."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    json: Annotated[
        bool,
        json_help(
            'Print {"bench", "device", "rows": [...]}; `ratio` is relative to the sequential loop.'
        ),
    ] = False

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        device = usable_device(self.device)
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_signs import bench_signs

        with counted_loop(len(workers) * len(dims), "sizes") as advance:
            rows = bench_signs(workers, dims, device, advance)
        print_bench("signs", str(device), rows, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class BenchCoordinationCommand:
    """Time the gradient exchange of a step over local processes, with and without balancing.

    all-reduce only averages the gradients. all-gather is CD-GraB as published: every rank gathers
    all gradients. sharded is gradherd's: every rank gets one shard of all gradients and averages
    it on the way.

    Example: gradherd bench coordination --workers 2,4,8 --dim 4000000
    """

    workers: str = "2,4"
    """Numbers of local processes, separated by commas."""
    dim: str = "1000000"
    """Gradient sizes, separated by commas."""
    repeats: int = 7
    """Pairs of steps to measure; the median counts."""
    json: Annotated[
        bool,
        json_help('Print {"bench", "device", "rows": [...]}; ratios are relative to all-reduce.'),
    ] = False

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        check_at_least("--repeats", self.repeats, 1)
        from gradherd.cli.launch import measure_on_ranks
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_coordination import bench_coordination

        rows = []
        with counted_loop(len(workers) * len(dims), "sizes") as advance:
            for count in workers:
                for dim in dims:
                    rows += measure_on_ranks(bench_coordination, count, dim, self.repeats)
                    advance()
        print_bench("coordination", "cpu", rows, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class BenchRowsCommand:
    """Time per-example gradients: of an MLP, or within whole training steps of a known model.

    For the MLP, plain is forward and backward alone; vmap (torch.func) and loop (one example at a
    time) are what one would do instead; exact and sketch are gradherd's. With --model, every case
    is a training step with these rows and an order, next to the plain step, with memory and
    fidelity: the correlation of centred inner products with exact ones.

    Example: gradherd bench rows --params 2e6 --batch 256 --json
    Example: gradherd bench rows --model resnet50 --device cuda --cases batch,two-sided
    """

    model: Annotated[
        MaybeStr, tyro.conf.arg(metavar="NAME", help_behavior_hint="(default: an MLP)")
    ] = None
    """mlp, lenet, resnet18, resnet50, vit-b16, gpt2-124m or llama-160m; the last four need
    torchvision or transformers."""
    compile: Annotated[
        MaybeStr, tyro.conf.arg(metavar="MODE", help_behavior_hint="(default: not compiled)")
    ] = None
    """With --model: compile every case, the plain step too: default or reduce-overhead."""
    cases: str = "batch,sketch,two-sided"
    """With --model: rows to measure, separated by commas: batch (whole batches, as attach() reads
    them by default), batch-exact, exact, sketch, two-sided."""
    params: str = "2000000"
    """Without --model: approximate number of parameters of the MLP."""
    batch: Annotated[
        MaybeInt, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 256; the model's)")
    ] = None
    """Examples in a batch."""
    repeats: int = 3
    """With --model: blocks of steps to measure in each case; the median counts."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    json: Annotated[
        bool,
        json_help('Print {"bench", "device", "rows": [...]}; `ratio` is relative to plain.'),
    ] = False

    def run(self) -> None:
        """Measure."""
        sizes = parse_counts("--params", self.params)
        if len(sizes) > 1:
            raise UsageError(f"--params must be one number, got {self.params!r}")
        # The same parser, for the same upper bound.
        batch = None if self.batch is None else parse_counts("--batch", str(self.batch))[0]
        check_at_least("--repeats", self.repeats, 1)
        device = usable_device(self.device)
        if self.compile is not None and self.model is None:
            raise UsageError("--compile goes with --model")
        if self.model is not None:
            self._run_model(self.model, batch, device)
            return
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_rows import bench_rows

        with counted_loop(5, "cases") as advance:
            rows = bench_rows(sizes[0], batch or 256, device, advance)
        print_bench("rows", str(device), rows, as_json=self.json)

    def _run_model(self, model: str, batch: int | None, device: torch.device) -> None:
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_models import CASES, COMPILE_MODES, MODELS, bench_models

        if self.compile not in (None, *COMPILE_MODES):
            modes = " or ".join(COMPILE_MODES)
            raise UsageError(f"--compile must be {modes}, got {self.compile!r}")
        if model not in MODELS:
            raise UsageError(f"--model must be one of {', '.join(MODELS)}, got {model!r}")
        cases = tuple(case.strip() for case in self.cases.split(","))
        for case in cases:
            if case not in CASES:
                known = ", ".join(CASES)
                raise UsageError(f"--cases must be some of {known}, got {case!r}")
        with counted_loop(1 + len(cases) * self.repeats, "repeats") as advance:
            try:
                rows = bench_models(
                    model,
                    cases,
                    device,
                    batch=batch,
                    repeats=self.repeats,
                    compiled=self.compile,
                    progress=advance,
                )
            except ImportError as error:
                raise UsageError(
                    f"--model {model} needs {error.name}: pip install {error.name}"
                ) from error
        print_bench("rows", str(device), rows, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class BenchSparsifyCommand:
    """Time selection in one process, and whole exchanges over local processes.

    Selection (workers = 1): copy reads and writes every element once; eager adds the residual,
    selects above a threshold and clears, as one would write it in torch; topk does so with
    torch.topk; fused is gradherd's. Steps (workers = 1): a whole DDP step of an MLP, dense and with
    the hooks of exdyna and topk; sync_free says that a step never waits for the GPU. Exchange:
    torch's own hooks dense (all-reduce), fp16 and powersgd (rank 1), and exdyna with everything it
    does. Ratios are relative to copy, to the dense step and to dense.

    Example: gradherd bench sparsify --workers 4 --dim 1e7
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    dim: str = "1000000"
    """Gradient sizes, separated by commas."""
    density: float = 0.001
    """Share of the elements to send, in (0, 1]."""
    repeats: int = 15
    """Exchanges to measure; the median counts."""
    device: str = "cpu"
    """Where to measure selection and steps, cpu or cuda; exchanges are measured on the CPU only."""
    json: Annotated[
        bool,
        json_help('Print {"bench", "device", "rows": [...]}.'),
    ] = False

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        check_at_least("--repeats", self.repeats, 1)
        check_density(self.density)
        device = usable_device(self.device)
        from gradherd.cli.launch import measure_on_ranks
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_hook import bench_hook, one_rank
        from gradherd.lab.bench.bench_sparsify import bench_exchange, bench_select_on_one_core

        # Local ranks are gloo processes on the CPU, and one worker sends nothing.
        counts = [count for count in workers if count > 1] if device.type == "cpu" else []
        rows = []
        with counted_loop(len(dims) * (1 + len(counts)), "sizes") as advance:
            for dim in dims:
                rows += bench_select_on_one_core(dim, self.density, device)
                with one_rank(device):
                    rows += bench_hook(dim, self.density, device, self.repeats)
                advance()
                for count in counts:
                    rows += measure_on_ranks(bench_exchange, count, dim, self.density, self.repeats)
                    advance()
        print_bench("sparsify", device.type, rows, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class BenchStepCommand:
    """Time a whole training step over local processes: with d-rr, cd-grab and other exchanges.

    An MLP is trained with whole batches as units; a step is data, forward, backward, exchange and
    optimizer. d-rr and cd-grab exchange densely. With --exchanges, the same step with d-rr is also
    timed with torch's fp16 and powersgd hooks, with exdyna, and with 30 local steps (local-30).

    Example: gradherd bench step --workers 4 --params 2e6 --batch 64
    Example: gradherd bench step --params 1e7 --exchanges fp16,exdyna,exdyna-int2,local-30
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    params: str = "1000000"
    """Approximate numbers of parameters of the MLP, separated by commas."""
    batch: int = 64
    """Examples per rank and step."""
    repeats: int = 9
    """Blocks of 4 steps to measure in each case (local-30: of 30); the median counts."""
    exchanges: Annotated[
        str,
        tyro.conf.arg(
            metavar="A,B",
            help=f"Other exchanges to time, of {', '.join(STEP_EXCHANGES)}.",
            help_behavior_hint="(default: none)",
        ),
    ] = ""
    json: Annotated[
        bool,
        json_help('Print {"bench", "device", "rows": [...]}; `ratio` is relative to d-rr.'),
    ] = False

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        params = parse_counts("--params", self.params)
        check_at_least("--batch", self.batch, 1)
        check_at_least("--repeats", self.repeats, 1)
        exchanges = []
        if self.exchanges:
            exchanges = parse_names("--exchanges", self.exchanges, STEP_EXCHANGES)
        from gradherd.cli.launch import measure_on_ranks
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_step import bench_step

        rows = []
        with counted_loop(len(workers) * len(params), "sizes") as advance:
            for count in workers:
                for size in params:
                    rows += measure_on_ranks(
                        bench_step, count, size, self.batch, self.repeats, exchanges
                    )
                    advance()
        print_bench("step", "cpu", rows, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class BenchVirtualCommand:
    """Time a step of virtual runs of LeNet on random images.

    plain loop is what one writes without an order. turns is cd-grab with workers one after the
    other. one run, nine runs (cd-grab, id-grab and id-pair-grab with three seeds each) and nine
    runs, d-rr train all workers at once. Times are per step of one run: with nine runs side by
    side, each one counts a ninth.

    Example: gradherd bench virtual --device cuda --json
    """

    workers: int = 64
    """Workers of a run."""
    batch: int = 1
    """Examples per worker and step."""
    steps: Annotated[
        MaybeInt, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: 10; cuda: 200)")
    ] = None
    """Steps of an epoch; turns takes a tenth of them."""
    repeats: int = 5
    """Epochs to measure of each case; the median counts."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    json: Annotated[
        bool,
        json_help(
            'Print {"bench", "device", "rows": [...]}; `ratio` is relative to the plain loop.'
        ),
    ] = False

    def run(self) -> None:
        """Measure."""
        check_at_least("--workers", self.workers, 1)
        check_at_least("--batch", self.batch, 1)
        check_at_least("--repeats", self.repeats, 1)
        device = usable_device(self.device)
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_virtual import CASES, LEAST_STEPS, bench_virtual

        # Steps are short on a GPU, so an epoch needs more of them to be timed well.
        default = 10 if device.type == "cpu" else 200
        steps = default if self.steps is None else self.steps
        # Fewer would time the capture of the CUDA graph, not its replay.
        check_at_least("--steps", steps, LEAST_STEPS)
        with counted_loop(len(CASES) * (self.repeats + 1), "epochs") as advance:
            rows = bench_virtual(self.workers, self.batch, steps, self.repeats, device, advance)
        print_bench("virtual", str(device), rows, as_json=self.json)
