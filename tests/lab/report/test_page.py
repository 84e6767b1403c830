"""The page in a real browser."""

import json
import re
from dataclasses import replace

import pytest

from gradherd.lab.report.page import render, write_report
from tests.lab.report.sample_records import hostile, orders, record, sparsifiers

LINES = ".scatterlayer path.js-line"
BARS = ".barlayer .point path"
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


def drawn(page, chart):
    return page.locator(f"#{chart} {LINES}").count(), page.locator(f"#{chart} {BARS}").count()


def test_every_chart_is_drawn(look, usual):
    with look(usual) as page:
        assert "digits: d-rr, always-plus and cd-grab; digits-mlp: dense" in page.title()
        charts = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.id)")
        assert charts == [
            "c0-loss", "c0-metric", "c0-herding", "c0-time",
            "c1-loss", "c1-metric", "c1-herding", "c1-density", "c1-load", "c1-time",
        ]  # fmt: skip
        # Three arms with a line each; a band has a fill but no line of its own to count.
        for chart in ("c0-loss", "c0-metric", "c0-herding", "c1-loss", "c1-metric"):
            assert page.locator(f"#{chart} {LINES}[style*='stroke-width: 2.2px']").count() == 3
            assert page.locator(f"#{chart} .fills path").count() == 3
        assert drawn(page, "c1-density")[0] >= 2
        assert drawn(page, "c1-load") == (0, 2 * 4)
        assert drawn(page, "c0-time") == (0, 3 * 5) and drawn(page, "c1-time")[1] == 3 * 4
        assert page.locator("#c0-loss .shapelayer path").count() == 1
        assert page.locator("#c0-loss .shapelayer text").text_content() == "final loss of d-rr"


def test_one_copy_of_plotly_and_the_verdicts_on_top(usual):
    text = usual.read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1 and text.count("<script") == 3
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text.split("<script", 1)[0])
    assert text.index("Findings") < text.index('<table class="arms"')
    for heading in ("Does a better order need fewer epochs?", "Does sending less cost accuracy?"):
        assert heading in text
    for told in ("Made-up 3000 · 8 cores", "torch 2.13.0", "batch_size"):
        assert told in text


def test_axis_switch_redraws_loss_and_metric(look, usual):
    with look(usual) as page:
        title = page.locator("#c0-loss .xtitle")
        before = page.locator(f"#c0-loss {LINES}").last.get_attribute("d")
        assert title.text_content() == "epochs"
        for name, axis in (("seconds", "seconds of training"), ("bytes", "bytes sent per worker")):
            button = page.locator(f"[data-group=c0] [data-against={name}]")
            button.click()
            assert title.text_content() == axis and button.get_attribute("aria-pressed") == "true"
            assert page.locator("#c0-metric .xtitle").text_content() == axis
            after = page.locator(f"#c0-loss {LINES}").last.get_attribute("d")
            assert after != before
            before = after
        assert "MB" in page.locator("#c0-loss .xaxislayer-above").text_content()
        assert page.locator("#c1-loss .xtitle").text_content() == "epochs"
        assert page.locator("[data-against][aria-pressed=true]").count() == 2


def test_log_switch(look, usual):
    with look(usual) as page:
        kind = "document.getElementById('c0-loss')._fullLayout.yaxis.type"
        button = page.locator("[data-log=c0-loss]")
        assert page.evaluate(kind) == "log" and button.get_attribute("aria-pressed") == "true"
        button.click()
        assert page.evaluate(kind) == "linear" and button.get_attribute("aria-pressed") == "false"
        assert page.evaluate(kind.replace("c0", "c1")) == "log"


def test_pointer_tells_figures(look, usual):
    with look(usual) as page:
        told = []
        for chart in ("c0-loss", "c0-time", "c1-load"):
            place = page.locator(f"#{chart} .nsewdrag")
            place.scroll_into_view_if_needed()
            place.hover()
            shown = page.locator(f"#{chart} .hoverlayer text").first
            shown.wait_for(timeout=10_000)
            told.append(page.locator(f"#{chart} .hoverlayer").text_content())
        assert all(arm in told[0] for arm in ("d-rr", "always-plus", "cd-grab"))
        assert "± " in told[0] and "after epoch 10" in told[0]
        assert "s per epoch" in told[1] and "elements per step from worker" in told[2]
        buttons = page.locator("#c0-loss .modebar-btn").all()
        assert [button.get_attribute("data-title").split()[0] for button in buttons] == [
            "Download", "Zoom", "Pan", "Reset",
        ]  # fmt: skip


def test_arms_can_be_hidden(look, usual):
    with look(usual) as page:
        page.locator("[data-group=c0] [data-arm='2']").click()
        assert page.locator(f"#c0-loss {LINES}[style*='stroke-width: 2.2px']").count() == 2
        assert page.locator(f"#c1-loss {LINES}[style*='stroke-width: 2.2px']").count() == 3
        page.locator("[data-group=c0] [data-arm='2']").click()
        assert page.locator(f"#c0-loss {LINES}[style*='stroke-width: 2.2px']").count() == 3


def colours(page):
    return page.evaluate(
        """() => [
            getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('#c0-loss .xtick text')).fill,
            getComputedStyle([...document.querySelectorAll('#c0-loss path.js-line')].pop()).stroke,
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


@pytest.mark.parametrize("width", [375, 1280])
def test_nothing_sticks_out(look, usual, width):
    with look(usual, width=width) as page:
        for details in page.locator("summary").all():
            details.click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for plot in page.locator(".plot").all():
            box = plot.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["width"] > 250


def test_structure_can_be_read_without_eyes(look, usual):
    with look(usual) as page:
        assert page.locator("h1").count() == 1
        assert page.locator(".plot:not([aria-label]), figure:not(:has(figcaption))").count() == 0
        assert page.locator("table.arms thead th[scope=col]").count() == 11 + 12
        assert page.locator("table.arms tbody th[scope=row]").count() == 6
        assert page.locator(".mark[aria-label='best mean']").count() > 5
        page.locator("summary", has_text="Values by epoch").first.click()
        assert page.locator("details[open] tbody tr").count() == 20


def test_hostile_strings_stay_text(look, page_of):
    arms = [(o, s, d, k) for o, s, d in (("d-rr", "dense", None), ("cd-grab", "dense", None),
            ("d-rr", "exdyna", 0.01)) for k in (0, 1)]  # fmt: skip
    # A text in front of the task's name, too, so each of them has a comparison of its own.
    found = [hostile(evil, record(*arm, epochs=3)) for evil in EVIL for arm in arms]
    path = page_of("hostile", found, title=EVIL[1], files=[run.order for run in found])
    with look(path) as page:
        assert page.locator("section.comparison").count() == len(EVIL)
        for details in page.locator("summary").all():
            details.click()
        page.hover("#c0-loss .nsewdrag")
        assert page.locator("main script, header script, [onerror], [onload]").count() == 0
        assert page.locator("img, svg[onload], main a:not([href^='#c'])").count() == 0
        # Plotly makes tspans with a weight out of <b>, and links out of <a>.
        assert page.locator(".plot a, .plot tspan[style*='font-weight']").count() == 0
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
        assert page.locator("#c0-time .ytick text").first.text_content() == evil
        assert page.locator("#c0-loss .shapelayer text").text_content() == f"final loss of {evil}"


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
            assert plot.locator(".js-line, .points path, .point path").count() > 0
        empty = page.locator("section.comparison", has_text="no run finished its first epoch")
        assert empty.locator(".plot").count() == 0


def test_equal_records_make_equal_pages():
    assert render(orders(2)) == render(orders(2))


def test_charts_are_plain_json(usual):
    text = usual.read_text(encoding="utf-8")
    block = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.S)
    charts = json.loads(block.group(1))
    assert charts["c0-loss"]["pieces"][1]["xs"]["epochs"] == [float(e) for e in range(1, 21)]


def test_page_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report([record(epochs=2)], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="two records"):
        write_report([record(), record()], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
