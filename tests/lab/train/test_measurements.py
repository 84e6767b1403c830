"""Environment and prefix sums."""

import json

import numpy as np
import pytest
import torch

from gradherd.lab.train import measurements
from gradherd.lab.train.measurements import hardware, herding_bound, versions


def test_prefix_sums_are_bounded_as_by_hand():
    means = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    centred = means.double() - means.double().mean(0)
    sums, worst = torch.zeros(4, dtype=torch.float64), 0.0
    for step in centred:
        sums = sums + step
        worst = max(worst, float(sums.abs().max()))
    assert herding_bound(means, 12) == pytest.approx(12 * worst)


def test_prefix_sums_are_the_same_in_parts(monkeypatch):
    means = torch.randn(20, 1000, generator=torch.Generator().manual_seed(0))
    whole = herding_bound(means, 3)
    for at_once in (1, 2000, 10_000):
        monkeypatch.setattr(measurements, "_MAX_DOUBLES", at_once)
        assert herding_bound(means, 3) == whole
    means[3, 5] = torch.nan
    assert np.isnan(herding_bound(means, 3))


def test_the_environment_is_described():
    assert set(versions()) == {"gradherd", "torch", "numpy", "python"}
    info = hardware()
    assert info["cores"] >= 1 and info["cpu"] and info["accelerator"] is None
    json.dumps(info)
