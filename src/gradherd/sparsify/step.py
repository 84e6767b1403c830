"""One step of one worker: propose, agree, exchange, average; and what it keeps between steps.

Letters: D coordinates, of which the first S may stay and the rest is always sent; K are sent.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script
from gradherd.sparsify.exchange import add_up
from gradherd.sparsify.residuals import Feedback
from gradherd.sparsify.selector import Chosen, Place, Proposal, Selector, target
from gradherd.sparsify.settings import Sparsify


@dataclass(frozen=True)
class Outcome:
    """What came of a step."""

    indices: Tensor
    """(K,) what travelled, the same on all workers."""
    mean: Tensor
    """(K,) mean over workers, the same bits on all of them."""
    left: Tensor | None
    """(K,) what this worker keeps of what travelled; None is nothing."""
    sent: Tensor | None
    """(K,) whether this worker's own value travelled; None is all of them."""
    chosen: Chosen
    """What the method chose, without what always travels."""

    def metrics(self, dim: int) -> dict[str, Any]:
        """Return the figures of a step in which `dim` coordinates could have stayed."""
        selected = len(self.chosen.indices)
        return {
            "selected": selected,
            "per_rank": self.chosen.counts,
            "threshold": self.chosen.threshold,
            "density": selected / dim if dim else 1.0,
            "padding": padding(self.chosen.counts),
        }


def reduce(
    acc: Tensor,
    sparse: int,
    finite: bool,
    method: Selector,
    density: float,
    state: Any,
    place: Place,
    wire: torch.dtype,
) -> Script[Outcome | None]:
    """Average the coordinates that matter over workers.

    Args:
        acc: (D,) residual + gradient of this worker; not changed.
        sparse: S, how many of them may stay; the rest always travels.
        finite: Whether all of `acc` is.
        method: What chooses.
        density: Share of the S coordinates that should travel.
        state: What the method remembers.
        place: Which worker this is.
        wire: Type in which values travel.

    Returns:
        What came of it; None if any worker had something that is not finite, or a sum is not.
    """
    part = acc[:sparse] if finite else torch.zeros_like(acc[:sparse])
    k = target(density, sparse)
    flag = torch.tensor([int(finite)], dtype=torch.int32, device=acc.device)
    # Where all parameters are small, there is nothing to choose.
    proposal = method.propose(part, k, state, place) if sparse else Proposal(flag[:0])
    headers: Tensor = yield AllGather(torch.cat([flag, proposal.header]))
    headers = headers.cpu()  # here the host waits for the device: shapes depend on it
    if not bool(headers[:, 0].all()):
        return None
    chosen = Chosen(flag[:0].long(), [0] * place.size, state)
    if sparse:
        chosen = yield from method.settle(part, k, state, place, proposal, headers[:, 1:])

    always = torch.arange(sparse, len(acc), device=acc.device)
    indices = torch.cat([chosen.indices, always])
    if chosen.sums is None:
        total, left = yield from add_up(acc[indices], place, wire, len(acc))
        sent = None
    else:
        rest, rest_left = yield from add_up(acc[sparse:], place, wire, len(acc))
        total = torch.cat([chosen.sums, rest])
        sent, left = _partly_sent(acc, chosen, rest, rest_left)
    if not bool(total.isfinite().all()):
        return None
    return Outcome(indices, total / place.size, left, sent, chosen)


def _partly_sent(
    acc: Tensor, chosen: Chosen, rest: Tensor, rest_left: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what of this worker travelled and what it keeps, where a method adds up itself."""
    assert chosen.sent is not None
    sent = torch.cat([chosen.sent, torch.ones_like(rest, dtype=torch.bool)])
    kept = acc[chosen.indices].masked_fill(chosen.sent, 0)
    return sent, torch.cat([kept, torch.zeros_like(rest) if rest_left is None else rest_left])


def padding(counts: Sequence[int]) -> float:
    """Return f = R max / sum, what padding everybody to the longest costs; 1 is none."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


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
        self.feedback = Feedback(
            dim, dtype=dtype, device=torch.device(device), momentum=settings.momentum
        )
        self._rate: float | None = None
        self._first_rate: float | None = None  # what a method's own settings are in units of
        self._unit = 1.0

    def set_unit(self, loss_scale: float) -> None:
        """Prepare a step whose gradients were multiplied by `loss_scale`."""
        self.feedback.begin()
        self._unit = 1 / loss_scale
        if self.settings.learning_rate is None:
            return
        rate = float(self.settings.learning_rate())
        if not 0 <= rate < math.inf:
            raise ValueError(f"learning_rate must tell a number of at least 0, got {rate}")
        self._unit *= rate
        if not rate:
            return
        if self._rate is not None and rate != self._rate:
            self.state = self.settings.method.rescale(self.state, rate / self._rate)
        self._rate = rate
        self._first_rate = rate if self._first_rate is None else self._first_rate

    @property
    def weightless(self) -> bool:
        """Whether the learning rate is zero: there is nothing to exchange then."""
        return self._unit == 0

    def add(self, begin: int, grad: Tensor, *, clear: bool = False) -> None:
        """Take a flat gradient of the coordinates from `begin` on; leave zeros if `clear`."""
        self.feedback.add(begin, grad, self._unit, clear=clear)

    def script(self) -> Script[Outcome | None]:
        """Return what this worker says in this step."""
        return reduce(
            self.feedback.acc,
            self.sparse,
            self.feedback.finite(),
            self.settings.method,
            self.settings.density(self.step),
            self.state,
            Place(self.step, self._rank, self._size),
            torch.bfloat16 if self.settings.values == "bf16" else self.feedback.kept.dtype,
        )

    def mean_of(self, outcome: Outcome) -> Tensor:
        """Return the (K,) mean in the units of gradients, as far as they are finite."""
        if self._unit == 1:
            return outcome.mean
        limit = torch.finfo(outcome.mean.dtype).max
        return (outcome.mean / self._unit).clamp_(-limit, limit)

    def commit(
        self,
        outcome: Outcome | None,
        *,
        written: Tensor | None = None,
        left_out: list[tuple[int, int]] | None = None,
    ) -> None:
        """Keep what did not travel; None calls the step off, and all is as it was before.

        Args:
            outcome: What the script returned.
            written: (K,) what could be written to the gradients of the mean; None is all of it.
            left_out: What `feedback.leave_out` was called for.
        """
        if outcome is None:
            self.skipped += 1
            return
        left = outcome.left
        if written is not None:
            # Everybody lost the same part of the mean, so everybody keeps it.
            lost = outcome.mean - (written if self._unit == 1 else written * self._unit)
            left = lost if left is None else left + lost
        self.feedback.commit(
            outcome.indices,
            left,
            sent=outcome.sent,
            low_pass=outcome.chosen.low_pass,
            left_out=left_out,
        )
        self.state = outcome.chosen.state
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return all but the residuals: numbers, lists and tensors."""
        state = None if self.state is None else _fields(self.state)
        rates = {"rate": self._rate, "first_rate": self._first_rate}
        return self._identity() | {"step": self.step, "method": state} | rates

    def _identity(self) -> dict[str, Any]:
        method = type(self.settings.method).__name__
        return {"kind": method, "rank": self._rank, "workers": self._size, "dim": self.sparse}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise unless `state` was taken from such a worker, or merged from all such workers."""
        free = ("rank", "workers") if _is_merged(state) else ()
        for key, own in self._identity().items():
            if key not in free and state.get(key) != own:
                raise ValueError(f"sparsify state has {key} {state.get(key)!r}, expected {own!r}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; the method begins anew with a merged state."""
        self.check_state(state)
        self.step, self._rate = state["step"], state["rate"]
        self._first_rate = state.get("first_rate")
        if self.state is None:
            return
        if not _is_merged(state):
            self.state = type(self.state)(**state["method"])
            return
        self.state = self.settings.method.begin(self.sparse, self._size, self._layers)
        if self._rate is not None and self._first_rate is not None:
            self.state = self.settings.method.rescale(self.state, self._rate / self._first_rate)


def _is_merged(state: Mapping[str, Any]) -> bool:
    return "rank" in state and state["rank"] is None


def _fields(state: Any) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
