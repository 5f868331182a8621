"""Hooks of mkdocs: adapts links that lead out of the folder docs/, and shows screenshots.

The same pages are read in the repository, where a link to a source file works. On the site it has
no target, so it becomes the path in code font. Screenshots of TensorBoard are shown if there are
some in docs/pictures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_OUT = re.compile(r"\[([^\]]*)\]\((?:\.\./)+([^)#]*)(?:#[^)]*)?\)")
_SCREENSHOTS = "<!-- screenshots of TensorBoard -->"


def on_page_markdown(markdown: str, page: Any, config: Mapping[str, Any], **_: Any) -> str:
    """Returns the text of a page with links out of docs/ replaced by paths, and screenshots."""
    depth = page.file.src_uri.count("/")

    def replaced(match: re.Match[str]) -> str:
        ups = match[0].partition("](")[2].count("../")
        if ups <= depth:  # a page of docs/
            return match[0]
        text = match[1].strip("`")
        return f"`{text}`" if "." in text else f"{text} (`{match[2]}`)"

    if _SCREENSHOTS in markdown:
        found = sorted(Path(config["docs_dir"], "pictures").glob("tensorboard.*.png"))
        shown = [f"![TensorBoard: {p.stem.partition('.')[2]}](pictures/{p.name})" for p in found]
        markdown = markdown.replace(_SCREENSHOTS, "\n\n".join(shown))
    return _OUT.sub(replaced, markdown)
