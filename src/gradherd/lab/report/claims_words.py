"""Measures as people read them."""

from collections.abc import Iterable

_WORDS = {
    "bound": "herding bound after the last round",
    "mean": "herding bound, mean over rounds",
    "train_loss": "train loss",
    "bytes": "sent by a worker",
    "ordering_bytes": "sent by a worker for ordering",
    "epochs_share": "epochs to the other's best loss of the same seed / epochs it took itself",
    "epochs_to_final": "epochs to the other's final loss of the same seed, for the first time",
    "density_error": "share that the density is off, mean over steps",
    "density_off": "share that the density of an epoch is off, the largest",
    "build_up": "density / wanted, last half of the steps",
}
OF_EPOCHS = ("train_loss", "metric", "herding_bound", "padding", "residual_norm", "density")
"""What runs that train have after each epoch."""
_OF_CASES = {
    "seconds": "seconds of {}",
    "ratio": "time of {} / that of the plain case",
    "bytes": "sent by {}",
    "bytes_ratio": "bytes of {} / those of the plain case",
    "peak_bytes": "memory of {}",
    "steps_per_second": "steps of {} in a second",
}


def words_of(name: str, metric: str = "metric", when: str = "") -> str:
    """Return a measure in words; `when` is told where it is of one epoch.

    >>> words_of("late_metric", "test accuracy (%)"), words_of("train_loss", when="after epoch 5")
    ('test accuracy (%), mean over the last half of the epochs', 'train loss after epoch 5')
    >>> words_of("train_loss"), words_of("nine runs.ratio"), words_of("padding")
    ('train loss', 'time of nine runs / that of the plain case', 'padding')
    """
    case, _, kind = name.partition(".")
    if kind:
        return _OF_CASES.get(kind, f"{kind} of {{}}").format(case)
    plain = name.removeprefix("late_")
    words = metric if plain == "metric" else _WORDS.get(plain, plain.replace("_", " "))
    if plain not in OF_EPOCHS:
        return words
    if name != plain:
        return f"{words}, mean over the last half of the epochs"
    return f"{words} {when}" if when else words


def scale_of(name: str, values: Iterable[float | None]) -> tuple[float, str]:
    """Return by what to divide values, and the unit that they have then.

    >>> scale_of("bytes", [2e9, None]), scale_of("sharded.peak_bytes", [3e7])
    ((1000000000.0, ' GB'), (1000000.0, ' MB'))
    >>> scale_of("train_loss", [2e9]), scale_of("bytes", [12.0])
    ((1.0, ''), (1.0, ' bytes'))
    """
    if not name.endswith("bytes"):
        return 1.0, ""
    largest = max((value for value in values if value is not None), default=0.0)
    units = ((1e9, " GB"), (1e6, " MB"), (1e3, " kB"), (1.0, " bytes"))
    return next((unit for unit in units if largest >= unit[0]), units[-1])
