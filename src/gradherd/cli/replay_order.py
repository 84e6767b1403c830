"""`gradherd replay order`: what order would a policy find for these gradients?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from gradherd.cli.progress import steps
from gradherd.cli.usage import UsageError, at_least, name, print_json
from gradherd.ordering.registry import POLICIES, make_policy
from gradherd.ordering.sign_rules import SIGN_RULES
from gradherd.ordering.state import Start
from gradherd.replay.order import load_vectors, replay_order


@dataclass(frozen=True, kw_only=True)
class ReplayOrder:
    """Let a policy sort recorded vectors for some rounds; print the bounds and the last orders.

    FILE is an .npy array (workers, units, dim): the gradient, or any vector, of each worker's
    units. H is the maximum over time steps of the largest entry of the running sum over workers
    of (vector - mean of all vectors).

    Example: gradherd replay order gradients.npy --order cd-grab --rounds 10 --json
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Array (workers, units, dim) in numpy's .npy format."""
    order: str = "cd-grab"
    """Policy, one of: d-rr, shuffle-once, fixed, flip-flop, grab, pair-grab, id-grab,
    id-pair-grab, cd-grab, always-plus."""
    rounds: int = 10
    """How often it sorts."""
    start: Start = "identity"
    """First order: that of the file, or a random one."""
    signs: str = "greedy"
    """Sign rule of the balancing policies: greedy, walk or kernel."""
    seed: int = 0
    """Seed of random choices."""
    json: bool = False
    """Print {"order", "bounds": [H0..HR], "orders": [[unit ids] per worker]}."""

    def run(self) -> None:
        """Replay the file."""
        name("--order", self.order, POLICIES)
        name("--signs", self.signs, SIGN_RULES)
        if self.signs != "greedy" and not make_policy(self.order).needs_rows:
            raise UsageError(f"--signs {self.signs!r} has no effect: {self.order} takes no signs")
        at_least("--rounds", self.rounds, 0)
        at_least("--seed", self.seed, 0)
        try:
            vectors = load_vectors(self.file)
        except ValueError as error:
            raise UsageError(str(error)) from None
        with steps(self.rounds) as tick:
            result = replay_order(
                vectors,
                make_policy(self.order, self.signs),
                rounds=self.rounds,
                start=self.start,
                seed=self.seed,
                progress=tick,
            )
        if self.json:
            print_json({"order": self.order, "bounds": result.bounds, "orders": result.orders})
            return
        console = Console()
        for done, bound in enumerate(result.bounds):
            console.print(f"{'start' if done == 0 else f'round {done}':>9}  H = {bound:.6g}")
        for worker, order in enumerate(result.orders[:8]):
            head = " ".join(map(str, order[:12]))
            console.print(f"worker {worker}: {head}{' ...' if len(order) > 12 else ''}")
        if len(result.orders) > 8:
            console.print(f"... and {len(result.orders) - 8} more workers (--json has them all)")
