"""`gradherd bench step`: what does ordering cost a whole training step?"""

from dataclasses import dataclass

from gradherd.cli.bench_show import show
from gradherd.cli.local import on_ranks
from gradherd.cli.usage import at_least, numbers
from gradherd.lab.bench.step import bench_step


@dataclass(frozen=True, kw_only=True)
class BenchStep:
    """Measure a DDP step with d-rr and the same with cd-grab, in one run over real processes.

    An MLP is trained in whole-batch units: data, forward, backward, exchange, optimizer.

    Example: gradherd bench step --workers 4 --params 2e6 --batch 64
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    params: str = "1000000"
    """Parameters of the MLP, about."""
    batch: int = 64
    """Examples in a rank's batch."""
    repeats: int = 9
    """Blocks of 4 steps measured of each order; the median counts."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is to d-rr."""

    def run(self) -> None:
        """Measure."""
        workers, params = numbers("--workers", self.workers), numbers("--params", self.params)
        at_least("--batch", self.batch, 1)
        at_least("--repeats", self.repeats, 1)
        rows = [
            row
            for count in workers
            for size in params
            for row in on_ranks(bench_step, count, size, self.batch, self.repeats)
        ]
        show("step", "cpu", rows, as_json=self.json)
