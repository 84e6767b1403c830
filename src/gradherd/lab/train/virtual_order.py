"""The orders of workers in one process, and the coordination that real ranks would have.

Letters: R workers, D parameters, U units of a batch, k elements of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradherd.comm.script import SharedRunner
from gradherd.lab.train.config import RunConfig
from gradherd.ordering.coordination import (
    RowGatherer,
    observe_gathered,
    observe_slices,
    scatters_columns,
)
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.registry import make_policy
from gradherd.ordering.sharding import UnitSharding
from gradherd.rows.settings import BatchRows, RowSettings, choose_rows, resolve_rows, row_length


def make_ordering(config: RunConfig, examples: int) -> tuple[UnitSharding, Ordering]:
    """Return how examples are sharded over workers, and the orders of all workers."""
    sharding = UnitSharding(examples, config.unit, config.workers, drop_last=False)
    policy = make_policy(config.order)
    return sharding, Ordering(policy, sharding.sizes, seed=config.seed, length=sharding.length)


def row_settings(config: RunConfig, needs_rows: bool, size: int) -> RowSettings:
    """Return how `attach` would read the rows of a DDP model.

    Args:
        config: The settings of the run.
        needs_rows: Whether its order needs rows at all.
        size: Number of parameters, D.

    Raises:
        ValueError: `attach` would refuse these settings.
    """
    named = resolve_rows(config.row_choice(), config.unit, config.batch_size)
    # Local steps have no DDP whose hook could deliver whole gradients.
    free = config.workers == 1 or (config.density is None and config.local_steps is None)
    if isinstance(named, BatchRows) and not free:
        # The same refusal as by `attach`: a virtual run must not accept what real ranks do not.
        raise ValueError(
            "rows='batch' does not work with a sparsifier or local steps: use 'sketch'"
        )
    if named is not None:
        return named
    whole_batches = config.unit == config.batch_size
    return choose_rows(
        needs_rows=needs_rows,
        whole_batches=whole_batches,
        free=free,
        size=size,
        on_gpu=False,  # the same rows as on the CPU: virtual runs have the bits of real ranks
        workers=config.workers,
    )[0]


class VirtualCoordination:
    """Runs the coordination of real ranks for workers that share one ordering."""

    def __init__(
        self,
        ordering: Ordering,
        workers: int,
        rows: RowSettings | None = None,
        parameters: int = 0,
    ) -> None:
        """Start empty; real ranks scatter rows that are whole gradients of D `parameters`."""
        self._ordering = ordering
        self._workers = workers
        self._runner = SharedRunner(workers)
        length = 0 if rows is None else row_length(rows, parameters)
        self._scatters = scatters_columns(length, parameters, workers)
        self._gatherer = RowGatherer(ordering, self._runner, scatters=self._scatters)

    @property
    def bytes(self) -> int:
        """Bytes that one worker would have sent for ordering alone."""
        return self._runner.bytes

    def add(self, rows: Tensor) -> None:
        """Add the (R, U, k) rows of one batch of every worker."""
        self._gatherer.add(rows)

    def gather(self, rows: Tensor, batches: Sequence[int]) -> None:
        """Learn from (R, units, k) rows of several steps; `batches` are the units of each."""
        self._runner.start(observe_gathered(self._ordering, rows, batches, scatters=self._scatters))

    def exchange(self, grads: Tensor) -> None:
        """Learn from the (R, D) gradients of whole batches, exchanged by slices."""
        self._runner.start(observe_slices(self._ordering, (grads,)))

    def end_epoch(self) -> None:
        """Adopt the next orders."""
        self._gatherer.flush()
        ordering = self._ordering
        # Nothing was observed, but the order still needs to know that the epoch is complete.
        if not ordering.policy.needs_rows:
            steps = ordering.length - ordering.steps
            ordering.observe(None, torch.ones((steps, self._workers), dtype=torch.bool))
        ordering.end_epoch()
