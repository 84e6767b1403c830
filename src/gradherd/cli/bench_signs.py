"""`gradherd bench signs`: how fast are signs taken?"""

from dataclasses import dataclass

from gradherd.cli.bench_show import show, usable_device
from gradherd.cli.progress import steps
from gradherd.cli.usage import numbers
from gradherd.lab.bench.signs import bench_signs


@dataclass(frozen=True, kw_only=True)
class BenchSigns:
    """Measure how long the signs of one step take, side by side in one run.

    sequential is the loop of the published CD-GraB code, block-gram takes all signs of a step
    from one Gram matrix, balance is what gradherd chooses for this device and size.

    Example: gradherd bench signs --workers 4,64 --dim 1e4,1e6 --json
    """

    workers: str = "4,16,64"
    """Numbers of workers, separated by commas: each gives one vector per step."""
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
        show("signs", str(device), rows, as_json=self.json)
