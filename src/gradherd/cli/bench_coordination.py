"""`gradherd bench coordination`: what does it cost to balance all workers together?"""

from dataclasses import dataclass

from gradherd.cli.bench_show import show
from gradherd.cli.local import on_ranks
from gradherd.cli.progress import steps
from gradherd.cli.usage import at_least, numbers
from gradherd.lab.bench.coordination import bench_coordination


@dataclass(frozen=True, kw_only=True)
class BenchCoordination:
    """Measure a step's exchange over real processes, side by side in one run.

    all-reduce only averages the gradients, all-gather is the published CD-GraB (every rank
    gathers everything), sharded is gradherd's (every rank gets a slice of everything, and the
    mean on the way).

    Example: gradherd bench coordination --workers 2,4,8 --dim 4000000
    """

    workers: str = "2,4"
    """Numbers of local processes, separated by commas."""
    dim: str = "1000000"
    """Numbers of gradient coordinates, separated by commas."""
    repeats: int = 7
    """Pairs of steps measured; the median counts."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}; ratios are to all-reduce."""

    def run(self) -> None:
        """Measure."""
        workers, dims = numbers("--workers", self.workers), numbers("--dim", self.dim)
        at_least("--repeats", self.repeats, 1)
        rows = []
        with steps(len(workers) * len(dims), "sizes") as tick:
            for count in workers:
                for dim in dims:
                    rows += on_ranks(bench_coordination, count, dim, self.repeats)
                    tick()
        show("coordination", "cpu", rows, as_json=self.json)
