"""Peers of `few_bytes.py` that gradherd does not have, written out from their papers.

Each takes what R workers have found, (R, D), and returns what all of them get, (D,). `metrics` says
how many bytes a worker sends, which is also what it receives. What workers select by themselves is
all-gathered: b bytes of each are (R - 1) b for each to send.

Letters: R workers, D coordinates, k that a worker sends; N chunks of A x B coordinates.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.comm.message_sizes import GROUP
from gradherd.comm.packing import decode_values, encode_values
from gradherd.local.exchange import SharedWeights
from gradherd.local.settings import LocalSteps

PAGE = 65_536
"""An index is an offset of 16 bits in a page; every page has a count."""


class FewBitGradients:
    """All coordinates of every gradient in few bits, with error feedback: 1-bit SGD's exchange.

    It is that of local steps, with shared weights of zero that move by the mean.
    """

    def __init__(self, values: Any, dim: int, workers: int, device: torch.device) -> None:
        settings = LocalSteps(every=1, values=values, outer_momentum=0.0, keep_residual=False)
        self._shared = SharedWeights.simulate(settings, dim, 0, 0, workers, device=device)
        self._shared.start(torch.zeros(self._shared.numel, device=device))
        self._rows = torch.zeros(workers, self._shared.numel, device=device)
        self.metrics: dict[str, int] = {}

    def step(self, grads: Tensor) -> Tensor:
        """Return the mean of (R, D) gradients as all workers get it."""
        torch.neg(grads, out=self._rows[:, : grads.shape[1]])
        mean = self._shared.outer.shared.zero_()
        self._shared.exchange(list(self._rows))
        self.metrics = {"bytes": self._shared.bytes}
        return mean[: grads.shape[1]].neg()


class TopK:
    """Each worker's own k largest, in bf16; the rest waits.

    Aji, Heafield, EMNLP 2017, arXiv:1704.05021; of all coordinates instead of each matrix.
    """

    def __init__(self, density: float, dim: int, workers: int, device: torch.device) -> None:
        self._k = max(1, int(density * dim))
        self.residuals = torch.zeros(workers, dim, device=device)
        pages = -(-dim // PAGE)
        self.metrics = {"bytes": (workers - 1) * (self._k * (2 + 2) + 2 * pages)}

    def step(self, grads: Tensor) -> Tensor:
        """Return the mean of what was sent, zero elsewhere."""
        waiting = self.residuals.add_(grads)
        at = waiting.abs().topk(self._k, sorted=False).indices
        sent = waiting.gather(1, at).bfloat16().float()
        waiting.scatter_add_(1, at, -sent)  # what rounding took waits, too
        mean = torch.zeros_like(waiting[0])
        return mean.index_add_(0, at.flatten(), sent.flatten() / len(grads))


class SparseLoCo:
    """Each worker's own largest of every 4,096, in 2 bits with an index of 12.

    Sarfi et al., arXiv:2508.15706; the mean over all workers, or over those that have sent.
    """

    def __init__(
        self, density: float, decay: float, dim: int, workers: int, device: torch.device,
        *, senders: bool,
    ) -> None:  # fmt: skip
        self._density, self._decay, self._dim, self._senders = density, decay, dim, senders
        self._residuals = torch.zeros(workers, dim, device=device)
        self.metrics = {"bytes": 0}

    def step(self, difference: Tensor) -> Tensor:
        """Return the mean of (R, D) differences."""
        size, chunk = len(difference), 4096
        each = max(1, round(self._density * chunk))
        total, counts = torch.zeros_like(difference[0]), torch.zeros_like(difference[0])
        for own, residual in zip(difference, self._residuals, strict=True):
            acc = self._decay * residual + own
            padded = F.pad(acc, (0, -len(acc) % chunk)).view(-1, chunk)
            at = padded.abs().topk(each, sorted=False).indices
            at = (at + chunk * torch.arange(len(at), device=at.device)[:, None]).flatten()
            at = at[at < self._dim]
            sent = decode_values(encode_values(acc[at], 2), len(at), 2)
            residual.copy_(acc).index_add_(0, at, -sent)
            total.index_add_(0, at, sent)
            counts.index_add_(0, at, torch.ones_like(sent))
            self.metrics["bytes"] = (size - 1) * len(at) * (12 + 2) // 8
        return total / (counts.clamp(min=1) if self._senders else size)


class DeMo:
    """The k largest cosine coefficients of each chunk of a worker's momentum leave it and are sent.

    Peng, Quesnelle, Kingma, arXiv:2411.19870, with its decay of 0.999 and chunks of up to 64 x 64
    of a matrix, 64 of a vector: the largest divisors of its sides. The step that follows is along
    the sign of the mean. Here values are bf16, and indices of a chunk take 12 bits.
    """

    SIDE, DECAY = 64, 0.999

    def __init__(
        self, k: int, shapes: Iterable[tuple[int, ...]], workers: int, device: torch.device
    ) -> None:
        places: dict[tuple[int, int], list[Tensor]] = {}
        first = 0
        for shape in shapes:
            rows, columns = (1, *shape) if len(shape) == 1 else shape
            a, b = _divisor(rows, self.SIDE), _divisor(columns, self.SIDE)
            at = torch.arange(first, first + rows * columns, device=device)
            at = at.view(rows // a, a, columns // b, b).transpose(1, 2).reshape(-1, a * b)
            places.setdefault((a, b), []).append(at)
            first += rows * columns
        self._k = k
        self._chunks = {side: torch.cat(at) for side, at in places.items()}
        self._bases = {n: cosines(n, device) for n in {n for side in places for n in side}}
        self.momenta = torch.zeros(workers, first, device=device)
        sent = sum(min(k, a * b) * len(at) for (a, b), at in self._chunks.items())
        self.metrics = {"bytes": (workers - 1) * -(-sent * (16 + 12) // 8)}

    def step(self, grads: Tensor) -> Tensor:
        """Return the mean of what was sent."""
        self.momenta.mul_(self.DECAY).add_(grads)
        mean = torch.empty_like(self.momenta[0])
        for (a, b), at in self._chunks.items():
            over, along = self._bases[a], self._bases[b]
            chunks = self.momenta[:, at].view(-1, *at.shape[:1], a, b)
            found = (over @ chunks @ along.T).flatten(2)  # (R, N, A B)
            chosen = found.abs().topk(min(self._k, a * b), sorted=False).indices
            values = found.gather(2, chosen).bfloat16().float()
            sent = torch.zeros_like(found).scatter_(2, chosen, values).view_as(chunks)
            self.momenta[:, at] = (chunks - over.T @ sent @ along).flatten(2)
            mean[at] = (over.T @ sent.mean(0) @ along).flatten(1)
        return mean


def cosines(size: int, device: torch.device) -> Tensor:
    """Return the orthonormal matrix of the type-II cosine transform, a frequency per row."""
    steps = torch.arange(size, dtype=torch.float64)
    matrix = math.sqrt(2 / size) * torch.cos(math.pi / size * (steps + 0.5) * steps[:, None])
    matrix[0] /= math.sqrt(2)
    return matrix.float().to(device)


def _divisor(size: int, most: int) -> int:
    return next(one for one in range(min(size, most), 0, -1) if size % one == 0)


def frozen_root(v: Tensor, floor: float) -> Tensor:
    """Return the root of a second moment that will not change any more, as 1-bit Adam divides by.

    Tang et al., arXiv:2102.02888. One bit cannot say zero: a coordinate that hardly had a gradient
    so far gets as much as others of its group, divided by nearly nothing, and training diverges
    (GPT-2 has words that its text lacks). DeepSpeed lets its user mask those. Here a root is at
    least `floor` of the mean of its group; 0 is the published rule.
    """
    root = v.sqrt()
    groups = F.pad(root, (0, -root.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    least = floor * groups.mean(-1, keepdim=True).expand_as(groups).flatten(-2)
    return torch.maximum(root, least[..., : root.shape[-1]]).add_(1e-8)
