"""Where DDP's buckets and the flat vector of all parameters correspond.

The flat vector is in the order of the model and stays as it is; DDP rebuilds its buckets after the
first step. So the map is made anew for every backward.

Shapes: D elements of all parameters in the flat vector, K of them that are sent.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gradherd.sparsify import kernels


def pieces(bucket: dist.GradBucket) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parameters of a bucket, each with its flat gradient in the bucket."""
    flat, offset = bucket.buffer(), 0
    for parameter in bucket.parameters():
        yield parameter, flat[offset : offset + parameter.numel()]
        offset += parameter.numel()


class BucketMap:
    """Where the buckets of one backward and the flat vector of all parameters correspond."""

    def __init__(self, buckets: Sequence[dist.GradBucket], slices: Mapping[Tensor, slice]) -> None:
        """Map all buckets of a backward.

        Args:
            buckets: DDP's buckets, in the order in which they arrived.
            slices: Where each parameter is in the flat vector.
        """
        self._flats = [bucket.buffer() for bucket in buckets]
        self.parameters: set[Tensor] = set()
        """Parameters that the buckets hold."""
        table = []  # (begin in the flat vector, bucket, begin in the bucket) of each parameter
        for number, bucket in enumerate(buckets):
            offset = 0
            for parameter, piece in pieces(bucket):
                self.parameters.add(parameter)
                # An empty parameter begins where the next one does: `put` could not tell them
                # apart.
                if parameter in slices and len(piece):
                    table.append((slices[parameter].start, number, offset))
                offset += len(piece)
        # Sorted by where parameters begin, for the binary search in `put`; on the device, so that
        # indices need not be copied to the host.
        rows = torch.tensor(sorted(table), dtype=torch.int64).view(-1, 3).T
        device = self._flats[0].device
        self._begins, self._numbers, self._offsets = rows.contiguous().to(device)

    def fill(self, value: float) -> None:
        """Fill all buckets with one value."""
        for flat in self._flats:
            flat.fill_(value)

    def put(self, indices: Tensor, values: Tensor) -> Tensor:
        """Write values into buckets that are zero.

        Args:
            indices: (K,) positions in the flat vector.
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
