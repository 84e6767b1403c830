"""Steps that stay on the device: the host launches kernels and never waits.

`GpuSteps` does what `Worker.script` does for a DDP hook on a GPU, for methods that agree by
consensus. The worker keeps its residual, its counters and the state of its method; they are on the
device, and a step overwrites them in place. Every shape is known beforehand (`consensus`). Whether
a step is called off is a number on the device, too: the residual is then restored, and the
gradients become NaN, by kernels that do nothing otherwise. Counts and thresholds are copied to the
host when somebody asks for metrics.

What the host does for a bucket takes longer than the GPU does, so after a few steps it is cut to
the least: the pass over a bucket is replayed as a CUDA graph, and DDP gets a future that was made
before. With one rank all that follows the last bucket is a single CUDA graph, too; with several,
collectives come in between, and its two hundred operations are launched one by one.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; N
positions in storage, R workers, K coordinates that are sent.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

from gradherd.comm.message_sizes import VALUE_BITS
from gradherd.comm.script import AllGather, Script, run
from gradherd.comm.world import World
from gradherd.gpu import captured, has_triton
from gradherd.sparsify import consensus, kernels
from gradherd.sparsify.partitioned import Partitioned
from gradherd.sparsify.selecting import step_metrics
from gradherd.sparsify.selector import StepContext, target_count
from gradherd.sparsify.value_sums import sum_values
from gradherd.sparsify.worker import Placement, Worker

# Room for candidates, in multiples of k: more than the search is steered to.
_ROOM = 6
# Values that the first step looks at for a threshold, and the distance between two, modulo D: a
# prime above all D takes none twice, and no pattern of rows and columns has this period.
_SAMPLES, _STRIDE = 1 << 16, 2_654_435_761
# The smallest float32 above zero.
_LEAST_START = 2.0**-149
# Steps that are launched one by one before anything is captured: Triton compiles and libraries
# allocate in their first calls, which a capture does not allow.
_LAUNCHED_FIRST = 3
# Buckets up to which each has a graph. A model with more of them keeps the GPU busy anyway.
_MOST_GRAPHS = 64
# Tails that are captured. Shapes that change all the time are not worth a graph.
_MOST_TAILS = 8


def runs_on_device(worker: Worker) -> bool:
    """Return whether the steps of a worker have fixed shapes, and kernels to run them."""
    residual = worker.feedback.residual
    if not (residual.is_cuda and has_triton() and residual.dtype == torch.float32):
        return False
    return has_fixed_shapes(worker)


def has_fixed_shapes(worker: Worker) -> bool:
    """Return whether all lengths of a worker's steps are known beforehand."""
    settings, method = worker.settings, worker.settings.method
    if not isinstance(method, Partitioned) or settings.momentum or not worker.sparse:
        return False
    k = target_count(max(settings.density(0), method.density), worker.sparse)
    rule = method.rule(worker.sparse, worker.size)
    return method.threshold == "consensus" and not rule.diffusive and rule.offers(k) > 0


class StepTensors(NamedTuple):
    """Metrics of a step, still on the device; they are read when somebody asks."""

    counts: Tensor
    threshold: Tensor
    ok: Tensor
    k: int


class GpuSteps:
    """One worker's steps in fixed shapes, which overwrite its residual and state.

    A step is `begin`, then `add` for each bucket, then `exchange`. `place` comes before the first
    bucket is added, and again whenever DDP hands out other buckets.
    """

    def __init__(self, worker: Worker) -> None:
        method, device = worker.settings.method, worker.feedback.residual.device
        assert isinstance(method, Partitioned)
        self._worker, self._rule = worker, method.rule(worker.sparse, worker.size)
        self._bad = torch.zeros(1, dtype=torch.int32, device=device)
        self._threshold = torch.zeros((), device=device)
        self._unit = torch.ones((), device=device)
        self._unit_is_one = True
        self._outcome: StepTensors | None = None  # of the last step
        self._begun = False  # whether a step is under way
        self._added = False  # whether it has any bucket
        self._remark = False  # whether it has buckets without marks
        self._warm = False  # whether the density has fallen to its last value
        self._captures = True
        self._forget_graphs()

    def place(self, placement: Placement) -> None:
        """Lay out the residual as buckets are, also in the middle of a step."""
        worker, feedback = self._worker, self._worker.feedback
        feedback.lay_out(placement)
        residual, acc = feedback.residual, feedback.acc
        worker.decide_on(residual.device)
        self._placement, self._marks = placement, kernels.marks_for(residual)
        # By coordinates, not by positions: a resumed run must find the same threshold although its
        # buckets are not rebuilt yet.
        count = min(worker.sparse, _SAMPLES)
        spread = torch.arange(count, device=residual.device) * _STRIDE % worker.sparse
        self._sample = placement.positions(spread)
        self._turn = 0  # which of the two vectors is the residual
        # Views of each bucket, made once: making them takes longer than launching a kernel.
        spans = list(zip(placement.begins, placement.lengths, strict=True))
        self._parts = [(residual[b : b + n], acc[b : b + n]) for b, n in spans]
        self._mark_parts = [self._marks.part(b, n) for b, n in spans]
        # Buckets that were added before have no marks here.
        self._remark = self._added
        if not self._added:
            self._clear()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        self._tails: dict[Any, tuple[torch.cuda.CUDAGraph, StepTensors]] = {}
        """What follows the last bucket; a replay overwrites its metrics."""
        self._adds: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        """The pass over each bucket, by where the residual is."""
        self._futures: list[Future[Tensor]] = []
        """Of each bucket, made once; empty while buckets may still change."""
        self._launched = 0

    def reset(self) -> None:
        """Go on from another state, which was loaded into the worker."""
        self._forget_graphs()
        self._warm, self._outcome = False, None
        self._clear()

    def _clear(self) -> None:
        """Forget what was noted of a step; the end of every step does so for the next."""
        self._bad.zero_()
        self._threshold.copy_(self._worker.state.start[0])

    def begin(self, loss_scale: Tensor | None) -> None:
        """Start a step whose gradients are multiplied by the () `loss_scale`; None is 1."""
        if self._begun:
            self._clear()  # The backward before has raised.
        if loss_scale is not None:
            self._unit.copy_(1 / loss_scale)
        elif not self._unit_is_one:
            self._unit.fill_(1.0)
        self._unit_is_one = loss_scale is None
        self._begun, self._added, self._remark = True, False, False

    def add(self, bucket: int, grad: Tensor) -> Future[Tensor] | None:
        """Add the flat gradients of a bucket to the residual, and set them to zero.

        Return a future of the bucket that can be handed to DDP, if there is one.
        """
        self._added = True
        graph = self._adds.get((self._turn, bucket))
        if graph is None:
            self._launch_add(bucket, grad)
        else:
            graph.replay()
        return self._futures[bucket] if self._futures else None

    def _launch_add(self, bucket: int, grad: Tensor) -> None:
        parts = self._parts[bucket]
        # Residual and sum change places after each step.
        kernels.add(
            parts[self._turn],
            grad,
            self._unit,
            parts[1 - self._turn],
            bad=self._bad,
            clear=True,
            threshold=self._threshold,
            marks=self._mark_parts[bucket],
        )

    def exchange(self, flats: Sequence[Tensor], world: World) -> int:
        """Write the mean into the buckets `flats`, which were added; return the bytes sent."""
        k = target_count(self._density(), self._worker.sparse)
        # Residual and sum change places after each step, so there are two graphs of everything.
        key = (self._turn, k, self._unit_is_one)
        if key not in self._tails and self._warm and flats[0].is_cuda:
            self._launched += 1
            if self._launched > _LAUNCHED_FIRST and self._captures:
                self._capture_adds(flats)
                # With several ranks the script runs collectives in between: they are not captured.
                if world.size == 1 and len(self._tails) < _MOST_TAILS:
                    self._capture_tail(key, lambda: run(self.script(k, flats), world))
        sent = 0
        if key in self._tails:
            graph, self._outcome = self._tails[key]
            graph.replay()
        else:
            sent = run(self.script(k, flats), world).bytes
        self.commit()
        return sent

    def _density(self) -> float:
        settings = self._worker.settings
        if self._warm or not settings.warmup_steps:
            self._warm = True
            return settings.method.density
        # In a warm-up the host must know how many steps were not called off, so it waits.
        step = self._worker.step
        self._warm = step >= settings.warmup_steps
        return settings.density(step)

    def _capture_adds(self, flats: Sequence[Tensor]) -> None:
        """Capture the pass over each bucket, and make their futures."""
        if (self._turn, 0) in self._adds or len(flats) > _MOST_GRAPHS:
            return
        passes = [partial(self._launch_add, *one) for one in enumerate(flats)]
        graphs = captured(passes, "passes over buckets", flats[0].device)
        if graphs is None:
            self._captures = False
            return
        self._adds |= {(self._turn, number): graph for number, graph in enumerate(graphs)}
        if not self._futures:
            # Completed, and without a device to wait for, so nothing is left to do in a step. That
            # is enough: autograd makes the stream on which DDP reads the buckets wait for those
            # on which its hooks ran.
            self._futures = [Future() for _ in flats]
            for future, flat in zip(self._futures, flats, strict=True):
                future.set_result(flat)

    def _capture_tail(self, key: Any, work: Callable[[], Any]) -> None:
        """Capture what follows the last bucket."""
        # One pool for all graphs: they never run at the same time.
        pools = [graph.pool() for graph, _ in self._tails.values()]
        device, pool = self._bad.device, pools[0] if pools else None
        graphs = captured([work], "the exchange", device, pool=pool)
        if graphs is None:
            self._captures = False
            return
        assert self._outcome is not None
        self._tails[key] = graphs[0], self._outcome

    def script(self, k: int, flats: Sequence[Tensor]) -> Script[None]:
        """Exchange k coordinates, and write the mean into the buckets `flats`, which are zero."""
        worker, form = self._worker, self._worker.settings.values
        context = StepContext(0, worker.rank, worker.size, compact=form in VALUE_BITS)
        state, acc, counters = worker.state, worker.feedback.acc, worker.counters
        step, compact = counters[0], context.compact
        count = self._rule.offers(k)
        spans = self._rule.spans(state.cuts, step, count)
        first, end = spans.firsts[worker.rank], spans.ends[worker.rank]
        own = self._offers(k, first, end)
        if worker.size == 1:
            finite = self._bad[0] == 0
            offers = consensus.Offers(*(one.unsqueeze(0) for one in own))
        else:
            message = consensus.pack(own, spans.reach, compact)
            headers: Tensor = yield AllGather(torch.cat([self._bad, message]))
            finite = (headers[:, 0] == 0).all()
            offers = consensus.unpack(headers[:, 1:], count, spans, compact)
        accepted, new = consensus.accept_offers(self._rule, state, offers, k, step)
        always = self._placement.always
        at = torch.cat([self._placement.positions(accepted.indices), always])
        total, error = yield from sum_values(acc[at], len(always), context, form)
        ok = finite & total.isfinite().all()
        self._finish(at, total / worker.size, error, ok, flats)
        state.update(ok, new)
        counters.add_(torch.stack([ok, ~ok]))
        self._outcome = StepTensors(accepted.counts, accepted.threshold, ok, k)
        self._clear()

    def _offers(self, k: int, first: Tensor, end: Tensor) -> consensus.Offers:
        """Return this worker's offers from its partition of coordinates [first, end)."""
        worker, placement = self._worker, self._placement
        acc, count = worker.feedback.acc, self._rule.offers(k)
        room = min(len(acc), _ROOM * k + 64)
        # If a sudden change has made the start useless, search again from a better one. The kernel
        # that does this returns at once otherwise.
        wanted = worker.state.start[0].float()
        found = kernels.count_marks(acc, wanted, self._marks)
        lost = wanted <= (torch.inf if self._remark else 0)
        lost = lost | (found > room) | (4 * found < 7 * k)
        start = torch.where(lost, self._sampled_start(k), wanted)
        kernels.mark_if(lost, acc, start, self._marks)
        positions, total = kernels.marked(acc, start, self._marks, room)
        places, magnitudes = placement.coordinates(positions) - first, acc[positions].abs()
        fits, length = total <= room, end - first
        mine = fits & (torch.arange(room, device=acc.device) < total)
        mine &= (places >= 0) & (places < length)
        candidates = (mine & (magnitudes >= wanted)).sum().int() * (wanted > 0)
        # Where too few reach the start, evenly spaced coordinates fill up: the host cannot search
        # again. Those of them that reach the start are candidates already.
        spare = torch.arange(count, device=acc.device) * length // count
        spares = acc[placement.positions(first + spare)].abs()
        spares = torch.where(fits & (spares >= start), -1.0, spares)
        # Clamped for steps that are called off: with NaN, what is not there may be chosen.
        every = torch.cat([places, spare]).clamp_(min=0).minimum(length - 1)
        keys = torch.cat([torch.where(mine, magnitudes, -1.0), spares])
        return consensus.make_offers(every, keys, candidates, count)

    def _sampled_start(self, k: int) -> Tensor:
        """Return a () magnitude that about 4k coordinates reach."""
        sample = self._worker.feedback.acc[self._sample].abs()
        rank = min(len(sample), 4 * k * len(sample) // self._worker.sparse + 16)
        # Above zero, or all zeros would be candidates where fewer values are not: there is no room.
        return sample.topk(rank).values[-1].float().clamp(min=_LEAST_START)

    def _finish(
        self, at: Tensor, mean: Tensor, error: Tensor | None, ok: Tensor, flats: Sequence[Tensor]
    ) -> None:
        """Write the mean into the buckets, and make what was not sent the residual."""
        feedback = self._worker.feedback
        limit = torch.finfo(flats[0].dtype).max
        exact = self._unit_is_one and flats[0].dtype == mean.dtype
        grads = mean if self._unit_is_one else (mean / self._unit).clamp(-limit, limit)
        written = self._placement.write(flats, at, grads)
        for flat in flats:
            kernels.overwrite_unless(ok, flat, torch.nan)
        left = error
        if not exact:
            # What the bucket's dtype could not hold; all workers keep the same part of the mean.
            lost = mean - (written if self._unit_is_one else written * self._unit)
            left = lost if left is None else left + lost
        if left is None:
            feedback.acc.index_fill_(0, at, 0)
        else:
            feedback.acc.index_copy_(0, at, left)
        kernels.overwrite_unless(ok, feedback.acc, feedback.residual)

    def commit(self) -> None:
        """Make the sum of this step the residual of the next."""
        self._worker.feedback.swap()
        self._turn = 1 - self._turn
        self._begun = False

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; waits for the device."""
        outcome = self._outcome
        if outcome is None or not bool(outcome.ok):
            return {}
        counts, threshold = outcome.counts.tolist(), float(outcome.threshold)
        return step_metrics(outcome.k, counts, threshold, self._worker.sparse)
