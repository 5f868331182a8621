"""Tests of the code itself: style, size of files and functions, imports, names."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("framework", "models", "tasks", "params", "tools")
# Other files in a checkout belong to the user: runs/, or a package from README.md.
LINTED = (*PACKAGES, "benchmarks", "tests", "conftest.py", "setup.py")

MAX_LINES = 400
MAX_FUNCTION_LINES = 80
LONGER_FILES = {  # each with the reason
    "framework/params/params.py",  # one class: what a node of the tree can do
    "models/layers/attention.py",  # one layer: training, decoding and a cache of keys and values
}


def sources(root: Path = ROOT) -> list[Path]:
    """Returns the Python files of a checkout, relative to it."""
    paths = [root / name for name in LINTED]
    found = [path for path in paths if path.suffix] + [
        path for folder in paths if not folder.suffix for path in sorted(folder.rglob("*.py"))
    ]
    return [path.relative_to(root) for path in found]


def too_long(root: Path = ROOT) -> dict[str, int]:
    """Returns {file: number of lines} for files of Tekso with more than MAX_LINES lines."""
    return {
        str(path): lines
        for path in sources(root)
        if path.parts[0] in (*PACKAGES, "benchmarks")
        and (lines := (root / path).read_text().count("\n")) > MAX_LINES
    }


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def tool(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def style(root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return run(tool("ruff"), "check", "--no-cache", "--output-format=concise", *LINTED, cwd=root)


def test_style() -> None:
    result = style()
    assert result.returncode == 0, f"\n{result.stdout}{result.stderr}"


def test_files_of_packages_are_checked_wherever_the_checkout_lies_and_no_others(
    tmp_path: Path,
) -> None:
    root, bad = tmp_path / "tests" / "checkout", "import os\n"
    for name in (*PACKAGES, "benchmarks", "tests", "my_lab", "runs/a"):
        (root / name).mkdir(parents=True)
        (root / name / "__init__.py").write_text('"""Nothing."""\n')
    for name in ("conftest.py", "setup.py"):
        (root / name).write_text('"""Nothing."""\n')
    shutil.copy(ROOT / "pyproject.toml", root)
    others = [root / "my_lab" / "layers.py", root / "runs" / "a" / "b.py", root / "try.py"]
    for path in others:
        path.write_text(bad + "\n" * MAX_LINES)
    assert not any((root / path).samefile(other) for path in sources(root) for other in others)
    result = style(root)
    assert result.returncode == 0 and too_long(root) == {}, result.stdout + result.stderr

    (root / "models" / "layers.py").write_text(bad + "\n" * MAX_LINES)
    result = style(root)
    assert result.returncode == 1 and "models/layers.py:1:8: F401" in result.stdout
    assert too_long(root) == {"models/layers.py": MAX_LINES + 1}


@pytest.mark.parametrize("name", ["experiment", "files", "params", "registry"])
def test_module_does_not_load_tensorflow(name: str) -> None:
    code = f"import sys, tekso.framework.{name}; sys.exit('tensorflow' in sys.modules)"
    assert run(sys.executable, "-c", code).returncode == 0


def test_no_file_is_too_long() -> None:
    assert len(sources()) > 300
    long = too_long()
    unexpected = {name: lines for name, lines in long.items() if name not in LONGER_FILES}
    assert not unexpected, f"longer than {MAX_LINES} lines: {unexpected}"
    assert not LONGER_FILES - set(long), "a name in LONGER_FILES is no longer needed"


@dataclasses.dataclass
class Module:
    """What the tests of the sources read from a module, which is parsed once for all of them."""

    function_lines: dict[str, int]
    untyped_seams: list[str]
    classes: list[str]


def module(text: str) -> Module:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return Module(function_lines(nodes), untyped_seams(nodes), classes)


@pytest.fixture(scope="module")
def modules() -> dict[Path, Module]:
    """Returns the modules of Tekso and of the benchmarks by their paths."""
    paths = [path for path in sources() if path.parts[0] in (*PACKAGES, "benchmarks")]
    return {path: module((ROOT / path).read_text()) for path in paths}


def function_lines(nodes: list[ast.AST]) -> dict[str, int]:
    """Returns {line and name of each function: its number of lines}."""
    return {
        f"{node.lineno}: {node.name}": node.end_lineno - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }


def test_no_function_is_too_long(modules: dict[Path, Module]) -> None:
    found = {
        f"{path}:{place}": lines
        for path, read in modules.items()
        for place, lines in read.function_lines.items()
    }
    assert len(found) > 3000
    long = {place: lines for place, lines in found.items() if lines > MAX_FUNCTION_LINES}
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines: {long}"
    text = "def f():\n    return (\n        1\n    )\n"
    assert module(text).function_lines == {"1: f": 4}


def import_contracts(*options: str) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on this checkout."""
    return subprocess.run(
        [tool("lint-imports"), "--no-cache", *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / ".typing")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_import_contracts_are_kept() -> None:
    result = import_contracts()
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 broken." in result.stdout


def test_a_broken_import_contract_is_found(tmp_path: Path) -> None:
    config = tmp_path / "contracts.toml"
    config.write_text(
        '[tool.importlinter]\nroot_packages = ["tekso.framework"]\n'
        '[[tool.importlinter.contracts]]\nname = "costs"\ntype = "forbidden"\n'
        'source_modules = ["tekso.framework.execution.pipeline"]\n'
        'forbidden_modules = ["tekso.framework.costs"]\n'
    )
    result = import_contracts(f"--config={config}")
    assert result.returncode == 1 and "costs BROKEN" in result.stdout, result.stdout


def import_cycles(imports: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Returns the groups of modules that import each other (strongly connected components)."""
    found: list[list[str]] = []
    reached: dict[str, set[str]] = {}

    def reach(start: str) -> set[str]:
        seen, stack = set(), [start]
        while stack:
            for module in imports[stack.pop()]:
                if module not in seen:
                    seen.add(module)
                    stack.append(module)
        return seen

    for module in imports:
        reached[module] = reach(module)
    for module in sorted(imports):
        group = sorted(m for m in reached[module] if module in reached[m])
        if group and group not in found:
            found.append(group)
    return found


def test_no_modules_import_each_other() -> None:
    packages = [f"tekso.{package}" for package in PACKAGES]
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=False)
    imports = {m: graph.find_modules_directly_imported_by(m) for m in graph.modules}
    assert len(imports) > 200
    assert import_cycles(imports) == []
    assert import_cycles({"a": ["b"], "b": ["a"], "c": ["a"]}) == [["a", "b"]]


SEAMS = {
    *("batch", "ctx", "example_offset", "execution", "input", "layer", "learner", "optimizer"),
    *("program", "schedule", "spec", "step", "task", "tokenizer"),
}
"""Names of arguments whose type says what they are."""

SEAM_CLASSES = {
    *("Execution", "ExecutionProgram", "Input", "Learner", "LearnerBase", "Optimizer"),
    *("PipelineSchedule", "Program", "Schedule", "StageBackend", "Step", "StepContext", "Task"),
}
"""Classes whose public methods name the types of all arguments and of the result."""

ANY_AT_SEAMS = {
    "ExecutionProgram.call: result": "what the function of the caller returns",
    "ExecutionProgram.trace: result": "what the function of the caller returns, as types",
    "Program.call: result": "what the function of the caller returns",
    "StageBackend.call: result": "what the function returns",
    "StageBackend.send: result": "each kind of backend has its form",
    "StageBackend.take: sent": "the result of `send`",
    "Step.decoded: result": "what the function of the caller returns",
}


def _is_any(annotation: ast.expr | None) -> bool:
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def _arguments(function: ast.FunctionDef | ast.Lambda) -> list[ast.arg]:
    given = function.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs]


def untyped_seams(nodes: list[ast.AST]) -> list[str]:
    """Returns the arguments and results in a module that should have another type than Any."""
    found = [
        f"{argument.lineno}: {argument.arg}"
        for function in nodes
        if isinstance(function, ast.FunctionDef | ast.Lambda)
        for argument in _arguments(function)
        if argument.arg in SEAMS and _is_any(argument.annotation)
    ]
    for kind in nodes:
        if isinstance(kind, ast.ClassDef) and kind.name in SEAM_CLASSES:
            for method in kind.body:
                if not isinstance(method, ast.FunctionDef):
                    continue
                if method.name[0] != "_" or method.name in ("__init__", "__call__"):
                    names = [a.arg for a in _arguments(method) if _is_any(a.annotation)]
                    names += ["result"] if _is_any(method.returns) else []
                    found += [f"{kind.name}.{method.name}: {name}" for name in names]
    return found


def test_seams_name_their_types(modules: dict[Path, Module]) -> None:
    found = {p: read.untyped_seams for p, read in modules.items() if p.parts[0] in PACKAGES}
    flat = [one for each in found.values() for one in each]
    new = {p: extra for p, each in found.items() if (extra := set(each) - ANY_AT_SEAMS.keys())}
    assert not new, new
    assert not ANY_AT_SEAMS.keys() - set(flat), "a name in ANY_AT_SEAMS is no longer needed"


def test_an_untyped_seam_is_found() -> None:
    text = """
class Step:
    def loss(self, own: Any, *, batch: Any) -> Any: ...
    def _inner(self, own: Any) -> int: ...
class Other:
    def loss(self, own: Any, task: Task) -> Any: ...
"""
    assert module(text).untyped_seams == [
        "3: batch",
        "Step.loss: own",
        "Step.loss: batch",
        "Step.loss: result",
    ]


SAME_NAMES = {
    "Constant": "an initializer and a schedule, each used by the name of its module",
    "Linear": "a layer, and a schedule that is used by the name of its module",
}


def test_no_two_classes_have_one_name(modules: dict[Path, Module]) -> None:
    homes: dict[str, list[str]] = {}
    for path, read in modules.items():
        if path.parts[0] in PACKAGES and path.parts[0] != "params":  # experiments are registered
            for name in read.classes:
                if not name.startswith("_"):
                    homes.setdefault(name, []).append(str(path))
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert set(twice) == set(SAME_NAMES), twice


def test_no_module_is_named_after_nothing() -> None:
    names = {"utils", "util", "helpers", "common", "misc"}
    found = [str(path) for path in sources() if path.stem in names]
    assert not found, f"name the idea that the module holds: {found}"


def test_nothing_is_asserted_outside_tests() -> None:
    # Raise instead: `python -O` removes an assert, and its message does not help a user.
    found = [
        f"{path}:{number}"
        for path in sources()
        if path.parts[0] in (*PACKAGES, "benchmarks")
        for number, line in enumerate((ROOT / path).read_text().splitlines(), start=1)
        if line.lstrip().startswith(("assert ", "assert("))
    ]
    assert not found, found


PLAIN_LOOPS = {  # their bodies call no layer
    "framework/costs/machine_probes.py",
    "framework/primitives/recurrence.py",
    "framework/run/step_probes.py",
    "framework/while_loops.py",
    "models/decoding/paths.py",
    "models/detection/suppression.py",
}


def test_loops_that_call_layers_are_those_of_while_loops() -> None:
    # In the body of a plain tf.while_loop, a layer must not add one weight twice to one result.
    paths = [path for path in sources() if path.parts[0] in PACKAGES]
    call = re.compile(r"(=|return) tf\.while_loop\(")  # not in texts
    found = {str(path) for path in paths if call.search((ROOT / path).read_text())}
    assert found == PLAIN_LOOPS, "call tekso.framework.while_loops.while_loop"


def test_no_test_waits_for_a_process_for_ever() -> None:
    texts = {p: (ROOT / p).read_text() for p in sources() if p.parts[0] == "tests"}
    calls = [
        (f"{path}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path, text in texts.items()
        if "subprocess." in text or ".communicate" in text  # or else it is not parsed
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and _waits_for_a_process(node.func)
    ]
    assert len(calls) > 10
    without = [place for place, keywords in calls if "timeout" not in keywords]
    assert not without, f"give a timeout: {without}"


def _waits_for_a_process(function: ast.expr) -> bool:
    name = ast.unparse(function)
    runs = ("run", "call", "check_call", "check_output")
    return name in {f"subprocess.{each}" for each in runs} or name.endswith(".communicate")
