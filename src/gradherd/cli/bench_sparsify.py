"""`gradherd bench sparsify`: what does it cost to send one number in a thousand?"""

from dataclasses import dataclass

import torch

from gradherd.cli.bench_show import show, usable_device
from gradherd.cli.local import on_ranks
from gradherd.cli.progress import steps
from gradherd.cli.usage import UsageError, at_least, numbers
from gradherd.lab.bench.sparsify import bench_exchange, bench_select


@dataclass(frozen=True, kw_only=True)
class BenchSparsify:
    """Measure picking on one process and whole exchanges over real ones, side by side in one run.

    Picking (workers = 1): copy reads and writes every number once; eager adds the residual, picks
    above a threshold and clears, as one would write it in torch; topk does so with torch.topk;
    fused is gradherd's, and on a GPU tally is that with all magnitudes counted. Exchange: torch's
    own hooks dense (all-reduce), fp16 and powersgd (rank 1), and exdyna with all it does. Ratios
    are to copy, and to dense.

    Example: gradherd bench sparsify --workers 4 --dim 1e7
    """

    workers: str = "4"
    """Numbers of local processes, separated by commas."""
    dim: str = "1000000"
    """Numbers of gradient coordinates, separated by commas."""
    density: float = 0.001
    """Share of the coordinates that travels, in (0, 1]."""
    repeats: int = 15
    """Exchanges measured; the median counts."""
    device: str = "cpu"
    """Where picking is measured: cpu or cuda. On cuda there is no exchange: it needs a GPU for
    each process."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}."""

    def run(self) -> None:
        """Measure."""
        workers, dims = numbers("--workers", self.workers), numbers("--dim", self.dim)
        at_least("--repeats", self.repeats, 1)
        if not 0 < self.density <= 1:
            raise UsageError(f"--density must be in (0, 1], got {self.density}")
        device = usable_device(self.device)
        counts = [count for count in workers if count > 1] if device.type == "cpu" else []
        rows = []
        with steps(len(dims) * (1 + len(counts)), "sizes") as tick:
            for dim in dims:
                rows += _alone(dim, self.density, device)
                tick()
                for count in counts:
                    rows += on_ranks(bench_exchange, count, dim, self.density, self.repeats)
                    tick()
        show("sparsify", device.type, rows, as_json=self.json)


def _alone(dim: int, density: float, device: torch.device) -> list[dict[str, object]]:
    """Measure picking on one core, as a rank among others has it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return bench_select(dim, density, device)
    finally:
        torch.set_num_threads(before)
