from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.lab.report.evidence import IMAGES, PAGE, build_evidence, is_current
from gradherd.lab.study.file import read_study
from gradherd.lab.study.run import plan_runs
from tests.lab.report.sample_studies import STUDY, result

ROOT = Path(__file__).parents[3]


def test_a_page_is_made_of_records_alone(root):
    first, second = build_evidence(root), build_evidence(root)
    assert first.files == second.files and len(first.verdicts) == 1
    images = {path.name for path in first.files if path.parent == IMAGES}
    assert images == {"small.svg", "small-2.svg"}
    assert "A &lt;study>" in first.files[PAGE] and "Made-up 3000" in first.files[PAGE]


def test_the_page_begins_with_all_studies_and_how_they_came_out(root):
    page = build_evidence(root).files[PAGE]
    assert "| [A &lt;study>](#a-study) | 0 / 0 / 1 |  |" in page.splitlines()
    assert "### A &lt;study>" in page and "![Late loss](images/evidence/small-2.svg)" in page
    own = STUDY.replace('source = "s"', 'source = "ours"')
    (root / "studies" / "small.toml").write_text(own)
    assert (
        "| [A &lt;study>](#a-study) |  | 0 / 0 / 1 |"
        in build_evidence(root).files[PAGE].splitlines()
    )


def test_rows_of_the_papers_claims_tell_our_budget(root):
    """Our own claims were never made on another."""
    own = STUDY[STUDY.index("[[claim]]") :].replace('"one"', '"two"').replace('"s"', '"ours"')
    text = STUDY.replace('title = "A', 'budget = "4 epochs of 90"\ntitle = "A', 1)
    (root / "studies" / "small.toml").write_text(text + own)
    rows = [
        row for row in build_evidence(root).files[PAGE].splitlines() if row.startswith("| less")
    ]
    assert ["4 epochs of 90" in row for row in rows] == [True, False]


def test_results_of_other_settings_do_not_count(root):
    text = STUDY.replace("epochs = 4", "epochs = 5", 1)
    (root / "studies" / "small.toml").write_text(text)
    found = build_evidence(root)
    assert (found.verdicts, found.unmeasured) == ([], {"small": ["one"]})
    assert list(found.files) == [PAGE] and "1 claim of `studies" in found.files[PAGE]


def test_a_claim_is_told_once(root):
    (root / "studies" / "other.toml").write_text(STUDY)
    with pytest.raises(ValueError, match="claim one is already in"):
        build_evidence(root)


def test_the_page_in_the_tree_is_what_its_records_give():
    made = build_evidence(ROOT).files
    for path, text in made.items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, (
            f"{path} is out of date: gradherd report --evidence"
        )
    there = {path.relative_to(ROOT) for path in (ROOT / IMAGES).glob("*.svg")}
    assert there == {path for path in made if path.parent == IMAGES}


@pytest.mark.parametrize("path", sorted((ROOT / "studies").glob("*.toml")), ids=lambda p: p.stem)
def test_runs_of_a_study_are_on_its_page(path):
    """What is planned fits the file; what had other settings does not."""
    study = read_study(path)
    arms = {arm.name: arm for arm in study.arms}
    for piece in plan_runs(study):
        made = replace(result(piece.arm, piece.seed, [1.0]), settings=piece.settings)
        assert is_current(study, arms[piece.arm], made), piece
        other = replace(made, settings={**piece.settings, "limit": 7, "dim": 7})
        assert not is_current(study, arms[piece.arm], other)
