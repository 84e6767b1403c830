"""How workers learn one order together: written once, for real ranks and virtual workers alike.

Two ways, both as scripts (`comm.script`):

* `observe_gathered`: every worker's rows are gathered, and every rank signs them. Used for rows of
  single examples and for sketches. An order is needed only at the end of an epoch, so rows wait
  until a few dozen batches have accumulated and are sent in one all-gather that nobody waits for.
* `observe_slices`: every rank holds a slice of the columns of every worker's gradient, which the
  averaging of gradients has already delivered (`comm.sliced_mean`). Only the partial inner
  products are exchanged. Used for whole batches.

Both give the same signs as CD-GraB's server (arXiv:2302.00845), which sees every gradient at every
step: signs depend on the rows and their sequence, not on when they arrive.

Shapes: b units of a batch, R workers, k columns of a row, C columns of this rank's slice.
"""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Runner, Script
from gradherd.ordering.batch_claims import BatchClaim

# Rows that wait to be sent take memory, and R times as much on arrival: no more than this.
_MAX_WAITING_ELEMENTS = 4_000_000
# A collective has its latency however little it sends: a few dozen batches share one.
BATCHES_PER_GATHER = 32
"""Batches whose rows are gathered in one collective."""


class Learner(Protocol):
    """What learns from rows: an `Ordering`, or a sampler that also moves on to the next epoch."""

    @property
    def epoch(self) -> int:
        """Epoch of the current orders."""
        ...

    def observe(
        self, rows: Tensor, seen: Tensor | None = None, *, first: int | None = None
    ) -> None:
        """Learn from the rows of all workers."""
        ...

    def observe_sharded(self, rows: Tensor, *, first: int | None = None) -> Script[None]:
        """Learn from this rank's columns of the rows of all workers."""
        ...


def observe_gathered(
    learner: Learner,
    rows: Tensor,
    batches: Sequence[int],
    claim: BatchClaim | None = None,
    *,
    leave_broken_rows: bool = False,
) -> Script[None]:
    """Gather the rows of some batches from all workers and learn from them.

    Args:
        learner: What learns.
        rows: (steps, k) this worker's rows; (R, steps, k) where one script serves all workers.
        batches: Units of each batch.
        claim: The units of the first batch; the next ones by default.
        leave_broken_rows: Leave it to the policy to leave out rows that are not finite.
    """
    # Every rank gathers all rows and repeats the same computation. The gathered bits are equal on
    # all ranks, and so are the signs: no order is ever sent.
    gathered: Tensor = yield AllGather(rows)
    by_step = gathered.transpose(0, 1)  # (steps, R, k)
    if claim is not None and claim.epoch != learner.epoch:
        return  # Rows of an epoch that is over come too late.
    seen = None if leave_broken_rows else finite_batches(by_step, batches)
    learner.observe(by_step, seen, first=None if claim is None else claim.step)


def observe_epoch(learner: Learner, rows: Tensor, seen: Tensor) -> Script[None]:
    """Learn from a whole epoch of which workers may have missed different steps.

    Args:
        learner: What learns.
        rows: (steps, k) this worker's rows by time step; zero where it has none.
        seen: (steps,) int64, which of them are real.
    """
    # Which steps a worker has missed is known to that worker only, so it is gathered, too.
    all_rows: Tensor = yield AllGather(rows)
    all_seen: Tensor = yield AllGather(seen)
    learner.observe(all_rows.transpose(0, 1), all_seen.T > 0, first=0)


def observe_slices(learner: Learner, slices: Tensor, *, first: int | None = None) -> Script[None]:
    """Learn from a batch of every worker, of which this rank holds a slice of the columns.

    Args:
        learner: What learns.
        slices: (R, C) every worker's gradient; all columns where one script serves all workers.
        first: Time step of the batch.
    """
    yield from learner.observe_sharded(slices.unsqueeze(0), first=first)


def finite_batches(rows: Tensor, batches: Sequence[int]) -> Tensor:
    """Return (steps, R) which rows count: all workers leave out a batch that is not finite.

    The mean gradient of such a batch is not finite either, so the optimizer skips it on all ranks.

    Args:
        rows: (steps, R, k) of some batches, one after the other.
        batches: Units of each batch.

    >>> rows = torch.tensor([1.0, torch.inf, 2.0]).view(3, 1, 1)
    >>> finite_batches(rows, [2, 1]).flatten().tolist()
    [False, False, True]
    """
    # The sum of a row tells whether all of it is finite, and needs no mask of the rows' size.
    broken = ~rows.sum(dim=(1, 2)).isfinite().cpu()
    batch_of_step = torch.repeat_interleave(torch.arange(len(batches)), torch.tensor(batches))
    count = torch.zeros(len(batches), dtype=torch.int64)
    count.index_add_(0, batch_of_step, broken.long())
    return (count[batch_of_step] == 0).unsqueeze(1).expand(-1, rows.shape[1])


class RowGatherer:
    """Collects rows of batches and has them gathered, many batches at a time."""

    def __init__(
        self,
        learner: Learner,
        runner: Runner,
        *,
        every: int = BATCHES_PER_GATHER,
        policy_checks: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start empty.

        Args:
            learner: What learns from the rows.
            runner: Runs the script: on this rank, or for all workers of this process.
            every: Batches that are gathered at a time.
            policy_checks: Says whether the policy leaves out rows that are not finite by itself,
                which only the rows of a single worker can be left to.
        """
        self._policy_checks = policy_checks
        self._learner = learner
        self._runner = runner
        self._every = every
        self._waiting: list[tuple[BatchClaim | None, Tensor]] = []

    @property
    def waiting(self) -> bool:
        """Whether rows wait to be sent; the same on all ranks."""
        return bool(self._waiting)

    def add(self, rows: Tensor, claim: BatchClaim | None = None) -> None:
        """Add the rows of a batch, and send what has accumulated once it is enough.

        Args:
            rows: (b, k) this worker's rows, or (R, b, k) the rows of all workers of this process.
            claim: The units they belong to; the next ones by default.
        """
        last = self._waiting[-1][0] if self._waiting else None
        if claim is not None and last is not None and not _follows(claim, last):
            self.flush()  # Steps were missed, or the epoch began anew: start another run of rows.
        self._waiting.append((claim, rows))
        # Counted per worker, also where the rows of all workers wait in one process: virtual
        # workers then send at the same points as real ranks, and count the same bytes.
        elements = sum(waiting.shape[-2] * waiting.shape[-1] for _, waiting in self._waiting)
        if len(self._waiting) >= self._every or elements >= _MAX_WAITING_ELEMENTS:
            self.send()

    def send(self) -> None:
        """Begin to gather what has accumulated."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            parts = [rows for _, rows in waiting]
            rows = torch.cat(parts, dim=-2) if len(parts) > 1 else parts[0]
            batches = [part.shape[-2] for part in parts]
            # A whole batch of one worker takes no other row with it. On a GPU, asking whether it
            # is finite would make the host wait for the whole backward.
            leave = rows.is_cuda and self._policy_checks() and max(batches) == 1
            self._runner.start(
                observe_gathered(
                    self._learner, rows, batches, waiting[0][0], leave_broken_rows=leave
                )
            )
        else:  # The last gather may still be under way.
            self._runner.finish()

    def flush(self) -> None:
        """Let everything be learned. All ranks must call it at the same point."""
        self.send()
        self._runner.finish()


def _follows(claim: BatchClaim, last: BatchClaim) -> bool:
    return (claim.epoch, claim.step) == (last.epoch, last.step + last.units)


class EpochGatherer:
    """Collects the rows of an epoch whose batches arrive in any order, and gathers them at its end.

    Workers may have missed different batches, so every worker sends a whole epoch. It takes memory
    for one row of every unit, which is why batches in order go through `RowGatherer`.
    """

    def __init__(self, learner: Learner, runner: Runner, length: int, batches: int) -> None:
        """Start empty.

        Args:
            learner: What learns from the rows.
            runner: Runs the script.
            length: Time steps of an epoch.
            batches: Batches of an epoch.
        """
        self._learner = learner
        self._runner = runner
        self._length = length
        self._batches = batches
        self._waiting: list[tuple[BatchClaim, Tensor]] = []

    def add(self, rows: Tensor, claim: BatchClaim) -> None:
        """Add the (b, k) rows of a batch; the last one of an epoch has them gathered."""
        self._waiting.append((claim, rows))
        # Batches are counted, not units: ranks feed back equally many batches, but one that has
        # met the short batch of the epoch twice, or not at all, has other units.
        if len(self._waiting) >= self._batches:
            self.flush()

    def flush(self) -> None:
        """Learn in the order of the epoch, with gaps for batches that were missed."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        like = waiting[0][1]
        rows = like.new_zeros(self._length, like.shape[1])
        seen = torch.zeros(self._length, dtype=torch.int64, device=like.device)
        for claim, own in waiting:
            span = slice(claim.step, claim.step + claim.units)
            rows[span] = own
            # Here a worker leaves out its own batch only: workers' batches of one step need not
            # have come from the same step of training.
            seen[span] = int(own.sum().isfinite())
        self._runner.start(observe_epoch(self._learner, rows, seen))
        self._runner.finish()


class BackgroundThread:
    """Runs jobs beside the training loop, in order and one at a time.

    Orders are needed at the end of an epoch only, so training does not wait for signs. Errors of a
    job are raised by the next `wait`, which everything that reads orders calls first. The thread
    is a daemon: a process whose main thread ends does not wait for a peer that has died.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._job: Callable[[], None] | None = None
        self._error: BaseException | None = None
        # A semaphore and an event, not a queue: there is at most one job.
        self._wake, self._idle = threading.Semaphore(0), threading.Event()
        self._idle.set()
        _threads.add(self)

    def submit(self, job: Callable[[], None]) -> None:
        """Run `job` after the one before it, and wait for that one first."""
        # At most one job is behind the training loop: `comm.sliced_mean` fills one set of buffers
        # while the job reads the other, and a third batch would overwrite what is being read.
        self.wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
            self._thread.start()
        self._job = job
        self._idle.clear()
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # or the thread would end, and `wait` never return
                self._error = error
            del job  # A job holds tensors: they are free as soon as it is done.
            self._idle.set()

    def wait(self) -> None:
        """Return when all jobs are done; raise the error of the last one, if it failed."""
        self._idle.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Return when no job runs; an error is left to `wait`."""
        if threading.current_thread() is not self._thread:
            self._idle.wait(_MOST_SECONDS)

    def close(self) -> None:
        """End the thread once its job is done."""
        if self._thread is not None:
            self._idle.wait()
            self._wake.release()
            self._thread.join()
            self._thread = None


_MOST_SECONDS = 60  # a job that waits for a dead peer never ends
_threads: "weakref.WeakSet[BackgroundThread]" = weakref.WeakSet()


def _settle_all() -> None:
    for thread in list(_threads):
        thread.settle()


# A loader forks its workers before it asks the sampler for anything. A lock inside torch that a job
# holds at that moment would stay locked in the worker for ever.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_settle_all)
