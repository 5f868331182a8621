"""Tests of the documentation as a site: it builds without warnings, and messages are Tekso's."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import printed_lines
import pytest

from tekso.tools import site_hooks

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGES = ("framework", "models", "tasks", "params", "tools")


@pytest.fixture(scope="module", autouse=True)
def nodes_are_freed() -> Iterator[None]:
    """Frees the nodes of all sources after these tests."""
    yield
    printed_lines.nodes.cache_clear()
    constants.cache_clear()


@functools.cache
def constants() -> set[str]:
    """Returns all texts in the sources; adjacent literals are one text."""
    found = set()
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in printed_lines.nodes(path):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(" ".join(node.value.split()))
    return found


def messages() -> list[str]:
    page = (DOCS / "troubleshooting.md").read_text()
    return printed_lines.lines("\n".join(re.findall(r"^### `.*", page, re.MULTILINE)))


def test_every_message_of_troubleshooting_is_one_of_tekso() -> None:
    texts = "\n".join(constants())
    assert len(messages()) > 80
    for message in messages():
        for part in message.split("…"):
            words = part.strip(" :;,'")
            if words:
                assert words in texts, f"no message contains {words!r} ({message})"


def test_every_line_of_some_runs_is_one_of_tekso() -> None:
    page = (DOCS / "output.md").read_text().partition("## Lines of some runs")[2]
    lines = printed_lines.lines(page.partition("\n## The last lines")[0])
    assert len(lines) > 60
    texts = "\n".join(constants())
    for line in lines:
        for part in printed_lines.fixed_parts(line):
            assert part in texts, f"no line contains {part!r} ({line})"


def test_every_warning_and_line_of_a_run_is_explained() -> None:
    patterns = printed_lines.explained("output.md", "troubleshooting.md")
    lines = list(printed_lines.printed())
    assert len(lines) > 40
    for place, text in lines:
        is_known = any(pattern.search(text) for pattern in patterns)
        assert is_known, f"docs/output.md does not explain: {text} ({place})"


def test_a_line_that_no_document_explains_is_found(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        "def text(console, n):\n"
        "    console.line(f'after {n} steps the moon is full', 'warning')\n"
        "def checked():\n"
        '    """Returns warnings about the moon."""\n'
        "    if True:\n"
        "        raise ValueError('an error is not a line of a run')\n"
        "    return [f'the moon of {n} days is new']\n"
        "def others(warnings):\n"
        "    return [*warnings, 'there may be no moon tonight']\n"
    )
    found = [text for _, text in printed_lines.printed((tmp_path,))]
    assert sorted(found) == [
        "after … steps the moon is full",
        "the moon of … days is new",
        "there may be no moon tonight",
    ]


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert listed == {p for p in pages if not re.match(r"adr/\d|examples/", p)}
    index = (DOCS / "adr" / "index.md").read_text()
    assert all(f"({path.name})" in index for path in (DOCS / "adr").glob("[0-9]*.md"))


@pytest.mark.parametrize(
    ("page", "text", "shown"),
    [
        ("catalogue.md", "[tekso.models.mlp](../models/mlp.py)", "`tekso.models.mlp`"),
        ("start.md", "[README](../README.md#start)", "README (`README.md`)"),
        ("adr/0001.md", "[page](../meshes.md)", "[page](../meshes.md)"),
        ("adr/0001.md", "[code](../../models/mlp.py)", "code (`models/mlp.py`)"),
    ],
)
def test_links_out_of_the_docs_become_paths(page: str, text: str, shown: str) -> None:
    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    assert site_hooks.on_page_markdown(text, place, {}) == shown


def test_screenshots_of_tensorboard_are_shown_if_there_are_some(tmp_path: Path) -> None:
    place = SimpleNamespace(file=SimpleNamespace(src_uri="measuring.md"))
    page = (DOCS / "measuring.md").read_text()
    config = {"docs_dir": str(tmp_path)}
    assert "](pictures/tensorboard" not in site_hooks.on_page_markdown(page, place, config)
    (tmp_path / "pictures").mkdir()
    for name in ("tensorboard.weights.png", "tensorboard.curves.png", "other.png"):
        (tmp_path / "pictures" / name).touch()
    shown = re.findall(r"!\[TensorBoard.*", site_hooks.on_page_markdown(page, place, config))
    assert shown == [
        "![TensorBoard: curves](pictures/tensorboard.curves.png)",
        "![TensorBoard: weights](pictures/tensorboard.weights.png)",
    ]


def test_no_page_links_to_what_the_site_does_not_have() -> None:
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS)
        if name.parts[0] == "examples":
            continue
        place = SimpleNamespace(file=SimpleNamespace(src_uri=str(name)))
        text = site_hooks.on_page_markdown(page.read_text(), place, {"docs_dir": str(DOCS)})
        text = re.sub(r"(?s)```.*?```|`[^`\n]*`", "", text)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if re.match(r"[\w+]+:", target):
                continue
            found = Path(os.path.normpath(page.parent / target))
            is_shown = found.is_file() and found.is_relative_to(DOCS)
            assert is_shown and found.relative_to(DOCS).parts[0] != "examples", f"{name}: {target}"


def make_docs(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command of `make docs` with further arguments."""
    for module in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(module) is None:
            pytest.skip("the extra `docs` is not installed")
    found = re.search(r"/bin/python (-m mkdocs .*)", (ROOT / "Makefile").read_text())
    assert found, "the Makefile does not run mkdocs"
    return subprocess.run(
        [sys.executable, *found[1].split(), *arguments],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("[page](index.md#here)", ""),
        ("[page](nowhere.md)", "'nowhere.md'"),
        ("[page](index.md#nowhere)", "'index.md#nowhere'"),
        ("[page](folder)", "unrecognized relative link 'folder'"),
    ],
)
def test_a_warning_fails_make_docs(text: str, warning: str, tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Page\n\n## Here\n\n{text}\n")
    if not warning:
        (pages / "adr").mkdir()
        (pages / "adr" / "0001-a.md").write_text("# Decision\n")
    config = tmp_path / "mkdocs.yml"
    config.write_text(
        f"INHERIT: {ROOT}/mkdocs.yml\ndocs_dir: pages\nnav: [index.md]\nplugins: []\nhooks: []\n"
    )
    done = make_docs("-f", str(config), "-d", str(tmp_path / "site"))
    if not warning:
        assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
        return
    assert done.returncode == 1 and warning in done.stdout, done.stdout
    assert "Aborted with 1 warnings in strict mode!" in done.stdout


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_has_a_search_index(tmp_path: Path) -> None:
    done = make_docs("-d", str(tmp_path))
    assert done.returncode == 0 and "WARNING" not in done.stdout, done.stdout
    assert "micro-batches" in (tmp_path / "search" / "search_index.json").read_text()
    layers = (tmp_path / "reference" / "layers.html").read_text()
    assert 'id="tekso.framework.layer.Layer.fprop"' in layers
    for page in tmp_path.rglob("*.html"):  # works without a network
        hosts = re.findall(
            r"<(?:link|script|img)[^>]*(?:src|href)=\"?(https?://[^\" >]+)", page.read_text()
        )
        assert not hosts, f"{page.name} loads {hosts[0]}"
