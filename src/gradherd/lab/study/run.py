"""From a study to results: which runs are left, and making them."""

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from gradherd.lab.study.archive import Result, done, read_arms, write_results
from gradherd.lab.study.compare import Compare
from gradherd.lab.study.cost import Cost
from gradherd.lab.study.density import Density
from gradherd.lab.study.herding import Herding
from gradherd.lab.study.jobs import run_jobs
from gradherd.lab.study.kind import Kind, Piece, Where
from gradherd.lab.study.spec import Study
from gradherd.lab.train.surroundings import hardware, versions

KINDS: dict[str, Kind] = {
    "compare": Compare(),
    "herding": Herding(),
    "density": Density(),
    "cost": Cost(),
}
"""Kinds of studies by name."""


def kind_of(study: Study) -> Kind:
    """Return how its runs are made."""
    if study.kind not in KINDS:
        raise ValueError(f"unknown kind {study.kind!r}; known are {', '.join(KINDS)}")
    return KINDS[study.kind]


def planned(study: Study, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Piece]:
    """Return the runs of a study, or raise ValueError if one of its arms cannot be run.

    Arms of one seed stand together: a study that is broken off has whole pairs.

    Args:
        study: The study.
        only: Names of arms, or patterns of names as `cd-grab*`; none is all.
        seeds: Some of its seeds; none is all.
    """
    foreign = [seed for seed in seeds if seed not in study.seeds]
    if foreign:
        known = ", ".join(map(str, study.seeds))
        raise ValueError(f"there is no seed {foreign[0]}; there are {known}")
    kind, chosen = kind_of(study), {}
    for arm in study.arms:
        if only and not any(fnmatch.fnmatchcase(arm.name, pattern) for pattern in only):
            continue
        try:
            chosen[arm.name] = kind.settings(study, arm.settings)
        except (ValueError, TypeError) as error:
            raise ValueError(f"arm {arm.name!r}: {error}") from None
    for pattern in only:
        if not any(fnmatch.fnmatchcase(arm.name, pattern) for arm in study.arms):
            names = ", ".join(repr(arm.name) for arm in study.arms)
            raise ValueError(f"there is no arm {pattern!r}; there are {names}")
    return [
        Piece(arm=name, seed=seed, settings=settings)
        for seed in study.seeds
        if not seeds or seed in seeds
        for name, settings in chosen.items()
    ]


def left(pieces: Sequence[Piece], there: Mapping[str, Sequence[Result]]) -> list[Piece]:
    """Return the runs whose results are not there, or are of other settings."""
    return [
        piece for piece in pieces if not done(there.get(piece.arm, ()), piece.seed, piece.settings)
    ]


def twins(pieces: Sequence[Piece], others: Sequence[Result]) -> list[Result]:
    """Return the results of those runs that another study made with the same settings."""
    found = []
    for piece in pieces:
        same = (one for one in others if done([one], piece.seed, piece.settings))
        if (twin := next(same, None)) is not None:
            found.append(dataclasses.replace(twin, arm=piece.arm, settings=piece.settings))
    return found


def run_pieces(
    study: Study, pieces: Sequence[Piece], out: Path, where: Where, jobs: int = 1
) -> Iterator[list[Result]]:
    """Make runs, write their results into `out`, and yield them batch by batch.

    Results of other seeds of the same arm stay; those of other settings are replaced.

    Args:
        study: The study.
        pieces: Its runs.
        out: Folder for results.
        where: What they depend on.
        jobs: Processes to make them in, side by side; see `study.jobs`.
    """
    kind = kind_of(study)
    batches = kind.batches(pieces, where)
    if jobs == 1:
        for batch in batches:
            where.told.pieces(batch)
            yield add(study, out, made(study, batch, where))
        return
    if kind.alone:
        raise ValueError(f"a study of kind {study.kind} measures time: its runs go one by one")
    where.told.side_by_side(len(pieces), jobs)
    for results in run_jobs(partial(made, study), batches, where, jobs):
        where.told.step(len(results))
        yield add(study, out, results)


def made(study: Study, batch: Sequence[Piece], where: Where) -> list[Result]:
    """Make the runs of a batch."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    found = kind_of(study).run(batch, where)
    return [
        Result(
            arm=piece.arm,
            seed=piece.seed,
            settings=piece.settings,
            status=one.status,
            about=one.about,
            figures=one.figures,
            versions=versions(),
            hardware=_machine(where.device),
            started=started,
        )
        for piece, one in zip(batch, found, strict=True)
    ]


def _machine(device: str) -> dict[str, Any]:
    """Return what figures depend on; the rest of a machine is nobody's business."""
    known = hardware(device)
    return {name: known[name] for name in ("cpu", "cores", "accelerator")}


def add(study: Study, out: Path, results: list[Result]) -> list[Result]:
    """Add to what is there now: other arms or seeds may have been run meanwhile."""
    there = read_arms(out, {one.arm for one in results}, study.kind)
    for arm in dict.fromkeys(one.arm for one in results):
        new = {one.seed: one for one in results if one.arm == arm}
        settings = next(iter(new.values())).settings
        kept = [
            one
            for one in there.get(arm, [])
            if one.seed not in new and done([one], one.seed, settings)
        ]
        write_results(out, study.name, study.kind, [*kept, *new.values()])
    return results
