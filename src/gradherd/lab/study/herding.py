"""Studies of random vectors: how short does each order keep prefix sums?

CD-GraB, arXiv:2302.00845, its simulation of parallel herding.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gradherd.lab.study.kind import Found, OneByOne, Piece, Where, checked, no_task, positive
from gradherd.lab.study.spec import Study
from gradherd.ordering.registry import make_policy
from gradherd.replay.order import random_vectors, replay_order


@dataclass(frozen=True)
class Herding(OneByOne):
    """Sorts the same vectors round after round."""

    keys: ClassVar[Mapping[str, Any]] = {
        "order": str,
        "workers": int,
        "units": int,
        "dim": int,
        "rounds": int,
    }

    def settings(self, study: Study, arm: Mapping[str, Any]) -> dict[str, Any]:
        """Return them, checked."""
        no_task(study)
        found = checked(self.keys, {}, {**study.settings, **arm})
        positive(found, "workers", "units", "dim", "rounds")
        make_policy(found["order"])
        return found

    def run(self, pieces: Sequence[Piece], where: Where) -> list[Found]:
        """Sort, and note the bound after each round."""
        found = []
        for piece in pieces:
            get = piece.settings
            where.told.begin(1, get["rounds"])
            vectors = random_vectors(get["workers"], get["units"], get["dim"], piece.seed)
            bounds = replay_order(
                vectors,
                make_policy(get["order"]),
                rounds=get["rounds"],
                seed=piece.seed,
                progress=where.told.step,
            ).bounds
            series = {"round": list(range(len(bounds))), "bound": bounds}
            found.append(Found(figures={"series": series, "summary": summary(bounds)}))
        return found


def summary(bounds: Sequence[float]) -> dict[str, float]:
    """Return what the bounds before the first and after each round come to.

    >>> summary([9.0, 4.0, 2.0])
    {'start': 9.0, 'bound': 2.0, 'mean': 3.0}
    """
    return {"start": bounds[0], "bound": bounds[-1], "mean": statistics.fmean(bounds[1:])}
