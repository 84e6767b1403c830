"""One step of one worker, on one screen: propose, agree, exchange, average.

Letters: D coordinates, of which the first S may stay and the rest always travel; K that travel.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script
from gradherd.sparsify.choice import Chosen, Place, Proposal, target
from gradherd.sparsify.exchange import add_up
from gradherd.sparsify.selector import Selector
from gradherd.sparsify.thresholds import padding


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
