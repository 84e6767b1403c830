"""DDP's buckets and the flat vector: which number lies where.

Letters: D numbers of all parameters in the flat vector, K of them that travelled.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.sparsify import kernels


class Buckets:
    """All buckets of one backward."""

    def __init__(self, buckets: Sequence[dist.GradBucket], places: Mapping[Tensor, slice]) -> None:
        self._flats = [bucket.buffer() for bucket in buckets]
        self.parameters: set[Tensor] = set()
        table = []  # (begin in the flat vector, bucket, begin in the bucket), by parameter
        for number, bucket in enumerate(buckets):
            at = 0
            for parameter, piece in self.pieces(bucket):
                self.parameters.add(parameter)
                if parameter in places and len(piece):
                    table.append((places[parameter].start, number, at))
                at += len(piece)
        rows = torch.tensor(sorted(table), dtype=torch.int64).view(-1, 3).T
        device = self._flats[0].device
        self._begins, self._numbers, self._at = rows.contiguous().to(device)

    @staticmethod
    def pieces(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the parameters of a bucket, each with its numbers as they lie in memory."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            yield parameter, flat[at : at + parameter.numel()]
            at += parameter.numel()

    def fill(self, value: float) -> None:
        """Write one value everywhere."""
        for flat in self._flats:
            flat.fill_(value)

    def put(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write values into cleared buckets; return (K,) what their types could hold of them.

        Args:
            indices: (K,) places in the flat vector.
            values: (K,) numbers.
        """
        row = torch.searchsorted(self._begins, indices, right=True) - 1
        at = indices - self._begins[row] + self._at[row]
        number = self._numbers[row]
        held = torch.zeros_like(values)
        for own, flat in enumerate(self._flats):
            kernels.put(flat, number, own, at, values, held)
        return held
