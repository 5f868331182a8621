"""An execution imports only what it uses: the lines of `framework/execution/` that it loads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tekso.framework import execution

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = "tekso.framework.execution"


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split(".")[1:])
    files = [path.with_suffix(".py"), path / "__init__.py"]
    return next((file for file in files if file.is_file()), None)


def imports(node: ast.AST) -> Iterator[str]:
    """Yields the modules, and perhaps modules, that a file imports at run time, in any function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.module is not None
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        else:
            yield from imports(child)


def closure(start: str) -> dict[str, Path]:
    """Returns the modules of the package that importing a module loads, packages among them."""
    found: dict[str, Path] = {}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        file = file_of(module)
        if module in found or file is None or not f"{module}.".startswith(f"{PACKAGE}."):
            continue
        found[module] = file
        waiting += [module.rpartition(".")[0], *imports(ast.parse(file.read_text()))]
    return found


@pytest.mark.parametrize(
    ("name", "most", "unused"),
    [
        ("data_parallel", 2230, ("mesh", "pipeline", "parameter_server")),
        ("pipelined", 5250, ("mesh", "spmd")),
    ],
)
def test_an_execution_loads_only_what_it_uses(
    name: str, most: int, unused: tuple[str, ...]
) -> None:
    found = closure(f"{PACKAGE}.{name}")
    assert not [m for m in found if m != f"{PACKAGE}.{name}" and any(u in m for u in unused)]
    lines = {module: len(file.read_text().splitlines()) for module, file in found.items()}
    assert sum(lines.values()) < most, lines


def lines_of(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def test_the_document_has_the_counts_of_the_code() -> None:
    text = (ROOT / "docs" / "adr" / "0028-the-size-of-the-execution.md").read_text()
    begin, end = text.index("| planning |"), text.index("## Reasons")
    table = text[text.index("| execution |") : begin].splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line]

    def number(cell: str) -> int:
        return int(re.split(r"[ ,](?!\d)", cell)[0].replace(",", ""))

    all_lines = lines_of((ROOT / "framework" / "execution").rglob("*.py"))
    assert sum(number(own) for _, own, _ in rows) == pytest.approx(all_lines, rel=0.02)
    imported = {name.strip("`"): number(cell) for name, _, cell in rows if cell}
    imported["parameter_servers"] = imported.pop("… with parameter servers")
    assert imported.keys() == {*execution.EXECUTIONS, "parameter_servers"}
    for name, stated in imported.items():
        found = lines_of(closure(f"{PACKAGE}.{name}").values())
        assert stated == pytest.approx(found, rel=0.02), name
    planning = [row.split("|")[2].strip() for row in re.findall(r"^\| .*", text[begin:end], re.M)]
    all_lines = lines_of((ROOT / "framework" / "planning").rglob("*.py"))
    assert sum(map(number, planning[1:])) == pytest.approx(all_lines, rel=0.02)


def test_the_count_follows_imports() -> None:
    found = closure(f"{PACKAGE}.spmd_pipelined")
    assert {
        PACKAGE,
        f"{PACKAGE}.mesh.layouts",
        f"{PACKAGE}.mesh",
        f"{PACKAGE}.base",
    } <= found.keys()


@pytest.mark.parametrize(("name", "kind"), execution.EXECUTIONS.items())
def test_an_execution_is_imported_by_the_name_of_its_class(name: str, kind: str) -> None:
    assert getattr(execution, kind) is execution.by_name(name)
    assert execution.by_name(name).__module__ == f"{PACKAGE}.{name}"


def test_all_public_names_can_be_imported() -> None:
    for name in execution.__all__:
        assert getattr(execution, name) is not None
    with pytest.raises(AttributeError, match=r"has no attribute 'DataParalel'"):
        execution.DataParalel  # type: ignore[attr-defined]  # noqa: B018
