"""gTop-k: the k largest of sums that are formed up a tree, so that k coordinates travel.

Shi et al., "A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
Bandwidth Networks", ICDCS 2019, arXiv:1901.04359. Every worker starts with its own k largest
coordinates. In round j worker r, if r mod 2^(j+1) is 2^j, hands its list to worker r - 2^j, which
adds the two up and keeps the k largest sums. The list that worker 0 ends up with goes down the
same way, to everybody. Any number of workers will do.

With the list goes a bit for each entry that was handed up: whether it is still in the sums. So
everybody knows which of its picks travelled, also if one was dropped half-way and another
worker's value at the same coordinate was not. What was dropped stays with the worker that
picked it.

Letters: R workers, k entries of a list, B bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradherd.comm.script import Script, SendRecv
from gradherd.sparsify.kernels import largest
from gradherd.sparsify.selector import Chosen, Place, Proposal, check_density


@dataclass(frozen=True)
class GTopK:
    """The k largest of sums that are formed up a tree."""

    density: float = 1e-3
    """Share of the coordinates that each worker picks, and that travels."""

    exclusive = False
    sums_values = True

    def __post_init__(self) -> None:
        check_density(self.density)

    def begin(self, dim: int, workers: int, layers: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, acc: Tensor, k: int, state: None, place: Place) -> Proposal:
        """Pick; there is nothing to tell, as everybody picks as many."""
        own = largest(acc, k) if k < len(acc) else torch.arange(len(acc), device=acc.device)
        return Proposal(torch.zeros(0, dtype=torch.int32, device=acc.device), own)

    def settle(
        self, acc: Tensor, k: int, state: None, place: Place, proposal: Proposal, headers: Tensor
    ) -> Script[Chosen]:
        """Add up the tree, and learn which of this worker's picks are in the sums."""
        own: Tensor = proposal.found
        counts = [len(own)] * place.size
        if k >= len(acc):
            return Chosen(own, counts, None)  # nothing to drop: added up like anything else
        final, alive = yield from _tree(Entries(own, acc[own]), place)
        sent = torch.zeros(k, dtype=torch.bool, device=acc.device)
        sent[torch.searchsorted(final.indices, own[alive])] = True
        return Chosen(final.indices, counts, None, sums=final.values, sent=sent)

    def rescale(self, state: None, factor: float) -> None:
        """Nothing has a unit."""


class Entries(NamedTuple):
    """A list of sums on its way through the tree."""

    indices: Tensor
    """(k,) int64, ascending."""
    values: Tensor
    """(k,) sums of what some workers have there."""


def merge(mine: Entries, theirs: Entries) -> tuple[Entries, Tensor, Tensor]:
    """Add two lists up and keep the k largest; of equal ones those with lower indices.

    Returns:
        The new list, and where in it the k entries of each old one are; -1 is nowhere.
    """
    k = len(mine.indices)
    union, inverse = torch.unique(torch.cat([mine.indices, theirs.indices]), return_inverse=True)
    values = torch.cat([mine.values, theirs.values])
    sums = values.new_zeros(len(union)).index_add_(0, inverse, values)
    kept = sums.abs().argsort(descending=True, stable=True)[:k].sort().values
    places = torch.full_like(union, -1)
    places[kept] = torch.arange(k, device=union.device)
    here, there = places[inverse].split(k)
    return Entries(union[kept], sums[kept]), here, there


def _tree(entries: Entries, place: Place) -> Script[tuple[Entries, Tensor]]:
    """Return the list of worker 0, and (k,) which of this worker's entries are in it."""
    k, rank = len(entries.indices), place.rank
    gaps = [1 << j for j in range((place.size - 1).bit_length())]
    merges: dict[int, tuple[Tensor, Tensor]] = {}
    message = _pack(entries)
    for gap in gaps:
        if rank % (2 * gap) == gap:
            yield SendRecv(message, dst=rank - gap)
        elif rank % (2 * gap) == 0 and rank + gap < place.size:
            taken: Tensor = yield SendRecv(like=message, src=rank + gap)
            entries, here, there = merge(entries, _unpack(taken, k, entries.values.dtype))
            merges[gap] = here, there
            message = _pack(entries)
        else:
            yield SendRecv()

    alive = torch.ones(k, dtype=torch.bool, device=message.device)
    size = len(message)
    for gap in reversed(gaps):
        if rank % (2 * gap) == gap:
            like = message.new_empty(size + -(-k // 8))
            taken = yield SendRecv(like=like, src=rank - gap)
            message, alive = taken[:size], _flags(taken[size:], k)
        elif gap in merges:
            here, there = merges[gap]
            yield SendRecv(torch.cat([message, _bits(_still(alive, there))]), dst=rank + gap)
            alive = _still(alive, here)
        else:
            yield SendRecv()
    return _unpack(message, k, entries.values.dtype), alive


def _still(alive: Tensor, places: Tensor) -> Tensor:
    """Return which entries are alive that went to these places of a list; -1 is none."""
    return (places >= 0) & alive[places]


def _pack(entries: Entries) -> Tensor:
    """Return (B,) uint8: values first, whose size suits the alignment of indices."""
    values, indices = entries.values, entries.indices.int()
    return torch.cat([values.view(torch.uint8), indices.view(torch.uint8)])


def _unpack(message: Tensor, k: int, dtype: torch.dtype) -> Entries:
    border = k * dtype.itemsize
    # Copies, as others may hold the message too.
    return Entries(message[border:].view(torch.int32).long(), message[:border].view(dtype).clone())


def _bits(flags: Tensor) -> Tensor:
    """Pack flags eight to a byte: (k,) bool -> (B,) uint8."""
    padded = torch.zeros(-(-len(flags) // 8), 8, dtype=torch.uint8, device=flags.device)
    padded.view(-1)[: len(flags)] = flags
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1).byte()


def _flags(packed: Tensor, k: int) -> Tensor:
    """Return the k flags that were packed: (B,) uint8 -> (k,) bool."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).bool().view(-1)[:k]
