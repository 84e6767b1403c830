"""`gradherd replay` and `gradherd herding`: policies and sparsifiers without training.

On recorded gradients, or on random vectors.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gradherd.cli.parser import (
    Arg,
    Count,
    Density,
    FileArgument,
    FolderOption,
    UsageError,
    usage_errors,
    whole,
)
from gradherd.cli.terminal import print_json, print_table, say
from gradherd.comm.message_sizes import DEFAULT_DENSITY, ValueFormat
from gradherd.ordering.registry import POLICIES, SIGN_RULES, make_policy
from gradherd.sparsify.registry import (
    SPARSIFIERS,
    setting_names,
    takes_density,
)

# Imported by the methods that need them: these import torch, and --help must not wait for it.
if TYPE_CHECKING:
    from gradherd.sparsify.settings import Sparsify

# The terminal shows the head of long orders; --json has all of it.
_SHOWN_WORKERS, _SHOWN_UNITS = 8, 12
_MAX_ELEMENTS = 1 << 33  # 64 GiB of float64


@dataclass(frozen=True, kw_only=True)
class ReplayOrderCommand:
    """Reorder recorded gradients with a policy; print the herding bounds and the final orders.

    FILE is an .npy array (workers, units, dim) with one gradient, or any other vector, for each
    unit of each worker. The policy sees all of them in every round and reorders them. The herding
    bound H after a round is the largest entry of any prefix sum of (vector - mean of all vectors)
    over all workers; smaller is better.

    Example: gradherd replay order gradients.npy --order cd-grab --rounds 10 --json
    """

    file: FileArgument
    """Array (workers, units, dim) in numpy's .npy format."""
    order: Annotated[str, Arg(known=POLICIES)] = "cd-grab"
    """Policy, one of: {known}."""
    rounds: Annotated[int, Arg(parse=whole(0))] = 10
    """Number of rounds in which the policy reorders."""
    start: Literal["identity", "random"] = "identity"
    """First order: as in the file (identity) or random."""
    signs: Annotated[str, Arg(known=SIGN_RULES)] = "greedy"
    """Sign rule of the balancing policies, one of: {known}."""
    seed: Annotated[int, Arg(parse=whole(0))] = 0
    """Seed of all random choices."""
    json: bool = False
    """Print {"order", "bounds": [H0..HR], "orders": [[unit ids] per worker]}."""

    def run(self) -> None:
        """Replay the file."""
        # A setting without effect is refused, not ignored.
        if self.signs != "greedy" and not make_policy(self.order).needs_rows:
            raise UsageError(f"--signs {self.signs!r} has no effect: {self.order} uses no signs")
        from gradherd.cli.progress import counted_loop
        from gradherd.cli.recordings import load_vectors
        from gradherd.replay.recorded import replay_order

        with usage_errors():
            vectors = load_vectors(self.file)
        with counted_loop(self.rounds, "rounds") as advance:
            result = replay_order(
                vectors,
                make_policy(self.order, self.signs),
                rounds=self.rounds,
                start=self.start,
                seed=self.seed,
                progress=advance,
            )
        workers, units, _ = vectors.shape
        if workers > units:
            _warn_of_axes(f"{workers} workers of {units} units", "steps, workers, dim", "sparsify")
        if self.json:
            print_json({"order": self.order, "bounds": result.bounds, "orders": result.orders})
            return
        for number, bound in enumerate(result.bounds):
            label = "start" if number == 0 else f"round {number}"
            print(f"{label:>9}  H = {bound:.6g}")
        for worker, order in enumerate(result.orders[:_SHOWN_WORKERS]):
            head = " ".join(map(str, order[:_SHOWN_UNITS]))
            say(f"worker {worker}: {head}{' ...' * (len(order) > _SHOWN_UNITS)}")
        if workers > _SHOWN_WORKERS:
            say(f"... and {workers - _SHOWN_WORKERS} more workers (--json prints all of them)")


@dataclass(frozen=True, kw_only=True)
class ReplaySparsifyCommand:
    """Exchange recorded gradients with a sparsifier, with all workers in this process.

    FILE is an .npy array (steps, workers, dim) with the gradient of each worker at each step. It is
    read step by step, so it may be larger than memory. What a worker does not send stays in its
    residual and is added to its next gradient.

    For each step, --json prints: selected, the number of elements sent; per_rank, how many each
    worker selected; the threshold; density = selected / dim; padding = workers x largest count /
    sum of counts; and, as means over workers, the norm of the residual and the bytes sent.

    Example: gradherd replay sparsify gradients.npy --method exdyna --density 0.001 --json
    """

    file: FileArgument
    """Array (steps, workers, dim) in numpy's .npy format."""
    method: Annotated[str, Arg(known=SPARSIFIERS)] = "exdyna"
    """Sparsifier, one of: {known}."""
    density: Density = DEFAULT_DENSITY
    """Share of the elements to send, in (0, 1]; dense sends all."""
    threshold: Annotated[Literal["consensus", "online"] | None, Arg(default="consensus")] = None
    """For methods that select by a threshold: agree on one in each step (consensus), or adjust it
    a little after each step as in the papers (online)."""
    values: ValueFormat = "fp32"
    """Precision of the values sent; what is rounded off stays in the residual."""
    out: FolderOption = None
    """Folder for mean.npy (steps, dim) and residual.npy (workers, dim)."""
    json: bool = False
    """Print {"method", "density", "steps": [{"selected", "per_rank", "threshold", "density",
    "padding", "residual_norm", "bytes"}]}."""

    def run(self) -> None:
        """Replay the file."""
        from gradherd.cli.progress import counted_loop
        from gradherd.cli.recordings import open_array
        from gradherd.replay.recorded import replay_sparsify

        settings = self._settings()
        # From the method, not the option: dense has density 1 whatever was given.
        density = settings.method.density
        with usage_errors():
            # Mapped, not read: the file may be larger than memory.
            gradients = open_array(self.file, ("steps", "workers", "dim"))
            with counted_loop(len(gradients), "steps") as advance:
                steps = replay_sparsify(
                    gradients,
                    settings,
                    out=self.out,
                    progress=advance,
                )
        count, workers, _ = gradients.shape
        if workers > count:
            read = f"{count} steps of {workers} workers"
            _warn_of_axes(read, "workers, units, dim", "order")
        if self.json:
            print_json({"method": self.method, "density": density, "steps": steps})
        else:
            self._print(steps, gradients.shape, density)

    def _settings(self) -> Sparsify:
        # A setting without effect is refused, not ignored.
        if self.threshold is not None and "threshold" not in setting_names(self.method):
            methods = [name for name in SPARSIFIERS if "threshold" in setting_names(name)]
            raise UsageError(
                f"--threshold {self.threshold} has no effect with --method {self.method}: use it "
                f"with {' or '.join(methods)}"
            )
        from gradherd.sparsify.settings import make_settings

        density = self.density if takes_density(self.method) else None
        settings = {} if self.threshold is None else {"threshold": self.threshold}
        return make_settings(self.method, density, values=self.values, **settings)

    def _print(self, steps: list[dict[str, Any]], shape: tuple[int, ...], density: float) -> None:
        count, workers, dim = shape
        # Relative to the target, since densities span orders of magnitude.
        errors = [abs(step["density"] / density - 1) for step in steps]
        within = sum(error <= 0.1 for error in errors) / len(errors)
        dense_bytes = 8 * dim * (workers - 1) / workers  # ring all-reduce of float32
        sent_bytes = sum(step["bytes"] for step in steps) / count
        mean = {
            key: statistics.fmean(step[key] for step in steps) for key in ("density", "padding")
        }
        rows = {
            "mean density": f"{mean['density']:.6g}",
            "mean deviation from the target density": f"{100 * statistics.fmean(errors):.2f} %",
            "steps within 10 % of the target density": f"{100 * within:.1f} %",
            "mean padding": f"{mean['padding']:.3f}",
            "norm of the residual after the last step": f"{steps[-1]['residual_norm']:.6g}",
            "bytes sent per worker and step": f"{sent_bytes:,.0f}",
        }
        if dense_bytes:  # one worker sends nothing, dense or not
            share = 100 * sent_bytes / dense_bytes
            rows["... relative to a dense exchange"] = f"{share:.3f} %"
        title = f"{self.method}, density {density:g}: {count} steps of {workers} workers, "
        print_table(list(rows.items()), title=f"{title}{dim:,} elements")
        if self.out is not None:
            print(f"wrote mean.npy and residual.npy to {self.out}")


def _warn_of_axes(read: str, other: str, command: str) -> None:
    """Say how a file was read whose first two axes look like those of the other command."""
    said = f"read as {read}; a file of axes ({other}) is for `gradherd replay {command}`"
    print(f"gradherd: {said}", file=sys.stderr)


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
