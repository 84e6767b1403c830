"""Seeded sketches: k elements that preserve inner products on average, equal on every rank.

Every hash is a function of (seed, name, position) only: integers from splitmix64, keyed by
blake2b. No random generator is read or advanced, so ranks, devices and torch versions agree.

- `count_sketch` adds up a long vector in k buckets with random signs. Coordinates are hashed in
  blocks of k: inside a block they keep their order and never collide, and each block is rotated by
  its own random amount. The variance of an inner product is that of a plain count sketch, 2/k of
  the norms, at the cost of one read: a block is added as a whole.
- `tensor_sketch` is the count sketch of an outer product g a^T, from the two factors alone
  (Pham and Pagh, KDD 2013): the bucket of (i, j) is h(i) + h'(j) mod k, so the sketch is the
  circular convolution of two small sketches and the outer product is never formed. For one
  position its variance is close to 2/k too; projecting both factors to sqrt(k) elements and
  taking their outer product would have 4/sqrt(k).

On a GPU the number of kernels counts, not the number of multiplications. So short factors are
sketched there by one product with a cached matrix; for the factors of an outer product its rows
are already Fourier transforms of buckets.

Shapes: B examples, T positions of an example, N coordinates, k buckets, F = 2 (k // 2 + 1) real
and imaginary parts of k // 2 + 1 frequencies.
"""

from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_TEMPORARY = 1 << 22
"""Elements of the largest temporary; larger work is cut into pieces."""
_FEW = 16
"""Up to this many vectors, blocks are added up faster than buckets on a CPU."""
_MAX_CACHED = 1 << 21
"""Elements of the largest matrix cached on a GPU: small beside the weight it is for."""


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


@lru_cache(maxsize=1024)
def buckets_and_signs(
    seed: int, name: str, start: int, count: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return buckets (count,) int64 in [0, k) and signs (count,) float32 of some positions."""
    values = hashes(seed, name, start, count)
    # The high half gives the bucket and the lowest bit the sign: independent parts of one hash.
    buckets = ((values >> np.uint64(32)) % np.uint64(k)).astype(np.int64)
    signs = 1.0 - 2.0 * (values & np.uint64(1)).astype(np.float32)
    return torch.from_numpy(buckets).to(device), torch.from_numpy(signs).to(device)


def check_size(k: int) -> None:
    """Raise ValueError unless k is a valid sketch size."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def count_sketch(vectors: Tensor, k: int, seed: int, *, name: str = "", offset: int = 0) -> Tensor:
    """Sketch vectors (..., N) by (..., k).

    Linear, so a long vector may come in slices: the sketches of the slices, each with its
    `offset` in the vector, add up to the sketch of the vector.

    Args:
        vectors: (..., N) vectors, or the same slice of several.
        k: Number of buckets.
        seed: Seed of the hash.
        name: Separates independent sketches of one seed, such as those of several parameters.
        offset: Position of the first coordinate in the whole vector.

    >>> whole = torch.arange(10.0)
    >>> parts = count_sketch(whole[:4], 3, 0) + count_sketch(whole[4:], 3, 0, offset=4)
    >>> torch.equal(parts, count_sketch(whole, 3, 0))
    True
    """
    check_size(k)
    if offset < 0:
        raise ValueError(f"offset must not be negative, got {offset}")
    if vectors.dim() == 2 and not offset and has_cached_matrix(vectors, k):
        return vectors @ count_sketch_matrix(seed, name, vectors.shape[-1], k, vectors.device)
    if vectors.dim() == 2 and not offset and _fits_bags(vectors):
        return _sum_buckets(vectors.detach(), k, _count_members(seed, name, vectors.shape[-1], k))
    first, lead = divmod(offset, k)
    tail = -(lead + vectors.shape[-1]) % k
    count = (lead + vectors.shape[-1] + tail) // k
    if not count:
        return vectors.new_zeros((*vectors.shape[:-1], k))
    padded = F.pad(vectors, (lead, tail)) if lead or tail else vectors
    blocks = padded.reshape(*vectors.shape[:-1], count, k)
    device = vectors.device
    shifts, block_signs = buckets_and_signs(seed, f"{name}/block", first, count, k, device)
    _, signs = buckets_and_signs(seed, f"{name}/column", 0, k, k, device)
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


def sketch_columns(columns: Tensor, k: int, seed: int, name: str, *, scale: float = 1.0) -> Tensor:
    """Return the `count_sketch` of columns (B, N) times `scale`; in one launch on a GPU."""
    if not columns.is_cuda or columns.dtype != torch.float32 or columns.stride(1) != 1:
        sketch = count_sketch(columns, k, seed, name=name)
        return sketch if scale == 1 else sketch * scale
    from gradherd.rows import triton_sketch

    count = -(-columns.shape[1] // k)
    return triton_sketch.sketch_columns(
        columns, k, *block_hashes(seed, name, count, k, columns.device, scale)
    )


def sketch_vector(vector: Tensor, k: int, seed: int) -> Tensor:
    """Return the `count_sketch` (k,) of one long vector, with short temporaries."""
    total = vector.new_zeros(k)
    step = max(1, _MAX_TEMPORARY // k) * k  # whole blocks
    for lo in range(0, len(vector), step):
        total += count_sketch(vector[lo : lo + step], k, seed, offset=lo)
    return total


@lru_cache(maxsize=1024)
def block_hashes(
    seed: int, name: str, count: int, k: int, device: torch.device, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return shifts and signs (count,) of blocks of k coordinates, and signs (k,) within them.

    Signs of blocks are multiplied by `scale`, which then takes no launch of its own in a step.
    """
    _, signs = buckets_and_signs(seed, f"{name}/column", 0, k, k, device)
    shifts, block_signs = buckets_and_signs(seed, f"{name}/block", 0, count, k, device)
    return shifts, block_signs if scale == 1 else block_signs * scale, signs


def factor_sketch(factor: Tensor, k: int, seed: int, name: str) -> Tensor:
    """Sketch one factor of an outer product, (B, T, N), by (B, T, k).

    On a CPU the coordinates of each bucket are added up. Elsewhere a product with a matrix of one
    sign per coordinate, built piece by piece: deterministic on every device, and cheap next to the
    layer's own product.
    """
    size = factor.shape[-1]
    if _fits_bags(factor):
        return _sum_buckets(factor.detach(), k, _factor_members(seed, name, size, k))
    buckets, signs = buckets_and_signs(seed, name, 0, size, k, factor.device)
    signs = signs.to(factor.dtype)
    total: Tensor | None = None
    step = max(1, _MAX_TEMPORARY // k)
    for lo in range(0, size, step):
        hi = min(size, lo + step)
        # (k, N) and transposed, not (N, k): this product is far faster on CPUs.
        matrix = factor.new_zeros(k, hi - lo)
        matrix.scatter_(0, buckets[None, lo:hi], signs[None, lo:hi])
        part = factor[..., lo:hi] @ matrix.T
        total = part if total is None else total + part
    return factor.new_zeros((*factor.shape[:-1], k)) if total is None else total


def _fits_bags(vectors: Tensor) -> bool:
    """Say whether vectors (..., N) are added up by buckets: on a CPU, several of moderate length.

    A single one is added faster in blocks; what is remembered of a long one takes memory.
    """
    exact = vectors.dtype in (torch.float32, torch.float64)
    size = vectors.shape[-1]
    several = 0 < size <= _MAX_CACHED and vectors.numel() >= _FEW * size
    return vectors.device.type == "cpu" and exact and several


class _Members(NamedTuple):
    """The coordinates of each bucket."""

    coordinates: Tensor
    """(N,) int64, bucket after bucket."""
    starts: Tensor
    """(k,) int64, where each bucket starts."""
    signs: Tensor
    """(N,) float32 of the coordinates."""

    @classmethod
    def of(cls, buckets: Tensor, signs: Tensor, k: int) -> "_Members":
        order = buckets.argsort(stable=True)
        return cls(order, torch.searchsorted(buckets[order], torch.arange(k)), signs[order])


def _sum_buckets(vectors: Tensor, k: int, members: _Members) -> Tensor:
    """Sketch vectors (..., N) by (..., k) in one read: a tenth of a product with a matrix."""
    # Coordinate by coordinate, as rows of a table whose bags are the buckets: torch has no faster
    # way on a CPU to add up rows by a list.
    table = vectors.reshape(-1, vectors.shape[-1]).T.contiguous()
    signs = members.signs.to(table.dtype)
    sums = F.embedding_bag(
        members.coordinates, table, members.starts, mode="sum", per_sample_weights=signs
    )
    return sums.T.reshape(*vectors.shape[:-1], k)


@lru_cache(maxsize=1024)
def _factor_members(seed: int, name: str, size: int, k: int) -> _Members:
    return _Members.of(*buckets_and_signs(seed, name, 0, size, k, torch.device("cpu")), k)


@lru_cache(maxsize=1024)
def _count_members(seed: int, name: str, size: int, k: int) -> _Members:
    return _Members.of(*count_buckets(seed, name, size, k, torch.device("cpu")), k)


def one_hot_sketch(
    tokens: Tensor, size: int, k: int, seed: int, name: str, dtype: torch.dtype
) -> Tensor:
    """Return the `factor_sketch` of one-hot rows, given as token ids (B, T) below `size`."""
    buckets, signs = buckets_and_signs(seed, name, 0, size, k, tokens.device)
    sketches = torch.zeros((*tokens.shape, k), dtype=dtype, device=tokens.device)
    return sketches.scatter_(-1, buckets[tokens, None], signs.to(dtype)[tokens, None])


def tensor_sketch(left: Tensor, right: Tensor) -> Tensor:
    """Sketch the sum over T of outer products, from sketched factors (B, T, k): (B, k)."""
    k, examples = left.shape[-1], left.shape[0]
    spectrum: Tensor | None = None
    step = max(1, _MAX_TEMPORARY // max(1, examples * k))
    for lo in range(0, left.shape[1], step):
        span = slice(lo, lo + step)
        # Convolution is a product of spectra, and sums over T can be taken before going back.
        product = torch.fft.rfft(left[:, span]) * torch.fft.rfft(right[:, span])
        part = product[:, 0] if product.shape[1] == 1 else product.sum(1)
        spectrum = part if spectrum is None else spectrum + part
    return left.new_zeros(examples, k) if spectrum is None else torch.fft.irfft(spectrum, n=k)


def tensor_sketch_by_matrix(
    left: Tensor, right: Tensor, k: int, seed: int, keys: tuple[str, str]
) -> Tensor:
    """Compute `factor_sketch` and `tensor_sketch` with cached matrices: three matrix products.

    Args:
        left: (B, T, O) factor.
        right: (B, T, I) factor.
        k: Number of buckets.
        seed: Seed of the hash.
        keys: Names of the two hashes.

    Returns:
        (B, k) sketches.
    """
    examples, positions, _ = left.shape
    spectra = []
    for factor, name in zip((left, right), keys, strict=True):
        matrix = _fourier_matrix(seed, name, factor.shape[-1], k, factor.device)
        spectra.append((factor.reshape(-1, factor.shape[-1]) @ matrix).view(torch.complex64))
    product = spectra[0] * spectra[1]
    if positions > 1:
        product = product.view(examples, positions, -1).sum(1)
    # A matrix again: torch's inverse transform takes three kernels.
    return product.view(torch.float32) @ _inverse_fourier_matrix(k, left.device)


def has_cached_matrix(factor: Tensor, k: int) -> bool:
    """Say whether vectors (..., N) are sketched with a cached matrix."""
    short = (
        0 < factor.shape[-1] * k <= _MAX_CACHED
        and factor.numel() // factor.shape[-1] * k <= _MAX_TEMPORARY
    )
    return factor.is_cuda and factor.dtype == torch.float32 and short


@lru_cache(maxsize=1024)
def count_sketch_matrix(seed: int, name: str, size: int, k: int, device: torch.device) -> Tensor:
    """Return `count_sketch` as an (N, k) matrix with one sign in each row."""
    buckets, signs = count_buckets(seed, name, size, k, device)
    matrix = torch.zeros(size, k, device=device)
    return matrix.scatter_(1, buckets.unsqueeze(1), signs.unsqueeze(1))


def count_buckets(
    seed: int, name: str, size: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the bucket (N,) and the sign (N,) of each coordinate in `count_sketch`."""
    count = -(-size // k)
    shifts, block_signs = buckets_and_signs(seed, f"{name}/block", 0, count, k, device)
    _, signs = buckets_and_signs(seed, f"{name}/column", 0, k, k, device)
    buckets = (torch.arange(k, device=device) + shifts[:, None]) % k
    return buckets.flatten()[:size], (block_signs[:, None] * signs).flatten()[:size]


@lru_cache(maxsize=1024)
def _fourier_matrix(seed: int, name: str, size: int, k: int, device: torch.device) -> Tensor:
    """Return `factor_sketch` followed by a Fourier transform, as an (N, F) matrix.

    Columns alternate between the real and the imaginary part of a frequency.
    """
    buckets, signs = buckets_and_signs(seed, name, 0, size, k, device)
    rows = torch.zeros(size, k, device=device).scatter_(1, buckets[:, None], signs[:, None])
    matrix: Tensor = torch.fft.rfft(rows).view(torch.float32)
    return matrix


@lru_cache(maxsize=64)
def _inverse_fourier_matrix(k: int, device: torch.device) -> Tensor:
    """Return the inverse transform as an (F, k) matrix."""
    each = torch.eye(2 * (k // 2 + 1), device=device).view(torch.complex64)
    matrix: Tensor = torch.fft.irfft(each, n=k)
    return matrix
