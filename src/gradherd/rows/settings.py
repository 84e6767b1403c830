"""How rows are read: the settings a user may choose."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """One row for a whole batch: the local gradient itself. Works with any model."""


@dataclass(frozen=True, kw_only=True)
class ExactRows:
    """The gradient of every example, exactly."""

    reduction: Literal["mean", "sum"] = "mean"
    """How the loss joins the examples of a batch."""
    batch_dim: int | None = None
    """Dimension of the examples, tried first; None finds the one of the right size."""


@dataclass(frozen=True, kw_only=True)
class SketchRows:
    """A few numbers of each gradient whose inner products are, on average, the gradients'."""

    size: int = 512
    """Numbers of a row."""
    seed: int = 0
    """Of the projection; must be equal on all ranks."""
    reduction: Literal["mean", "sum"] = "mean"
    """How the loss joins the examples of a batch."""
    batch_dim: int | None = None
    """Dimension of the examples, tried first; None finds the one of the right size."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


RowSettings = BatchRows | ExactRows | SketchRows
