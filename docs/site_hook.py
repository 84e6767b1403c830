"""Hooks of mkdocs: links into the repository, the pages of studies, the width of the summary."""

import re
from pathlib import Path
from typing import Any

_SUMMARY, _INDEX = "evidence.md", "evidence/README.md"


def on_config(config: Any) -> Any:
    """List the page of every study below the summary; a new one needs no line of its own."""
    folder = Path(config["docs_dir"]) / "evidence"
    pages = sorted(f"evidence/{path.name}" for path in folder.glob("*.md"))
    for part in config["nav"]:
        for entries in part.values():
            if _SUMMARY in entries:
                studies = [_INDEX, *(page for page in pages if page != _INDEX)]
                entries.insert(entries.index(_SUMMARY) + 1, {"Studies": studies})
    return config


def on_files(files: Any, *, config: Any) -> Any:
    """Add CONTRIBUTING.md, which lies in the root of the repository, as a page of the site."""
    from mkdocs.structure.files import File

    text = (Path(config["docs_dir"]).parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    page = re.sub(r"\]\(docs/", "](", text)
    files.append(File.generated(config, "contributing.md", content=page))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Return the page with `[text](../path)` as text and path: the site has no such page."""
    if page.file.src_uri == _SUMMARY:
        # The whole width: its tables and pictures are to fit one screen.
        page.meta["hide"] = ["navigation", "toc"]
    if page.file.src_uri.startswith("evidence/"):
        page.meta["hide"] = ["toc"]
        return markdown  # Links up lead to pages of the site.
    markdown = markdown.replace("(../CONTRIBUTING.md)", "(contributing.md)")
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+((?!docs/)[^)#]+)\)", _as_path, markdown)


def _as_path(match: "re.Match[str]") -> str:
    text, path = match.groups()
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
