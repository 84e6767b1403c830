"""What pages need of a study file."""

import re

import pytest

from gradherd.lab.study.file import read_study
from studies.evidence.claims import check_measures
from studies.evidence.file import page_study
from tests.lab.study.test_file import GOOD, STUDIES, read


def test_a_page_has_the_claims_and_figures_of_the_file(tmp_path):
    study = page_study(read(tmp_path, GOOD))
    assert study.claims[0].against == "d-rr, two" and study.figures[0]["y"] == "train_loss"


WRONG = [
    ('theme = "ordering"', 'theme = "ordering"\nbudget = 5', "budget must be a string, got 5"),
    ('theme = "ordering"', 'theme = "ordering"\nnote = ["a"]', "note must be a string, got ['a']"),
    ("[[figure]]", "[figure]", "figure must be tables, each under [[figure]]"),
    ('arm = "cd-grab, two"', 'arm = "cd-grab"', "unknown arm of claim a 'cd-grab'; known are"),
    ('test = "less"', 'test = "same"', "unknown test of claim a 'same'; known are less"),
    ('against = "d-rr, two"', "", "against goes with less, greater and no-worse"),
    ('test = "less"', 'test = "less"\nvalue = 1', "value goes with no-worse, at-most and"),
    ('source = "ours"\npaper', "paper", "claim a lacks source"),
    ('test = "less"', 'test = "less"\nepoch = "2"', "epoch of claim a must be an integer, got"),
    ('test = "less"', 'test = "less"\nepoch = 0', "claim a: epochs are counted from 1, got 0"),
    ('test = "less"', 'test = "less"\nepoch = 3', "there is no epoch 3, 'cd-grab, two' has 2"),
    (
        'test = "less"',
        'test = "less"\npaper_values = [1]',
        "paper_values of claim a must be a list of length 2, each a number, got [1]",
    ),
    ('test = "less"', 'test = "at-most"\nvalue = "1"', "value of claim a must be a number, got"),
]


@pytest.mark.parametrize("old, new, says", WRONG, ids=[says[:24] for _, _, says in WRONG])
def test_what_is_wrong_with_claims_and_figures_is_said(tmp_path, old, new, says):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ValueError, match=re.escape(says)):
        page_study(read(tmp_path, text))


def test_a_claim_that_no_result_could_show_is_refused(tmp_path):
    study = page_study(read(tmp_path, GOOD.replace('"train_loss"', '"train_los"', 1)))
    with pytest.raises(ValueError, match="unknown measure of claim a 'train_los'; known are"):
        check_measures(study)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_that_come_along_have_figures_or_a_note(path):
    study = page_study(read_study(path))
    assert bool(study.claims) == bool(study.figures)
    assert study.claims or study.note  # without claims, it says what it is for


def test_claims_are_called_by_names_of_their_own():
    ids = [claim.id for path in STUDIES for claim in page_study(read_study(path)).claims]
    assert len(STUDIES) >= 15 and len(set(ids)) == len(ids)
