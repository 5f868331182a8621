"""The lines that training prints, found in the sources, and those that the documents explain."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_SOURCES = tuple(ROOT / name for name in ("framework", "models", "tasks", "tools/supervisor.py"))
_OTHERS = ("pipeline_text.py", "stored_speeds.py")
"""Files of other commands, and of a warning that only tests provoke."""
_PRINTS = {"warn", "_warn", "warning", "log", "_log", "line"}
"""Functions and methods that print a text, among others `Console.line` and `logging.warning`."""
_RETURNS = re.compile(r"\bwarn(s|ings?)?\b|\bprints?\b|^Returns a line\b")
"""In the first line of the docstring of a function that returns such texts."""
_FEWEST_WORDS = 5  # fewer are a part of a line, or a figure
_SHORTEST = 9  # characters of a fixed part that recognises a line
_REST = {
    "it is True by default",
    "is too large to check",
    "has several processes, which do not check",
    "the model cannot use them",
    "there is nothing to learn",
    "changed Params of the execution",
    "…: … of these examples … numbers that are not finite",
}
"""Texts that stand in a line that is explained."""
_ADVICE = "Look for a logarithm or a root of a number"  # of lines that are explained


def printed(sources: Sequence[Path] = _SOURCES) -> Iterator[tuple[str, str]]:
    """Yields places and texts of lines, with "…" for what a run fills in."""
    for path in (path for source in sources for path in sorted(_files(source))):
        for node in nodes(path):
            for text in _printed_by(node):
                words = re.findall(r"(?<!\S)[^\W\d_]{2,}", text)
                if len(words) >= _FEWEST_WORDS and text not in _REST and _ADVICE not in text:
                    yield f"{path.name}:{getattr(node, 'lineno', 0)}", text


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns all nodes of a Python file; a file is parsed once for several tests."""
    return list(ast.walk(ast.parse(path.read_text())))


def explained(*pages: str) -> list[re.Pattern[str]]:
    """Returns patterns of the lines that pages explain: the longest fixed part of each."""
    found = []
    for page in pages:
        for line in lines((ROOT / "docs" / page).read_text()):
            part = max(fixed_parts(line), key=len, default="")
            if len(part) >= _SHORTEST and " " in part:
                found.append(re.compile(r"\b" + re.escape(part)))
    return found


def lines(page: str) -> list[str]:
    """Returns the lines that the headings and the first columns of a page name, as code."""
    named = re.findall(r"^(?:### |\| )(`.*?`)(?: \||$)", page, re.MULTILINE)
    return [line for code in named for line in re.findall(r"`(.*?)`(?=$|, `)", code)]


def fixed_parts(line: str) -> list[str]:
    """Returns the parts of a line in a document that are not numbers or names of a run."""
    parts = re.split(r"…|\b\d\S*|'\S*'|\blearner\S*|SIG\w+|--cluster|\b[A-Z]{4,}\b", line)
    return [part for each in parts if (part := each.strip(" :;,().->"))]


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        return iter([path])
    return (file for file in path.rglob("*.py") if file.name not in _OTHERS)


def _printed_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        appends = name == "append" and "warnings" in ast.unparse(node.func)
        if name in _PRINTS or appends:
            for argument in node.args[:1]:
                yield from _texts(argument)
    elif isinstance(node, ast.List):
        if any(ast.unparse(element) == "*warnings" for element in node.elts):
            yield from _texts(node)
    elif isinstance(node, ast.FunctionDef):
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        if _RETURNS.search(summary):
            for statement in node.body[1:]:
                yield from _texts(statement)


def _texts(node: ast.AST) -> Iterator[str]:
    """Yields the texts in a node, except those of errors."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield " ".join(re.sub("%[sd]", "…", node.value).split())
    elif isinstance(node, ast.JoinedStr):
        parts = [str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values]
        yield " ".join("".join(parts).split())
    elif not isinstance(node, ast.Raise):
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)
