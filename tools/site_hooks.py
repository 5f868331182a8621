"""Hooks of mkdocs: adapts links that lead out of the folder docs/, and lists the decisions.

The same pages are read in the repository, where a link to a source file works. On the site it has
no target, so it becomes the path in code font.
"""

from __future__ import annotations

import re
from typing import Any

_OUT = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of a page with links out of docs/ replaced by paths."""
    depth = page.file.src_uri.count("/")

    def replaced(match: re.Match[str]) -> str:
        ups = match[0].partition("](")[2].count("../")
        if ups <= depth:  # a page of docs/
            return match[0]
        text = match[1].strip("`")
        return f"`{text}`" if "." in text else f"{text} (`{match[2]}`)"

    return _OUT.sub(replaced, markdown)
