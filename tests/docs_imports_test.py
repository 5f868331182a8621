"""The programs of the documents import a module of Tekso before TensorFlow."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ON_PURPOSE = ("session.py",)
"""Programs that use TensorFlow before, to show that this is possible."""


def programs() -> list[tuple[Path, str, str]]:
    """Returns the document, the name and the code of every Python file in the documents."""
    block = re.compile(r"^```python\n# (\S+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    texts = [(document, document.read_text()) for document in DOCUMENTS]
    return [(d, *found.groups()) for d, text in texts for found in block.finditer(text)]


PROGRAMS = programs()
MODULES = {name.removesuffix(".py"): code for _, name, code in PROGRAMS}
STARTED = [
    (name, code)
    for document, name, code in PROGRAMS
    if re.search(rf"^python {re.escape(name)}", document.read_text(), re.MULTILINE)
]


def imported(code: str) -> Iterator[str]:
    """Yields the packages outside the documents that a program imports, in order."""
    for node in ast.parse(code).body:
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name in MODULES:
                yield from imported(MODULES[name])
            else:
                yield "import tekso alone" if name == "tekso" else name.partition(".")[0]


@pytest.mark.parametrize(("name", "code"), STARTED, ids=[name for name, _ in STARTED])
def test_a_program_imports_a_module_of_tekso_before_tensorflow(name: str, code: str) -> None:
    packages = list(imported(code))
    if "tekso" in packages:
        before = packages[: packages.index("tekso")]
        assert bool({"tensorflow", "keras"} & set(before)) == (name in ON_PURPOSE)


def test_a_file_name_is_used_once_in_a_document() -> None:
    names = [(document.name, name) for document, name, _ in PROGRAMS]
    assert sorted(names) == sorted(set(names))
