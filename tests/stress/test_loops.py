"""Composed loops hold what they promise, and a promise that is broken is told."""

import warnings

import pytest

from gradherd.lab.ranks import run_ranks
from gradherd.local.mean import FewBitMean
from gradherd.sparsify.worker import Worker
from tests.stress.loops import Composed, run_one


def run_some(seeds):
    warnings.simplefilter("ignore")
    return [run_one(seed) for seed in seeds]


def run_losing(seeds):
    """Run loops whose exchange loses a hundredth of what waits."""
    with pytest.MonkeyPatch.context() as patch:
        commit, unsent = Worker.commit, FewBitMean.unsent

        def loses(self, *args, **kwargs):
            commit(self, *args, **kwargs)
            self.feedback.residual.mul_(0.99)

        patch.setattr(Worker, "commit", loses)
        patch.setattr(FewBitMean, "unsent", lambda *given: unsent(*given) * 0.99)
        return run_some(seeds)


# In the last loop of each, events alone would leave the rest of a resumed epoch without a gradient,
# where the sampler skips and where the loader does.
@pytest.mark.parametrize(
    ("ranks", "seeds"), [(2, [*range(8), 20261399]), (4, [20264943, 20264235])]
)
def test_composed_loops(ranks, seeds):  # `make stress` runs more
    for rank in run_ranks(run_some, ranks, seeds):
        assert [wrong for _, _, wrong, _ in rank] == [[]] * len(seeds)


def kinds(seeds):
    warnings.simplefilter("ignore")
    found = {}
    for seed in seeds:
        loop = Composed(seed, restores=False)
        loop.herd.detach()
        if loop.way == "sparse":
            lossy = loop.settings.method.density < 1
        else:
            lossy = loop.way == "local" and loop.settings.values != "fp32"
            lossy = lossy and loop.herd._exchange.layout.sparse > 0
        if lossy and not getattr(loop.settings, "clip", None):
            found.setdefault((loop.way, getattr(loop.settings, "momentum", 0.0)), seed)
    return found


def test_what_is_lost_is_found():
    first, _ = run_ranks(kinds, 2, range(40))
    seeds = [first["sparse", 0.0], first["local", 0.0]]
    for (_, _, sparse, _), (_, _, local, _) in run_ranks(run_losing, 2, seeds):
        assert any("what is given and kept" in one for one in sparse)
        assert any("shared weights" in one for one in local)
