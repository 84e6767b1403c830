"""The settings that tasks and runs share, each declared and checked once; no torch is imported.

`Defaults` (of a task) and `RunConfig` (of a run, in `lab.train.config`) inherit `Hyperparameters`.
"""

from dataclasses import dataclass
from typing import Literal

from gradherd.comm.checks import check_choice, check_in, check_whole


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """How a task is trained; checked on construction."""

    workers: int
    """Number of workers; under torchrun, that of the processes it has started."""
    epochs: int
    """Number of epochs."""
    batch_size: int
    """Examples per worker and step."""
    unit: int = 1
    """Consecutive examples that are ordered as one; the batch size orders whole batches."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer."""
    lr: float
    """Learning rate."""
    momentum: float = 0.0
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Weight decay."""
    clip: float | None = None
    """Largest norm of the averaged gradient. With a sparsifier, workers clip their own gradients
    before these join the residuals, at sqrt(workers) times as much; with local steps, as given."""
    lr_drop: float | None = None
    """Factor by which the learning rate drops; 1 keeps it."""
    lr_drop_every: int | None = None
    """Epochs between two drops."""

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch_size", "unit"):
            check_whole(name, getattr(self, name), 1)
        if self.batch_size % self.unit:
            raise ValueError(f"unit must divide batch_size {self.batch_size}, got {self.unit}")
        # Literal is checked by mypy only, and tasks come from files of users.
        check_choice("optimizer", self.optimizer, "sgd", "adamw")
        check_in("(0, inf)", lr=self.lr)
        check_in("[0, 1)", momentum=self.momentum)
        check_in("[0, inf)", weight_decay=self.weight_decay)
        if self.optimizer == "adamw" and self.momentum:
            raise ValueError(f"momentum {self.momentum} has no effect on adamw: leave it at 0")
        if self.clip is not None:
            check_in("(0, inf)", clip=self.clip)
        # One without the other would be ignored in silence.
        if (self.lr_drop is None) != (self.lr_drop_every is None):
            raise ValueError(
                "lr_drop and lr_drop_every go together, "
                f"got {self.lr_drop} and {self.lr_drop_every}"
            )
        if self.lr_drop is not None:
            check_in("(0, 1]", lr_drop=self.lr_drop)
            check_whole("lr_drop_every", self.lr_drop_every, 1)


@dataclass(frozen=True, kw_only=True)
class Defaults(Hyperparameters):
    """The settings that a task is trained with unless others are given."""

    seeds: int
    """Number of seeds in an experiment."""
    source: str
    """Where these settings come from, in one sentence."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("seeds", self.seeds, 1)
