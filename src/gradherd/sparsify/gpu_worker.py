"""Steps that stay on the device: the host launches kernels and never waits.

`GpuSteps` does what `Worker.script` does for a DDP hook on a GPU, for methods that agree by
consensus. The worker keeps its residual, its counters and the state of its method; they are on the
device, and a step overwrites them in place. Every shape is known beforehand (`consensus`). Whether
a step is called off is a number on the device, too: the residual is then restored, and the
gradients become NaN, by kernels that do nothing otherwise. Counts and thresholds are copied to the
host when somebody asks for metrics.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; N
positions in storage, R workers, K coordinates that are sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script
from gradherd.gpu import has_triton
from gradherd.sparsify import consensus, kernels
from gradherd.sparsify.exchange import step_metrics
from gradherd.sparsify.message_sizes import VALUE_BITS
from gradherd.sparsify.partitioned import Partitioned
from gradherd.sparsify.selector import StepContext, target_count
from gradherd.sparsify.value_sums import sum_values
from gradherd.sparsify.worker import Placement, Worker

# Room for candidates, in multiples of k: more than the search is steered to.
_ROOM = 6
# Values that the first step looks at for a threshold.
_SAMPLES = 1 << 16


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
    return method.threshold == "consensus" and method.rule(worker.sparse).fits(k, worker.size)


@dataclass(frozen=True)
class StepTensors:
    """Metrics of a step, still on the device; they are read when somebody asks."""

    counts: Tensor
    threshold: Tensor
    ok: Tensor
    k: int


class GpuSteps:
    """One worker's steps in fixed shapes.

    A step is `begin`, then `add` for each bucket, then `script`, then `commit`.

    Args:
        worker: Whose residual and state these steps overwrite.
        placement: Where coordinates lie; the residual is laid out so.
    """

    def __init__(self, worker: Worker, placement: Placement) -> None:
        method = worker.settings.method
        assert isinstance(method, Partitioned)
        feedback = worker.feedback
        feedback.lay_out(placement)
        residual, acc = feedback.residual, feedback.acc
        worker.decide_on(residual.device)
        self._worker, self._placement, self._rule = worker, placement, method.rule(worker.sparse)
        self._marks = kernels.marks_for(residual)
        self._bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
        self._threshold = torch.zeros((), device=residual.device)
        self._unit = torch.ones((), device=residual.device)
        self.unit_is_one = True
        self.outcome: StepTensors | None = None
        """Of the last step."""
        # By coordinates, not by positions: a resumed run must find the same threshold although its
        # buckets are not rebuilt yet.
        count = min(worker.sparse, _SAMPLES)
        spaced = torch.arange(count, device=residual.device) * worker.sparse // count
        self._sample = placement.positions(spaced)
        self.turn = 0
        """Which of the two vectors is the residual."""
        # Views of each bucket, made once: making them takes longer than launching a kernel.
        spans = list(zip(placement.begins, placement.lengths, strict=True))
        self._parts = [(residual[b : b + n], acc[b : b + n]) for b, n in spans]
        self._mark_parts = [self._marks.part(b, n) for b, n in spans]
        self._remark = False
        self.clear()

    def take_over(self, old: "GpuSteps") -> None:
        """Continue where other steps of the worker have stopped, also in the middle of one."""
        self.outcome, self.unit_is_one = old.outcome, old.unit_is_one
        self._bad.copy_(old._bad)
        self._unit.copy_(old._unit)
        # Buckets that were added before have no marks here.
        self._remark = True

    def clear(self) -> None:
        """Forget what was noted of a step; the end of every step does so for the next."""
        self._bad.zero_()
        self._threshold.copy_(self._worker.state.start[0])

    def begin(self, loss_scale: Tensor | None) -> None:
        """Start a step whose gradients are multiplied by the () `loss_scale`; None is 1."""
        if loss_scale is not None:
            self._unit.copy_(1 / loss_scale)
        elif not self.unit_is_one:
            self._unit.fill_(1.0)
        self.unit_is_one = loss_scale is None

    def add(self, bucket: int, grad: Tensor) -> None:
        """Add the flat gradients of a bucket to the residual, and set them to zero."""
        parts = self._parts[bucket]
        # Residual and sum change places after each step.
        kernels.add(
            parts[self.turn],
            grad,
            self._unit,
            parts[1 - self.turn],
            bad=self._bad,
            clear=True,
            threshold=self._threshold,
            marks=self._mark_parts[bucket],
        )

    def script(self, k: int, flats: Sequence[Tensor]) -> Script[None]:
        """Exchange k coordinates, and write the mean into the buckets `flats`, which are zero."""
        worker, form = self._worker, self._worker.settings.values
        context = StepContext(0, worker.rank, worker.size, compact=form in VALUE_BITS)
        state, acc, counters = worker.state, worker.feedback.acc, worker.counters
        offers, count = self._offers(k), self._rule.offers(k, worker.size)
        # From anywhere in the vector: the host does not know where partitions begin.
        reach, compact = worker.sparse, context.compact
        if worker.size == 1:
            finite = self._bad[0] == 0
            indices, bits = offers.indices[None], consensus.leading_bits(offers.magnitudes)[None]
            candidates = offers.candidates[None]
        else:
            message = consensus.pack(offers.indices, offers.magnitudes, reach, compact)
            own = torch.stack([self._bad[0], offers.candidates])
            headers: Tensor = yield AllGather(torch.cat([own, message]))
            finite = (headers[:, 0] == 0).all()
            candidates = headers[:, 1]
            indices, bits = consensus.unpack(headers[:, 2:], count, reach, compact)
        accepted = consensus.accept_largest(indices, bits, k)
        new = consensus.with_next_start(state, accepted, candidates, exact=False)
        if self._rule.memory is not None and worker.size > 1:
            known = candidates * ~state.is_first
            loads = consensus.estimate_loads(accepted.counts, count, known)
            least = self._rule.least(k, worker.size)
            new = consensus.moved(self._rule, new, accepted.indices, accepted.counts, loads, least)
        always = self._placement.always
        at = torch.cat([self._placement.positions(accepted.indices), always])
        # D, not N: how many messages there are must not depend on how buckets are padded.
        dim = sum(self._placement.lengths)
        total, error, _ = yield from sum_values(acc[at], len(always), context, form, dim)
        ok = finite & total.isfinite().all()
        self._finish(at, total / worker.size, error, ok, flats)
        state.update(ok, new)
        counters.add_(torch.stack([ok, ~ok]))
        self.outcome = StepTensors(accepted.counts, accepted.threshold, ok, k)
        self.clear()

    def _offers(self, k: int) -> consensus.Offers:
        """Return this worker's offers."""
        worker, rule, placement = self._worker, self._rule, self._placement
        state, acc = worker.state, worker.feedback.acc
        room = min(len(acc), _ROOM * k + 64)
        # If a sudden change has made the start useless, search again from a better one. The kernel
        # that does this returns at once otherwise.
        wanted = state.start[0].float()
        found = kernels.count_marks(acc, wanted, self._marks)
        lost = wanted <= (torch.inf if self._remark else 0)
        lost = lost | (found > room) | (4 * found < 7 * k)
        start = torch.where(
            lost, consensus.search_start(acc[self._sample], k / worker.sparse), wanted
        )
        kernels.mark_if(lost, acc, start, self._marks)
        positions, total = kernels.marked(acc, start, self._marks, room)
        firsts, ends = consensus.worker_spans(rule, state.cuts, worker.counters[0], worker.size)
        own = firsts[worker.rank], ends[worker.rank]
        spare = consensus.reserve_of(own, rule.offers(k, worker.size))
        return consensus.make_offers(
            (placement.coordinates(positions), acc[positions].abs()),
            total,
            start,
            (spare, acc[placement.positions(spare)].abs()),
            own,
            wanted,
        )

    def _finish(
        self, at: Tensor, mean: Tensor, error: Tensor | None, ok: Tensor, flats: Sequence[Tensor]
    ) -> None:
        """Write the mean into the buckets, and make what was not sent the residual."""
        feedback = self._worker.feedback
        limit = torch.finfo(flats[0].dtype).max
        exact = self.unit_is_one and flats[0].dtype == mean.dtype
        grads = mean if self.unit_is_one else (mean / self._unit).clamp(-limit, limit)
        written = self._placement.write(flats, at, grads)
        for flat in flats:
            kernels.overwrite_unless(ok, flat, torch.nan)
        left = error
        if not exact:
            # What the bucket's dtype could not hold; all workers keep the same part of the mean.
            lost = mean - (written if self.unit_is_one else written * self._unit)
            left = lost if left is None else left + lost
        if left is None:
            feedback.acc.index_fill_(0, at, 0)
        else:
            feedback.acc.index_copy_(0, at, left)
        kernels.overwrite_unless(ok, feedback.acc, feedback.residual)

    def commit(self) -> None:
        """Make the sum of this step the residual of the next."""
        self._worker.feedback.swap()
        self.turn = 1 - self.turn
        self._remark = False

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of the last step; waits for the device."""
        outcome = self.outcome
        if outcome is None or not bool(outcome.ok):
            return {}
        counts, threshold = outcome.counts.tolist(), float(outcome.threshold)
        return step_metrics(outcome.k, counts, threshold, self._worker.sparse)
