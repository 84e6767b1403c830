"""docs/iframe-worker.js: the script of the site's search runs where a page is opened from disk."""

import shutil
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
PAGE = """<body><script src="iframe-worker.js"></script><script>
const worker = new Worker(new URL("worker.js", location.href));
worker.addEventListener("message", (event) => (document.title = event.data));
worker.postMessage("twice");
</script></body>"""
WORKER = """addEventListener("message", async (event) => {
  await importScripts("library.js");
  postMessage(`${event.data} ${twice(21)}`);
});"""


def test_a_worker_answers_a_page_that_was_opened_from_disk(browser, tmp_path):
    shutil.copy(DOCS / "iframe-worker.js", tmp_path)
    (tmp_path / "worker.js").write_text(WORKER)
    (tmp_path / "library.js").write_text("function twice(x) { return 2 * x; }")
    (tmp_path / "page.html").write_text(PAGE)
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("document.title != ''", timeout=30_000)
    assert page.title() == "twice 42"
    page.close()
