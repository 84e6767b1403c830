"""The page in a real browser."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gradherd.lab.report.page import render, write_report
from tests.lab.report.sample_records import hostile, orders, record, sparsifiers

LINES, RUNS = "g > path[stroke-width='2'] >> visible=true", "path.run >> visible=true"
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
            "c1-loss", "c1-metric", "c1-herding", "c1-time",
        ]  # fmt: skip
        for chart in ("c0-loss", "c0-metric", "c0-herding", "c1-loss", "c1-metric"):
            assert page.locator(f"#{chart} {LINES}").count() == 3
            assert page.locator(f"#{chart} .band >> visible=true").count() == 3
        # Curves over anything but epochs are there, too, and hidden.
        assert (
            page.locator("#c0-loss svg").count() == 3
            and page.locator("#c0-herding svg").count() == 1
        )
        assert page.locator("#c0-time i").count() == 3 * 5
        assert page.locator("#c1-time i").count() == 3 * 4
        assert "final loss of d-rr" in page.locator("#c0-loss .over-epochs").text_content()


def test_charts_need_no_script(browser, usual):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(usual.as_uri())
    for chart in ("c0-loss", "c0-metric", "c0-herding", "c1-loss"):
        assert page.locator(f"#{chart} {LINES}").count() == 3
        assert page.locator(f"#{chart} svg >> visible=true").bounding_box()["width"] > 400
    # Arms can be hidden, in curves and bars, and axes chosen.
    page.locator("#c0 [data-arm='2']").uncheck()
    for chart in ("c0-loss .over-epochs g", "c0-time .bar"):
        shown = [one.is_visible() for one in page.locator(f"#{chart}").all()]
        assert sorted(shown) == [False, True, True]
    assert all(one.is_visible() for one in page.locator("#c1-loss .over-epochs g").all())
    page.locator("#c0 [data-over=bytes]").check()
    assert page.locator("#c0-loss .over-bytes").is_visible()
    context.close()


def test_a_page_is_small_and_says_its_verdicts_first(usual):
    text = usual.read_text(encoding="utf-8")
    assert len(text) < 250_000 and "<script" not in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text)
    assert text.index("Findings") < text.index('<table class="arms"')
    for heading in ("Does a better order need fewer epochs?", "Does sending less cost accuracy?"):
        assert heading in text
    for told in ("Made-up 3000", "34.4 GB", "<dt>torch</dt><dd>2.13.0", "batch_size"):
        assert told in text


def test_findings_are_one_sentence_with_folded_figures(look, usual):
    with look(usual) as page:
        found = page.locator(".verdicts li").all_inner_texts()
        assert len(found) == 5 and not any("p <" in text or "interval" in text for text in found)
        assert "cd-grab: better than d-rr, whose final loss it reaches after 10 epochs" in found[1]
        page.locator(".verdicts summary").nth(1).click()
        assert "3 seeds, paired p < 0.001" in page.locator(".verdicts li").nth(1).inner_text()


def test_controls_switch_their_own_comparison(look, usual):
    with look(usual) as page:
        assert page.locator("#c0-loss .over-epochs").is_visible()
        for name, axis in (("seconds", "seconds of training"), ("bytes", "bytes sent per worker")):
            page.locator(f"#c0 [data-over={name}]").check()
            for chart in ("c0-loss", "c0-metric"):
                (shown,) = page.locator(f"#{chart} svg >> visible=true").all()
                assert axis in shown.text_content()
        assert "MB" in page.locator("#c0-loss .over-bytes").text_content()
        assert page.locator("#c1-loss .over-epochs").is_visible()
        assert page.locator(RUNS).count() == 0
        page.locator("#c0 [data-seeds]").check()
        assert page.locator(f"#c0-loss {RUNS}").count() == 3 * 3
        assert page.locator(f"#c1-loss {RUNS}").count() == 0
        assert page.locator("#c0-loss .band >> visible=true").count() == 0
        page.locator("#c0 [data-arm='1']").uncheck()
        assert page.locator(f"#c0-loss {RUNS}").count() == 6
        assert page.locator("#c0-loss .over-bytes").is_visible()


def test_hidden_arms_are_gone_from_curves_and_bars(look, usual):
    with look(usual) as page:
        for arm in (0, 1):
            page.locator(f"#c0 [data-arm='{arm}']").uncheck()
        assert page.locator(f"#c0-loss {LINES}").count() == 1
        assert page.locator(f"#c1-loss {LINES}").count() == 3
        assert page.locator("#c0-time i >> visible=true").count() == 5
        page.locator("#c0 [data-arm='0']").check()
        assert page.locator(f"#c0-loss {LINES}").count() == 2


def test_noise_looks_flat(look, page_of):
    """A metric that differs in the fourth digit is a level line."""
    still = [
        record(seed=seed, epochs=8, metrics=[97 + 1e-3 * e for e in range(8)]) for seed in (0, 1)
    ]
    with look(page_of("flat", still)) as page:
        path = page.locator(f"#c0-metric {LINES}").get_attribute("d")
        heights = [float(point.split()[1]) for point in path[1:].split("L")]
        assert max(heights) - min(heights) < 2


def colours(page):
    return page.evaluate(
        """() => [
            getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('#c0-loss text')).fill,
            getComputedStyle(document.querySelector('#c0-loss g > path.s0')).stroke,
        ]"""
    )


def test_theme_follows_the_system_and_the_choice(look, usual):
    with look(usual, theme="light") as page:
        light = colours(page)
        page.locator("#theme-dark").check()
        dark = colours(page)
        assert all(a != b for a, b in zip(light, dark, strict=True))
        page.locator("#theme-system").check()
        assert colours(page) == light
    with look(usual, theme="dark") as page:
        assert colours(page) == dark
        page.locator("#theme-light").check()
        assert colours(page) == light
        page.locator("#theme-dark").check()
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
        assert not page.locator("[data-over]").first.is_visible()


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
        assert page.locator("#c0-time .name").first.text_content() == evil
        assert f"final loss of {evil}" in page.locator("#c0-loss .over-epochs").text_content()


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
            assert plot.locator("g > path, circle, .bar").count() > 0
        empty = page.locator("section.comparison", has_text="no run finished its first epoch")
        assert empty.locator(".plot").count() == 0


def test_equal_records_make_equal_pages():
    assert render(orders(2)) == render(orders(2))


def test_page_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_report([record(epochs=2)], path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="two records"):
        write_report([record(), record()], path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_page_about_nothing_is_refused():
    with pytest.raises(ValueError, match="there is no record to compare"):
        render([])
