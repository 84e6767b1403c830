import itertools
import math
import xml.etree.ElementTree as ET

import pytest

from gradherd.lab.report.svg import COLOURS, ChartLine, dashes
from gradherd.ordering.registry import POLICIES
from gradherd.sparsify.registry import SPARSIFIERS
from studies.evidence.chart_file import chart_file as chart
from studies.evidence.chart_file import line_styles


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
    assert [one.get("style") for one in small.iter() if one.text == "train loss"] == [None]
    wordy = ET.fromstring(chart("t", "x", "y" * 60, many[:3]))
    (style,) = [one.get("style") for one in wordy.iter() if one.text == "y" * 60]
    assert 60 * float(style.removeprefix("font-size:").removesuffix("px")) / 2 <= 340 - 34 - 46


def test_few_values_of_a_logarithmic_axis_are_all_marked():
    some = [ChartLine("a", [(4, 1.0), (16, 2.0), (64, 3.0)])]
    image = ET.fromstring(chart("t", "workers", "y", some, log_x=True))
    marks = {one.text for one in image.iter()}
    assert {"4", "16", "64"} <= marks and "10" not in marks


def test_an_axis_does_not_magnify_nothing():
    """A density that is off by a ten-thousandth is flat; a loss that halves is not."""
    for values, most in (
        ((0.01, 0.0099985, 0.01), 3),
        ((0.5, 0.5, 0.5), 1),
        ((2.0, 1.5, 1.0), 400),
    ):
        text = chart("t", "x", "y", [ChartLine("a", list(enumerate(values)))])
        path = next(one for one in ET.fromstring(text).iter() if one.get("stroke-width") == "2")
        heights = [float(point.split()[1]) for point in path.get("d")[1:].split("L")]
        assert max(heights) - min(heights) <= most
        assert most < 9 or max(heights) - min(heights) > 200


def test_a_line_under_another_is_named():
    lines = [ChartLine("a", [(1, 1.0), (2, 3.0)]), ChartLine("b", [(1, 1.0), (2, 3.001)]),
             ChartLine("c", [(1, 1.0), (2, 2.0)])]  # fmt: skip
    words = {one.text for one in ET.fromstring(chart("t", "x", "y", lines)).iter()}
    assert {"a", "b (under a)", "c"} <= words


REGISTERED = (tuple(POLICIES), tuple(SPARSIFIERS))


def test_a_method_looks_the_same_everywhere_and_unlike_the_others():
    for names in REGISTERED:
        styles = dict(zip(names, line_styles(names), strict=True))
        assert len(set(styles.values())) == len(names)
        for some in itertools.combinations(names, 2):
            assert line_styles(some) == [styles[name] for name in some]


def test_a_line_of_no_method_has_a_style_of_its_own():
    base, known, mine = line_styles(["d-rr", "cd-grab", "mine"])
    assert (base, known) == (0, 1) and mine not in (base, known)


def test_lines_of_one_method_share_its_colour_and_differ_in_dashes():
    names = ["d-rr + dense", "cd-grab + dense", "d-rr + exdyna 0.01", "cd-grab + exdyna 0.01"]
    styles = line_styles(names)
    assert [style % len(COLOURS) for style in styles[:3]] == [0, 1, 0]
    assert len({(style % len(COLOURS), dashes(style)) for style in styles}) == 4
    many = line_styles([f"order-{n}" for n in range(20)])
    assert len({(style % len(COLOURS), dashes(style)) for style in many}) == 20
