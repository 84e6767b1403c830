"""The charts of a comparison: drawings that a page can switch between and hide arms in."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradherd.lab.report.arms import (
    TIME_PARTS,
    ArmSummary,
    mean_by_epoch,
    mean_seconds,
)
from gradherd.lab.report.comparison import Comparison
from gradherd.lab.report.stats import MeanStd
from gradherd.lab.report.svg import ChartLine, page_chart
from gradherd.lab.text import counted, in_bytes, in_seconds, listed, printable, significant

X_AXES: Mapping[str, tuple[str, Callable[[float], str] | None]] = {
    "epochs": ("epoch", None),
    "seconds": ("seconds of training", in_seconds),
    "bytes": ("bytes sent per worker", in_bytes),
}
"""What curves can be drawn over: the label of the axis, and how its values are written."""


@dataclass(frozen=True, kw_only=True)
class PageChart:
    """A chart of a page."""

    kind: str
    """loss, metric, herding or time."""
    title: str
    note: str
    """What is drawn, in small print."""
    alt: str
    """What is drawn, for those who cannot see it."""
    drawings: Mapping[str, str] = field(default_factory=dict)
    """SVG by the x axis; "only" if there is no choice."""
    bars: Sequence[Mapping[str, Any]] = ()
    """How long an epoch of each arm takes: the position of the arm, its name, a text, and the
    percent of the longest bar that each part takes."""
    parts: Mapping[int, str] = field(default_factory=dict)
    """Names of the parts of bars, by their number."""


def charts_of(comparison: Comparison) -> list[PageChart]:
    """Return the charts of a comparison that have data, in page order."""
    # Only charts that have data: an empty frame would look like a failure.
    found = [*_curves(comparison), _time(comparison)]
    return [chart for chart in found if chart is not None]


def _curves(comparison: Comparison) -> Iterator[PageChart]:
    """Yield what is measured after each epoch: loss, metric and herding bound."""
    arms, base, name = comparison.arms, comparison.baseline, comparison.metric_name
    better = "higher" if comparison.higher_is_better else "lower"
    ends = [(arm.label, arm.final_loss.mean) for arm in arms if arm.final_loss.mean]
    finals = (
        listed([f"{label} ends at {significant(mean)}" for label, mean in ends]) if ends else ""
    )
    over_set = _seeds_note(arms, "over the full training set, after each epoch")
    prefixes = "Largest deviation of prefix sums of gradients in each epoch; lower is better."
    for kind, column, title, note, more in (
        ("loss", "train_loss", "Train loss", over_set, f": {finals}" if finals else ""),
        (
            "metric",
            "metric",
            name,
            _seeds_note(arms, f"{better} is better"),
            f", {better} is better",
        ),
        # Runs whose gradients of an epoch are too many to be stored have no bound.
        ("herding", "herding_bound", "Herding bound", prefixes, ", lower is better"),
    ):
        points = [mean_by_epoch(arm.used, arm.epochs, column) for arm in arms]
        means = [point.mean for some in points for point in some if point.mean is not None]
        if not means:
            continue
        levels = []
        # The goal that "epochs to baseline's final loss" in the table refers to.
        if kind == "loss" and base.final_loss.mean is not None:
            text = f"{'final' if base.finished else 'last'} loss of {printable(base.label, 20)}"
            levels = [(base.final_loss.mean, text)]
        drawings = {
            axis: page_chart(
                label,
                name if kind == "metric" else title.lower(),
                [
                    _curve(n, arm, some, column, axis)
                    for n, (arm, some) in enumerate(zip(arms, points, strict=True))
                ],
                # Over a factor of ten, the later epochs look flat on a linear axis.
                log=kind == "loss" and min(means) > 0 and max(means) > 10 * min(means),
                levels=levels,
                x_text=x_text,
            )
            for axis, (label, x_text) in X_AXES.items()
        }
        yield PageChart(
            kind=kind,
            title=title,
            note=note,
            alt=f"{title} by epoch{more}.",
            drawings={"only": drawings["epochs"]} if kind == "herding" else drawings,
        )


def _time(comparison: Comparison) -> PageChart | None:
    arms = [(index, arm) for index, arm in enumerate(comparison.arms) if arm.seconds]
    if not arms:
        return None
    seconds = [[mean_seconds(arm, part) for part in TIME_PARTS] for _, arm in arms]
    # Not the measured seconds: parts are clamped at zero, and a bar must be as long as its parts.
    longest = max(map(sum, seconds)) or 1.0
    # A part below half a percent in every arm would be an invisible bar with a legend entry.
    visible = {
        number: part
        for number, part in enumerate(TIME_PARTS)
        if any(own[number] > 0.005 * sum(own) for own in seconds)
    }
    return PageChart(
        kind="time",
        title="Where time goes",
        note="Seconds per epoch on worker 0, mean over epochs and seeds, without evaluation.",
        alt="Seconds per epoch by part, for each arm.",
        parts=visible,
        bars=[
            {
                "arm": index,
                "name": arm.label,
                "shares": {number: 100 * own[number] / longest for number in visible},
                "text": in_seconds(sum(own)),
            }
            for (index, arm), own in zip(arms, seconds, strict=True)
        ],
    )


def _seeds_note(arms: Sequence[ArmSummary], what: str) -> str:
    # Arms may differ in seeds; then the note names no number rather than a wrong one.
    counts = {len(arm.seeds) for arm in arms if arm.seeds}
    if counts == {1}:
        return f"One seed; {what}."
    seeds = counted(counts.pop(), "seed") if len(counts) == 1 else "seeds"
    return f"Mean over {seeds}, band ± one standard deviation; {what}."


def _curve(
    index: int, arm: ArmSummary, points: Sequence[MeanStd], field: str, axis: str
) -> ChartLine:
    """Return an arm's mean over seeds, a band of one standard deviation, and its single seeds."""
    xs: Sequence[float] = {
        "epochs": range(1, arm.epochs + 1),
        "seconds": arm.seconds_by_epoch,
        "bytes": arm.bytes_by_epoch,
    }[axis]
    known = [
        (x, p.mean, p.std or 0.0) for x, p in zip(xs, points, strict=True) if p.mean is not None
    ]
    # One seed has no standard deviation: a band would pretend otherwise.
    several = len(arm.seeds) > 1
    runs = [
        [
            (x, value)
            for x, row in zip(xs, run.epochs, strict=False)
            if (value := getattr(row, field)) is not None
        ]
        for run in arm.used
    ]
    return ChartLine(
        arm.label,
        [(x, mean) for x, mean, _ in known],
        [(x, mean - std, mean + std) for x, mean, std in known] if several else (),
        index,
        f"a{index}",
        runs if several else (),
    )
