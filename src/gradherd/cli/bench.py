"""`gradherd bench`: time gradherd's parts against what a user would do instead.

Benchmarks are imported by the command that runs them: they import torch, and --help must not wait
for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from gradherd.cli.options import usable_device
from gradherd.cli.parser import Arg, Count, Counts, Density, one_count, whole
from gradherd.cli.terminal import print_json, print_table
from gradherd.comm.message_sizes import DEFAULT_DENSITY

Rows = list[dict[str, Any]]
Params = Annotated[int, Arg(parse=one_count)]


@dataclass(frozen=True, kw_only=True)
class _BenchCommand:
    """What all benchmarks share."""

    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is relative to the first case of a size."""

    def _print(self, name: str, device: object, rows: Rows) -> None:
        if self.json:
            print_json({"bench": name, "device": str(device), "rows": rows})
            return
        import torch

        print_rows(rows, f"bench {name} on {device}, torch {torch.__version__}")


def print_rows(rows: Rows, title: str) -> None:
    """Print the rows of a benchmark: one for each case and size, in a block for each size."""
    cells: dict[str, Callable[[dict[str, Any]], str]] = {
        "case": lambda row: row["case"],
        "workers": lambda row: str(row["workers"]),
        "dim": lambda row: f"{row['dim']:,}",
        "ms": lambda row: f"{1e3 * row['seconds']:.3f}",
        "time ratio": lambda row: f"{row['ratio']:.2f}",
        "peak bytes": lambda row: "" if row["peak_bytes"] is None else f"{row['peak_bytes']:,}",
    }
    # Leave out columns that would be empty: a terminal has little room.
    if any(row["bytes"] for row in rows):
        cells["bytes sent"] = lambda row: f"{row['bytes']:,}"
    elif all("ceiling_ratio" in row for row in rows):
        cells["x ceiling"] = lambda row: f"{row['ceiling_ratio']:.2f}"
    table: list[list[str]] = []
    for row, before in zip(rows, [rows[0], *rows], strict=False):
        if (row["workers"], row["dim"]) != (before["workers"], before["dim"]):
            table.append([])
        table.append([cell(row) for cell in cells.values()])
    print_table(table, list(cells), title=title)


def _on_local_ranks(
    bench: Callable[..., Rows], workers: Sequence[int], sizes: Sequence[int], *args: Any
) -> Rows:
    """Measure every size on every number of local processes."""
    from gradherd.cli.launch import measure_on_ranks
    from gradherd.cli.progress import counted_loop

    rows: Rows = []
    with counted_loop(len(workers) * len(sizes), "sizes") as advance:
        for count, size in product(workers, sizes):
            rows += measure_on_ranks(bench, count, size, *args)
            advance()
    return rows


@dataclass(frozen=True, kw_only=True)
class BenchCoordinationCommand(_BenchCommand):
    """Time the gradient exchange of a step over local processes, with and without balancing.

    all-reduce only averages the gradients. all-gather is CD-GraB as published: every rank gathers
    all gradients. sharded is gradherd's: every rank gets one shard of all gradients and averages
    it on the way.

    Example: gradherd bench coordination --workers 2,4,8 --dim 4000000
    """

    workers: Counts = (2, 4)
    """Numbers of local processes, separated by commas."""
    dim: Counts = (1_000_000,)
    """Gradient sizes, separated by commas."""
    repeats: Count = 7
    """Pairs of steps to measure; the median counts."""

    def run(self) -> None:
        """Measure."""
        from gradherd.lab.bench.bench_coordination import bench_coordination

        rows = _on_local_ranks(bench_coordination, self.workers, self.dim, self.repeats)
        self._print("coordination", "cpu", rows)


@dataclass(frozen=True, kw_only=True)
class BenchRowsCommand(_BenchCommand):
    """Time per-example gradients of an MLP.

    plain is forward and backward alone; vmap (torch.func) and loop (one example at a time) are what
    one would do instead; exact and sketch are gradherd's. Steps of well-known models are measured
    by benchmarks/model_steps.py of the repository.

    Example: gradherd bench rows --params 2e6 --batch 256 --json
    """

    params: Params = 2_000_000
    """Approximate number of parameters of the MLP."""
    batch: Annotated[int, Arg(parse=whole(1, 2**31))] = 256
    """Examples in a batch."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""

    def run(self) -> None:
        """Measure."""
        device = usable_device(self.device)
        from gradherd.lab.bench.bench_rows import bench_rows

        self._print("rows", device, bench_rows(self.params, self.batch, device))


@dataclass(frozen=True, kw_only=True)
class BenchSparsifyCommand(_BenchCommand):
    """Time selection in one process, and whole exchanges over local processes.

    Selection (workers = 1): copy reads and writes every element once; eager adds the residual,
    selects above a threshold and clears, as one would write it in torch; topk does so with
    torch.topk; fused is gradherd's. Exchange: DDP's own all-reduce (dense), torch's hooks fp16 and
    powersgd (rank 1), and exdyna with everything it does. Ratios are relative to copy and to dense.

    Example: gradherd bench sparsify --workers 4 --dim 1e7
    """

    workers: Counts = (4,)
    """Numbers of local processes, separated by commas."""
    dim: Counts = (1_000_000,)
    """Gradient sizes, separated by commas."""
    density: Density = DEFAULT_DENSITY
    """Share of the elements to send, in (0, 1]."""
    repeats: Count = 15
    """Exchanges to measure; the median counts."""
    device: str = "cpu"
    """Where to measure selection, cpu or cuda; exchanges are measured on the CPU only."""

    def run(self) -> None:
        """Measure."""
        device = usable_device(self.device)
        from gradherd.lab.bench.bench_sparsify import bench_exchange, bench_select

        # Local ranks are gloo processes on the CPU, and one worker sends nothing.
        counts = [count for count in self.workers if count > 1] if device.type == "cpu" else []
        rows: Rows = []
        for dim in self.dim:
            rows += bench_select(dim, self.density, device)
            rows += _on_local_ranks(bench_exchange, counts, [dim], self.density, self.repeats)
        self._print("sparsify", device.type, rows)


@dataclass(frozen=True, kw_only=True)
class BenchStepCommand(_BenchCommand):
    """Time a whole training step over local processes, with d-rr and with cd-grab.

    An MLP is trained with whole batches as units; a step is data, forward, backward, exchange and
    optimizer. Both exchange densely; `bench sparsify` times other exchanges.

    Example: gradherd bench step --workers 4 --params 2e6 --batch 64
    """

    workers: Counts = (4,)
    """Numbers of local processes, separated by commas."""
    params: Counts = (1_000_000,)
    """Approximate numbers of parameters of the MLP, separated by commas."""
    batch: Count = 64
    """Examples per rank and step."""
    repeats: Count = 9
    """Blocks of 4 steps to measure in each case; the median counts."""

    def run(self) -> None:
        """Measure."""
        from gradherd.lab.bench.bench_step import bench_step

        rows = _on_local_ranks(bench_step, self.workers, self.params, self.batch, self.repeats)
        self._print("step", "cpu", rows)
