"""`gradherd replay sparsify`: what would a sparsifier have sent of these gradients?"""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from gradherd.cli.progress import steps
from gradherd.cli.usage import UsageError, name, numbers, print_json
from gradherd.replay.arrays import open_array
from gradherd.replay.sparsify import replay_sparsify
from gradherd.sparsify.registry import SPARSIFIERS, make_sparsifier
from gradherd.sparsify.settings import Sparsify

_THRESHOLDED = ("exdyna", "micro")


@dataclass(frozen=True, kw_only=True)
class ReplaySparsify:
    """Let a sparsifier exchange recorded gradients, all workers in this process.

    FILE is an .npy array (steps, workers, dim): each worker's own gradient at each step. It is
    read step by step, so it may be larger than memory. What is not sent stays with its worker and
    is added to its next gradient. Per step: how many coordinates travelled (selected), how many
    each worker picked (per_rank), the threshold, density = selected / dim, padding = workers x
    the most picked / all picked, and means over workers of the norm of what is kept and of the
    bytes sent.

    Example: gradherd replay sparsify gradients.npy --method exdyna --density 0.001 --json
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Array (steps, workers, dim) in numpy's .npy format."""
    method: str = "exdyna"
    """One of: dense, exdyna, micro, deft, topk, gtopk, cltk, randomk, threshold, sage, sidco."""
    density: float = 0.001
    """Share of the coordinates that should travel, in (0, 1]; dense sends all."""
    threshold: Literal["consensus", "online"] | None = None
    """Of exdyna and micro: agreed on in each step (consensus, the default), or the papers' rule
    that moves a little after each step (online)."""
    values: Literal["fp32", "bf16"] = "fp32"
    """How values travel; what bf16 rounds away stays with the worker."""
    layers: str | None = None
    """Lengths of the tensors that the vector consists of, separated by commas (for deft)."""
    out: Path | None = None
    """Folder for mean.npy (steps, dim) and residual.npy (workers, dim)."""
    json: bool = False
    """Print {"method", "density", "steps": [{"selected", "per_rank", "threshold", "density",
    "padding", "residual_norm", "bytes"}]}."""

    def run(self) -> None:
        """Replay the file."""
        settings = self._settings()
        try:
            gradients = open_array(self.file, ("steps", "workers", "dim"))
            layers = self._layers(gradients.shape[2])
            with steps(len(gradients), "steps") as tick:
                figures = replay_sparsify(
                    gradients, settings, layers=layers, out=self.out, progress=tick
                )
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.json:
            print_json(
                {"method": self.method, "density": settings.method.density, "steps": figures}
            )
        else:
            self._show(figures, gradients.shape, settings.method.density)

    def _settings(self) -> Sparsify:
        name("--method", self.method, SPARSIFIERS)
        if not 0 < self.density <= 1:
            raise UsageError(f"--density must be in (0, 1], got {self.density}")
        if self.threshold is not None and self.method not in _THRESHOLDED:
            raise UsageError(
                f"--threshold {self.threshold} has no effect: only {' and '.join(_THRESHOLDED)} "
                f"take one, not {self.method}"
            )
        if self.values == "bf16" and self.method == "gtopk":
            raise UsageError("--values bf16 has no effect: gtopk adds values up on their way")
        if self.layers is not None and self.method != "deft":
            raise UsageError(f"--layers has no effect: only deft looks at them, not {self.method}")
        if self.threshold is not None:
            method = SPARSIFIERS[self.method](density=self.density, threshold=self.threshold)
        else:
            method = make_sparsifier(self.method, None if self.method == "dense" else self.density)
        return Sparsify(method=method, values=self.values)

    def _layers(self, dim: int) -> list[int] | None:
        if self.layers is None:
            return None
        lengths = numbers("--layers", self.layers)
        if sum(lengths) != dim:
            raise UsageError(f"--layers add up to {sum(lengths)}, but vectors have {dim} numbers")
        return lengths

    def _show(self, figures: list[dict[str, Any]], shape: tuple[int, ...], density: float) -> None:
        count, workers, dim = shape
        wrong = [abs(figure["density"] / density - 1) for figure in figures]
        near = sum(off <= 0.1 for off in wrong) / len(wrong)
        dense = 8 * dim * (workers - 1) / workers
        mean_bytes = statistics.fmean(figure["bytes"] for figure in figures)
        table = Table(
            title=f"{self.method}, density {density:g}: {count} steps of {workers} workers, "
            f"{dim:,} coordinates",
            show_header=False,
        )
        mean = {key: statistics.fmean(figure[key] for figure in figures) for key in _MEANS}
        table.add_row("density, mean over steps", f"{mean['density']:.6g}")
        table.add_row("off its target, mean over steps", f"{statistics.fmean(wrong):.2%}")
        table.add_row("steps within 10 % of the target", f"{near:.1%}")
        table.add_row("padding, mean over steps", f"{mean['padding']:.3f}")
        table.add_row("norm of what is kept, last step", f"{figures[-1]['residual_norm']:.6g}")
        table.add_row("bytes of a worker in a step", f"{mean_bytes:,.0f}")
        if dense:
            table.add_row("... of those of a dense exchange", f"{mean_bytes / dense:.3%}")
        Console().print(table)
        if self.out is not None:
            Console().print(f"wrote mean.npy and residual.npy to {self.out}")


_MEANS = ("density", "padding")
