"""Residuals for another number of workers."""

import pytest
import torch

from gradherd.sparsify.residuals import merge_residuals
from gradherd.sparsify.settings import Sparsify
from gradherd.sparsify.step import Worker
from gradherd.sparsify.threshold import Threshold


def state(rank, workers=3, **more):
    torch.manual_seed(rank)
    named = {"weight": torch.randn(4, 5) * 10.0**rank, "bias": torch.randn(3)}
    return {
        "kind": "ExDyna", "rank": rank, "workers": workers, "dim": 23, "step": 9, "rate": None,
        "method": {"start": 1.0}, "residual": named,
    } | more  # fmt: skip


def test_the_mean_of_residuals_stays():
    states = [state(rank) for rank in range(3)]
    found = merge_residuals(iter(states))
    for name in ("weight", "bias"):
        exact = torch.stack([one["residual"][name].double() for one in states]).mean(0)
        assert torch.equal(found["residual"][name], exact.float()), "rounded once"
    assert (found["rank"], found["method"], found["step"]) == (None, None, 9)
    assert states[0]["rank"] == 0, "what was given is left alone"


def test_velocities_too():
    found = merge_residuals(
        [state(rank, velocity={"weight": torch.full((2,), rank)}) for rank in range(3)]
    )
    assert found["velocity"]["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ([], "of all ranks"),
        ([state(0), state(1)], "of all ranks of 3"),
        ([state(0), state(1), state(1)], r"got ranks \[0, 1, 1\]"),
        ([state(0), state(1), state(2, step=8)], "differ in step: 9 and 8"),
        ([state(0), state(1, kind="Micro"), state(2)], "differ in kind"),
    ],
)
def test_what_does_not_belong_together_is_refused(states, reason):
    with pytest.raises(ValueError, match=reason):
        merge_residuals(states)


def test_a_threshold_keeps_its_unit():
    """Residuals are in units of parameters here, so a threshold follows the learning rate."""
    rate = [0.1]
    settings = Sparsify(method=Threshold(density=0.1), learning_rate=lambda: rate[0])
    old = [Worker(settings, 50, rank=rank, size=2) for rank in range(2)]
    for value in (0.1, 0.001):
        rate[0] = value
        for worker in old:
            worker.set_unit(1.0)
    new = Worker(settings, 50, rank=0, size=3)
    new.load_state_dict(merge_residuals([worker.state_dict() for worker in old]))
    assert new.state == old[0].state
