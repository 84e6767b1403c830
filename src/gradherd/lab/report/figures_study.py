"""Results of a study -> the lines of its charts."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradherd.lab.report.claims_measures import in_percent, mean_by_seed, measured, share_more
from gradherd.lab.report.claims_words import words_of
from gradherd.lab.report.figures import COLOURS, DASHES, Line, chart
from gradherd.lab.study.results import RunResult
from gradherd.lab.study.spec import Figure, Study

Results = Mapping[str, Sequence[RunResult]]
SERIES = ("epoch", "step", "round", "bytes")
_MANIFOLD = ("bytes", "lr", "workers")
"""What arms differ in many times over: told on a logarithmic axis."""
_IN_SERIES = {"bound": "herding_bound"}
"""What has a value at every time in a series, and otherwise is that of the last."""
_ORDERS = ("d-rr", "cd-grab", "id-grab", "id-pair-grab", "shuffle-once", "always-plus")
_SPARSIFIERS = (
    *("dense", "exdyna", "micro", "topk", "cltk", "deft", "threshold", "sidco"),
    *("gtopk", "randomk", "sage"),
)
"""Methods by their colour."""
Series = tuple[list[float], list[float | None]]


def drawn(study: Study, results: Results) -> dict[str, str]:
    """Return the charts of a study that `check_told` has found good, as SVG by file name.

    Those without results are left out.
    """
    found = {}
    for number, figure in enumerate(study.figures, 1):
        names = [arm.name for arm in study.arms_in(figure)]
        there = {name: results[name] for name in names if name in results}
        base = () if figure.against is None else results.get(figure.against, ())
        if there and (svg := _chart(figure, there, base)) is not None:
            found[file_name(study, number)] = svg
    return found


def _chart(figure: Figure, results: Results, base: Sequence[RunResult]) -> str | None:
    """Return a chart of some arms; None if there is nothing to draw."""
    metric = next(iter(results.values()))[0].about.get("metric_name", "metric")
    if figure.against is not None:
        points = in_percent(figure.y, metric)
        lines = against(figure, results, base, points)
        words = f"{words_of(figure.y, metric)}, {'points' if points else '%'} from {figure.against}"
    elif figure.x in SERIES:
        lines = over_time(figure, results)
        words = words_of(_IN_SERIES.get(figure.y, figure.y), metric)
    else:
        lines, words = across(figure, results), words_of(figure.y, metric)
    if not any(line.points for line in lines):
        return None
    short = short_names([line.name for line in lines])
    coloured = zip(lines, short, own_colours(short), strict=True)
    return chart(
        figure.title,
        _x(figure.x),
        words,
        [replace(line, name=name, colour=colour) for line, name, colour in coloured],
        log=figure.log,
        log_x=figure.x in _MANIFOLD,
        zero=figure.zero or figure.against is not None,
    )


def file_name(study: Study, number: int) -> str:
    """Return the name of a chart, counted from 1."""
    return f"{study.name}.svg" if number == 1 else f"{study.name}-{number}.svg"


def short_names(names: Sequence[str]) -> list[str]:
    """Leave out what all names share: there is little room beside a chart.

    >>> short_names(["d-rr, 64 workers", "cd-grab, 64 workers", "cd-grab, 64 workers, sketch"])
    ['d-rr', 'cd-grab', 'cd-grab, sketch']
    >>> short_names(["cd-grab, a"]), short_names(["a, b", "b, a"])
    (['cd-grab, a'], ['a, b', 'b, a'])
    """
    parts = [name.split(", ") for name in names]
    shared = set.intersection(*map(set, parts)) if len(parts) > 1 else set()
    short = [", ".join(part for part in one if part not in shared) for one in parts]
    return short if all(short) and len(set(short)) == len(short) else list(names)


def own_colours(names: Sequence[str]) -> list[int]:
    """Return a colour for each line: methods have the same in all charts, others what is left.

    Further lines of a method have its colour in dashes, if there are kinds of them for all.

    >>> own_colours(["d-rr", "always-plus"]), own_colours(["exdyna 0.01", "exdyna 0.01, online"])
    ([0, 5], [1, 9])
    >>> own_colours(["exdyna, a", "exdyna, b", "exdyna, c", "exdyna, d", "exdyna, e"])
    [1, 2, 3, 4, 5]
    """
    methods = [name.split(", ")[0].split(" ")[0] for name in names]
    known = next((k for k in (_ORDERS, _SPARSIFIERS) if any(m in k for m in methods)), ())
    taken = {m: known.index(m) for m in methods if m in known}
    # The first colour is the baseline's: nobody else's where methods are known.
    free = (n for n in itertools.count(1 if taken else 0) if n not in taken.values())
    dashed = max(map(methods.count, methods), default=0) <= len(DASHES)
    places = []
    for at, method in enumerate(methods):
        before = methods[:at].count(method)
        own = method in taken and (dashed or not before)
        places.append(taken[method] + before * len(COLOURS) if own else next(free))
    return places


def _x(name: str) -> str:
    return {"bytes": "MB sent by a worker"}.get(name, name.replace("_", " "))


def over_time(figure: Figure, results: Results) -> list[Line]:
    """Return a line for each arm: the mean over seeds, and where single seeds lie."""
    return [_line(name, [_series(figure, run) for run in runs]) for name, runs in results.items()]


def against(
    figure: Figure, results: Results, base: Sequence[RunResult], points: bool
) -> list[Line]:
    """Return a line for each other arm: how far it is from `base`, in percent, pairs of seeds.

    Args:
        figure: What is drawn.
        results: The arms.
        base: The arm that they are held against.
        points: Whether values are in percent themselves and differ by points.
    """
    bases = {run.seed: _series(figure, run) for run in base}
    lines = []
    for name, runs in results.items():
        pairs = [(_series(figure, run), bases[run.seed]) for run in runs if run.seed in bases]
        if pairs and name != figure.against:
            lines.append(_line(name, [_far(own, other, points) for own, other in pairs]))
    return lines


def _far(series: Series, base: Series, points: bool) -> Series:
    """Return how far a series is from another one in percent, as long as both go on."""
    xs: list[float] = []
    far: list[float | None] = []
    for x, here, other, there in zip(*series, *base, strict=False):
        if x != other:
            raise ValueError(f"against needs arms measured at the same times, got {x} and {other}")
        share = None if here is None or there is None else share_more(here, there, points)
        xs.append(x)
        far.append(None if share is None else 100 * share)
    return xs, far


def _line(name: str, every: Sequence[Series]) -> Line:
    """Return the mean of several series and where each of them lies, while all of them go on."""
    points, band = [], []
    for at in range(min(len(ys) for _, ys in every)):
        values = [ys[at] for _, ys in every]
        known = [value for value in values if value is not None]
        if known and len(known) == len(values):
            x = statistics.fmean(xs[at] for xs, _ in every)
            points.append((x, statistics.fmean(known)))
            band.append((x, min(known), max(known)))
    return Line(name, points, band if len(every) > 1 else ())


def _series(figure: Figure, result: RunResult) -> Series:
    if "summary" in result.figures:
        series = result.figures.get("series", {})
        for name in (figure.x, figure.y):
            if name not in series:
                known = ", ".join(series) or "none"
                raise ValueError(f"{figure.title}: no series {name!r}; known are {known}")
        return list(series[figure.x]), list(series[figure.y])
    record = result.record()
    if figure.x == "step" and figure.y == "density" and record.density_by_step:
        points = record.density_by_step
        return [one["step"] for one in points], [one["mean"] for one in points]
    values = [getattr(row, figure.y) for row in record.epochs]
    sizes = {
        "epoch": (1.0 for _ in record.epochs),
        "step": (float(row.steps) for row in record.epochs),
        "bytes": (row.bytes / 1e6 for row in record.epochs),
    }
    return list(itertools.accumulate(sizes[figure.x])), values


def across(figure: Figure, results: Results) -> list[Line]:
    """Return a line for each value of a setting, over another setting that arms differ in."""
    found: dict[str, list[tuple[float, float]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for name, runs in results.items():
        settings = runs[0].settings
        x = settings[figure.x]
        values = measured(figure.y, None, runs, None).arm
        mean = mean_by_seed(values)
        known = [value for value in values.values() if value is not None]
        line = name if figure.lines == "arm" else str(settings.get(figure.lines))
        found.setdefault(line, [])
        if mean is not None:
            found[line].append((float(x), mean))
            bands.setdefault(line, []).append((float(x), min(known), max(known)))
    return [Line(name, sorted(pts), sorted(bands.get(name, ()))) for name, pts in found.items()]
