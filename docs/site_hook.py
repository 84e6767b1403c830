"""A hook of mkdocs: links to files of the repository that are not pages become their paths."""

import re
from typing import Any


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Return the page with `[text](../path)` as text and path: the site has no such page."""
    return re.sub(r"\[([^\]]+)\]\((?:\.\./)+((?!docs/)[^)#]+)\)", _as_path, markdown)


def _as_path(match: "re.Match[str]") -> str:
    text, path = match.groups()
    return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"
