"""A real browser for the pages."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no chromium or google-chrome on this machine to look at pages with")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def look(browser):
    """Open a page; at its end there must have been no complaint, alert or request."""

    @contextmanager
    def opened(path: Path, *, width: int = 1280, theme: str = "light") -> Iterator:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme, offline=True
        )
        page = context.new_page()
        asked, complaints = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        yield page
        context.close()
        assert complaints == []
        assert {url for url in asked if not url.startswith(("data:", "blob:"))} == {path.as_uri()}

    return opened
