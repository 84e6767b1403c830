"""`gradherd bench virtual`: how fast are runs with all workers in one process?"""

from dataclasses import dataclass

from gradherd.cli.bench_show import show, usable_device
from gradherd.cli.progress import steps
from gradherd.cli.usage import at_least
from gradherd.lab.bench.virtual import CASES, LEAST_STEPS, bench_virtual


@dataclass(frozen=True, kw_only=True)
class BenchVirtual:
    """Measure a step of a virtual run of LeNet on random images, side by side in one run.

    plain loop is what one writes without an order; turns is cd-grab with workers one after the
    other; one run, nine runs (cd-grab, id-grab, id-pair-grab, three seeds) and nine runs, d-rr go
    through the engine. Times are of one step of one run: of nine, each has a ninth.

    Example: gradherd bench virtual --device cuda --json
    """

    workers: int = 64
    """Workers of a run."""
    batch: int = 1
    """Examples of a worker in a step."""
    steps: int | None = None
    """Steps of an epoch; 10 on the CPU and 200 on a GPU if not given. turns takes a tenth."""
    repeats: int = 5
    """Epochs measured of each case; the median counts."""
    device: str = "cpu"
    """Where: cpu, cuda, cuda:1 ..."""
    json: bool = False
    """Print {"bench", "device", "rows": [...]}; `ratio` is to the plain loop."""

    def run(self) -> None:
        """Measure."""
        at_least("--workers", self.workers, 1)
        at_least("--batch", self.batch, 1)
        at_least("--repeats", self.repeats, 1)
        device = usable_device(self.device)
        usual = 10 if device.type == "cpu" else 200
        count = usual if self.steps is None else self.steps
        at_least("--steps", count, LEAST_STEPS)
        with steps(len(CASES) * (self.repeats + 1), "epochs") as tick:
            rows = bench_virtual(self.workers, self.batch, count, self.repeats, device, tick)
        show("virtual", str(device), rows, as_json=self.json)
