"""What the orders of runs that are trained side by side are shown of the gradients.

Letters: S runs, s of them that read rows alike, G groups of a step, T steps, D parameters, k
numbers of a row.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradherd.lab.train.config import RunConfig
from gradherd.lab.train.virtual import row_settings
from gradherd.ordering.registry import make_policy
from gradherd.rows.settings import SketchRows
from gradherd.rows.sketch import count_sketch


class Shown:
    """Rows of some of the runs, kept until there are enough to be shown together."""

    def __init__(self, runs: Sequence[int], sketch: SketchRows | None, size: int) -> None:
        """Start with nothing.

        Args:
            runs: Their places among all runs, rising.
            sketch: How their rows are folded; None keeps all of a row.
            size: D.
        """
        self.runs, self._sketch = list(runs), sketch
        self.columns = size if sketch is None else sketch.size
        self._held = torch.empty(0)

    def fold(self, rows: Tensor) -> Tensor:
        """Return (s, G, k) of the (S, G, D) gradients of all runs."""
        own = rows[self.runs[0] : self.runs[-1] + 1]
        if len(own) > len(self.runs):  # Others stand between them.
            own = torch.stack([rows[run] for run in self.runs])
        if self._sketch is None:
            return own
        return count_sketch(own, self._sketch.size, self._sketch.seed)

    def hold(self, kept: Tensor, at: int, steps: int) -> None:
        """Keep (s, G, k) rows as those of step `at` of `steps`."""
        shape = (len(kept), steps, *kept.shape[1:])
        if self._held.shape != shape:
            self._held = kept.new_empty(shape)
        self._held[:, at].copy_(kept)

    def held(self, steps: int) -> Iterator[tuple[int, Tensor]]:
        """Give each run's place and its (T, G, k) rows of the first so many steps."""
        yield from zip(self.runs, self._held[:, :steps], strict=True)


def shown_of(configs: Sequence[RunConfig], size: int) -> list[Shown]:
    """Return what each kind of runs is shown; runs whose orders need no gradients are in none."""
    runs: dict[SketchRows | None, list[int]] = {}
    for at, config in enumerate(configs):
        if make_policy(config.order).needs_rows:
            settings = row_settings(config, True, size)
            sketch = settings if isinstance(settings, SketchRows) else None
            runs.setdefault(sketch, []).append(at)
    return [Shown(places, sketch, size) for sketch, places in runs.items()]
