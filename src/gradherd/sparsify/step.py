"""One step of one worker: propose, agree, exchange, average; and what it keeps between steps.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; K are
sent.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script
from gradherd.sparsify.exchange import sum_over_workers
from gradherd.sparsify.residuals import ErrorFeedback
from gradherd.sparsify.selector import Proposal, Selection, Selector, StepContext, target_count
from gradherd.sparsify.settings import Sparsify


@dataclass(frozen=True)
class Outcome:
    """Result of a step on one worker."""

    indices: Tensor
    """(K,) coordinates that were sent, the same on all workers."""
    mean: Tensor
    """(K,) mean over workers, the same bits on all of them."""
    remainder: Tensor | None
    """(K,) what this worker keeps at those coordinates; None is nothing."""
    sent: Tensor | None
    """(K,) whether this worker's own value is part of the mean; None is everywhere."""
    selection: Selection
    """What the method selected, without what is always sent."""

    def metrics(self, dim: int) -> dict[str, Any]:
        """Return the metrics of a step that sparsified `dim` coordinates."""
        selected = len(self.selection.indices)
        return {
            "selected": selected,
            "per_rank": self.selection.counts,
            "threshold": self.selection.threshold,
            "density": selected / dim if dim else 1.0,
            "padding": padding(self.selection.counts),
        }


def padding(counts: Sequence[int]) -> float:
    """Return R max / sum of the counts: the cost of padding all workers to the longest.

    1 is perfect balance.
    """
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


def reduce(
    acc: Tensor,
    sparse: int,
    finite: bool,
    method: Selector,
    density: float,
    state: Any,
    context: StepContext,
    sent_dtype: torch.dtype,
) -> Script[Outcome | None]:
    """Average the selected coordinates over workers.

    Args:
        acc: (D,) residual + gradient of this worker; not changed.
        sparse: S, how many coordinates are sparsified; the others are always sent.
        finite: Whether all of `acc` is finite.
        method: Selects the coordinates.
        density: Share of the S coordinates to send.
        state: State of the method.
        context: Which worker this is.
        sent_dtype: Dtype in which values are sent.

    Returns:
        The outcome; None, on all workers, if a value of any worker or a sum is not finite.
    """
    # A worker with values that are not finite must still take part, or the others would hang. It
    # proposes zeros, and its flag calls the step off everywhere.
    part = acc[:sparse] if finite else torch.zeros_like(acc[:sparse])
    k = target_count(density, sparse)
    flag = torch.tensor([int(finite)], dtype=torch.int32, device=acc.device)
    # If all parameters are small, there is nothing to select.
    proposal = method.propose(part, k, state, context) if sparse else Proposal(flag[:0])
    headers: Tensor = yield AllGather(torch.cat([flag, proposal.header]))
    headers = headers.cpu()  # The host waits for the device here: later shapes depend on headers.
    if not bool(headers[:, 0].all()):
        return None
    selection = Selection(flag[:0].long(), [0] * context.size, state)
    if sparse:
        selection = yield from method.settle(part, k, state, context, proposal, headers[:, 1:])

    always = torch.arange(sparse, len(acc), device=acc.device)
    indices = torch.cat([selection.indices, always])
    if selection.sums is None:
        total, remainder = yield from sum_over_workers(acc[indices], context, sent_dtype, len(acc))
        sent = None
    else:
        rest, error = yield from sum_over_workers(acc[sparse:], context, sent_dtype, len(acc))
        total = torch.cat([selection.sums, rest])
        sent, remainder = _partly_sent(acc, selection, rest, error)
    if not bool(total.isfinite().all()):
        return None
    return Outcome(indices, total / context.size, remainder, sent, selection)


def _partly_sent(
    acc: Tensor, selection: Selection, rest: Tensor, error: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return which own values were sent and what stays, for a method that sums values itself."""
    assert selection.sent is not None
    sent = torch.cat([selection.sent, torch.ones_like(rest, dtype=torch.bool)])
    unsent = acc[selection.indices].masked_fill(selection.sent, 0)
    return sent, torch.cat([unsent, torch.zeros_like(rest) if error is None else error])


class Worker:
    """One worker's side of the exchange: `add` gradients, run `script`, then `commit`."""

    def __init__(
        self,
        settings: Sparsify,
        dim: int,
        *,
        rank: int,
        size: int,
        sparse: int | None = None,
        layers: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if dim >= 2**31:
            raise ValueError(f"{dim:,} coordinates are too many: indices reach {2**31 - 1:,}")
        self.settings = settings
        self.sparse = dim if sparse is None else sparse
        self._rank, self._size = rank, size
        self.step = 0
        self.skipped = 0
        self._layers = layers or [self.sparse]
        self.state = settings.method.begin(self.sparse, size, self._layers)
        self.feedback = ErrorFeedback(
            dim, dtype=dtype, device=torch.device(device), momentum=settings.momentum
        )
        self._learning_rate: float | None = None
        # Thresholds in a method's settings are in the unit of the first step.
        self._first_learning_rate: float | None = None
        self._unit = 1.0

    def set_unit(self, loss_scale: float) -> None:
        """Begin a step whose gradients are multiplied by `loss_scale`."""
        self.feedback.begin()
        self._unit = 1 / loss_scale
        if self.settings.learning_rate is None:
            return
        rate = float(self.settings.learning_rate())
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rate must return a number of at least 0, got {rate}")
        self._unit *= rate
        if not rate:
            return
        if self._learning_rate is not None and rate != self._learning_rate:
            self.state = self.settings.method.rescale(self.state, rate / self._learning_rate)
        self._learning_rate = rate
        if self._first_learning_rate is None:
            self._first_learning_rate = rate

    @property
    def weightless(self) -> bool:
        """Whether the learning rate is zero, so that there is nothing to exchange."""
        return self._unit == 0

    def add(self, begin: int, grad: Tensor, *, clear: bool = False) -> None:
        """Add a flat gradient of the coordinates from `begin` on; zero it if `clear`."""
        self.feedback.add(begin, grad, self._unit, clear=clear)

    def script(self) -> Script[Outcome | None]:
        """Return this worker's script of the step."""
        return reduce(
            self.feedback.acc,
            self.sparse,
            self.feedback.finite(),
            self.settings.method,
            self.settings.density(self.step),
            self.state,
            StepContext(self.step, self._rank, self._size),
            torch.bfloat16 if self.settings.values == "bf16" else self.feedback.residual.dtype,
        )

    def mean_of(self, outcome: Outcome) -> Tensor:
        """Return the (K,) mean in the unit of gradients, clamped to finite values."""
        if self._unit == 1:
            return outcome.mean
        limit = torch.finfo(outcome.mean.dtype).max
        return (outcome.mean / self._unit).clamp_(-limit, limit)

    def commit(
        self,
        outcome: Outcome | None,
        *,
        written: Tensor | None = None,
        excluded: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what was not sent; with None the step is called off, and nothing changes.

        Args:
            outcome: What the script returned.
            written: (K,) the mean as the gradients' dtype could hold it; None is exactly.
            excluded: The ranges that `feedback.exclude` was called for.
        """
        if outcome is None:
            self.skipped += 1
            return
        remainder = outcome.remainder
        if written is not None:
            # All workers lost the same part of the mean, so each of them keeps it.
            lost = outcome.mean - (written if self._unit == 1 else written * self._unit)
            remainder = lost if remainder is None else remainder + lost
        self.feedback.commit(
            outcome.indices,
            remainder,
            sent=outcome.sent,
            low_pass=outcome.selection.low_pass,
            excluded=excluded,
        )
        self.state = outcome.selection.state
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the residuals, as numbers, lists and tensors."""
        state = None if self.state is None else _fields(self.state)
        rates = {"rate": self._learning_rate, "first_rate": self._first_learning_rate}
        return self._identity() | {"step": self.step, "method": state} | rates

    def _identity(self) -> dict[str, Any]:
        method = type(self.settings.method).__name__
        return {"kind": method, "rank": self._rank, "workers": self._size, "dim": self.sparse}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` fits this worker, or is merged from all such workers."""
        free = ("rank", "workers") if _is_merged(state) else ()
        for key, own in self._identity().items():
            if key not in free and state.get(key) != own:
                raise ValueError(f"sparsify state has {key} {state.get(key)!r}, expected {own!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; from a merged state, the method starts again."""
        self.check_state(state)
        self.step, self._learning_rate = state["step"], state["rate"]
        self._first_learning_rate = state.get("first_rate")
        if self.state is None:
            return
        if not _is_merged(state):
            self.state = type(self.state)(**state["method"])
            return
        self.state = self.settings.method.begin(self.sparse, self._size, self._layers)
        if self._learning_rate is not None and self._first_learning_rate is not None:
            ratio = self._learning_rate / self._first_learning_rate
            self.state = self.settings.method.rescale(self.state, ratio)


def _is_merged(state: Mapping[str, Any]) -> bool:
    return "rank" in state and state["rank"] is None


def _fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
