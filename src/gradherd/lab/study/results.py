"""Store results of a study: one JSON file per arm, one line per run, written atomically.

Results are committed, and a study may run in pieces on several machines: with a file per arm, two
machines change different files, and with a line per run, a diff shows which seeds were added.

Records of training runs are stored as columns, a few kilobytes a run: a column whose values are
all equal is stored as one value, and seconds as their mean.
"""

import dataclasses
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradherd.lab.text import printable
from gradherd.lab.train.record import (
    RECORD_FORMAT,
    EpochRow,
    RunRecord,
    read_bounded,
    write_atomic,
)

FORMAT = 1
_FINAL = ("done", "diverged")
"""Statuses of runs that need not be run again: a run that diverged would diverge again."""
_AVERAGED = tuple(
    field.name for field in dataclasses.fields(EpochRow) if field.name.endswith("seconds")
)
_DESCRIPTION = (
    *("task", "description", "metric_name", "higher_is_better", "parameters"),
    *("train_examples", "test_examples", "start_loss", "start_metric"),
)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one run of an arm measured."""

    arm: str
    seed: int
    settings: Mapping[str, Any]
    """Everything that determines the run, except the seed and the device."""
    status: str
    """done, or diverged: the loss became NaN or infinite."""
    about: Mapping[str, Any]
    """Facts that all runs of the arm share, such as the task's description."""
    figures: Mapping[str, Any]
    """Measurements: columns over epochs for training runs, else `series` and `summary`."""
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    started: str
    """Start time, UTC, ISO 8601."""

    def record(self) -> RunRecord:
        """Return the record of a training run, as far as it is stored."""
        settings, columns = dict(self.settings), dict(self.figures)
        count = columns.pop("epochs")
        rows = [
            {
                "epoch": at + 1,
                **{k: v[at] if isinstance(v, list) else v for k, v in columns.items()},
            }
            for at in range(count)
        ]
        return RunRecord.from_json(
            {
                **self.about,
                "format": RECORD_FORMAT,
                "order": settings["order"],
                "sparsify": settings["sparsify"],
                "density": settings["density"],
                "seed": self.seed,
                # All workers of a study share one process.
                "config": {**settings, "seed": self.seed, "virtual": True},
                "versions": dict(self.versions),
                "hardware": dict(self.hardware),
                "started": self.started,
                "status": self.status,
                "epochs": rows,
            }
        )


def result_path(folder: Path, arm: str) -> Path:
    """Return the path of an arm's result file.

    >>> result_path(Path("results"), "cd-grab + exdyna 0.01, 64 workers").as_posix()
    'results/cd-grab_exdyna-0.01_64-workers.json'
    """
    # Underscores where a name has parts, so that the file name still shows them.
    words = re.sub(r" \+ |, ", "_", arm)
    return folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", words) + ".json")


def same_settings(stored: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Return whether two runs have the same settings; a missing setting equals None.

    Later versions add settings; None always means the behaviour from before the setting existed,
    so old results stay valid.

    >>> same_settings({"lr": 0.1}, {"lr": 0.1, "sketch_size": None})
    True
    >>> same_settings({"lr": 0.1}, {"lr": 0.2})
    False
    """
    names = {*stored, *current}
    # Stored values are rounded: compare what the file could hold.
    return all(round_floats(stored.get(n)) == round_floats(current.get(n)) for n in names)


def is_done(results: Iterable[RunResult], seed: int, settings: Mapping[str, Any]) -> bool:
    """Return whether these results include a run with this seed and these settings."""
    return any(
        one.seed == seed and one.status in _FINAL and same_settings(one.settings, settings)
        for one in results
    )


def write_results(folder: Path, study: str, kind: str, results: Sequence[RunResult]) -> None:
    """Write all results of one arm to its file; fields that all runs share are written once."""
    runs = []
    # By seed: the file must not depend on which run happened to end first.
    for one in sorted(results, key=lambda result: result.seed):
        run = dataclasses.asdict(one)
        for field in ("figures", "about", "settings"):
            run[field] = round_floats(run[field])
        runs.append(run)
    shared = {
        key: value
        for key, value in runs[0].items()
        if key not in ("seed", "figures") and all(run[key] == value for run in runs)
    }
    head = {"format": FORMAT, "study": study, "kind": kind, "shared": shared}
    lines = ",\n".join(
        _json({key: value for key, value in run.items() if key not in shared}) for run in runs
    )
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{_json(head)[:-1]},\n"runs":[\n{lines}\n]}}\n'
    write_atomic(result_path(folder, results[0].arm), text)


def _json(value: Any) -> str:
    # NaN is not JSON; records have None where a value is not finite.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_results(path: Path) -> list[RunResult]:
    """Read the results of one arm.

    Raises:
        ValueError: The file is damaged; the message names it.
    """
    try:
        content = json.loads(read_bounded(path).decode())
        if content["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        results = [RunResult(**{**content["shared"], **run}) for run in content["runs"]]
        # A seed that is no integer would match no planned run, which would then run every time.
        if any(type(one.seed) is not int or not isinstance(one.figures, dict) for one in results):
            raise ValueError("seed, figures")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(printable(f"{path}: damaged results ({error}); remove the file")) from None
    return results


def read_arms(folder: Path, names: Iterable[str]) -> dict[str, list[RunResult]]:
    """Return the results in a folder of those arms that have any.

    Raises:
        ValueError: A file is damaged; the message names it.
    """
    paths = {name: result_path(folder, name) for name in names}
    return {name: read_results(path) for name, path in paths.items() if path.exists()}


def round_floats(value: Any, digits: int = 7) -> Any:
    """Return plain JSON with floats rounded to this many significant digits.

    Seconds get four: they are noisy, and would be most of the file.

    >>> round_floats({"a": [1 / 3, 2, None], "b": 1e-12 / 3})
    {'a': [0.3333333, 2, None], 'b': 3.333333e-13}
    """
    if isinstance(value, float):
        # Seven digits are what float32 has; more would only be noise to store.
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {
            key: round_floats(inner, 4 if str(key).endswith("seconds") else digits)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [round_floats(inner, digits) for inner in value]
    return value


def describe_run(record: RunRecord) -> dict[str, Any]:
    """Return the facts that all runs of an arm share, or nearly all."""
    return {name: getattr(record, name) for name in _DESCRIPTION}


def to_columns(record: RunRecord) -> dict[str, Any]:
    """Return the epochs of a run as columns; the epoch is a row's position."""
    names = [one.name for one in dataclasses.fields(EpochRow) if one.name != "epoch"]
    columns = {name: _column(name, [getattr(row, name) for row in record.epochs]) for name in names}
    return {"epochs": len(record.epochs), **columns}


def _column(name: str, values: list[Any]) -> Any:
    if not values:
        return None
    if name in _AVERAGED:
        # Seconds of single epochs are noise; claims read their sum.
        return statistics.fmean(values)
    # Bytes and steps are the same in every epoch of most runs.
    return values[0] if all(value == values[0] for value in values) else values
