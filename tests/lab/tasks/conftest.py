import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradherd.lab.tasks.datasets import DATASETS

REAL = os.environ.get("GRADHERD_DATA")


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path_factory):
    """Keep tests away from the data and the cache of whoever runs them."""
    monkeypatch.delenv("GRADHERD_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def any_edition(monkeypatch):
    """Forget published sizes and checksums: made-up sets are sets then."""
    for name, dataset in list(DATASETS.items()):
        forms = tuple(
            replace(form, files=tuple(replace(f, size=None, sha256=None) for f in form.files))
            for form in dataset.forms
        )
        monkeypatch.setitem(DATASETS, name, replace(dataset, forms=forms))


@pytest.fixture
def real() -> Path:
    """The folder with the real data sets."""
    if not REAL:
        pytest.skip("needs the real data sets: set GRADHERD_DATA to their folder")
    return Path(REAL)
