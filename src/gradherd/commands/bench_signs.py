"""`gradherd bench signs`: how fast are signs taken?"""

from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from gradherd.bench.signs import bench_signs
from gradherd.commands.progress import steps
from gradherd.commands.usage import UsageError, numbers, print_json


@dataclass(frozen=True, kw_only=True)
class BenchSigns:
    """Measure signs per second, side by side in one run.

    sequential is the loop of the published CD-GraB code, block-gram takes all signs of a step
    from one Gram matrix, balance is what gradherd chooses for this device and size.

    Example: gradherd bench signs --workers 4,64 --dim 1e4,1e6 --json
    """

    workers: str = "4,16,64"
    """Numbers of workers, separated by commas: each gives one vector per block."""
    dim: str = "10000,1000000"
    """Numbers of gradient coordinates, separated by commas."""
    device: str = "cpu"
    """Where: cpu, cuda, cuda:1 ..."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is to the sequential loop."""

    def run(self) -> None:
        """Measure."""
        workers, dims = numbers("--workers", self.workers), numbers("--dim", self.dim)
        device = usable_device(self.device)
        with steps(len(workers) * len(dims), "sizes") as tick:
            rows = bench_signs(workers, dims, device, tick)
        if self.json:
            print_json({"bench": "signs", "device": str(device), "rows": rows})
            return
        table = Table(title=f"Signs per second on {device}, torch {torch.__version__}")
        for column in ("dim", "workers", "case", "signs/s", "time / sequential"):
            table.add_column(column, justify="left" if column == "case" else "right")
        for row in rows:
            table.add_row(
                f"{row['dim']:,}",
                str(row["workers"]),
                row["case"],
                f"{row['signs_per_second']:,.0f}",
                f"{row['ratio']:.2f}",
                end_section=row["case"] == "balance",
            )
        Console().print(table)


def usable_device(name: str) -> torch.device:
    """Return the device of that name, or raise UsageError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"--device {name!r} cannot be used here: {reason}") from None
    return device
