"""Results of a study on disk: one file for each arm, a line for each run, whole or not at all."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradherd.lab.study.compact import record_from, rounded
from gradherd.lab.train.record import RunRecord, plain, read_text, write_whole

FORMAT = 1
_DONE = ("done", "diverged")
"""How a run ends that need not be run again."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one run of an arm found."""

    arm: str
    seed: int
    settings: Mapping[str, Any]
    """All that decides it, apart from the seed and the device."""
    status: str
    """done, or diverged: the loss was not finite any more."""
    about: Mapping[str, Any]
    """What is told about all runs of the arm."""
    figures: Mapping[str, Any]
    """What was measured: `series`, lists; `summary`, numbers. Epochs of runs that train."""
    versions: Mapping[str, str]
    hardware: Mapping[str, Any]
    started: str
    """When, UTC, ISO 8601."""

    def record(self) -> RunRecord:
        """Return it as the record of a run that trained."""
        settings = dict(self.settings)
        return record_from(
            self.about,
            self.figures,
            order=settings["order"],
            sparsify=settings["sparsify"],
            density=settings["density"],
            seed=self.seed,
            config={**settings, "seed": self.seed},
            versions=dict(self.versions),
            hardware=dict(self.hardware),
            started=self.started,
            status=self.status,
        )


def file_of(folder: Path, arm: str) -> Path:
    """Return where the results of an arm are.

    >>> file_of(Path("results"), "cd-grab + exdyna 0.01, 64 workers").as_posix()
    'results/cd-grab_exdyna-0.01_64-workers.json'
    """
    words = re.sub(r" \+ |, ", "_", arm)
    return folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", words) + ".json")


def same(there: Mapping[str, Any], here: Mapping[str, Any]) -> bool:
    """Return whether two runs have the same settings; one that is missing is None.

    Later versions have more settings, and None is what they were before.

    >>> same({"lr": 0.1}, {"lr": 0.1, "sketch_size": None}), same({"lr": 0.1}, {"lr": 0.2})
    (True, False)
    """
    names = {*there, *here}
    return all(rounded(there.get(name)) == rounded(here.get(name)) for name in names)


def done(results: Iterable[Result], seed: int, settings: Mapping[str, Any]) -> bool:
    """Return whether a run is among these results."""
    return any(
        one.seed == seed and one.status in _DONE and same(one.settings, settings) for one in results
    )


def write_results(folder: Path, study: str, kind: str, results: Sequence[Result]) -> None:
    """Write the results of one arm; what all runs share is written once."""
    runs = []
    for one in sorted(results, key=lambda result: result.seed):
        run = asdict(one)
        run["figures"] = rounded(run["figures"])
        run["about"], run["settings"] = rounded(run["about"]), rounded(run["settings"])
        runs.append(run)
    shared = {
        key: value
        for key, value in runs[0].items()
        if key not in ("seed", "figures") and all(run[key] == value for run in runs)
    }
    head = {"format": FORMAT, "study": study, "kind": kind, "shared": shared}
    own = [{key: value for key, value in run.items() if key not in shared} for run in runs]
    lines = ",\n".join(_json(run) for run in own)
    folder.mkdir(parents=True, exist_ok=True)
    text = f'{_json(head)[:-1]},\n"runs":[\n{lines}\n]}}\n'
    write_whole(file_of(folder, results[0].arm), text)


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def read_results(path: Path, kind: str) -> list[Result]:
    """Read the results of one arm; ValueError names the file if it is damaged."""
    kind_there, results = _read(path)
    if kind_there != kind:
        raise ValueError(
            plain(f"{path}: results of kind {kind_there}, not {kind}; remove the file")
        )
    return results


def _read(path: Path) -> tuple[str, list[Result]]:
    """Return the kind of study, and results."""
    try:
        found = json.loads(read_text(path))
        if found["format"] != FORMAT or not isinstance(found["kind"], str):
            raise ValueError(f"expected format {FORMAT}")
        results = [Result(**{**found["shared"], **run}) for run in found["runs"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ValueError(plain(f"{path}: damaged results ({why}); remove the file")) from None
    for one in results:
        if type(one.seed) is not int or not isinstance(one.figures, dict):
            raise ValueError(plain(f"{path}: damaged results (seed, figures); remove the file"))
    return found["kind"], results


def read_arms(folder: Path, names: Iterable[str], kind: str) -> dict[str, list[Result]]:
    """Return the results of those arms that have some."""
    paths = {name: file_of(folder, name) for name in names}
    return {name: read_results(path, kind) for name, path in paths.items() if path.exists()}


def read_others(folder: Path, name: str, kind: str, damaged: Callable[[str], None]) -> list[Result]:
    """Return the results of all studies of a kind but one, each in a folder of its own.

    `damaged` is told of files that cannot be read: they are the others' business.
    """
    found: list[Result] = []
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name == name:
            continue
        try:
            kind_there, results = _read(path)
        except ValueError as error:
            damaged(str(error))
            continue
        found += results if kind_there == kind else []
    return found
