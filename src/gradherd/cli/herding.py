"""`gradherd herding`: the random-vector study of the CD-GraB paper."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradherd.cli.arguments import check_at_least, parse_names, print_json
from gradherd.cli.errors import UsageError
from gradherd.ordering.registry import POLICIES, make_policy

if TYPE_CHECKING:
    from rich.table import Table

_MAX_ELEMENTS = 1 << 33  # 64 GiB of float64


@dataclass(frozen=True, kw_only=True)
class HerdingCommand:
    """Reorder the same random vectors with every policy and compare the herding bounds.

    Each of M workers holds N random unit vectors that sum to zero. In each round a policy sees all
    of them and reorders them. The herding bound H is the largest entry of any prefix sum over all
    workers; the smaller it is, the faster training converges. Random orders stay near sqrt(M N),
    independent balancing (id-grab) grows like sqrt(M), and coordinated balancing (cd-grab) stays
    flat whatever M and N are. Repeats the random-vector study of the CD-GraB paper, arXiv
    2302.00845.

    Example: gradherd herding --workers 100 --units 10000 --orders cd-grab,id-grab,d-rr
    """

    workers: int = 16
    """Number of workers, M."""
    units: int = 500
    """Vectors of each worker, N."""
    dim: int = 16
    """Dimension of the vectors."""
    rounds: int = 12
    """Number of rounds in which each policy reorders."""
    orders: str = ",".join(POLICIES)
    """Orders to compare, separated by commas."""
    seed: int = 0
    """Seed of the vectors and of random orders."""
    json: bool = False
    """Print {"workers", "units", "dim", "orders": {name: [H0..HR]}} instead of a table."""

    def run(self) -> None:
        """Run the study."""
        for option, value in (("workers", self.workers), ("units", self.units), ("dim", self.dim)):
            check_at_least(f"--{option}", value, 1)
        check_at_least("--rounds", self.rounds, 0)
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"--seed must be in [0, 2**32), got {self.seed}")
        # Python integers do not overflow, so the product can be checked before anything is
        # allocated.
        if self.workers * self.units * self.dim > _MAX_ELEMENTS:
            raise UsageError(
                f"--workers x --units x --dim must be at most {_MAX_ELEMENTS:,}, "
                f"got {self.workers * self.units * self.dim:,}"
            )
        orders = parse_names("--orders", self.orders, POLICIES)
        # Late, for the sake of --help: these import torch.
        from rich.console import Console

        from gradherd.cli.progress import counted_loop
        from gradherd.cli.tables import has_colours, print_table
        from gradherd.replay.recorded import random_vectors, replay_order

        # The same vectors for all policies, so that bounds can be compared.
        vectors = random_vectors(self.workers, self.units, self.dim, self.seed)
        bounds: dict[str, list[float]] = {}
        with counted_loop(len(orders) * self.rounds, "rounds") as advance:
            for name in orders:
                policy = make_policy(name)
                bounds[name] = replay_order(
                    vectors, policy, rounds=self.rounds, seed=self.seed, progress=advance
                ).bounds
        if self.json:
            sizes = {"workers": self.workers, "units": self.units, "dim": self.dim}
            print_json({**sizes, "orders": bounds})
        else:
            console = Console()
            print_table(self._table(bounds, has_colours(console)), console)

    def _table(self, bounds: dict[str, list[float]], coloured: bool) -> "Table":
        from rich.table import Table

        table = Table(
            title=f"Herding bound H by round: {self.workers} workers x {self.units} vectors, "
            f"dimension {self.dim}, seed {self.seed}",
            caption="Largest entry of any prefix sum; smaller is better; "
            f"{'green' if coloured else '*'}: smallest at the end.",
        )
        # Bounds fall fast at first: a few early rounds and the last one fit a terminal.
        rounds = sorted({0, 1, 2, 3, 5, 8, self.rounds} & set(range(self.rounds + 1)))
        table.add_column("order", no_wrap=True)
        for number in rounds:
            table.add_column("start" if number == 0 else str(number), justify="right", no_wrap=True)
        best = min(values[-1] for values in bounds.values())
        for name, values in bounds.items():
            style = "bold green" if values[-1] == best else None
            name += "*" if style and not coloured else ""
            table.add_row(name, *(f"{values[number]:.2f}" for number in rounds), style=style)
        return table
