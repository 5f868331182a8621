"""Writes docs/catalogue.md, the list of classes for experiments, from their docstrings.

    python -m tekso.tools.catalogue > docs/catalogue.md

The page contains every public class with Params, grouped by base class.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence

from tekso.framework.params import REQUIRED, Configurable, Field, Params
from tekso.framework.params.types import type_name
from tekso.framework.run.quiet_tensorflow import quiet

_PACKAGES = ("tekso.framework", "tekso.models", "tekso.tasks")

_SECTIONS = (
    ("Tasks", "tekso.framework.task:Task", ""),
    ("Models", "tekso.framework.layer:Layer", r"tekso\.models\.\w+$"),
    ("Layers", "tekso.framework.layer:Layer", ""),
    ("Initializers", "tekso.framework.initializers:Initializer", ""),
    ("Inputs", "tekso.framework.input.input:Input", ""),
    ("Text, pairs, images and records", "tekso.framework.input.sources:Source", ""),
    ("Tokenizers", "tekso.framework.input.tokenizers:Tokenizer", ""),
    ("Optimizers", "tekso.framework.optimizers.optimizer:Optimizer", ""),
    ("Schedules", "tekso.framework.schedules:Schedule", ""),
    ("Learners", "tekso.framework.learning_step:LearnerBase", ""),
    ("Searches", "tekso.models.decoding.search:Search", ""),
    ("Executions", "tekso.framework.execution.base:Execution", ""),
    ("Schedules of a pipeline", "tekso.framework.execution.pipeline.schedule:PipelineSchedule", ""),
    ("Other parts", "tekso.framework.params.configurable:Configurable", ""),
)
"""Sections: title, "module:Class" of the base class, regular expression for the module name.

A class is listed in the first section that matches."""

_INTRODUCTION = """\
# Catalogue

The layers, inputs, optimizers, schedules and other classes that an experiment can be made of. This
page is generated from their docstrings: `make catalogue`. `tekso-trainer --list` prints the
experiments, and `--mode=inspect_params` every field of one of them.

The Params of a class have the fields of its table and those of its bases. "required" is a field
without a default; many of these are filled in by the layer or the input around it.
"""


def main(argv: Sequence[str]) -> int:
    """Prints the page; returns the exit code."""
    if len(argv) > 1:
        print(f"catalogue takes no arguments, got {' '.join(argv[1:])}", file=sys.stderr)
        return 2
    print(page(), end="")
    return 0


def page() -> str:
    """Returns the text of docs/catalogue.md."""
    lines = [_INTRODUCTION]
    sections = _by_section()
    lines += [f"- [{title}](#{_anchor(title)})" for title in sections]
    for title, members in sections.items():
        lines += ["", f"## {title}", "", *_overview(members)]
        for member in members:
            lines += ["", *_entry(member)]
    return "\n".join(lines) + "\n"


def classes() -> list[type[Configurable]]:
    """Returns the public classes with Params of the framework, the models and the tasks."""
    with quiet():
        importlib.import_module("tensorflow")
    for name in _PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
            importlib.import_module(module.name)
    found = {_name(kind): kind for kind in _derived(Configurable) if not _is_private(kind)}
    return [found[name] for name in sorted(found)]


def _derived(base: type[Configurable]) -> Iterator[type[Configurable]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith(tuple(f"{package}." for package in _PACKAGES)):
            yield kind
            yield from _derived(kind)


def _is_private(kind: type) -> bool:
    return any(part.startswith("_") for part in _name(kind).replace(":", ".").split("."))


def _by_section() -> dict[str, list[type[Configurable]]]:
    """Returns {section: its classes, sorted by module, base classes first}."""
    kinds = classes()
    everything: list[type] = [Configurable, *kinds]
    loaded = {_name(kind): kind for kind in everything}
    sections: dict[str, list[type[Configurable]]] = {title: [] for title, *_ in _SECTIONS}
    for kind in sorted(kinds, key=lambda kind: (kind.__module__, len(kind.__mro__), kind.__name__)):
        title = next(
            title
            for title, base, pattern in _SECTIONS
            if issubclass(kind, loaded[base]) and re.match(pattern, kind.__module__)
        )
        sections[title].append(kind)
    return sections


def _overview(members: list[type[Configurable]]) -> list[str]:
    rows = [f"| {kind.__name__} | {_cell(_paragraphs(kind)[0])} |" for kind in members]
    return ["| class | |", "|---|---|", *rows]


def _paragraphs(kind: type) -> list[str]:
    return re.split(r"\n\s*\n", inspect.getdoc(kind) or "")


def _entry(kind: type[Configurable]) -> list[str]:
    path = kind.__module__.removeprefix("tekso.").replace(".", "/")
    lines = [f"### {kind.__name__}", "", f"[{kind.__module__}](../{path}.py)", ""]
    summary, *others = _paragraphs(kind)
    lines += [" ".join(summary.split())]
    for paragraph in others:
        if paragraph.startswith("    "):  # a formula or code, which Markdown also indents
            lines += ["", paragraph]
        elif shapes := re.search(r"^Shapes:\n((?: .*\n?)+)", paragraph, re.MULTILINE):
            lines += ["", "```text", textwrap.dedent(shapes[1].rstrip()), "```"]
    own = _own_fields(kind)
    if own:
        lines += ["", "| field | default | meaning |", "|---|---|---|"]
        lines += [_row(field) for field in own.values()]
    bases = [base.__name__ for base in kind.__mro__[1:] if _own_fields(base)]
    if bases:
        lines += ["", f"And the fields of {', '.join(f'`{base}`' for base in bases)}."]
    return lines


def _own_fields(kind: type) -> dict[str, Field]:
    """Returns the fields of the Params class of a class, without those of its base classes."""
    params = vars(kind).get("Params")
    inherited = {name for base in kind.__bases__ for name in _all_fields(base)}
    own = {} if params is None else vars(params).get("_own_fields", {})
    others = {n: f for n, f in _all_fields(kind).items() if n not in own and n not in inherited}
    return {**others, **own}


def _all_fields(kind: type) -> dict[str, Field]:
    params = getattr(kind, "Params", None)
    return {} if params is None else dict(params._fields)


def _row(field: Field) -> str:
    name = f"`{field.name}`: `{type_name(field.type)}`"
    return f"| {_cell(name)} | {_cell(_default(field))} | {_cell(field.doc)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(field: Field) -> str:
    if field.default is REQUIRED:
        return "required"
    if isinstance(field.default, Params):
        return f"`{type_name(type(field.default))}`"
    return f"`{field.default!r}`"


def _anchor(title: str) -> str:
    return title.lower().replace(",", "").replace(" ", "-")


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


if __name__ == "__main__":
    sys.exit(main(sys.argv))
