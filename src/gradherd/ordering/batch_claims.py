"""Which units a gradient belongs to, and whether ranks feed back the same ones at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.comm.script import AllGather, Script

# In place of a time step: the gradient belongs to no batch of the order; no gradient at all, but
# the end of what was fed.
_NO_BATCH, _END = -1, -2


class BatchClaim(NamedTuple):
    """The units that a gradient belongs to."""

    epoch: int
    """Epoch in which they are visited."""
    step: int
    """Position of the first one in the order of that epoch."""
    units: int
    """Number of units."""
    examples: int
    """Number of examples in them."""
    version: str = ""
    """Version of that order, which must be the same on all ranks."""


def compare_claims(
    claim: BatchClaim | None, *, finite: bool = True, end: bool = False
) -> Script["ClaimComparison"]:
    """Compare the batches that all ranks feed back at this step of training.

    A rank may have skipped a batch that the others trained on. Their gradients then belong to
    different time steps, and signs are decided for one time step of all workers at once.

    Args:
        claim: This rank's batch; None if its gradient belongs to none.
        finite: Whether this rank knows of nothing in the gradients that is not finite.
        end: This rank feeds back nothing: it wants all that was fed to be learned.

    Raises:
        RuntimeError: The ranks hold different orders of an epoch.
    """
    if claim is None:
        own = [_END if end else _NO_BATCH, 0, 0, 0]
    else:
        own = [claim.step, claim.units, claim.epoch, int(claim.version or "0", 16) - 2**63]
    gathered: Tensor = yield AllGather(torch.tensor([*own, finite]))
    rows: list[list[int]] = gathered.tolist()
    ranks, all_finite = [row[:-1] for row in rows], all(row[-1] for row in rows)
    if claim is not None and all(one == own for one in ranks):  # at nearly every step
        return ClaimComparison(True, all_finite, claim.step + claim.units, "")
    epochs = [epoch if step >= 0 else None for step, _, epoch, _ in ranks]
    for epoch in set(epochs) - {None}:
        versions = [one[3] if one[2] == epoch and one[0] >= 0 else None for one in ranks]
        check_same_version(versions, int(epoch or 0))
    visited = min(step + units for step, units, _, _ in ranks)
    return ClaimComparison(
        same=all(one == own for one in ranks),
        finite=all_finite,
        visited=visited if len(set(epochs)) == 1 and None not in epochs else None,
        text=", ".join(f"{_named(one)} on rank {rank}" for rank, one in enumerate(ranks)),
    )


def _named(own: list[int]) -> str:
    step, _, epoch, _ = own
    if step < 0:
        return "the end" if step == _END else "none"
    return f"unit {step} of epoch {epoch}"


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
