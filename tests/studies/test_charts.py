import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from gradherd.lab.study.file import read_study
from studies.evidence.charts import (
    Figure,
    draw_charts,
    figures_of,
    lines_against,
    lines_over_time,
)
from studies.evidence.file import page_study
from studies.evidence.summary import IMAGES, build_evidence
from tests.lab.report.sample_studies import STUDY, result


@pytest.mark.parametrize(
    "given, says",
    [
        ({"z": "odd"}, "unknown key of figure Loss 'z'; known are title"),
        ({"y": ""}, "figure Loss lacks y"),
        ({"y": 5}, "y of figure Loss must be a string, got 5"),
        ({"log": "no"}, "log of figure Loss must be true or false, got 'no'"),
        ({"y": "odd"}, "unknown y of figure Loss 'odd'; known are train_loss"),
        ({"x": "round"}, "unknown x of figure Loss 'round'; known are epoch, step, bytes"),
        ({"x": "order"}, "figure Loss: order is no number in 'd-rr, few', got 'd-rr'"),
        ({"x": "worker"}, "unknown x of figure Loss 'worker'; known are epoch,"),
        ({"x": "lr", "y": "metrics"}, "unknown y of figure Loss 'metrics'; known are train_loss"),
        ({"x": "lr", "lines": "ordr"}, "unknown lines of figure Loss 'ordr'; known"),
    ],
)
def test_charts_that_cannot_be_drawn_are_refused(root, given, says):
    study = page_study(read_study(root / "studies" / "small.toml"))
    assert [figure.x for figure in figures_of(study)] == ["epoch", "workers"]
    table = {name: value for name, value in {**study.figures[0], **given}.items() if value != ""}
    with pytest.raises(ValueError, match=says):
        figures_of(replace(study, figures=(table,)))


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
        figures_of(page_study(read_study(path)))
    for line, told in (
        ('x = "bytes"', "unknown x of a figure with against 'bytes'"),
        ('lines = "order"', "figure Loss: with against every arm is a line"),
        ("log = true", "figure Loss: log cannot be used with zero or against"),
    ):
        wrong = f'y = "train_loss"\nagainst = "d-rr, few"\n{line}'
        path.write_text(STUDY.replace('y = "train_loss"', wrong, 1))
        with pytest.raises(ValueError, match=told):
            figures_of(page_study(read_study(path)))


def test_without_the_arm_that_others_are_held_against_there_is_no_figure(root):
    path = root / "studies" / "small.toml"
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "train_loss"\nagainst = "d-rr, few"', 1))
    for file in (root / "benchmarks/results/small").glob("d-rr*"):
        file.unlink()
    assert IMAGES / "small.svg" not in build_evidence(root).files


def test_accuracies_against_another_differ_by_points(root):
    path = root / "studies" / "small.toml"
    path.write_text(STUDY.replace('y = "train_loss"', 'y = "metric"\nagainst = "d-rr, few"', 1))
    study = page_study(read_study(path))
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
