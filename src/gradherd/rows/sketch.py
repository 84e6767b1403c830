"""Seeded sketches: k numbers that keep inner products on average, equal on every rank.

Every hash is a function of (seed, name, position) only: integers from splitmix64, keyed by
blake2b. No random generator is read or moved, so ranks, devices and torch versions agree.

- `count_sketch` folds a long vector into k buckets with random signs. Coordinates are hashed
  in blocks of k: inside a block they keep their order and never collide, each block is shifted
  round by its own random amount. Variance of an inner product as for a plain count sketch,
  2/k of the norms, and one cheap pass: a block is added as a whole.
- `tensor_sketch` is the count sketch of an outer product g a^T, from the two factors alone
  (Pham & Pagh, KDD 2013): the bucket of (i, j) is h(i) + h'(j) mod k, so it is the circular
  convolution of two small sketches and the outer product is never formed. For one position
  its variance is close to 2/k too, where projecting both sides to sqrt(k) numbers and taking
  the outer product would have 4/sqrt(k).

On a GPU what counts is the number of kernels, not of multiplications. So whatever folds a short
side there is one product with a matrix that is made once and kept; for the factors of an outer
product, its lines are Fourier transforms of buckets already.

Shapes: B examples, T positions of an example, N coordinates, K buckets.
"""

from functools import lru_cache
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 1 << 22
"""Numbers of a temporary matrix; larger ones are worked off piece by piece."""
_KEEP = 1 << 21
"""Numbers of a matrix that may be kept on a GPU: small beside the weight it is for."""


def hashes(
    seed: int, name: str, start: int, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.uint64]]":
    """Return the hashes of positions start .. start + count - 1, as 64-bit integers.

    >>> bool((hashes(7, "w", 0, 10)[4:] == hashes(7, "w", 4, 6)).all())
    True
    """
    digest = blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    x = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(int.from_bytes(digest, "little"))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = x ^ (x >> np.uint64(31))
    return mixed


@lru_cache(maxsize=1024)
def table(
    seed: int, name: str, start: int, count: int, k: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return buckets (count,) int64 in [0, k) and signs (count,) float32 for a run of positions."""
    drawn = hashes(seed, name, start, count)
    # The high half gives the bucket, the lowest bit the sign: independent parts of one hash.
    buckets = ((drawn >> np.uint64(32)) % np.uint64(k)).astype(np.int64)
    signs = 1.0 - 2.0 * (drawn & np.uint64(1)).astype(np.float32)
    return torch.from_numpy(buckets).to(device), torch.from_numpy(signs).to(device)


def check_size(k: int) -> None:
    """Raise ValueError unless k is a usable sketch size."""
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")


def count_sketch(vectors: Tensor, k: int, seed: int, *, name: str = "", offset: int = 0) -> Tensor:
    """Fold vectors (..., N) into (..., k).

    Linear, so a long vector may come in slices: the sketches of the slices, each with its
    `offset` in the whole, add up to the sketch of the whole.

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
    if vectors.dim() == 2 and not offset and kept_on_gpu(vectors, k):
        return vectors @ _fold(seed, name, vectors.shape[-1], k, vectors.device)
    first, lead = divmod(offset, k)
    tail = -(lead + vectors.shape[-1]) % k
    count = (lead + vectors.shape[-1] + tail) // k
    if not count:
        return vectors.new_zeros((*vectors.shape[:-1], k))
    padded = F.pad(vectors, (lead, tail)) if lead or tail else vectors
    blocks = padded.reshape(*vectors.shape[:-1], count, k)
    shifts, block_signs = table(seed, f"{name}/block", first, count, k, vectors.device)
    _, signs = table(seed, f"{name}/column", 0, k, k, vectors.device)
    signed = blocks * block_signs.to(vectors.dtype).unsqueeze(-1)
    if count > k:
        # More blocks than shifts: add those of equal shift first, row by row.
        sums = signed.new_zeros((*signed.shape[:-2], k, k))
        signed = sums.index_add_(-2, shifts, signed)
        shifts = torch.arange(k, device=vectors.device)
    signed = signed * signs.to(vectors.dtype)
    source = (torch.arange(k, device=vectors.device) - shifts.unsqueeze(-1)) % k
    return signed.gather(-1, source.expand(signed.shape)).sum(-2)


def kept_on_gpu(side: Tensor, k: int) -> bool:
    """Tell whether numbers (..., N) are folded by a matrix that is kept."""
    short = 0 < side.shape[-1] * k <= _KEEP and side.numel() // side.shape[-1] * k <= _CHUNK
    return side.is_cuda and side.dtype == torch.float32 and short


@lru_cache(maxsize=1024)
def _fold(seed: int, name: str, size: int, k: int, device: torch.device) -> Tensor:
    """Return the (N, k) matrix of `count_sketch`, one sign in each line."""
    count = -(-size // k)
    shifts, block_signs = table(seed, f"{name}/block", 0, count, k, device)
    _, signs = table(seed, f"{name}/column", 0, k, k, device)
    buckets = (torch.arange(k, device=device) + shifts[:, None]) % k
    drawn = block_signs[:, None] * signs
    lines = torch.zeros(size, k, device=device)
    return lines.scatter_(1, buckets.view(-1, 1)[:size], drawn.view(-1, 1)[:size])


@lru_cache(maxsize=1024)
def _spectra(seed: int, name: str, size: int, k: int, device: torch.device) -> Tensor:
    """Return the (N, F) matrix of `side_sketch` and a Fourier transform after it.

    F is 2 (k // 2 + 1): each frequency's real part, then its imaginary part.
    """
    buckets, signs = table(seed, name, 0, size, k, device)
    lines = torch.zeros(size, k, device=device).scatter_(1, buckets[:, None], signs[:, None])
    matrix: Tensor = torch.fft.rfft(lines).view(torch.float32)
    return matrix


@lru_cache(maxsize=64)
def _back(k: int, device: torch.device) -> Tensor:
    """Return the (F, k) matrix of the transform back."""
    each = torch.eye(2 * (k // 2 + 1), device=device).view(torch.complex64)
    matrix: Tensor = torch.fft.irfft(each, n=k)
    return matrix


def outer_sketch(left: Tensor, right: Tensor, k: int, seed: int, keys: tuple[str, str]) -> Tensor:
    """Do `tensor_sketch` of two `side_sketch` by kept matrices: (B, T, O), (B, T, I) to (B, k).

    Three matrix products and one of numbers; a sum where there are several positions.
    """
    examples, positions, _ = left.shape
    spectra = []
    for side, name in zip((left, right), keys, strict=True):
        matrix = _spectra(seed, name, side.shape[-1], k, side.device)
        spectra.append((side.reshape(-1, side.shape[-1]) @ matrix).view(torch.complex64))
    product = spectra[0] * spectra[1]
    if positions > 1:
        product = product.view(examples, positions, -1).sum(1)
    # By a matrix too: torch's transform takes three kernels.
    return product.view(torch.float32) @ _back(k, left.device)


def side_sketch(side: Tensor, k: int, seed: int, name: str) -> Tensor:
    """Fold one factor of an outer product, (B, T, N), into (B, T, k).

    A product with a matrix of one sign per line, made piece by piece: deterministic on every
    device, and cheap next to the layer's own product.
    """
    size = side.shape[-1]
    buckets, signs = table(seed, name, 0, size, k, side.device)
    signs = signs.to(side.dtype)
    folded: Tensor | None = None
    step = max(1, _CHUNK // k)
    for lo in range(0, size, step):
        hi = min(size, lo + step)
        # Bucket by coordinate, not the other way round: this product is far faster on CPUs.
        matrix = side.new_zeros(k, hi - lo)
        matrix.scatter_(0, buckets[None, lo:hi], signs[None, lo:hi])
        part = side[..., lo:hi] @ matrix.T
        folded = part if folded is None else folded + part
    return side.new_zeros((*side.shape[:-1], k)) if folded is None else folded


def token_sketch(
    tokens: Tensor, size: int, k: int, seed: int, name: str, dtype: torch.dtype
) -> Tensor:
    """Do what `side_sketch` does to one-hot lines, given as token numbers (B, T) below `size`."""
    buckets, signs = table(seed, name, 0, size, k, tokens.device)
    folded = torch.zeros((*tokens.shape, k), dtype=dtype, device=tokens.device)
    return folded.scatter_(-1, buckets[tokens, None], signs.to(dtype)[tokens, None])


def tensor_sketch(left: Tensor, right: Tensor) -> Tensor:
    """Sketch the sum over T of outer products, from sketched factors (B, T, k): (B, k)."""
    k, examples = left.shape[-1], left.shape[0]
    spectrum: Tensor | None = None
    step = max(1, _CHUNK // max(1, examples * k))
    for lo in range(0, left.shape[1], step):
        span = slice(lo, lo + step)
        product = torch.fft.rfft(left[:, span]) * torch.fft.rfft(right[:, span])
        spectrum = product.sum(1) if spectrum is None else spectrum + product.sum(1)
    return left.new_zeros(examples, k) if spectrum is None else torch.fft.irfft(spectrum, n=k)
