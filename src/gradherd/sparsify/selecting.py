"""What workers agree on in a step, as scripts for real or virtual workers: headers and indices.

Letters: D coordinates, of which the first S are sparsified and the others are always sent; R
workers; K coordinates that are sent, K_r those that worker r selected. Sizes are in bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.message_sizes import index_bytes
from gradherd.comm.packing import pack_indices, unpack_indices
from gradherd.comm.script import AllGather, Script, check_script
from gradherd.sparsify.selector import Proposal, Selection, Selector, Step, StepContext

# --- One step ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Result of a step on one worker."""

    indices: Tensor | None
    """(K,) coordinates that were sent, the same on all workers; None is all."""
    mean: Tensor
    """(K,) mean over workers, the same bits on all of them."""
    remainder: Tensor | None
    """(K,) what this worker keeps at those coordinates; None is nothing."""
    selection: Selection
    """What the method selected, without what is always sent."""

    def coordinates(self) -> Tensor:
        """Return (K,) the coordinates that were sent."""
        if self.indices is None:
            return torch.arange(len(self.mean), device=self.mean.device)
        return self.indices

    def whole_mean(self, dim: int) -> Tensor:
        """Return (D,) the mean, zero where nothing was sent."""
        if self.indices is None:
            return self.mean
        return self.mean.new_zeros(dim).index_copy_(0, self.indices, self.mean)

    def metrics(self, dim: int) -> dict[str, Any]:
        """Return the metrics of a step that sparsified `dim` coordinates."""
        one = self.selection
        selected = len(one.indices) if one.indices is not None else 0
        selected = selected if one.selected is None else one.selected
        return step_metrics(selected, one.counts, one.threshold, dim)


def step_metrics(
    selected: int, counts: list[int], threshold: float | None, dim: int
) -> dict[str, Any]:
    """Return the metrics of a step that selected so many of `dim` coordinates."""
    return {
        "selected": selected,
        "per_rank": counts,
        "threshold": threshold,
        "density": selected / dim if dim else 1.0,
        "padding": padding(counts),
    }


def padding(counts: Sequence[int]) -> float:
    """Return R max / sum of the counts: the cost of padding all workers to the longest.

    1 is perfect balance. The ExDyna paper calls this f(t).

    >>> padding([3, 1])
    1.5
    """
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


def select(
    step: Step, finite: bool, method: Selector, known: list[Selection] | None = None
) -> Script[Selection | None]:
    """Agree on what is sent of (S,) `step.acc`; None, on all workers, if one is not `finite`.

    Args:
        step: The step.
        finite: Whether all values of this worker are.
        method: What selects.
        known: What other workers of this process have agreed on in this step, where all agree on
            it alike (`Selector.agrees_alone`): it is agreed on once.
    """
    # A worker with values that are not finite must still take part, or the others would hang. It
    # proposes zeros, and its flag calls the step off everywhere.
    step = step if finite else replace(step, acc=torch.zeros_like(step.acc))
    flag = torch.tensor([int(finite)], dtype=torch.int32, device=step.acc.device)
    # If all parameters are small, there is nothing to select.
    proposal = method.propose(step) if step.dim else Proposal(flag[:0])
    # The flag and the method's header share one message: a round costs more than its few bytes.
    headers: Tensor = yield AllGather(torch.cat([flag, proposal.header]))
    if known:
        selection = known[0]
    else:
        headers = headers.cpu()  # The host waits for the device: later shapes depend on headers.
        if not bool(headers[:, 0].all()):
            return None
        if not step.dim:
            return Selection(step.everything(), [0] * step.size, step.state)
        script = method.agree(step, proposal.own, headers[:, 1:])
        check_script(script, method, "agree")
        selection = yield from script
        if known is not None:
            known.append(selection)
    if not type(method).__module__.startswith("gradherd."):
        yield from _check_selection(selection, step, method)
    # A worker loads a saved state only if `begin` makes one to compare it with.
    if (selection.state is None) != (step.state is None):
        kinds = [type(one).__name__ for one in (step.state, selection.state)]
        raise ValueError(
            f"{type(method).__name__}.begin returned {kinds[0]}, but agree {kinds[1]}: both must "
            "return a state, or both None"
        )
    return selection


# --- Selections of methods of one's own -------------------------------------------------------

# Steps at which workers compare what was selected: the first ones, and then one in so many.
_COMPARED_FIRST, _COMPARED_EVERY = 3, 100
# Terms of a checksum are below the prime, so their sum fits 64 bits.
_PRIME, _FACTOR = 2**31 - 1, 48_271


def _check_selection(selection: Selection, step: Step, method: Selector) -> Script[None]:
    """Raise ValueError if a selection cannot be sent, or differs between workers.

    Sums of other coordinates would let weights drift apart without a sign of it. What takes long,
    and comparing, is done at few steps.
    """
    thorough = step.number < _COMPARED_FIRST or step.number % _COMPARED_EVERY == 0
    mistake = _mistake_in(selection, step, thorough)
    if thorough and step.size > 1:
        # Before this worker raises: the others must not wait for it.
        checksum = 0 if mistake else _checksum(selection.indices)
        own = torch.tensor([int(mistake is not None), checksum], device=step.acc.device)
        rows: Tensor = yield AllGather(own)
        wrong, checksums = rows.T.tolist()
        if mistake is None and any(wrong):
            mistake = f"returned what cannot be sent on worker {wrong.index(1)}"
        elif mistake is None and len(set(checksums)) > 1:
            mistake = (
                "selected other coordinates on different workers: compute them from what all "
                "workers know, or gather them (gather_union)"
            )
    if mistake is not None:
        raise ValueError(f"{type(method).__name__}.agree {mistake}")


def _mistake_in(selection: Selection, step: Step, thorough: bool) -> str | None:
    """Say why a selection cannot be sent; None if it can. Repeats are looked for if `thorough`."""
    indices: Any = selection.indices  # A user may return anything.
    if len(selection.counts) != step.size:
        return f"returned {len(selection.counts)} counts for {step.size} workers"
    if indices is None:
        return None
    if not isinstance(indices, Tensor):
        return f"must return coordinates as an int64 tensor, got {type(indices).__name__}"
    if indices.dtype != torch.int64 or indices.dim() != 1 or indices.device != step.acc.device:
        got = f"{indices.dtype} {tuple(indices.shape)} on {indices.device}"
        return f"must return coordinates as a 1-D int64 tensor, got {got}"
    if len(indices) and not (0 <= int(indices.min()) and int(indices.max()) < step.dim):
        return f"must return coordinates in [0, {step.dim})"
    if thorough and len(indices.unique()) < len(indices):
        return "must not return a coordinate twice: they repeat"
    return None


def _checksum(indices: Tensor | None) -> int:
    """Return a number that other coordinates, or the same in another order, do not have."""
    if indices is None:
        return -1
    places = torch.arange(1, len(indices) + 1, device=indices.device)
    terms = (indices + 1) * (places * _FACTOR % _PRIME) % _PRIME
    return int(terms.sum())


# --- Indices -----------------------------------------------------------------------------------


def gather_indices(
    own: Tensor, counts: Sequence[int], spans: Sequence[tuple[int, int]], context: StepContext
) -> Script[Tensor]:
    """Concatenate the indices that all workers selected.

    Messages (`packing`) are padded to the longest; all workers know `counts` and `spans`, and so
    the length of each.

    Args:
        own: (K_r,) int64 indices of this worker, without repeats. They are sorted here: values
            that are sent in their order must come from ascending ones.
        counts: K_r of each worker.
        spans: Coordinates [first, end) that each worker selects from.
        context: Which worker this is.

    Returns:
        (K,) int64, in the order of workers; those of each are ascending.
    """
    # Most methods have them so. On a GPU the host would wait for the comparison.
    if not own.is_cpu or not bool((own[1:] > own[:-1]).all()):
        own = own.sort().values
    # All workers know all counts, so either all of them skip the round or none does.
    if context.size == 1 or not sum(counts):
        return own
    lengths = [end - first for first, end in spans]
    sizes = [index_bytes(*one) for one in zip(counts, lengths, strict=True)]
    packed = pack_indices(own - spans[context.rank][0], lengths[context.rank])
    rows: Tensor = yield AllGather(F.pad(packed, (0, max(sizes) - len(packed))))
    parts = zip(rows, sizes, counts, lengths, spans, strict=True)
    return torch.cat(
        [
            unpack_indices(row[:size], count, length) + span[0]
            for row, size, count, length, span in parts
        ]
    )


def gather_union(
    own: Tensor, counts: Sequence[int], dim: int, context: StepContext
) -> Script[Tensor]:
    """Return the (K,) union of the indices that workers selected from `dim` coordinates, ascending.

    Arguments as in `gather_indices`.
    """
    indices = yield from gather_indices(own, counts, [(0, dim)] * context.size, context)
    return indices if context.size == 1 else torch.unique(indices)
