"""`gradherd bench rows`: what does the gradient of every example cost?"""

from dataclasses import dataclass

from gradherd.cli.bench_show import show, usable_device
from gradherd.cli.progress import steps
from gradherd.cli.usage import UsageError, numbers
from gradherd.lab.bench.rows import bench_rows


@dataclass(frozen=True, kw_only=True)
class BenchRows:
    """Measure per-example gradients of an MLP, side by side in one run.

    plain is forward and backward alone; vmap (torch.func) and loop (one example at a time) are
    what one would do instead; exact and sketch are gradherd's.

    Example: gradherd bench rows --params 2e6 --batch 256 --json
    """

    params: str = "2000000"
    """Parameters of the MLP, about."""
    batch: int = 256
    """Examples in a batch."""
    device: str = "cpu"
    """Where: cpu, cuda, cuda:1 ..."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is to plain."""

    def run(self) -> None:
        """Measure."""
        sizes = numbers("--params", self.params)
        if len(sizes) > 1:
            raise UsageError(f"--params must be one number, got {self.params!r}")
        params = sizes[0]
        (batch,) = numbers("--batch", str(self.batch))
        device = usable_device(self.device)
        with steps(5, "cases") as tick:
            rows = bench_rows(params, batch, device, tick)
        show("rows", str(device), rows, as_json=self.json)
