"""A root folder with a study and its results."""

from dataclasses import replace

import pytest

from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import write_results
from gradherd.lab.study.run import plan_runs
from tests.lab.report.sample_studies import STUDY, result


@pytest.fixture
def root(tmp_path):
    """Return a folder with one study and results of its two arms."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "small.toml").write_text(STUDY)
    for order in ("d-rr", "cd-grab"):
        pieces = plan_runs(read_study(tmp_path / "studies" / "small.toml"), [f"{order}, few"])
        made = [
            replace(
                result(piece.arm, piece.seed, [2.0, 1.5, 1.2, 1.0 + 0.1 * piece.seed]),
                settings=piece.settings,
            )
            for piece in pieces
        ]
        write_results(tmp_path / "benchmarks/results/small", "small", "compare", made)
    return tmp_path
