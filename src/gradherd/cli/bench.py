"""`gradherd bench`: time gradherd's parts against what a user would do instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from gradherd.cli.arguments import check_at_least, check_density, parse_counts, parse_names
from gradherd.cli.errors import UsageError
from gradherd.cli.options import usable_device
from gradherd.cli.parser import Arg
from gradherd.cli.tables import print_bench
from gradherd.lab.bench import STEP_EXCHANGES
from gradherd.sparsify.message_sizes import DEFAULT_DENSITY

# Benchmarks are imported by the command that runs them: they import torch, and --help must not
# wait for it.
Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class _BenchCommand:
    """What all benchmarks share."""

    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is relative to the first case of a size."""

    def _print(self, name: str, device: object, rows: Rows) -> None:
        print_bench(name, str(device), rows, as_json=self.json)


def _on_local_ranks(
    bench: Callable[..., Rows], workers: Sequence[int], sizes: Sequence[int], *args: Any
) -> Rows:
    """Measure every size on every number of local processes."""
    from gradherd.cli.launch import measure_on_ranks
    from gradherd.cli.progress import counted_loop

    rows = []
    with counted_loop(len(workers) * len(sizes), "sizes") as advance:
        for count in workers:
            for size in sizes:
                rows += measure_on_ranks(bench, count, size, *args)
                advance()
    return rows


@dataclass(frozen=True, kw_only=True)
class BenchSignsCommand(_BenchCommand):
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

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        device = usable_device(self.device)
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_balancing import bench_signs

        with counted_loop(len(workers) * len(dims), "sizes") as advance:
            rows = bench_signs(workers, dims, device, advance)
        self._print("signs", device, rows)


@dataclass(frozen=True, kw_only=True)
class BenchCoordinationCommand(_BenchCommand):
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

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        check_at_least("--repeats", self.repeats, 1)
        from gradherd.lab.bench.bench_balancing import bench_coordination

        rows = _on_local_ranks(bench_coordination, workers, dims, self.repeats)
        self._print("coordination", "cpu", rows)


@dataclass(frozen=True, kw_only=True)
class BenchRowsCommand(_BenchCommand):
    """Time per-example gradients of an MLP.

    plain is forward and backward alone; vmap (torch.func) and loop (one example at a time) are what
    one would do instead; exact and sketch are gradherd's. Steps of well-known models are measured
    by benchmarks/model_steps.py of the repository.

    Example: gradherd bench rows --params 2e6 --batch 256 --json
    """

    params: str = "2000000"
    """Approximate number of parameters of the MLP."""
    batch: int = 256
    """Examples in a batch."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""

    def run(self) -> None:
        """Measure."""
        sizes = parse_counts("--params", self.params)
        if len(sizes) > 1:
            raise UsageError(f"--params must be one number, got {self.params!r}")
        check_at_least("--batch", self.batch, 1, 2**31)
        device = usable_device(self.device)
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_rows import bench_rows

        with counted_loop(5, "cases") as advance:
            rows = bench_rows(sizes[0], self.batch, device, advance)
        self._print("rows", device, rows)


@dataclass(frozen=True, kw_only=True)
class BenchSparsifyCommand(_BenchCommand):
    """Time selection in one process, and whole exchanges over local processes.

    Selection (workers = 1): copy reads and writes every element once; eager adds the residual,
    selects above a threshold and clears, as one would write it in torch; topk does so with
    torch.topk; fused is gradherd's. Exchange: DDP's own all-reduce (dense), torch's hooks fp16 and
    powersgd (rank 1), and exdyna with everything it does. Ratios are relative to copy and to dense.

    Example: gradherd bench sparsify --workers 4 --dim 1e7
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    dim: str = "1000000"
    """Gradient sizes, separated by commas."""
    density: float = DEFAULT_DENSITY
    """Share of the elements to send, in (0, 1]."""
    repeats: int = 15
    """Exchanges to measure; the median counts."""
    device: str = "cpu"
    """Where to measure selection, cpu or cuda; exchanges are measured on the CPU only."""

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        dims = parse_counts("--dim", self.dim)
        check_at_least("--repeats", self.repeats, 1)
        check_density(self.density)
        device = usable_device(self.device)
        from gradherd.cli.progress import counted_loop
        from gradherd.lab.bench.bench_sparsify import bench_exchange, bench_select

        # Local ranks are gloo processes on the CPU, and one worker sends nothing.
        counts = [count for count in workers if count > 1] if device.type == "cpu" else []
        rows: Rows = []
        for dim in dims:
            with counted_loop(1, "sizes") as advance:
                rows += bench_select(dim, self.density, device)
                advance()
            rows += _on_local_ranks(bench_exchange, counts, [dim], self.density, self.repeats)
        self._print("sparsify", device.type, rows)


@dataclass(frozen=True, kw_only=True)
class BenchStepCommand(_BenchCommand):
    """Time a whole training step over local processes: with d-rr, cd-grab and other exchanges.

    An MLP is trained with whole batches as units; a step is data, forward, backward, exchange and
    optimizer. d-rr and cd-grab exchange densely. With --exchanges, the same step with d-rr is also
    timed with torch's fp16 and powersgd hooks, with exdyna, and with 4 local steps (local-4).

    Example: gradherd bench step --workers 4 --params 2e6 --batch 64
    Example: gradherd bench step --params 1e7 --exchanges fp16,exdyna,exdyna-int2,local-4
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    params: str = "1000000"
    """Approximate numbers of parameters of the MLP, separated by commas."""
    batch: int = 64
    """Examples per rank and step."""
    repeats: int = 9
    """Blocks of 4 steps to measure in each case; the median counts."""
    exchanges: Annotated[
        str,
        Arg(
            metavar="A,B",
            help=f"Other exchanges to time, of {', '.join(STEP_EXCHANGES)}.",
            default="none",
        ),
    ] = ""

    def run(self) -> None:
        """Measure."""
        workers = parse_counts("--workers", self.workers)
        params = parse_counts("--params", self.params)
        check_at_least("--batch", self.batch, 1)
        check_at_least("--repeats", self.repeats, 1)
        exchanges = []
        if self.exchanges:
            exchanges = parse_names("--exchanges", self.exchanges, STEP_EXCHANGES)
        from gradherd.lab.bench.bench_step import bench_step

        rows = _on_local_ranks(bench_step, workers, params, self.batch, self.repeats, exchanges)
        self._print("step", "cpu", rows)
