"""`gradherd herding`: the random-vector study of the CD-GraB paper."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gradherd.cli.progress import steps
from gradherd.cli.usage import UsageError, at_least, names, print_json
from gradherd.ordering.registry import POLICIES, make_policy
from gradherd.replay.order import random_vectors, replay_order

# Numbers in memory: 64 GiB of them.
_MOST = 1 << 33


@dataclass(frozen=True, kw_only=True)
class Herding:
    """Let every order sort the same random vectors and print how short it keeps prefix sums.

    Each of M workers holds N random unit vectors that sum to zero. In each round an order sees
    them all and sorts them anew; H is the largest entry of any prefix sum over all workers
    (smaller is better: it is what training's speed depends on). Random orders stay near
    sqrt(M N), independent balancing grows like sqrt(M), coordinated balancing (cd-grab) stays
    flat whatever M and N are.

    Example: gradherd herding --workers 100 --units 10000 --orders cd-grab,id-grab,d-rr
    """

    workers: int = 16
    """Number of workers, M."""
    units: int = 500
    """Vectors of each worker, N."""
    dim: int = 16
    """Dimension of the vectors."""
    rounds: int = 12
    """How often each order sorts."""
    orders: str = ",".join(POLICIES)
    """Orders to compare, separated by commas."""
    seed: int = 0
    """Seed of the vectors and of random orders."""
    json: bool = False
    """Print {"workers", "units", "dim", "orders": {name: [H0..HR]}} instead of a table."""

    def run(self) -> None:
        """Run the study."""
        for option, value in (("workers", self.workers), ("units", self.units), ("dim", self.dim)):
            at_least(f"--{option}", value, 1)
        at_least("--rounds", self.rounds, 0)
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed must be in [0, 2**32), got {self.seed}")
        if self.workers * self.units * self.dim > _MOST:
            raise UsageError(
                f"--workers x --units x --dim must be at most {_MOST:,} numbers, "
                f"got {self.workers * self.units * self.dim:,}"
            )
        orders = names("--orders", self.orders, POLICIES)
        vectors = random_vectors(self.workers, self.units, self.dim, self.seed)
        bounds: dict[str, list[float]] = {}
        with steps(len(orders) * self.rounds) as tick:
            for name in orders:
                policy = make_policy(name)
                bounds[name] = replay_order(
                    vectors, policy, rounds=self.rounds, seed=self.seed, progress=tick
                ).bounds
        if self.json:
            sizes = {"workers": self.workers, "units": self.units, "dim": self.dim}
            print_json({**sizes, "orders": bounds})
        else:
            Console().print(self._table(bounds))

    def _table(self, bounds: dict[str, list[float]]) -> Table:
        table = Table(
            title=f"Herding bound H by round: {self.workers} workers x {self.units} vectors, "
            f"dimension {self.dim}, seed {self.seed}",
            caption="Largest entry of any prefix sum; smaller is better.",
            title_justify="left",
        )
        shown = sorted({0, 1, 2, 3, 5, 8, self.rounds} & set(range(self.rounds + 1)))
        table.add_column("order", no_wrap=True)
        for done in shown:
            table.add_column("start" if done == 0 else str(done), justify="right")
        best = min(values[-1] for values in bounds.values())
        for name, values in bounds.items():
            style = "bold green" if values[-1] == best else None
            table.add_row(name, *(f"{values[done]:.2f}" for done in shown), style=style)
        return table
