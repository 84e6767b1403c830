"""How rows are read: the settings a user may choose, and the choice behind "auto"."""

from dataclasses import dataclass, field
from typing import Literal

TOKEN_RANK, DEFAULT_RANK, MAX_RANK = 64, 16, 256
"""Ranks of projections, for models with tables of tokens and for others, and the highest."""


@dataclass(frozen=True, kw_only=True)
class BatchRows:
    """One row per batch: the local gradient itself. Works with any model."""


@dataclass(frozen=True, kw_only=True)
class ExampleRows:
    """What all rows of single examples have in common."""

    reduction: Literal["mean", "sum"] = "mean"
    """How the loss reduces the examples of a batch."""
    batch_dim: int | None = None
    """Batch dimension of the model's inputs; None takes the first one of the right size."""
    strict: bool = field(default=False, repr=False)
    """Raise if a parameter has no gradients of single examples, instead of leaving it out."""

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {self.reduction!r}")
        if self.strict not in (True, False):  # any text is true, "no" included
            raise ValueError(f"strict must be True or False, got {self.strict!r}")
        for name in ("batch_dim", "size", "rank", "layers"):
            value = getattr(self, name, None)
            if value is not None and type(value) is not int:  # True is an int, too
                raise ValueError(f"{name} must be a whole number, got {value!r}")
            if value is not None and name in ("size", "layers") and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True)
class ExactRows(ExampleRows):
    """The exact gradient of every example.

    Of several workers, and for orders of your own, they are formed: batch x parameters elements,
    for small models.
    """


@dataclass(frozen=True, kw_only=True)
class SketchedRows(ExampleRows):
    """What sketches of single examples have in common."""

    layers: int | None = 16
    """Most layers that rows are read from, chosen after some batches: those in which the gradients
    of examples differ most. None reads all."""


@dataclass(frozen=True, kw_only=True)
class SketchRows(SketchedRows):
    """A short sketch of each gradient; inner products of sketches are right on average."""

    size: int = 512
    """Elements of a row."""
    seed: int = 0
    """Seed of the projection; must be the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class TwoSidedRows(SketchedRows):
    """A sketch whose length grows with the model, projected from both sides as it arrives.

    For large layers with many positions (convolutions, transformers) it costs a few percent of a
    step. Layers with one position per example are sketched as by `SketchRows`.
    """

    rank: int | None = None
    """Columns that inputs of a layer are projected to: more is more exact and costs more. None
    takes 64 for models that look up tokens, whose gradients differ less than those of images, and
    16 for others."""
    size: int | None = None
    """Elements of a row; None takes one for every 2048 parameters, between 1024 and 65536."""
    seed: int = 0
    """Seed of the projections; must be the same on all ranks."""

    def size_for(self, parameters: int) -> int:
        """Return the elements of a row of a model with so many parameters.

        The error of an inner product is 1 / sqrt(size) of the norms. In larger models gradients
        of different examples are closer to orthogonal, and only small errors leave their angles.

        >>> TwoSidedRows().size_for(25_000_000)
        16384
        """
        if self.size is not None:
            return self.size
        return min(65536, max(1024, 1 << (parameters // 2048).bit_length()))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None and not 2 <= self.rank <= MAX_RANK:
            raise ValueError(f"rank must be between 2 and {MAX_RANK}, got {self.rank}")


RowSettings = BatchRows | ExactRows | SketchRows | TwoSidedRows

ROW_SETTINGS: dict[str, RowSettings] = {
    "batch": BatchRows(),
    "exact": ExactRows(),
    "sketch": SketchRows(),
    "two-sided": TwoSidedRows(),
}
"""Row settings by name; "auto" is not among them."""


def row_length(settings: RowSettings, parameters: int) -> int:
    """Return the elements of a row of a model with so many parameters."""
    if isinstance(settings, TwoSidedRows):
        return settings.size_for(parameters)
    return settings.size if isinstance(settings, SketchRows) else parameters


BATCH_SKETCH = 65536
"""Elements of a whole batch's row on a GPU. The error of an inner product is sqrt(2 / 65536) of the
norms, 0.55 %, and neither memory nor time shows."""
# Up to this many parameters exact rows cost no more than a sketch of them.
SMALL_MODEL = 20_000
# So few elements are sent as they are, whatever a sketch would save.
_SHORT_ROW = 1024
_SENT_SIZE = 2048


def resolve_rows(rows: str | RowSettings, unit: int, batch_size: int) -> RowSettings | None:
    """Return the settings a name stands for, or those that are given; None for "auto".

    Raises:
        ValueError: The name is unknown, or the settings cannot serve units of this size.
    """
    settings = ROW_SETTINGS.get(rows) if isinstance(rows, str) else rows
    if not isinstance(settings, RowSettings) and rows != "auto":
        raise ValueError(f"rows must be one of auto, {', '.join(ROW_SETTINGS)}, got {rows!r}")
    if isinstance(settings, BatchRows) and unit != batch_size:
        raise ValueError(
            f"rows='batch' has one row for a batch of {batch_size}, but units have {unit}: use "
            f"OrderedSampler(..., unit={batch_size}), or exact or sketch"
        )
    return settings


def choose_rows(
    *, needs_rows: bool, whole_batches: bool, free: bool, size: int, on_gpu: bool, workers: int
) -> tuple[RowSettings, str]:
    """Choose the settings for rows="auto"; also return the reason, in a few words.

    Args:
        needs_rows: Whether the order uses gradients at all.
        whole_batches: Whether units are whole batches.
        free: Whether the gradient of a whole batch costs nothing extra: with one worker, or from
            DDP's communication hook.
        size: Number of parameters of the model.
        on_gpu: Whether the model is on a GPU.
        workers: Number of workers; rows of a single one are not sent.
    """
    if not needs_rows:
        return BatchRows(), "this order needs no gradients"
    if whole_batches and workers == 1 and on_gpu and size > BATCH_SKETCH:
        why = f"units are whole batches; one pass over {size:,} parameters on a GPU"
        return SketchRows(size=BATCH_SKETCH), why
    if whole_batches and free:
        # On two CPU cores a step of an MLP of 2 M takes 1.1 times as long with exact rows, and 1.5
        # times with sketches.
        why = f"units are whole batches; {size:,} parameters, for which a sketch saves nothing here"
        return BatchRows(), why
    if whole_batches:
        return (
            SketchRows(),
            "units are whole batches, and whole gradients would be sent for it alone",
        )
    # Of exact rows every worker sends each of the R others 1/R, of sketches all it has.
    sketch = SketchRows()
    sent = "" if workers == 1 else f" to send among {workers} workers"
    most = SMALL_MODEL if workers == 1 else max(_SHORT_ROW, sketch.size * workers)
    if size <= min(most, SMALL_MODEL):
        return ExactRows(), f"{size:,} parameters are few{sent}"
    if on_gpu:
        # Rows that are sent stay short.
        rows = TwoSidedRows() if workers == 1 else TwoSidedRows(size=_SENT_SIZE)
        return rows, f"{size:,} parameters on a GPU"
    return sketch, f"{size:,} parameters are many{sent}"
