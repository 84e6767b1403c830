import re
from pathlib import Path

import pytest

from gradherd.lab.study.file import read_study
from gradherd.lab.study.run import plan_runs

STUDIES = sorted((Path(__file__).parents[3] / "studies").glob("*.toml"))
GOOD = """
kind = "compare"
theme = "ordering"
title = "Two orders"
task = "digits"
seeds = 2

[settings]
epochs = 2

[sources]
epochs = "ours"
workers = "ours"

[[arms]]
order = ["d-rr", "cd-grab"]
workers = 2
label = "two"

[[claim]]
id = "a"
text = "less"
source = "ours"
paper = "none"
measure = "train_loss"
test = "less"
arm = "cd-grab, two"
against = "d-rr, two"

[[figure]]
title = "Loss"
y = "train_loss"
"""


def read(tmp_path, text, name="small.toml"):
    path = tmp_path / name
    path.write_text(text)
    return read_study(path)


def test_a_study_is_what_its_file_says(tmp_path):
    study = read(tmp_path, GOOD)
    assert (study.name, study.kind, study.task, study.seeds) == (
        "small",
        "compare",
        "digits",
        (0, 1),
    )
    assert list(study.arms) == ["d-rr, two", "cd-grab, two"]
    assert study.page.keys() == {"theme", "sources", "claim", "figure"}
    pieces = plan_runs(study)
    assert [(p.seed, p.arm) for p in pieces] == [
        (0, "d-rr, two"),
        (0, "cd-grab, two"),
        (1, "d-rr, two"),
        (1, "cd-grab, two"),
    ]
    assert pieces[0].settings["epochs"] == 2 and pieces[0].settings["lr"] == 0.2
    assert not {"seed", "device", "virtual"} & set(pieces[0].settings)


WRONG = [
    ("kind =", "kind 1", "Expected '='"),
    ("seeds = 2", "seeds = 0", "or a list of distinct seeds below 2**31, got 0"),
    ("seeds = 2", "seeds = 1000000000", "seeds must be a count up to 1000"),
    ("seeds = 2", "seeds = true", "seeds must be a count"),
    ("seeds = 2", "seeds = [2147483648]", "seeds must be a count"),
    ("seeds = 2", "seeds = [1, 1]", "seeds must be a count"),
    ("seeds = 2", "seedz = 2", "unknown key 'seedz'; known are kind, title"),
    ("title = ", "# ", "there is no title: a study needs one"),
    ('task = "digits"', "task = 5", "task must be a string, got 5"),
    ('label = "two"', "label = 5", "label of an [[arms]] table must be a string, got 5"),
    (
        'order = ["d-rr", "cd-grab"]',
        'order = ["d-rr", "cd-grab"]\nlr = [0.1, 0.2]',
        "two arms are called 'd-rr, two': a label hides the values of lists",
    ),
    (
        "[[figure]]",
        '[[arms]]\norder = "d-rr"\nlabel = "Two"\n[[figure]]',
        "'d-rr, Two' would share",
    ),
    ('order = ["d-rr", "cd-grab"]', "order = []", "order of an [[arms]] table is an empty list"),
]


@pytest.mark.parametrize("old, new, says", WRONG, ids=[says[:24] for _, _, says in WRONG])
def test_what_is_wrong_with_a_file_is_said_in_a_line_that_names_it(tmp_path, old, new, says):
    text = GOOD.replace(old, new, 1)
    assert text != GOOD
    with pytest.raises(ValueError, match=re.escape(says)) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


UNFIT = [
    (
        'kind = "compare"',
        'kind = "odd"',
        "unknown kind 'odd'; known are compare, path/to/file.py:ClassName",
    ),
    ('task = "digits"', 'task = "odd"', "unknown task 'odd'; known are digits,"),
    ('task = "digits"', "", "needs a task"),
    ('"cd-grab"]', '"cd-grab", "odd"]', "arm 'odd, two': unknown order 'odd'; known are d-rr"),
    ("epochs = 2", "epochs = 0", "epochs must be at least 1, got 0"),
    ("epochs = 2", 'epochs = "2"', "epochs must be an integer, got '2'"),
    ("epochs = 2", "epochs = true", "epochs must be an integer, got True"),
    ("workers = 2", "wrkers = 2", "unknown setting 'wrkers'; known are workers, epochs"),
]


@pytest.mark.parametrize("old, new, says", UNFIT, ids=[says[:24] for _, _, says in UNFIT])
def test_settings_that_no_run_can_have_are_named_with_what_is_allowed(tmp_path, old, new, says):
    text = GOOD.replace(old, new, 1)
    text = text.replace('\nworkers = "ours"', '\nwrkers = "ours"') if "wrkers" in new else text
    study = read(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(says)):
        plan_runs(study)


def test_a_file_that_is_not_there_and_odd_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        read_study(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="lower-case letters"):
        read(tmp_path, GOOD, name="A study.toml")


def test_arms_can_be_picked_by_name_or_pattern(tmp_path):
    study = read(tmp_path, GOOD)
    assert {piece.arm for piece in plan_runs(study, ["cd-*"])} == {"cd-grab, two"}
    assert {piece.seed for piece in plan_runs(study, (), [1])} == {1}
    with pytest.raises(ValueError, match="there is no seed 2; there are 0, 1"):
        plan_runs(study, (), [2])
    with pytest.raises(ValueError, match="there is no arm 'grab'; there are 'd-rr, two'"):
        plan_runs(study, ["grab"])


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_studies_that_come_along_can_be_planned(path):
    study = read_study(path)
    assert len(plan_runs(study)) == len(study.seeds) * len(study.arms) > 0
