import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.lab.report.claims import judge, paper_effect, verdict_of
from gradherd.lab.report.evidence import IMAGES, PAGE, build_evidence, is_current
from gradherd.lab.report.evidence_charts import (
    check_reportable,
    draw_charts,
    lines_against,
    lines_over_time,
)
from gradherd.lab.report.measures import epochs_share, epochs_to_final, measure_runs
from gradherd.lab.report.svg_chart import ChartAxis, ChartLine, chart
from gradherd.lab.study.file import read_study
from gradherd.lab.study.results import RunResult, describe_run, to_columns, write_results
from gradherd.lab.study.run import plan_runs
from gradherd.lab.study.spec import Claim, Figure
from tests.lab.report.sample_records import record

ROOT = Path(__file__).parents[3]


def claim(**given):
    base = {"id": "c", "text": "t", "source": "s", "paper": "p", "measure": "train_loss"}
    return Claim(**{**base, "test": "less", "arm": "a", "against": "b", **given})


def result(arm, seed, losses, **fields):
    made = record(seed=seed, epochs=len(losses), losses=losses, **fields)
    settings = {k: v for k, v in made.config.items() if k not in ("seed", "source", "virtual")}
    return RunResult(
        arm=arm,
        seed=seed,
        settings=settings,
        status="done",
        about=describe_run(made),
        figures=to_columns(made),
        versions=made.versions,
        hardware=made.hardware,
        started=made.started,
    )


def arms(a, b):
    """Final losses of each seed -> results of two arms over four epochs."""
    return {
        name: [result(name, seed, [2.0, 1.5, 1.2, end]) for seed, end in enumerate(ends)]
        for name, ends in (("a", a), ("b", b))
    }


def summaries(**named):
    return {
        name: [
            replace(result(name, seed, [1.0]), figures={"summary": {"bound": value}})
            for seed, value in enumerate(values)
        ]
        for name, values in named.items()
    }


@pytest.mark.parametrize(
    "a, b, paper, word",
    [
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], None, "confirmed"),
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], (0.7, 1.0), "confirmed"),
        ([0.8, 0.81, 0.79], [1.0, 1.0, 1.0], (0.5, 1.0), "weaker"),
        ([0.99, 0.5, 0.9], [1.0, 1.0, 1.0], None, "weaker"),
        ([1.01, 0.5, 0.9], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([1.2, 1.2, 1.2], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([0.8, None, 0.8], [1.0, 1.0, 1.0], None, "not confirmed"),
        ([None, None], [1.0, 1.0], None, "not confirmed"),
    ],
)
def test_verdicts_on_less(a, b, paper, word):
    assert judge(claim(paper_values=paper), arms(a, b)).verdict == word


def test_seeds_are_pairs():
    """What all seeds share does not hide the difference."""
    found = judge(claim(), arms([1.0, 2.0, 3.0], [1.01, 2.02, 3.03]))
    assert found.verdict == "confirmed" and "0.99 % less" in found.ours and "3 seeds" in found.ours
    assert judge(claim(), arms([1.0, 2.0], [1.01])) is None  # One pair has no spread.
    # Figures and shares are of the same seeds.
    uneven = judge(claim(), arms([1.0, 2.0], [1.01, 2.02, 99.0]))
    assert "1.50 \N{PLUS-MINUS SIGN} 0.71 against 1.52" in uneven.ours


def test_verdicts_on_bounds_and_margins():
    found = summaries(a=[1.02, 1.03, 1.01], b=[1.0, 1.0, 1.0])
    bound = {"measure": "bound", "against": None}
    assert judge(claim(test="at-most", value=1.1, **bound), found).verdict == "confirmed"
    assert judge(claim(test="at-most", value=1.0, **bound), found).verdict == "not confirmed"
    assert judge(claim(test="at-least", value=0.9, **bound), found).verdict == "confirmed"
    worse = {"measure": "bound", "test": "no-worse"}
    assert judge(claim(value=0.1, **worse), found).verdict == "confirmed"
    assert judge(claim(value=0.021, **worse), found).verdict == "not confirmed"
    assert judge(claim(value=0.001, **worse), found).verdict == "not confirmed"
    assert judge(claim(measure="bound", test="greater"), found).verdict == "weaker"
    # What is counted is the same in every seed, and exact.
    same = summaries(a=[2.0, 2.0], b=[4.0, 4.0])
    assert judge(claim(measure="bound"), same).verdict == "confirmed"


def test_no_worse_goes_by_what_is_better():
    """The metric of these records is an accuracy: higher is better."""
    made = {
        name: [result(name, seed, [1.0], metrics=[value]) for seed, value in enumerate(values)]
        for name, values in (("a", [90.0, 90.1]), ("b", [80.0, 80.1]))
    }
    given = {"measure": "metric", "test": "no-worse", "value": 0.01}
    assert judge(claim(**given), made).verdict == "confirmed"
    assert judge(claim(**given, arm="b", against="a"), made).verdict == "not confirmed"


def test_a_row_tells_the_end_and_the_last_half_whichever_was_chosen():
    """Losses of the last half are 10 % less, of the last epoch alone 20 % more."""
    results = {
        "a": [result("a", seed, [3.0, 3.0, 0.6, 1.2]) for seed in (0, 1)],
        "b": [result("b", seed, [3.0, 3.0, 1.0, 1.0]) for seed in (0, 1)],
    }
    end = "after the last epoch alone 20 % more"
    half = "over the last half of the epochs 10 % less"
    for given, told, other in (
        ({"measure": "late_train_loss"}, end, half),
        ({}, half, end),
        ({"epoch": 4}, half, end),
    ):
        ours = judge(claim(**given), results).ours
        assert told in ours and other not in ours
    early = judge(claim(epoch=3), results).ours
    assert "40 % less" in early and half not in early and end not in early


def test_figures_in_percent_differ_by_points():
    made = {
        name: [result(name, seed, [1.0], metrics=[value]) for seed, value in enumerate(values)]
        for name, values in (("a", [90.0, 91.0]), ("b", [80.0, 80.8]))
    }
    found = judge(claim(measure="metric", test="greater"), made)
    assert "10.1 points more (95 % interval 8.8 to 11.4)" in found.ours
    assert "points" not in judge(claim(), arms([0.8, 0.81], [1.0, 1.0])).ours


def test_what_was_not_measured_has_no_verdict():
    found = arms([0.8, 0.8], [1.0, 1.0])
    assert judge(claim(arm="c"), found) is None
    assert judge(claim(measure="padding"), found) is None  # Dense runs have none.
    with pytest.raises(ValueError, match="unknown measure 'odd'; known are train_loss"):
        judge(claim(measure="odd"), found)
    with pytest.raises(ValueError, match="unknown measure 'odd'; known are bound"):
        judge(claim(measure="odd"), summaries(a=[1.0], b=[1.0]))


def test_epochs_to_the_best_loss_of_the_other():
    quick = [record(seed=s, epochs=4, losses=[1.0, 0.5, 0.4, 0.3]) for s in (0, 1)]
    slow = [record(seed=s, epochs=4, losses=[2.0, 1.0, 0.5, 0.6]) for s in (0, 1)]
    slow[1] = record(seed=1, epochs=4, losses=[2.0, 1.0, 0.5, 0.35])
    assert epochs_share(quick, slow) == {0: 2 / 3, 1: 1.0}
    assert epochs_share(slow, quick) == {0: None, 1: None}
    lost = [record(seed=0, epochs=2, losses=[1.0, None])]
    assert epochs_share(quick, lost) == {0: None}


def test_epochs_to_the_final_loss_of_the_same_seed():
    quick = [record(seed=s, epochs=4, losses=[1.0, 0.5, 0.4, 0.3]) for s in (0, 1, 2)]
    slow = [
        record(seed=s, epochs=4, losses=[2.0, 1.0, 0.1, end]) for s, end in ((0, 1.0), (1, 0.4))
    ]
    assert epochs_to_final(quick, slow) == {0: 1, 1: 3}
    assert epochs_to_final(slow, quick) == {0: 3, 1: 3}
    lost = [record(seed=0, epochs=2, losses=[None, None])]
    assert epochs_to_final(quick, lost) == {0: None}
    found = arms([0.8, 0.9], [1.2, 1.5])
    given = {"measure": "epochs_to_final", "test": "at-most"}
    told = judge(claim(**given, value=4), found)
    assert told.verdict == "weaker"
    assert "first reached: 2.50 \N{PLUS-MINUS SIGN} 0.71 against" in told.ours
    assert judge(claim(**given, value=2), found).verdict == "not confirmed"


def test_the_epoch_whose_density_is_furthest_off_counts():
    run = record(seed=0, epochs=3, sparsify="topk", density=0.01)
    rows = [
        replace(row, density=d) for row, d in zip(run.epochs, (0.01, 0.0097, 0.0102), strict=True)
    ]
    found = measure_runs("density_off", None, [replace(run, epochs=rows)])
    assert found == {0: pytest.approx(0.03)}
    assert measure_runs("density_off", 1, [replace(run, epochs=rows)]) == {0: 0.0}
    assert measure_runs("density_off", None, [record(seed=0, epochs=3)]) == {0: None}


def test_measures_of_runs():
    runs = [record(seed=0, epochs=6, losses=[6.0, 5.0, 4.0, 3.0, 2.0, 1.0])]
    assert measure_runs("train_loss", None, runs) == {0: 1.0}
    assert measure_runs("train_loss", 2, runs) == {0: 5.0}
    assert measure_runs("late_train_loss", None, runs) == {0: 2.0}
    assert measure_runs("bytes", None, runs) == {0: 6 * runs[0].epochs[0].bytes}


def test_the_paper_counts_by_half():
    assert paper_effect(claim(paper_values=(9, 39))) == pytest.approx(30 / 39)
    assert verdict_of([0.4, 0.4, 0.41], 0.8) == "confirmed"
    assert verdict_of([0.39, 0.39, 0.4], 0.8) == "weaker"
    assert verdict_of([]) == "not confirmed"


def test_charts_are_well_formed_and_say_what_is_hostile_as_text():
    evil = '</svg><script>alert("1")</script>&'
    lines = [ChartLine(evil, [(1, 2.0), (2, math.nan), (3, 1.0)], [(1, 1.9, 2.1), (3, 0.9, 1.1)])]
    text = chart(evil, evil, evil, lines)
    tree = ET.fromstring(text)
    assert "<script" not in text and tree.tag.endswith("svg")
    assert text == chart(evil, evil, evil, lines) and "nan" not in text
    assert any(evil[:20] in (element.text or "") for element in tree.iter())


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("points", [[(1, 1.0)], [(0, 0.0), (1, 0.0)], [(1, 1e-9), (2, 1e9)]])
def test_charts_of_odd_numbers(points, log):
    lines = [ChartLine("flat", points), ChartLine("none", [])]
    if log and not any(y > 0 for _, y in points):
        with pytest.raises(ValueError, match="nothing to draw"):
            chart("t", "x", "y", lines, log=log)
        return
    ET.fromstring(chart("t", "x", "y", lines, log=log))


def test_a_logarithmic_axis_across():
    lines = [ChartLine("a", [(0, 1.0), (1, 2.0), (100, 3.0)]), ChartLine("b", [(10, 1.0)])]
    text = chart("t", "x", "y", lines, log_x=True)
    assert text.count("<circle") == 3  # 0 has no place.
    middle = (64 + 800 - 280) / 2
    assert f'cx="{middle:g}"' in text  # 10 is half way from 1 to 100.


def test_marks_of_an_axis():
    assert ChartAxis(1, 4, 0, 1, whole=True).ticks() == [1, 2, 3, 4]
    assert ChartAxis(2, 2, 0, 1).ticks() == [2] and ChartAxis(2, 2, 0, 1).at(2) == 0.5
    assert ChartAxis(1e-3, 10, 0, 1, log=True).at(0.1) == pytest.approx(0.5)


STUDY = """
kind = "compare"
theme = "ordering"
title = "A <study>"
task = "digits"
seeds = 2
[settings]
epochs = 4
[sources]
epochs = "ours"
workers = "ours"
[[arms]]
order = ["d-rr", "cd-grab"]
workers = [4]
label = "few"
[[figure]]
title = "Loss"
y = "train_loss"
[[figure]]
title = "Late loss"
x = "workers"
y = "late_train_loss"
lines = "order"
[[claim]]
id = "one"
text = "less"
source = "s"
paper = "p"
measure = "train_loss"
test = "less"
arm = "cd-grab, few"
against = "d-rr, few"
"""


@pytest.fixture
def root(tmp_path):
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


@pytest.mark.parametrize(
    "given, says",
    [
        ({"y": "odd"}, "unknown y of figure Loss 'odd'; known are train_loss"),
        ({"x": "round"}, "unknown x of figure Loss 'round'; known are epoch, step, bytes"),
        ({"x": "order"}, "figure Loss: order is no number in 'd-rr, few', got 'd-rr'"),
    ],
)
def test_charts_that_cannot_be_drawn_are_refused(root, given, says):
    study = read_study(root / "studies" / "small.toml")
    check_reportable(study)
    with pytest.raises(ValueError, match=says):
        check_reportable(replace(study, figures=(replace(study.figures[0], **given),)))


def test_arms_are_drawn_against_another_seed_by_seed():
    """Seeds differ by more than arms do; one that the other arm lacks is left out."""
    base = [result("b", 0, [2.0, 1.0]), result("b", 1, [4.0, 2.0, 1.0])]
    arm = [result("a", 0, [1.0, 1.1]), result("a", 1, [3.0, 1.8, 9.0]), result("a", 2, [7.0])]
    figure = Figure(title="t", y="train_loss", against="b")
    (line,) = lines_against(figure, {"b": base, "a": arm}, base, points=False)
    assert line.name == "a" and [x for x, _ in line.points] == [1, 2]
    assert [y for _, y in line.points] == pytest.approx([(-50 - 25) / 2, (10 - 10) / 2])
    assert [band[1:] for band in line.band] == [pytest.approx((-50, -25)), pytest.approx((-10, 10))]
    (line,) = lines_against(figure, {"a": arm}, base, points=True)
    assert line.points[0][1] == pytest.approx(-1)
    assert lines_against(figure, {"a": arm[2:]}, base, points=False) == []


def test_a_figure_against_an_arm_says_so(root):
    path = root / "studies" / "small.toml"
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "train_loss"\nagainst = "d-rr, few"', 1))
    image = build_evidence(root).files[IMAGES / "small.svg"]
    assert "train loss, % from d-rr, few" in image and ">cd-grab, few<" in image
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "train_loss"\nagainst = "d-rr"', 1))
    with pytest.raises(
        ValueError, match="unknown arm of figure Loss 'd-rr'; known are 'd-rr, few'"
    ):
        read_study(path)
    for line, told in (
        ('x = "bytes"', "unknown x of a figure with against 'bytes'"),
        ('lines = "order"', "figure 'Loss': with against every arm is a line"),
        ("log = true", "figure 'Loss': log cannot be used with zero or against"),
    ):
        wrong = f'y = "train_loss"\nagainst = "d-rr, few"\n{line}'
        path.write_text(STUDY.replace('y = "train_loss"', wrong, 1))
        with pytest.raises(ValueError, match=told):
            read_study(path)


def test_without_the_arm_that_others_are_held_against_there_is_no_figure(root):
    path = root / "studies" / "small.toml"
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "train_loss"\nagainst = "d-rr, few"', 1))
    for file in (root / "benchmarks/results/small").glob("d-rr*"):
        file.unlink()
    assert IMAGES / "small.svg" not in build_evidence(root).files


def test_accuracies_against_another_differ_by_points(root):
    path = root / "studies" / "small.toml"
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "metric"\nagainst = "d-rr, few"', 1))
    study = read_study(path)
    made = {
        f"{order}, few": [
            replace(one, figures={**one.figures, "metric": [metric] * 4})
            for seed in (0, 1)
            for one in [result(f"{order}, few", seed, [1.0] * 4)]
        ]
        for order, metric in (("d-rr", 50.0), ("cd-grab", 60.0))
    }
    words = {one.text for one in ET.fromstring(draw_charts(study, made)["small.svg"]).iter()}
    assert "test accuracy (%), points from d-rr, few" in words
    assert {"0", "10"} <= words and "20" not in words


def test_arms_that_are_measured_at_other_times_cannot_be_drawn_against_each_other():
    few, many = result("a", 0, [1.0, 1.0]), result("b", 0, [1.0, 1.0])
    many = replace(many, figures={**many.figures, "steps": [7, 7]})
    figure = Figure(title="t", x="step", y="train_loss", against="b")
    with pytest.raises(ValueError, match="against needs arms measured at the same times, got"):
        lines_against(figure, {"a": [few]}, [many], points=False)


def test_a_figure_of_a_series_that_is_not_there_is_refused():
    one = replace(result("a", 0, [1.0]), figures={"series": {"round": [1]}, "summary": {}})
    with pytest.raises(ValueError, match="t: no series 'epoch'; known are round"):
        lines_over_time(Figure(title="t", y="bound"), {"a": [one]})


def test_an_axis_reaches_to_zero_if_it_should():
    def marks(lines, zero):
        return {one.text for one in ET.fromstring(chart("t", "x", "y", lines, zero=zero)).iter()}

    for sign in (1, -1):
        line = [ChartLine("a", [(1, sign * 10.0), (2, sign * 11.0)])]
        assert "0" in marks(line, True) and "0" not in marks(line, False)


def test_a_chart_has_room_for_all_its_lines_and_words():
    many = [ChartLine(f"line {n}", [(1, n), (2, n)]) for n in range(30)]
    image = ET.fromstring(chart("t", "x", "y", many))
    height = float(image.get("height"))
    places = [float(one.get("y")) for one in image.iter() if (one.text or "").startswith("line ")]
    assert len(places) == 30 and max(places) < height
    small = ET.fromstring(chart("t", "x", "train loss", many[:3]))
    assert small.get("height") == "340"
    assert [one.get("font-size") for one in small.iter() if one.text == "train loss"] == [None]
    wordy = ET.fromstring(chart("t", "x", "y" * 60, many[:3]))
    (size,) = [one.get("font-size") for one in wordy.iter() if one.text == "y" * 60]
    assert 60 * float(size) / 2 <= 340 - 34 - 46


def test_the_papers_effect_of_an_accuracy_that_is_no_worse():
    """Two points less of an accuracy are worse by two points; of a loss they would be better."""
    one = claim(test="no-worse", value=0.01, paper_values=(60.0, 62.0))
    assert paper_effect(one, in_percent=True, higher_is_better=True) == pytest.approx(-0.01)
    assert paper_effect(one, in_percent=True) == pytest.approx(0.03)


def test_few_values_of_a_logarithmic_axis_are_all_marked():
    some = [ChartLine("a", [(4, 1.0), (16, 2.0), (64, 3.0)])]
    image = ET.fromstring(chart("t", "workers", "y", some, log_x=True))
    marks = {one.text for one in image.iter()}
    assert {"4", "16", "64"} <= marks and "10" not in marks


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
