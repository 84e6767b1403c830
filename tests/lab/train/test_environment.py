"""Versions and hardware."""

import json

from gradherd.lab.train.environment import hardware, versions


def test_the_environment_is_described():
    assert set(versions()) == {"gradherd", "torch", "numpy", "python"}
    info = hardware()
    assert info["cores"] >= 1 and info["cpu"] and info["accelerator"] is None
    json.dumps(info)
