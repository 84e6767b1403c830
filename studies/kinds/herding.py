"""Studies of orders on random vectors: how far their prefix sums stray, round after round."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gradherd.lab.study.file import Study
from gradherd.lab.study.kinds import (
    PlannedRun,
    RunContext,
    RunOutcome,
    StudyKind,
    check_settings,
)
from gradherd.ordering.registry import make_policy
from gradherd.replay.recorded import random_vectors, replay_order


class HerdingStudy(StudyKind):
    """Reorders the same random vectors round after round and records the herding bound.

    The simulation of parallel herding in CD-GraB, arXiv:2302.00845.
    """

    keys: ClassVar[Mapping[str, Any]] = {
        "order": str,
        "workers": int,
        "units": int,
        "dim": int,
        "rounds": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked settings."""
        if study.task is not None:
            raise ValueError(f"a study of kind {study.kind} has no task, got {study.task!r}")
        settings = check_settings(self.keys, {**study.settings, **arm}, {})
        # An unknown order fails here, before any run.
        make_policy(settings["order"])
        return settings

    def run(self, runs: Sequence[PlannedRun], context: RunContext) -> list[RunOutcome]:
        """Reorder, and record the bound after each round."""
        outcomes = []
        for run in runs:
            get = run.settings
            context.progress.begin(1, get["rounds"])
            bounds = replay_order(
                # Drawn from the seed alone, so every order gets the same vectors.
                random_vectors(get["workers"], get["units"], get["dim"], run.seed),
                make_policy(get["order"]),
                rounds=get["rounds"],
                seed=run.seed,
                progress=context.progress.step,
            ).bounds
            series = {"round": list(range(len(bounds))), "bound": bounds}
            outcomes.append(RunOutcome(figures={"series": series, "summary": summarize(bounds)}))
        return outcomes


def summarize(bounds: Sequence[float]) -> dict[str, float]:
    """Return a summary of the bounds: before the first round, after the last, and on average.

    >>> summarize([9.0, 4.0, 2.0])
    {'start': 9.0, 'bound': 2.0, 'mean': 3.0}
    """
    # Without the start, which no order has changed yet.
    return {"start": bounds[0], "bound": bounds[-1], "mean": statistics.fmean(bounds[1:])}
