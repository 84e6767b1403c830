"""The seam between a run and how it is run: on real ranks, in one process, or many at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.utils.data import Dataset

from gradherd.lab.tasks.task import Tensors
from gradherd.lab.train.watch import Bins


@dataclass
class Tally:
    """What one epoch of one run has cost so far."""

    steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0
    ordering_seconds: float = 0.0
    exchange_seconds: float = 0.0
    saving_seconds: float = 0.0
    bytes: int = 0
    ordering_bytes: int = 0
    skipped_steps: int = 0
    residual_norm: float | None = None
    herding_bound: float | None = None
    sparse_steps: int = 0
    """Steps that were sparse; the sums below are over these."""
    density: float = 0.0
    padding: float = 0.0
    load: list[float] = field(default_factory=list)
    """Picked by each worker."""
    load_steps: int = 0
    """Steps that `load` is the sum of: fewer where the number of workers has changed."""

    def add_sparse(self, told: Mapping[str, Any]) -> None:
        """Count a sparse step: its density, padding and per_rank."""
        if not told:
            return
        self.sparse_steps += 1
        self.density += told["density"]
        self.padding += told["padding"]
        self.load_steps += 1
        before = self.load or [0.0] * len(told["per_rank"])
        self.load = [sum(pair) for pair in zip(before, told["per_rank"], strict=True)]


@dataclass(frozen=True)
class Quality:
    """What a model is worth; None where a number is not finite."""

    loss: float | None
    metric: float | None


class Tick(Protocol):
    """Is told that steps were done."""

    def __call__(self, steps: int = 1) -> None:
        """Move on by so many steps."""
        ...


class Fleet(Protocol):
    """Workers that train one or more runs side by side, an epoch at a time."""

    model: nn.Module
    """A model of the kind that is trained."""
    series: list[Bins]
    """Densities of all steps so far, for each run."""

    def epoch(self, number: int, tick: Tick) -> list[Tally]:
        """Train one epoch, counted from 1; return what it cost, for each run."""
        ...

    def quality(self) -> list[Quality]:
        """Return what the models of all runs are worth now."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class Table(Dataset[Tensors]):
    """Examples in memory; a loader takes a whole batch at once."""

    def __init__(self, columns: Tensors) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> Tensors:
        return tuple(column[index] for column in self.columns)

    def __getitems__(self, indices: list[int]) -> Tensors:
        """Return the columns of a batch."""
        return tuple(column[indices] for column in self.columns)


def as_is(batch: Any) -> Any:
    """Collate nothing: the table's batches are whole."""
    return batch
