"""DeMo: send the largest frequencies of each chunk of the vector.

Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", arXiv:2411.19870. What changes
slowly from weight to weight is a few coefficients of a cosine transform. The transform is
orthonormal and linear, so what was not sent is the vector minus the inverse transform of what was:
residuals stay in the unit and the order of parameters, and are saved, merged and resumed like those
of any other method.

Letters: D coordinates, R workers, B side of a chunk, C = B^2 coordinates of a chunk, N chunks,
k coefficients that a worker sends.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.message_sizes import DEFAULT_DENSITY
from gradherd.comm.script import AllGather, Script
from gradherd.sparsify.selecting import gather_indices
from gradherd.sparsify.selector import Proposal, Selection, Selector, Step, check_density


@dataclass(frozen=True)
class DeMo(Selector):
    """Send the largest coefficients of a cosine transform, chunk by chunk.

    Peng, Quesnelle, Kingma, arXiv:2411.19870. Raises ValueError if a setting is out of range.
    """

    density: float = DEFAULT_DENSITY
    """Share of the coefficients that each worker sends."""
    block: int = 64
    """B: a chunk has B x B consecutive coordinates, and is transformed along both sides."""
    decay: float = 1.0
    """Factor of what is kept from step to step. 1 loses nothing; the paper's momentum has 0.999."""

    sums_values = True

    def __post_init__(self) -> None:
        check_density(self.density)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block must be an integer of at least 1, got {self.block!r}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], got {self.decay}")

    def propose(self, step: Step) -> Proposal:
        """Select the largest coefficients of each chunk; every worker selects k, so no header."""
        if step.k >= step.dim:
            return Proposal.without_header(step)
        coefficients = transform(step.acc, self._side(step.acc))
        own = largest_of_chunks(coefficients, step.k, step.number)
        return Proposal.without_header(step, (own, coefficients.flatten()[own]))

    def agree(self, step: Step, own: Any, headers: Tensor) -> Script[Selection]:
        """Gather everybody's coefficients, and return their sum in coordinates."""
        acc, counts = step.acc, [step.k] * step.size
        if step.k >= step.dim:
            # All coefficients are all coordinates: the ordinary exchange sums them without rounding
            # twice.
            return Selection(step.everything(), counts, None)
        chosen, values = own
        side = self._side(acc)
        length = -(-len(acc) // side**2) * side**2
        spans = [(0, length)] * step.size
        indices = yield from gather_indices(chosen, counts, spans, step)
        gathered: Tensor = yield AllGather(values)
        total, part = acc.new_zeros(length), acc.new_zeros(length)
        # Worker after worker: each has an index once, so sums have one order and the same bits on
        # every worker, on a GPU as well.
        for theirs, sent in zip(indices.view(step.size, -1), gathered, strict=True):
            total.index_add_(0, theirs, sent)
        part[chosen] = values
        kept = acc - inverse(part, side)[: len(acc)]
        return Selection(
            step.everything(),
            counts,
            None,
            sums=inverse(total, side)[: len(acc)],
            kept=kept if self.decay == 1 else kept * self.decay,
            selected=len(indices.unique()),
        )

    def _side(self, acc: Tensor) -> int:
        # A short vector would be mostly padding.
        return min(self.block, math.isqrt(len(acc) - 1) + 1)


@functools.lru_cache(maxsize=8)
def cosine_matrix(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the orthonormal matrix of the type-II cosine transform: (B, B), a frequency per row.

    >>> matrix = cosine_matrix(3, torch.float64, torch.device("cpu"))
    >>> torch.allclose(matrix @ matrix.T, torch.eye(3, dtype=torch.float64))
    True
    """
    with torch.inference_mode(False):  # kept for later calls, whatever their mode
        # In double precision, since rounding here would make the transform less orthonormal.
        steps = torch.arange(size, dtype=torch.float64)
        matrix = torch.cos(math.pi / size * (steps + 0.5) * steps.unsqueeze(1))
        matrix *= math.sqrt(2 / size)
        matrix[0] /= math.sqrt(2)
        return matrix.to(device, dtype)


def transform(values: Tensor, side: int) -> Tensor:
    """Return the coefficients of each chunk: (D,) -> (N, C), the last chunk padded with zeros."""
    count = -(-len(values) // side**2)
    padded = F.pad(values, (0, count * side**2 - len(values)))
    matrix = cosine_matrix(side, values.dtype, values.device)
    return (matrix @ padded.view(count, side, side) @ matrix.T).flatten(1)


def inverse(coefficients: Tensor, side: int) -> Tensor:
    """Return the coordinates of all chunks: (N C,) -> (N C,)."""
    matrix = cosine_matrix(side, coefficients.dtype, coefficients.device)
    return (matrix.T @ coefficients.view(-1, side, side) @ matrix).flatten()


def largest_of_chunks(coefficients: Tensor, k: int, step: int) -> Tensor:
    """Return where the largest of each chunk are, k in all, ascending: (N, C) -> (k,) int64.

    Every chunk sends the same number. Where k is no multiple of N, some chunks send one more; which
    ones changes from step to step, so that with k < N each chunk has its turn.

    >>> chunks = torch.tensor([[1.0, -9.0], [3.0, 2.0]])
    >>> largest_of_chunks(chunks, 1, step=0), largest_of_chunks(chunks, 1, step=1)
    (tensor([1]), tensor([2]))
    """
    chunks, size = coefficients.shape
    each, more = divmod(k, chunks)
    top = coefficients.abs().topk(each + bool(more), dim=1).indices
    top = top + size * torch.arange(chunks, device=top.device).unsqueeze(1)
    if not more:
        return top.flatten().sort().values
    turn = (step * more + torch.arange(more, device=top.device)) % chunks
    return torch.cat([top[:, :each].flatten(), top[turn, each]]).sort().values
