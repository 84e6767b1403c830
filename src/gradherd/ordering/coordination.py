"""How workers learn one order together: written once, for real ranks and virtual workers alike.

Two ways, both as scripts (`comm.script`):

* `observe_gathered`: every worker's rows are gathered, and every rank signs them. Used for sketches
  and other short rows. An order is needed only at the end of an epoch, so rows wait until a few
  dozen batches have accumulated and are sent in one all-gather that nobody waits for.
* Every rank holds a slice of the columns of every worker's gradient, and only partial inner
  products are exchanged. Of whole batches the averaging of gradients has already delivered the
  slices (`comm.sliced_mean`): `observe_slices`. Long rows of single examples are scattered by
  `observe_gathered`, in the same rhythm as short ones are gathered, for one R-th of the bytes.

Both give the same signs as CD-GraB's server (arXiv:2302.00845), which sees every gradient at every
step: signs depend on the rows and their sequence, not on when they arrive.

Shapes: b units of a batch, R workers, k columns of a row, C columns of this rank's slice.
"""

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradherd.comm.collectives import all_gather
from gradherd.comm.script import AllGather, Runner, ScatterColumns, Script
from gradherd.comm.world import World
from gradherd.ordering.batches import BatchClaim
from gradherd.ordering.implicit import ImplicitRows, are_finite
from gradherd.ordering.ordering import Ordering
from gradherd.ordering.policy import ShardedRows
from gradherd.ordering.sampler import OrderedSampler

log = logging.getLogger("gradherd")

# In place of a time step: the gradient belongs to no batch of the order; no gradient at all, but
# the end of what was fed.
_NO_BATCH, _END = -1, -2
# Rows that wait to be sent take memory, and R times as much on arrival: no more than this.
_MAX_WAITING_ELEMENTS = 4_000_000
# A collective has its latency however little it sends: a few dozen batches share one.
BATCHES_PER_GATHER = 32
"""Batches whose rows are gathered in one collective."""
ROWS_PER_BLOCK = 64
"""Rows that a GPU signs together."""
# From this many columns on, whole gradients are scattered. Shorter ones, and sketches, are gathered
# in a single message, without one for the products of every few vectors.
_SCATTERED_COLUMNS = 1024


def scatters_columns(columns: int, parameters: int, workers: int) -> bool:
    """Return whether ranks scatter the columns of rows, given the number of parameters."""
    return workers > 1 and columns == parameters >= _SCATTERED_COLUMNS


Learner: TypeAlias = Ordering | OrderedSampler
"""What learns from rows: an ordering, or a sampler that also moves on to the next epoch."""


def observe_gathered(
    learner: Learner,
    rows: Tensor,
    batches: Sequence[int],
    claim: BatchClaim | None = None,
    *,
    scatters: bool = False,
    seen: Tensor | None = None,
) -> Script[None]:
    """Gather or scatter the rows of some batches of all workers and learn from them.

    Rows are (steps, k) of this worker, (R, steps, k) where one script serves all workers. The claim
    is of the first batch; None means the next units. If `scatters`, every rank gets a slice of the
    columns instead. (steps,) int64 `seen` says which rows of a whole epoch are real, where workers
    may differ in it.
    """
    # Every rank gathers all rows and repeats the same computation. The gathered bits are equal on
    # all ranks, and so are the signs: no order is ever sent.
    answer: Tensor = yield ScatterColumns(rows) if scatters else AllGather(rows)
    by_step = answer.transpose(0, 1)  # (steps, R, k or C)
    own = ShardedRows((by_step,)) if scatters else by_step
    finite = None
    if seen is not None:
        # What a worker has missed is known to that worker only.
        all_seen: Tensor = yield AllGather(seen)
        yield from learner.learn(own, all_seen.T > 0, first=0)
        return
    if scatters:
        # A slice does not tell whether the rest of its row is finite; who has sent it knows.
        told: Tensor = yield AllGather(rows.sum(-1).isfinite().cpu())
        finite = told.all(0)
    if claim is not None and claim.epoch != learner.epoch:
        return  # Rows of an epoch that is over come too late.
    counted = finite_batches(by_step, batches, finite)
    yield from learner.learn(own, counted, first=None if claim is None else claim.step)
    learner.note_finite(counted[:, 0])


def observe_slices(
    learner: Learner,
    slices: Sequence[Tensor],
    claim: BatchClaim | None = None,
    *,
    release: Callable[[Tensor | None], None] | None = None,
) -> Script[None]:
    """Learn from a batch of every worker, of which this rank holds a slice of the columns.

    Slices are (R, c) blocks of columns of every worker's gradient: all columns where one script
    serves all workers. Policies that have read them long before all is learned call `release` (see
    `ShardedRows`).
    """
    rows = ShardedRows(tuple(block.unsqueeze(0) for block in slices), release)
    if claim is None:
        yield from learner.learn(rows)
    elif claim.epoch == learner.epoch:  # Slices of an epoch that is over come too late.
        yield from learner.learn(rows, first=claim.step)


def finite_batches(rows: Tensor, batches: Sequence[int], finite: Tensor | None = None) -> Tensor:
    """Return (steps, R) which rows count: all workers leave out a batch that is not finite.

    The mean gradient of such a batch is not finite either, so the optimizer skips it on all ranks.

    (steps, R, k) rows are of batches with so many units each, one after the other; (steps,)
    `finite` says which steps are, if it is known already.

    >>> rows = torch.tensor([1.0, torch.inf, 2.0]).view(3, 1, 1)
    >>> finite_batches(rows, [2, 1]).flatten().tolist()
    [False, False, True]
    """
    # The sum of a row tells whether all of it is finite, and needs no mask of the rows' size.
    broken = ~rows.sum(dim=(1, 2)).isfinite().cpu() if finite is None else ~finite
    whole = torch.cat([~batch.any().expand(len(batch)) for batch in broken.split([*batches])])
    return whole.unsqueeze(1).expand(-1, rows.shape[1])


class RowGatherer:
    """Collects rows of batches and has them gathered, many batches at a time."""

    in_order: ClassVar[bool] = True
    """Whether batches come in the order of the epoch."""

    def __init__(
        self,
        learner: Learner,
        runner: Runner,
        *,
        every: int = BATCHES_PER_GATHER,
        policy_checks: Callable[[Tensor], bool] = lambda rows: False,
        scatters: bool = False,
    ) -> None:
        """Start empty; `every` is how many batches are gathered at a time.

        `policy_checks` says whether the policy leaves out rows that are not finite by itself,
        without waiting for the device. Only for the (b, k) rows of a single worker, which are then
        learned as soon as they fill a block of signs.
        """
        self._scatters = scatters
        self._policy_checks = policy_checks
        self._learner = learner
        self._runner = runner
        self._every = every
        self._waiting: list[tuple[BatchClaim | None, Tensor]] = []

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be sent; the same on all ranks."""
        return bool(self._waiting)

    def add(self, rows: Tensor | ImplicitRows, claim: BatchClaim | None = None) -> None:
        """Add the rows of a batch, and send what has accumulated once it is enough.

        They are (b, k) of this worker, or (R, b, k) of all workers of this process, and may be
        overwritten. Without a claim they are of the next units. Those of a single worker that are
        not formed are learned at once: what they are made of is that of a whole step.
        """
        if not isinstance(rows, Tensor):
            self.flush()
            if claim is None or claim.epoch == self._learner.epoch:
                seen = torch.tensor(are_finite(rows)).expand(len(rows), 1)
                self._learner.observe(rows, seen, first=None if claim is None else claim.step)
                self._learner.note_finite(seen[:, 0])
            return
        last = self._waiting[-1][0] if self._waiting else None
        if claim is not None and last is not None:
            if (claim.epoch, claim.step) != (last.epoch, last.step + last.units):
                self.flush()  # Steps were missed, or the epoch began anew: another run of rows.
        self._waiting.append((claim, rows))
        # Counted per worker, also where the rows of all workers wait in one process: virtual
        # workers then send at the same points as real ranks, and count the same bytes.
        count = sum(waiting.shape[-2] for _, waiting in self._waiting)
        is_full = len(self._waiting) >= self._every
        is_full = is_full or count * rows.shape[-1] >= _MAX_WAITING_ELEMENTS
        # Where nothing is sent, there is no latency to share; waiting would only take memory.
        if is_full or (count >= ROWS_PER_BLOCK and self._policy_checks(rows)):
            self.send()

    def send(self) -> None:
        """Begin to gather what has accumulated."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            self._runner.finish()  # The last gather may still be under way.
            return
        claim, parts = waiting[0][0], [rows for _, rows in waiting]
        leave = self._policy_checks(parts[0])
        if leave:
            # On a GPU, asking whether rows are finite would make the host wait for the whole
            # backward. A batch that is not leaves out all of its rows: 0 * inf is not a number.
            for part in parts:
                if part.shape[-2] > 1:
                    part.add_(part.sum(), alpha=0)
        rows = torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
        if not leave:
            batches = [part.shape[-2] for part in parts]
            self._runner.start(
                observe_gathered(self._learner, rows, batches, claim, scatters=self._scatters)
            )
            return
        # Without a script: at every step it would take the host as long as the signs do.
        self._runner.finish()
        if claim is None or claim.epoch == self._learner.epoch:
            first = None if claim is None else claim.step
            self._learner.observe(rows.unsqueeze(1), first=first)

    def flush(self) -> None:
        """Let everything be learned. All ranks must call it at the same point."""
        self.send()
        self._runner.finish()


class EpochGatherer(RowGatherer):
    """Collects the rows of an epoch whose batches arrive in any order, and gathers them at its end.

    Workers may have missed different batches, so every worker sends a whole epoch. It takes memory
    for one row of every unit, which is why batches in order go through `RowGatherer`.
    """

    in_order = False

    def __init__(
        self, learner: Learner, runner: Runner, length: int, batches: int, *, scatters: bool
    ) -> None:
        """Start empty, for epochs of so many time steps and batches."""
        super().__init__(learner, runner, every=batches, scatters=scatters)
        self._length = length

    def add(self, rows: Tensor | ImplicitRows, claim: BatchClaim | None = None) -> None:
        """Add the (b, k) rows of a batch; the last one of an epoch has them gathered."""
        self._waiting.append((claim, rows if isinstance(rows, Tensor) else rows.dense()))
        # Batches are counted, not units: ranks feed back equally many batches, but one that has
        # met the short batch of the epoch twice, or not at all, has other units.
        if len(self._waiting) >= self._every:
            self.flush()

    def send(self) -> None:
        """Learn in the order of the epoch, with gaps for batches that were missed."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        like = waiting[0][1]
        rows = like.new_zeros(self._length, like.shape[1])
        seen = torch.zeros(self._length, dtype=torch.int64, device=like.device)
        for claim, own in waiting:
            assert claim is not None
            span = slice(claim.step, claim.step + claim.units)
            rows[span] = own
            # Here a worker leaves out its own batch only: workers' batches of one step need not
            # have come from the same step of training.
            seen[span] = int(own.sum().isfinite())
        # On the host, where a rank that scatters exchanges what is small.
        seen = seen.cpu() if self._scatters else seen
        self._runner.start(
            observe_gathered(self._learner, rows, [], scatters=self._scatters, seen=seen)
        )


class ClaimComparison(NamedTuple):
    """What all ranks feed back at one step of training."""

    same: bool
    """Whether it is the same on all ranks."""
    finite: bool
    """Whether no rank knows of a gradient that is not finite."""
    visited: int | None
    """Time steps that all ranks have passed, if they are in one epoch."""
    text: str
    """The batches, for a message, if they are not the same."""


def check_same_version(versions: Sequence[int | None], epoch: int) -> None:
    """Raise if ranks hold different orders of an epoch; None for a rank that does not say."""
    known = [version for version in versions if version is not None]
    if len(set(known)) > 1:
        common = max(set(known), key=known.count)
        others = [rank for rank, held in enumerate(versions) if held not in (common, None)]
        raise RuntimeError(
            f"ranks {others} hold another order of epoch {epoch} than the other "
            f"{len(known) - len(others)}: are dataset length, seed, policy and loaded state "
            "equal on all ranks?"
        )


class StepComparison:
    """Finds out whether all ranks feed back the same batch of the order.

    A rank that skips a batch which the others train on is ahead of them from then on: gradients of
    one step of training belong to different time steps, and signs are decided for one time step of
    all workers. Nothing is learned from such steps: their units keep their place, on all ranks.
    """

    def __init__(self, sampler: OrderedSampler) -> None:
        self._sampler = sampler
        self._warned = False
        self.bytes = 0
        """Bytes that this rank has sent to compare batches."""

    def compare(
        self, claim: BatchClaim | None, world: World, *, finite: bool = True
    ) -> ClaimComparison:
        """Return what all ranks feed back. All ranks must call it together.

        The claim is None if this rank's gradient belongs to no batch. `finite`: it knows of nothing
        in the gradients that is not. Raises RuntimeError if ranks hold different orders.
        """
        own = [_NO_BATCH, 0, 0, 0]
        if claim is not None:
            own = [claim.step, claim.units, claim.epoch, int(claim.version or "0", 16) - 2**63]
        comparison = self._compared(own, finite, world)
        if not comparison.same and not self._warned:
            self._warned = True
            log.warning(
                "ranks have trained on different batches in the same step (%s), and nothing is "
                "learned from such steps: skip a batch on all ranks or on none",
                comparison.text,
            )
        return comparison

    def _compared(self, own: list[int], finite: bool, world: World) -> ClaimComparison:
        gathered, sent = all_gather(torch.tensor([*own, finite]), world)
        self.bytes += sent
        rows: list[list[int]] = gathered.tolist()
        ranks, all_finite = [row[:-1] for row in rows], all(row[-1] for row in rows)
        step, units, _, _ = own
        if all(one == own for one in ranks):  # at nearly every step
            return ClaimComparison(True, all_finite, None if step < 0 else step + units, "")
        epochs = {epoch if step >= 0 else None for step, _, epoch, _ in ranks}
        for epoch in epochs - {None}:
            versions = [one[3] if one[2] == epoch and one[0] >= 0 else None for one in ranks]
            check_same_version(versions, int(epoch or 0))
        visited = min(step + units for step, units, _, _ in ranks)
        return ClaimComparison(
            same=False,
            finite=all_finite,
            visited=visited if len(epochs) == 1 and None not in epochs else None,
            text=", ".join(f"{_named(one)} on rank {rank}" for rank, one in enumerate(ranks)),
        )

    def pass_over(self, claim: BatchClaim | None, comparison: ClaimComparison) -> None:
        """Count what all ranks have visited, although nothing is learned from some of it."""
        ordering = self._sampler.ordering
        if claim is not None and claim.epoch == ordering.epoch and comparison.visited is not None:
            ordering.skip_to(max(ordering.steps, comparison.visited))
            self._sampler.end_if_complete()

    def check_end(self, world: World) -> None:
        """Raise unless all ranks want all that was fed to be learned now."""
        comparison = self._compared([_END, 0, 0, 0], True, world)
        if not comparison.same:
            raise RuntimeError(
                f"ranks are at different steps where they must meet, as in set_epoch(): "
                f"{comparison.text}; let all ranks train on as many batches"
            )


def _named(own: list[int]) -> str:
    step, _, epoch, _ = own
    if step < 0:
        return "the end" if step == _END else "none"
    return f"unit {step} of epoch {epoch}"
