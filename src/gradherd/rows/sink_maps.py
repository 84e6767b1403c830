"""Linear maps that take a parameter's gradient to a few columns of a row.

A row is a random linear map of one example's gradient that keeps inner products on average. It must
be computed from what a layer's backward has at hand, the input x_t and the output gradient g_t of
each position t, without forming the gradient G = sum of g_t x_t^T itself:

- `MatrixMap`, for layers with many positions: one side of G is multiplied by c columns of random
  signs, the other is kept with a sign for each element: (Q^T g_t) x_t^T, two thin products. The
  variance of an inner product is |G_i^T G_j|^2 / c, about (Frobenius norms). Signs on the kept side
  keep layers apart that share their columns.
- `OuterMap`, for layers with one position: G has rank one, where a projection of one side is
  coarse. Its tensor sketch (Pham and Pagh, KDD 2013) is as good as a plain sketch of the whole
  matrix: the circular convolution of two count sketches. Kept as a spectrum, so that layers are
  added up before the one transform back.
- `VectorMap`, for biases and scales: a sign for each element, and nothing is lost.
- `WholeMap`, for exact rows: G itself.

Every map also takes a whole gradient (`project`): rows are checked by comparing their sum with it.

Shapes: B examples, T positions, P elements of the projected side and K of the kept one, c columns,
k buckets of a tensor sketch, N elements of a vector.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradherd.rows.outer_rows import products, whole_rows
from gradherd.rows.sketch import hashed_permutation, random_signs

MOST_KEPT = 1024
"""Elements of the kept side, above which it is folded: c x 1024 columns are enough."""
_MAX_TEMPORARY = 1 << 22
MOST_BUCKETS = 4096
"""Buckets of a tensor sketch: the error of an inner product is 2 % of the norms."""


@dataclass(frozen=True)
class MapSettings:
    """Sizes and seed of the maps of one model."""

    columns: int
    """c, of projections."""
    size: int
    """Elements of a row."""
    seed: int
    """Seed of all signs."""
    like: Tensor
    """A tensor of the rows' dtype and device."""
    is_exact: bool = False
    """Whether nothing is projected."""
    keeps_factors: bool = False
    """Whether exact rows of weights are held as factors where these are smaller."""


class Map:
    """What takes a gradient to columns of a row.

    In two steps: `columns_of` takes it to columns, `finish` gives them their signs, their shape and
    the precision of rows.
    """

    kind = "matrix"

    size: int
    """Columns."""

    signs: Tensor
    """Of what is kept; without them nothing is in the row."""

    start: int | None = None
    """First column of a row to which columns are added; None: they are hashed."""

    place: tuple[str, int, int] | None = None
    """Where layers add columns (`sink.Place`); None: those of each layer are kept apart."""

    def hold(self, like: Tensor, **tensors: Tensor) -> None:
        """Hold tensors in the dtype of rows and, since autocast multiplies in it, in bfloat16."""
        for name, tensor in tensors.items():
            own = tensor.contiguous().to(like)
            setattr(self, name, own)
            # Apart, so that no step converts it.
            setattr(self, f"half_{name}", own.bfloat16() if like.dtype == torch.float32 else own)

    def tensor_for(self, name: str, factor: Tensor) -> Tensor:
        """Return one of the tensors that it holds, in the dtype of a factor."""
        held: Tensor = getattr(self, f"half_{name}" if factor.dtype == torch.bfloat16 else name)
        return held.to(factor.dtype)

    @property
    def key(self) -> str:
        """What maps have in common whose columns are at the same place in a row."""
        return f"{self.kind} {self.size}"

    @property
    def length(self) -> int:
        """Elements of a row that columns take up."""
        return self.size

    def finish(self, columns: Tensor) -> Tensor:
        """Return rows (B, size) of columns (B, ..., K)."""
        return columns

    def vectors(self, columns: Tensor) -> Tensor:
        """Return what finished columns (B, size) are in a row: (B, length)."""
        return columns


class MatrixMap(Map):
    """Projects one dimension of a (rows, columns) gradient, and keeps the other."""

    side: Tensor
    """(P, c) matrix that projects."""

    def __init__(
        self, shape: tuple[int, int], name: str, settings: MapSettings, *, keep: int
    ) -> None:
        """Draw the signs for a gradient of this shape, as a matrix, which keeps one dimension.

        A side that is no longer than c is not projected.
        """
        self.keep, kept, projected = keep, shape[keep], shape[1 - keep]
        self.columns, seed, like = min(settings.columns, projected), settings.seed, settings.like
        if self.columns == projected:
            side = torch.eye(projected)
        else:
            side = random_signs(seed, name, projected, self.columns) / math.sqrt(self.columns)
        self.hold(like, side=side)
        # In the precision of rows: products in half precision become rows as they get their signs.
        self.signs = random_signs(seed, f"{name}/kept", kept, 1)[:, 0].to(like)
        self.folds = -(-kept // MOST_KEPT)
        self.width = -(-kept // self.folds)
        self.size = self.columns * self.width

    def columns_of(self, projected: Tensor, kept: Tensor) -> Tensor:
        """Return the columns (B, c, K) of factors (B, T, P) and (B, T, K)."""
        return self.combine(projected @ self.tensor_for("side", projected), kept)

    def combine(self, thin: Tensor, kept: Tensor) -> Tensor:
        """Do the same with a factor that is projected already, (B, T, c)."""
        return products(thin.transpose(1, 2), kept.to(thin.dtype))

    def finish(self, columns: Tensor) -> Tensor:
        """Give columns (..., c, K) their signs; fold and flatten them: (..., size)."""
        signed = columns * self.signs
        if self.folds > 1:
            signed = F.pad(signed, (0, self.folds * self.width - signed.shape[-1]))
            signed = signed.unflatten(-1, (self.folds, self.width)).sum(-2)
        return signed.flatten(-2)

    def project(self, grad: Tensor) -> Tensor:
        """Return the columns (size,) of a whole gradient, viewed as a matrix."""
        matrix = grad if self.keep == 1 else grad.T
        return self.finish(self.side.to(grad.dtype).T @ matrix)


class FilterMap(MatrixMap):
    """Projects the windows of a convolution by c random filters, and keeps the outputs.

    With many channels a filter is the outer product of signs for channels and signs for places in
    the window: then channels are added up first, and the window over few columns. Products of
    independent signs are uncorrelated, too.
    """

    filters: Tensor
    """(c, channels, *window), or (c, channels, 1, ...) if filters are products."""
    places: Tensor | None = None
    """(c, 1, *window) signs, if they are."""

    def __init__(self, weight: tuple[int, ...], name: str, settings: MapSettings) -> None:
        """Draw the signs; `weight` is its shape (outputs, channels of a group, *window)."""
        outputs, channels, *window = weight
        places = math.prod(window)
        super().__init__((outputs, channels * places), name, settings, keep=0)
        c, seed, like = self.columns, settings.seed, settings.like
        if places > 1 and channels >= c and c < channels * places:
            across = random_signs(seed, name, channels, c)
            places_signs = random_signs(seed, f"{name}/window", places, c)
            side = (across.unsqueeze(1) * places_signs).flatten(0, 1) / math.sqrt(c)
            filters = (across.T / math.sqrt(c)).reshape(c, channels, *(1 for _ in window))
            self.hold(like, side=side, places=places_signs.T.reshape(c, 1, *window))
        else:
            filters = self.side.T.reshape(c, channels, *window)
        self.hold(like, filters=filters)

    def thin(
        self, inputs: Tensor, stride: tuple[int, ...], padding: tuple[int, ...],
        dilation: tuple[int, ...],
    ) -> Tensor:  # fmt: skip
        """Slide the filters over inputs (B, channels, ...): (B, c, ...)."""
        conv = (F.conv1d, F.conv2d, F.conv3d)[len(stride) - 1]
        filters = self.tensor_for("filters", inputs)
        if self.places is None and not self.is_pointwise(stride, padding):
            return conv(inputs, filters, None, stride, padding, dilation)
        # A product over channels, in whatever layout the input has: cuDNN would convert it. In a
        # graph the layout is chosen for cuDNN, and cuDNN rounds float32 where products may not.
        rounds = torch.compiler.is_compiling() and inputs.dtype == torch.float32 and inputs.is_cuda
        if inputs.is_contiguous() and not rounds:
            across = filters.flatten(1) @ inputs.flatten(2)
            across = across.unflatten(2, inputs.shape[2:])
        else:
            across = conv(inputs, filters)
        if self.places is None:
            return across
        places = self.tensor_for("places", inputs)
        return conv(across, places, None, stride, padding, dilation, groups=self.columns)

    def is_pointwise(self, stride: tuple[int, ...], padding: tuple[int, ...]) -> bool:
        """Say whether every output depends on the input at its own place alone."""
        window = self.filters[0, 0].numel()
        return window == 1 and all(one == 1 for one in stride) and not any(padding)


class OuterMap(Map):
    """Sketches the outer product of two vectors: (rows, columns) to a spectrum of k buckets."""

    kind = "spectrum"

    def __init__(self, shape: tuple[int, int], name: str, settings: MapSettings) -> None:
        """Draw the hashes; see `MatrixMap`."""
        self.buckets = buckets = min(MOST_BUCKETS, settings.size)
        seed, like = settings.seed, settings.like
        self.size = 2 * (buckets // 2 + 1)
        # One side is hashed at random; then pairs collide at random, however the other side is
        # hashed: it is cut into pieces of k. Taking pieces costs less, so the longer one is cut.
        self._shuffled = 0 if shape[0] <= shape[1] else 1
        turns = -(-shape[self._shuffled] // buckets)
        order = hashed_permutation(seed, name, turns * buckets)
        inside = order < shape[self._shuffled]
        # Every bucket takes as many elements; those past the end take the first with no weight.
        self.order = torch.where(inside, order, 0).to(like.device)
        drawn = []
        for side, size in enumerate(shape):
            signs = random_signs(seed, f"{name}/{side}", -(-size // buckets) * buckets, 1)[:, 0]
            if side == self._shuffled:
                signs = signs * inside
            drawn.append(signs.to(like).view(-1, buckets))
        self.signs, self.column_signs = drawn
        """(turns, k) signs of rows and columns; without those of rows, nothing is in the sketch."""

    def _sums(self, factor: Tensor, side: int) -> Tensor:
        """Return the count sketch (..., k) of vectors (..., N)."""
        signs = (self.column_signs if side else self.signs).to(factor.dtype)
        k = self.buckets
        if side == self._shuffled:
            # Not `index_select`, which takes three times as long on a CPU.
            factor = factor.gather(-1, self.order.expand(*factor.shape[:-1], -1))
        total = None
        for turn in range(len(signs)):
            piece = factor[..., turn * k : (turn + 1) * k]
            if piece.shape[-1] < k:
                piece = F.pad(piece, (0, k - piece.shape[-1]))
            total = (
                piece * signs[turn] if total is None else torch.addcmul(total, piece, signs[turn])
            )
        assert total is not None
        return total

    def columns_of(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the spectra (B, size) of factors (B, T, rows) and (B, T, columns)."""
        spectra = [
            torch.fft.rfft(self._sums(one.float() if one.dtype.itemsize < 4 else one, side))
            for side, one in enumerate((left, right))
        ]
        if torch.compiler.is_compiling():  # Written out: compilers do not know complex numbers.
            (a, b), (c, d) = (torch.view_as_real(one).unbind(-1) for one in spectra)
            product = torch.stack([a * c - b * d, a * d + b * c], -1).flatten(-2)
        else:
            product = torch.view_as_real(spectra[0] * spectra[1]).flatten(-2)
        return product[:, 0] if product.shape[1] == 1 else product.sum(1)

    def project(self, grad: Tensor) -> Tensor:
        """Return the spectrum (size,) of a gradient: the sum of unit vectors times its rows."""
        total, step = grad.new_zeros(self.size), max(1, _MAX_TEMPORARY // self.buckets)
        for lo in range(0, len(grad), step):
            rows = grad[lo : lo + step]
            units = grad.new_zeros(len(rows), len(grad))
            units.diagonal(lo).fill_(1)
            total += self.columns_of(units[None], rows[None])[0]
        return total

    @property
    def length(self) -> int:
        """One for each bucket."""
        return self.buckets

    def vectors(self, columns: Tensor) -> Tensor:
        """Return what spectra (B, size) stand for: (B, k)."""
        spectrum = torch.view_as_complex(columns.unflatten(-1, (-1, 2)))
        vectors: Tensor = torch.fft.irfft(spectrum, n=self.buckets)
        return vectors


class WholeMap(Map):
    """Keeps a weight's gradient as it is, row by row."""

    def __init__(self, shape: tuple[int, ...], settings: MapSettings) -> None:
        """Keep the shape of the weight."""
        self.shape, self.size, self.keeps = shape, math.prod(shape), settings.keeps_factors

    def columns_of(self, left: Tensor, right: Tensor) -> Any:
        """Return the gradients (B, size) of factors (B, T, rows) and (B, T, columns)."""
        return whole_rows(left, right, keeps=self.keeps)

    def looked_up(self, tokens: Tensor, right: Tensor) -> Any:
        """Return the gradients (B, size) of a table from tokens (B, T) and (B, T, columns)."""
        return whole_rows(tokens, right, self.shape, keeps=self.keeps)

    def project(self, grad: Tensor) -> Tensor:
        """Return a whole gradient, flat."""
        return grad.flatten()


class VectorMap(Map):
    """Gives every element of a vector a sign."""

    kind = "vector"

    def __init__(self, sizes: dict[str, int], name: str, settings: MapSettings) -> None:
        """Draw the signs; all are plus in exact rows.

        `sizes` are the elements of each parameter that is part of the vector, by name.
        """
        self.size, self.keeps = sum(sizes.values()), settings.keeps_factors
        if settings.is_exact:
            drawn = torch.ones(self.size)
        else:
            drawn = random_signs(settings.seed, f"{name}/vector", self.size, 1)[:, 0]
        self.signs = drawn.to(settings.like)
        ends = accumulate(sizes.values())
        self.parts = {
            local: slice(end - sizes[local], end) for local, end in zip(sizes, ends, strict=True)
        }

    def finish(self, columns: Tensor) -> Tensor:
        """Give columns (B, size) their signs."""
        return columns if self.keeps else columns * self.signs

    def project(self, local: str, grad: Tensor) -> Tensor:
        """Return the columns of one parameter's whole gradient."""
        return grad.flatten() * self.signs[self.parts[local]].to(grad.dtype)
