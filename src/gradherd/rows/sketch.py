"""Hashes that are equal on every rank, device and version of torch, and the count sketch.

Every hash is a function of (seed, name, position) only: integers from splitmix64, keyed by blake2b.
No random generator is read or advanced.

`CountSketch` adds up a long vector in k buckets with random signs, which preserves inner products
on average. Coordinates are hashed in blocks of k: inside a block they keep their order and never
collide, and each block is rotated by its own random amount. The variance of an inner product is
that of a plain count sketch, 2/k of the norms, at the cost of one read: a block is added as a
whole.

Shapes: B examples, N coordinates, k buckets.
"""

from functools import reduce
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.gpu import has_triton

_MAX_TEMPORARY = 1 << 22
"""Elements of the largest temporary; larger work is cut into pieces."""
_FEW = 16
"""Up to this many vectors, blocks are added up faster than buckets on a CPU."""
_MAX_CACHED = 1 << 21
"""Elements of the longest vector whose buckets are remembered."""
_BITS = 64


def hashes(
    seed: int, name: str, start: int, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return the hashes of positions start .. start + count - 1, as 64-bit integers.

    >>> bool((hashes(7, "w", 0, 10)[4:] == hashes(7, "w", 4, 6)).all())
    True
    """
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # numpy, because torch has little arithmetic on unsigned 64-bit integers.
    x = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    # The constants of splitmix64; products wrap around, as they should.
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(int.from_bytes(digest, "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = x ^ (x >> np.uint64(31))
    return mixed


def random_signs(seed: int, name: str, rows: int, columns: int) -> Tensor:
    """Return a (rows, columns) matrix of random signs.

    >>> bool((random_signs(0, "w", 5, 3)[:2] == random_signs(0, "w", 2, 3)).all())
    True
    """
    parts = []
    for first in range(0, columns, _BITS):
        bits = np.arange(min(_BITS, columns - first), dtype=np.uint64)
        # 64 independent bits for each row: one hash serves 64 columns.
        values = hashes(seed, f"{name}/{first}", 0, rows)
        parts.append((values[:, None] >> bits) & np.uint64(1))
    return torch.from_numpy(1.0 - 2.0 * np.concatenate(parts, 1).astype(np.float32))


def hashed_permutation(seed: int, name: str, count: int) -> Tensor:
    """Return a permutation of 0 .. count - 1: positions sorted by their hashes."""
    return torch.from_numpy(np.argsort(hashes(seed, f"{name}/order", 0, count), kind="stable"))


def has_kernels(device: torch.device) -> bool:
    """Say whether Triton's kernels run on a device."""
    return device.type == "cuda" and has_triton()


def buckets_and_signs(
    seed: int, name: str, start: int, count: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return buckets (count,) int64 in [0, k) and signs (count,) float32 of some positions."""
    values = hashes(seed, name, start, count)
    # The high half gives the bucket and the lowest bit the sign: independent parts of one hash.
    buckets = ((values >> np.uint64(32)) % np.uint64(k)).astype(np.int64)
    signs = 1.0 - 2.0 * (values & np.uint64(1)).astype(np.float32)
    return torch.from_numpy(buckets).to(device), torch.from_numpy(signs).to(device)


class CountSketch:
    """Count sketches of one size and seed; remembers the hashes of what it has sketched.

    They are linear, so a long vector may come in slices: the sketches of the slices, each with its
    `offset` in the vector, add up to the sketch of the vector.

    >>> sketch, whole = CountSketch(3, seed=0), torch.arange(10.0)
    >>> torch.equal(sketch(whole[:4]) + sketch(whole[4:], offset=4), sketch(whole))
    True
    """

    def __init__(self, k: int, seed: int) -> None:
        self.size, self.seed = k, seed
        self._blocks: dict[tuple[str, int, int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}
        self._buckets: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, vectors: Tensor, name: str = "", *, offset: int = 0) -> Tensor:
        """Sketch vectors (..., N) by (..., k).

        Args:
            vectors: (..., N) vectors, or the same slice of several.
            name: Separates independent sketches, such as those of several parameters.
            offset: Position of the first coordinate in the whole vector.
        """
        k, size, device = self.size, vectors.shape[-1], vectors.device
        if vectors.dim() == 2 and not offset and _fits_buckets(vectors):
            buckets, signs = self._buckets_of(name, size)
            signed = vectors.detach() * signs.to(vectors.dtype)
            return signed.new_zeros(len(signed), k).index_add_(1, buckets, signed)
        step = max(1, _MAX_TEMPORARY // k) * k  # whole blocks
        if vectors.dim() == 1 and size > step and not has_kernels(device):
            parts = zip(vectors.split(step), range(offset, offset + size, step), strict=True)
            return reduce(torch.add, (self(part, name, offset=at) for part, at in parts))
        first, lead = divmod(offset, k)
        tail = -(lead + size) % k
        count = (lead + size + tail) // k
        if not count:
            return vectors.new_zeros((*vectors.shape[:-1], k))
        shifts, block_signs, signs = self.hashes(name, first, count, device)
        one_launch = vectors.dim() < 3 and vectors.dtype == torch.float32
        if one_launch and has_kernels(device) and vectors.stride(-1) == 1:
            # Imported here: Triton is optional, and absent where there is no GPU.
            from gradherd.rows.triton_sketches import sketch_vectors

            table = vectors if vectors.dim() == 2 else vectors.unsqueeze(0)
            found = sketch_vectors(table, lead, shifts, block_signs, signs)
            return found if vectors.dim() == 2 else found[0]
        padded = F.pad(vectors, (lead, tail)) if lead or tail else vectors
        blocks = padded.reshape(*vectors.shape[:-1], count, k)
        signed = blocks * block_signs.to(vectors.dtype).unsqueeze(-1)
        if count > k:
            # More blocks than possible shifts: add blocks of equal shift before they are rotated.
            sums = signed.new_zeros((*signed.shape[:-2], k, k))
            signed = sums.index_add_(-2, shifts, signed)
            shifts = torch.arange(k, device=device)
        signed = signed * signs.to(vectors.dtype)
        # Gathered, not scattered: sums over blocks then have a fixed order.
        source = (torch.arange(k, device=device) - shifts.unsqueeze(-1)) % k
        return signed.gather(-1, source.expand(signed.shape)).sum(-2)

    def hashes(
        self, name: str, first: int, count: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return shifts and signs (count,) of blocks of k coordinates, and signs (k,) within."""
        key = (name, first, count, device)
        if key not in self._blocks:
            blocks = buckets_and_signs(self.seed, f"{name}/block", first, count, self.size, device)
            _, signs = buckets_and_signs(
                self.seed, f"{name}/column", 0, self.size, self.size, device
            )
            self._blocks[key] = (*blocks, signs)
        return self._blocks[key]

    def _buckets_of(self, name: str, size: int) -> tuple[Tensor, Tensor]:
        """Return buckets (N,) and signs (N,) of all coordinates."""
        if (name, size) not in self._buckets:
            k = self.size
            shifts, block_signs, signs = self.hashes(name, 0, -(-size // k), torch.device("cpu"))
            buckets = ((torch.arange(k) + shifts[:, None]) % k).flatten()[:size]
            self._buckets[name, size] = buckets, (block_signs[:, None] * signs).flatten()[:size]
        return self._buckets[name, size]


def _fits_buckets(vectors: Tensor) -> bool:
    """Say whether vectors (..., N) are added up by buckets: on a CPU, several of moderate length.

    A single one is added faster in blocks; what is remembered of a long one takes memory.
    """
    exact = vectors.dtype in (torch.float32, torch.float64)
    size = vectors.shape[-1]
    several = 0 < size <= _MAX_CACHED and vectors.numel() >= _FEW * size
    return vectors.device.type == "cpu" and exact and several
