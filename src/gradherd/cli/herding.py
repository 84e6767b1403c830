"""`gradherd herding`: the random-vector study of the CD-GraB paper."""

from dataclasses import dataclass
from typing import Annotated

from gradherd.cli.parser import Arg, Count, UsageError, whole
from gradherd.cli.terminal import print_json, print_table
from gradherd.ordering.registry import POLICIES, make_policy

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

    workers: Count = 16
    """Number of workers, M."""
    units: Count = 500
    """Vectors of each worker, N."""
    dim: Count = 16
    """Dimension of the vectors."""
    rounds: Annotated[int, Arg(parse=whole(0))] = 12
    """Number of rounds in which each policy reorders."""
    orders: Annotated[
        tuple[str, ...], Arg(metavar="A,B", known=POLICIES, default="all of them")
    ] = tuple(POLICIES)
    """Orders to compare, separated by commas, from: {known}."""
    seed: Annotated[int, Arg(parse=whole(0, 2**32 - 1))] = 0
    """Seed of the vectors and of random orders."""
    json: bool = False
    """Print {"workers", "units", "dim", "orders": {name: [H0..HR]}} instead of a table."""

    def run(self) -> None:
        """Run the study."""
        # Python integers do not overflow, so the product can be checked before anything is
        # allocated.
        if self.workers * self.units * self.dim > _MAX_ELEMENTS:
            raise UsageError(
                f"--workers x --units x --dim must be at most {_MAX_ELEMENTS:,}, "
                f"got {self.workers * self.units * self.dim:,}"
            )
        # Late, for the sake of --help: these import torch.
        from gradherd.cli.progress import counted_loop
        from gradherd.replay.recorded import random_vectors, replay_order

        # The same vectors for all policies, so that bounds can be compared.
        vectors = random_vectors(self.workers, self.units, self.dim, self.seed)
        bounds: dict[str, list[float]] = {}
        with counted_loop(len(self.orders) * self.rounds, "rounds") as advance:
            for name in self.orders:
                policy = make_policy(name)
                bounds[name] = replay_order(
                    vectors, policy, rounds=self.rounds, seed=self.seed, progress=advance
                ).bounds
        if self.json:
            sizes = {"workers": self.workers, "units": self.units, "dim": self.dim}
            print_json({**sizes, "orders": bounds})
            return
        # Bounds fall fast at first: a few early rounds and the last one fit a terminal.
        rounds = sorted({0, 1, 2, 3, 5, 8, self.rounds} & set(range(self.rounds + 1)))
        best = min(values[-1] for values in bounds.values())
        print_table(
            [
                [name + "*" * (values[-1] == best), *(f"{values[at]:.2f}" for at in rounds)]
                for name, values in bounds.items()
            ],
            ["order", *("start" if at == 0 else str(at) for at in rounds)],
            title=f"Herding bound H by round: {self.workers} workers x {self.units} vectors, "
            f"dimension {self.dim}, seed {self.seed}",
            caption="Largest entry of any prefix sum; smaller is better; *: smallest at the end.",
        )
