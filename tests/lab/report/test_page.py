"""The page in a real browser."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.lab.report.page import render, write_report
from tests.lab.report.sample_records import hostile, orders, record, sparsifiers

LINES, RUNS = "path.line", "path.run"
OPEN = "document.querySelectorAll('details').forEach(one => { one.open = true; })"
EVIL = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "\"'><svg onload=alert(3)>",
    "<a href='javascript:alert(4)'>click</a><b>bold</b>",
    "%{meta[0]} %{y} {{ 7 * 7 }} {% raw %} ${alert(5)} &lt;i&gt;",
    "\u202e ünïcødé 漢字 \ud800 \x1b[31m \x00 " + "wide" * 80 + " ",
]


@pytest.fixture(scope="module")
def page_of(tmp_path_factory):
    """Write a page and return where it is."""

    def written(name, records, **more):
        path = tmp_path_factory.mktemp(name) / "report.html"
        write_report(records, path, **more)
        return path

    return written


@pytest.fixture(scope="module")
def usual(page_of):
    return page_of("usual", [*orders(), *sparsifiers()])


def test_every_chart_is_drawn(look, usual):
    with look(usual) as page:
        assert "digits: d-rr, always-plus and cd-grab; digits-mlp: dense" in page.title()
        charts = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.id)")
        assert charts == [
            "c0-loss", "c0-metric", "c0-herding", "c0-time",
            "c1-loss", "c1-metric", "c1-herding", "c1-density", "c1-load", "c1-time",
        ]  # fmt: skip
        for chart in ("c0-loss", "c0-metric", "c0-herding", "c1-loss", "c1-metric"):
            assert page.locator(f"#{chart} {LINES}").count() == 3
            assert page.locator(f"#{chart} .band").count() == 3
        assert page.locator(f"#c1-density {LINES}").count() == 2
        assert page.locator("#c1-load rect").count() == 2 * 4
        assert page.locator("#c0-time rect").count() == 3 * 5
        assert page.locator("#c1-time rect").count() == 3 * 4
        assert page.locator("#c0-loss text.level").text_content() == "final loss of d-rr"


def test_without_a_script_the_same_lines_are_there(browser, usual):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(usual.as_uri())
    strokes = "g > path[stroke-width='2']"
    for chart in ("c0-loss", "c0-metric", "c0-herding", "c1-loss"):
        assert page.locator(f"#{chart} {strokes}").count() == 3
        assert page.locator(f"#{chart} svg").bounding_box()["width"] > 400
    assert "final loss of d-rr" in page.locator("#c0-loss").text_content()
    assert (
        not page.locator("#theme").is_visible()
        and not page.locator("[data-log]").first.is_visible()
    )
    # Arms can still be hidden, in curves and bars.
    page.locator("[data-group=c0] [data-arm='2']").uncheck()
    for chart in ("c0-loss", "c0-time"):
        shown = [one.is_visible() for one in page.locator(f"#{chart} g").all()]
        assert sorted(shown) == [False, True, True]
    assert all(one.is_visible() for one in page.locator("#c1-loss g").all())
    context.close()


def test_a_page_is_small_and_says_its_verdicts_first(usual):
    text = usual.read_text(encoding="utf-8")
    assert len(text) < 200_000 and text.count("<script") == 2
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert text.index("Findings") < text.index('<table class="arms"')
    for heading in ("Does a better order need fewer epochs?", "Does sending less cost accuracy?"):
        assert heading in text
    for told in ("Made-up 3000 · 8 cores", "torch 2.13.0", "batch_size"):
        assert told in text


def test_controls_redraw_their_own_comparison(look, usual):
    with look(usual) as page:
        title = page.locator("#c0-loss .xtitle")
        line = page.locator(f"#c0-loss {LINES}").last
        before = line.get_attribute("d")
        assert title.text_content() == "epochs"
        for name, axis in (("seconds", "seconds of training"), ("bytes", "bytes sent per worker")):
            button = page.locator(f"[data-group=c0] [data-against={name}]")
            button.click()
            assert title.text_content() == axis and button.get_attribute("aria-pressed") == "true"
            assert page.locator("#c0-metric .xtitle").text_content() == axis
            assert line.get_attribute("d") != before
            before = line.get_attribute("d")
        assert "MB" in "".join(page.locator("#c0-loss .xtick").all_text_contents())
        assert page.locator("#c1-loss .xtitle").text_content() == "epochs"
        assert page.locator("[data-against][aria-pressed=true]").count() == 2

        log = page.locator("[data-log=c0-loss]")
        assert log.get_attribute("aria-pressed") == "true"
        log.click()
        assert log.get_attribute("aria-pressed") == "false" and line.get_attribute("d") != before
        assert page.locator("[data-log=c1-loss]").get_attribute("aria-pressed") == "true"

        assert page.locator(RUNS).count() == 0
        page.locator("[data-group=c0] [data-seeds]").check()
        assert page.locator(f"#c0-loss {RUNS}").count() == 3 * 3
        assert page.locator(f"#c0-loss .band, #c1-loss {RUNS}").count() == 0
        before = line.get_attribute("d")
        page.locator("[data-group=c0] [data-smooth]").fill("0.8")
        assert line.get_attribute("d") != before
        # What was chosen is still chosen after the page has loaded itself again.
        page.reload()
        page.wait_for_selector("html[data-drawn=true]")
        assert page.locator(f"#c0-loss {RUNS}").count() == 9 and title.text_content() != "epochs"
        assert page.locator("[data-group=c0] [data-smooth]").input_value() == "0.8"


def test_hidden_arms_give_their_room_to_the_others(look, usual):
    with look(usual) as page:
        line = page.locator("#c0-herding .a2 path.line")
        before = line.get_attribute("d")
        for arm in (0, 1):
            page.locator(f"[data-group=c0] [data-arm='{arm}']").uncheck()
        assert page.locator(f"#c0-loss {LINES}").count() == 1
        assert page.locator(f"#c1-loss {LINES}").count() == 3
        assert page.locator("#c0-time rect >> visible=true").count() == 5
        assert line.get_attribute("d") != before
        page.locator("[data-group=c0] [data-arm='2']").uncheck()
        assert "no arm is shown" in page.locator("#c0-loss").text_content()
        page.locator("[data-group=c0] [data-arm='0']").check()
        assert page.locator(f"#c0-loss {LINES}").count() == 1


def test_pointer_tells_figures_and_zooms(look, usual):
    with look(usual) as page:
        place = page.locator("#c0-loss svg")
        place.scroll_into_view_if_needed()
        box = place.bounding_box()
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        told = page.locator("#c0-loss .tip").inner_text()
        assert all(arm in told for arm in ("d-rr", "always-plus", "cd-grab"))
        assert "± " in told and told.startswith("epoch 10")
        page.mouse.down()
        page.mouse.move(box["x"] + 0.8 * box["width"], middle)
        page.mouse.up()
        marks = [float(mark) for mark in page.locator("#c0-loss .xtick").all_text_contents()]
        assert 10 <= min(marks) and max(marks) <= 17
        page.mouse.dblclick(box["x"] + box["width"] / 2, middle)
        assert page.locator("#c0-loss .xtick").last.text_content() == "20"
        page.mouse.move(5, 5)
        assert page.locator(".tip").count() == 0


def test_noise_looks_flat(look, page_of):
    """A metric that differs in the fourth digit is a level line, drawn and redrawn."""
    still = [
        record(seed=seed, epochs=8, metrics=[97 + 1e-3 * e for e in range(8)]) for seed in (0, 1)
    ]
    with look(page_of("flat", still)) as page:
        path = page.locator(f"#c0-metric {LINES}").get_attribute("d")
        heights = [float(point.split()[1]) for point in path[1:].split("L")]
        assert max(heights) - min(heights) < 2


def test_a_page_that_follows_a_training_loads_itself(page_of):
    text = page_of("live", [record(epochs=2)], reload=5).read_text()
    assert '<noscript><meta http-equiv="refresh" content="5"></noscript>' in text
    assert '"reload": 5' in text and "follows the training" in text


def colours(page):
    return page.evaluate(
        """() => [
            getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('#c0-loss .xtick')).fill,
            getComputedStyle(document.querySelector('#c0-loss path.line')).stroke,
        ]"""
    )


def test_theme_follows_the_system_and_the_button(look, usual):
    with look(usual, theme="light") as page:
        light = colours(page)
        page.locator("#theme").click()
        dark = colours(page)
        assert all(a != b for a, b in zip(light, dark, strict=True))
        assert page.locator("#theme").inner_text() == "light theme"
        page.locator("#theme").click()
        assert colours(page) == light
    with look(usual, theme="dark") as page:
        assert colours(page) == dark
        page.locator("#theme").click()
        assert colours(page) == light
        page.locator("#theme").click()
        page.emulate_media(color_scheme="light")
        assert colours(page) == dark  # What was chosen stays.


def test_nothing_sticks_out(look, usual):
    with look(usual) as page:
        page.evaluate(OPEN)
        for width in (1280, 375):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for plot in page.locator(".plot").all():
                box = plot.bounding_box()
                assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["width"] > 250
        page.emulate_media(media="print", color_scheme="dark")
        assert colours(page)[0] == "rgba(0, 0, 0, 0)"  # paper stays white
        assert not page.locator("[data-smooth]").first.is_visible()


def test_structure_can_be_read_without_eyes(look, usual):
    with look(usual) as page:
        assert page.locator("h1").count() == 1
        assert page.locator(".plot:not([aria-label]), figure:not(:has(figcaption))").count() == 0
        assert page.locator("table.arms thead th[scope=col]").count() == 11 + 12
        assert page.locator("table.arms tbody th[scope=row]").count() == 6
        assert page.locator(".mark[aria-label='best mean']").count() > 5
        page.locator("summary", has_text="Values by epoch").first.click()
        assert page.locator("details[open] tbody tr").count() == 20
        with page.expect_download() as download:
            page.get_by_text("Download as CSV").first.click()
        rows = list(csv.reader(Path(download.value.path()).read_text().splitlines()))
        assert len(rows) == 21 and rows[0][0] == "epoch" and float(rows[1][1]) > 0


def test_hostile_strings_stay_text(look, page_of):
    arms = [(o, s, d, k) for o, s, d in (("d-rr", "dense", None), ("cd-grab", "dense", None),
            ("d-rr", "exdyna", 0.01)) for k in (0, 1)]  # fmt: skip
    # A text in front of the task's name, too, so each of them has a comparison of its own.
    found = [hostile(evil, record(*arm, epochs=3)) for evil in EVIL for arm in arms]
    path = page_of("hostile", found, title=EVIL[1], files=[run.order for run in found])
    with look(path) as page:
        assert page.locator("section.comparison").count() == len(EVIL)
        page.evaluate(OPEN)
        page.hover("#c0-loss svg")
        assert page.locator("main script, header script, [onerror], [onload]").count() == 0
        assert (
            page.locator("img, svg[onload], main a:not([href^='#c'], [download]), .plot a").count()
            == 0
        )
        assert page.locator("h1").text_content() == EVIL[1]
        for index, evil in enumerate(EVIL[:-1]):
            assert page.locator(f"#c{index} h2").text_content() == f"{evil}digits"
        assert page.locator(f"#c{len(EVIL) - 1} h2").text_content().count("\ufffd") == 4
        for width in (1280, 375):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_labels_are_shown_as_written_in_charts(look, page_of):
    evil = "<b>x</b> & y"
    path = page_of("labels", [record(evil), record("cd-grab"), record(metric_name="m", task="t")])
    with look(path) as page:
        assert page.locator("#c0-time g text").first.text_content() == evil
        assert page.locator("#c0-loss text.level").text_content() == f"final loss of {evil}"


ODD = {
    "one run of one epoch": [record(epochs=1)],
    "one seed": orders(1),
    "cut short": [*orders(2, names=("d-rr",)), *orders(2, names=("cd-grab",), done=3)],
    "no epoch": orders(2, done=0),
    "diverged": [
        *orders(2, epochs=4, names=("d-rr",)),
        record("grab", seed=0, epochs=4, losses=[1.0, None, None, None]),
        record("grab", seed=1, epochs=4, losses=[1.0, 0.9, None], status="diverged"),
    ],
    "never finite": [record(epochs=2, losses=[None, None], metrics=[None, None])],
    "below zero": [record(seed=seed, epochs=3, losses=[0.5, -0.1, -seed]) for seed in (0, 1)],
    "more than colours": [
        record(f"order-{arm}", "topk", 0.1, seed, epochs=3) for arm in range(12) for seed in (0, 1)
    ],
    "long": [record("d-rr", epochs=200), record("cd-grab", epochs=200)],
}


def test_odd_records_make_a_page(look, page_of):
    runs = [replace(run, task=name) for name, found in ODD.items() for run in found]
    with look(page_of("odd", runs), width=375) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 375
        for index, found in enumerate(ODD.values()):
            rows = page.locator(f"#c{index} table.arms tbody tr").count()
            assert rows == len({run.order for run in found})
        for plot in page.locator(".plot").all():
            assert plot.locator("path.line, circle, rect").count() > 0
        empty = page.locator("section.comparison", has_text="no run finished its first epoch")
        assert empty.locator(".plot").count() == 0


def test_equal_records_make_equal_pages():
    assert render(orders(2)) == render(orders(2))


def test_charts_are_plain_json(usual):
    text = usual.read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    data = json.loads(block.group(1))
    assert data["charts"][0]["lines"][1]["xs"]["epochs"] == list(range(1, 21))
    assert [run["seed"] for run in data["charts"][0]["lines"][1]["runs"]] == [0, 1, 2]
    assert [arm["style"] for arm in data["arms"]["c0"]] == [0, 5, 1]  # as in every other chart


def test_page_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report([record(epochs=2)], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="two records"):
        write_report([record(), record()], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
