"""Where DDP's buckets and the flat vector of all parameters correspond.

Letters: D elements of all parameters in the flat vector, K of them that were sent.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.sparsify import kernels


class BucketMap:
    """All buckets of one backward pass."""

    def __init__(self, buckets: Sequence[dist.GradBucket], places: Mapping[Tensor, slice]) -> None:
        self._flats = [bucket.buffer() for bucket in buckets]
        self.parameters: set[Tensor] = set()
        table = []  # (begin in the flat vector, bucket, begin in the bucket) of each parameter
        for number, bucket in enumerate(buckets):
            at = 0
            for parameter, piece in self.pieces(bucket):
                self.parameters.add(parameter)
                if parameter in places and len(piece):
                    table.append((places[parameter].start, number, at))
                at += len(piece)
        rows = torch.tensor(sorted(table), dtype=torch.int64).view(-1, 3).T
        device = self._flats[0].device
        self._begins, self._numbers, self._offsets = rows.contiguous().to(device)

    @staticmethod
    def pieces(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parameters of a bucket, each with its flat gradient in the bucket."""
        flat, at = bucket.buffer(), 0
        for parameter in bucket.parameters():
            yield parameter, flat[at : at + parameter.numel()]
            at += parameter.numel()

    def fill(self, value: float) -> None:
        """Fill all buckets with one value."""
        for flat in self._flats:
            flat.fill_(value)

    def put(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write values into buckets that are zero.

        Args:
            indices: (K,) coordinates in the flat vector.
            values: (K,).

        Returns:
            (K,) the values as the dtypes of the buckets hold them.
        """
        row = torch.searchsorted(self._begins, indices, right=True) - 1
        offsets = indices - self._begins[row] + self._offsets[row]
        buckets = self._numbers[row]
        written = torch.zeros_like(values)
        for number, flat in enumerate(self._flats):
            kernels.scatter_to_bucket(flat, buckets, number, offsets, values, written)
        return written
