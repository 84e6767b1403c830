"""The exchange of one step: headers, indices and values, as scripts for real or virtual workers.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; R
workers; K coordinates that are sent, K_r those that worker r selected. Sizes are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, AllGatherUneven, Script
from gradherd.sparsify.message_sizes import ValueFormat, index_bytes
from gradherd.sparsify.packing import pack_indices, unpack_indices
from gradherd.sparsify.selector import Proposal, Selection, Selector, StepContext, target_count
from gradherd.sparsify.value_sums import sum_values

# --- One step ----------------------------------------------------------------------------------


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
        selected = self.selection.selected
        if selected is None:
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

    1 is perfect balance. The ExDyna paper calls this f(t).

    >>> padding([3, 1])
    1.5
    """
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


def exchange_step(
    acc: Tensor,
    sparse: int,
    finite: bool,
    method: Selector,
    density: float,
    state: Any,
    context: StepContext,
    values: ValueFormat = "fp32",
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
        values: How values are sent.

    Returns:
        The outcome; None, on all workers, if a value of any worker or a sum is not finite.
    """
    # Of S, not of D: what is always sent does not use up the density.
    k = target_count(density, sparse)
    selection = yield from select(acc[:sparse], finite, method, k, state, context)
    if selection is None:
        return None
    # Small parameters are sent together with the selected values, in the same rounds.
    always = torch.arange(sparse, len(acc), device=acc.device)
    indices = torch.cat([selection.indices, always])
    if selection.sums is None:
        total, remainder = yield from sum_values(
            acc[indices], len(always), context, values, len(acc)
        )
        sent = None
    else:
        rest, error = yield from sum_values(acc[sparse:], len(always), context, values, len(acc))
        total = torch.cat([selection.sums, rest])
        sent, remainder = _partly_sent(acc, selection, rest, error)
    # Finite values may have a sum that overflows. All workers have the same bits of it, so all
    # of them call the step off, without another round.
    if not bool(total.isfinite().all()):
        return None
    # Divided once, after the sum: dividing every summand would round R times.
    return Outcome(indices, total / context.size, remainder, sent, selection)


def select(
    part: Tensor, finite: bool, method: Selector, k: int, state: Any, context: StepContext
) -> Script[Selection | None]:
    """Agree on what is sent of (S,) `part`; None, on all workers, if one has values not finite."""
    # A worker with values that are not finite must still take part, or the others would hang. It
    # proposes zeros, and its flag calls the step off everywhere.
    part = part if finite else torch.zeros_like(part)
    flag = torch.tensor([int(finite)], dtype=torch.int32, device=part.device)
    # If all parameters are small, there is nothing to select.
    proposal = method.propose(part, k, state, context) if len(part) else Proposal(flag[:0])
    # The flag and the method's header share one message: a round costs more than its few bytes.
    headers: Tensor = yield AllGather(torch.cat([flag, proposal.header]))
    headers = headers.cpu()  # The host waits for the device here: later shapes depend on headers.
    if not bool(headers[:, 0].all()):
        return None
    if not len(part):
        return Selection(flag[:0].long(), [0] * context.size, state)
    return (yield from method.agree(part, k, state, context, proposal, headers[:, 1:]))


def _partly_sent(
    acc: Tensor, selection: Selection, rest: Tensor, error: Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Return which own values were sent and what stays, for a method that sums values itself."""
    error = torch.zeros_like(rest) if error is None else error
    if selection.kept is not None:
        return None, torch.cat([selection.kept, error])
    assert selection.sent is not None
    sent = torch.cat([selection.sent, torch.ones_like(rest, dtype=torch.bool)])
    unsent = acc[selection.indices].masked_fill(selection.sent, 0)
    return sent, torch.cat([unsent, error])


# --- Indices -----------------------------------------------------------------------------------


def gather_indices(
    own: Tensor, counts: Sequence[int], spans: Sequence[tuple[int, int]], context: StepContext
) -> Script[Tensor]:
    """Concatenate the indices that all workers selected.

    They are sent as int32, or as offsets in pages with a count for each page (`packing`),
    whichever is smallest. All workers know `counts` and `spans`, so they agree on the format
    without a flag.

    Args:
        own: (K_r,) int64 ascending indices of this worker.
        counts: K_r of each worker.
        spans: Coordinates [first, end) that each worker selects from.
        context: Which worker this is.

    Returns:
        (K,) int64, in the order of workers.
    """
    # All workers know all counts, so either all of them skip the round or none does.
    if context.size == 1 or not sum(counts):
        return own
    both = list(zip(counts, spans, strict=True))
    formats = {bits: [index_bytes(*one, bits) for one in both] for bits in context.index_bits}
    bits, sizes = min(formats.items(), key=lambda one: sum(one[1]))
    if bits == 32:
        # `Worker` refuses vectors whose coordinates do not fit int32.
        joined: Tensor = yield AllGatherUneven(own.int(), counts)
        return joined.long()
    # As bytes, because collectives do not support uint16.
    packed: Tensor = yield AllGatherUneven(pack_indices(own, spans[context.rank], bits), sizes)
    parts = zip(torch.split(packed, sizes), counts, spans, strict=True)
    return torch.cat([unpack_indices(part, count, span, bits) for part, count, span in parts])


def gather_union(
    own: Tensor, counts: Sequence[int], dim: int, context: StepContext
) -> Script[Tensor]:
    """Return the union of the indices that all workers selected.

    Args:
        own: (K_r,) int64 ascending indices of this worker.
        counts: K_r of each worker.
        dim: Number of coordinates that workers select from.
        context: Which worker this is.

    Returns:
        (K,) int64 without repeats, ascending and so in the same order on all workers.
    """
    indices = yield from gather_indices(own, counts, [(0, dim)] * context.size, context)
    return indices if context.size == 1 else torch.unique(indices)
