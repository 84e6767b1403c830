"""Which way of reading rows suits a model and its units."""

from gradherd.rows.settings import BatchRows, ExactRows, RowSettings, SketchRows

NAMED: dict[str, RowSettings] = {
    "batch": BatchRows(),
    "exact": ExactRows(),
    "sketch": SketchRows(),
}
"""Ways to read rows by name, apart from "auto"."""
# Below this many parameters exact rows cost no more than a sketch of them.
_SMALL = 20_000


def named_rows(rows: str | RowSettings, unit: int, batch_size: int) -> RowSettings | None:
    """Return what a name stands for; None is "auto".

    Raises:
        ValueError: There is no such way, or it cannot serve these units.
    """
    settings = NAMED.get(rows) if isinstance(rows, str) else rows
    if not isinstance(settings, BatchRows | ExactRows | SketchRows) and rows != "auto":
        raise ValueError(f"rows must be one of auto, {', '.join(NAMED)}, got {rows!r}")
    if isinstance(settings, BatchRows) and unit != batch_size:
        raise ValueError(
            f"rows='batch' has one row for a batch of {batch_size}, but units have {unit}: use "
            f"OrderedSampler(..., unit={batch_size}), or exact or sketch"
        )
    return settings


def auto_rows(*, needs_rows: bool, batches: bool, free: bool, size: int) -> tuple[RowSettings, str]:
    """Return how to read rows, and why.

    Args:
        needs_rows: Whether the order looks at gradients at all.
        batches: Whether units are whole batches.
        free: Whether the gradient of a whole batch can be had on the way, from one worker or
            from DDP's communication hook.
        size: Parameters of the model.
    """
    if not needs_rows:
        return BatchRows(), "this order needs no gradients"
    if batches and free:
        return BatchRows(), f"units are whole batches, {size:,} parameters"
    if batches:
        return SketchRows(), "units are whole batches, and there is no DDP hook to ride on"
    if size <= _SMALL:
        return ExactRows(), f"{size:,} parameters are few"
    return SketchRows(), f"{size:,} parameters are many"
