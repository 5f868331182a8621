"""Shows the Params tree and the weight table of an experiment, without running it.

Weights are counted from their specs, so models of any size can be inspected without allocation.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tekso.framework import files, foreign_variables, task_results
from tekso.framework.execution.base import signature_of
from tekso.framework.experiment import Tree
from tekso.framework.input.errors import InputError
from tekso.framework.input.task_inputs import KnownTasks, named
from tekso.framework.input.unread import UnreadInput
from tekso.framework.params import REQUIRED, Params
from tekso.framework.params import tree as params_tree
from tekso.framework.params.literals import write as literal
from tekso.framework.params.types import type_name
from tekso.framework.run import results, stored_sizes
from tekso.framework.run.report.lines import WIDTH
from tekso.framework.signature import Signature
from tekso.framework.tables import table
from tekso.framework.task import Task
from tekso.framework.units import bytes_text

_INDENT = "  "
_VALUE_WIDTH = 24  # columns
_INDENT_DOC, _MOST_INDENT = 6, 44


def params_record(model: str, tree: Tree.Params) -> dict[str, Any]:
    """Returns every value with its type, doc and origin, as JSON data."""
    rows: list[dict[str, Any]] = []

    def add(path: str, value: Any, field: Any) -> None:
        rows.append(
            {
                "path": path,
                "value": _shown(value),
                "type": type_name(field.type),
                "doc": field.doc,
                "origin": tree.origin(path),
            }
        )

    tree.visit(add)
    owners = {path: _owner(node) for path, node in _nodes(tree)}
    return {"model": model, "owners": owners, "params": rows}


def params_text(record: Mapping[str, Any]) -> str:
    """Returns the tree as text: a heading for each node, then its values, origins and docs."""
    lines = [record["model"]]
    by_node: dict[str, list[Mapping[str, Any]]] = {path: [] for path in record["owners"]}
    for row in record["params"]:
        above = [p for p in by_node if not p or row["path"].startswith((p + ".", p + "["))]
        by_node[max(above, key=len)].append(row)
    for path, rows in by_node.items():
        lines += ["", f"{path or '.'}  ({record['owners'][path]})"]
        names = [row["path"][len(path) :].lstrip(".") for row in rows]
        name_width = max(map(len, names), default=0)
        value_width = min(_VALUE_WIDTH, max((len(row["value"]) for row in rows), default=0))
        for name, row in zip(names, rows, strict=True):
            left = f"{_INDENT}{name:<{name_width}} = {row['value']:<{value_width}}  # "
            origin = f"[{row['origin']}] " if row["origin"] != "default" else ""
            indent = " " * (_INDENT_DOC if len(left) > _MOST_INDENT else len(left) - 2) + "# "
            text = " ".join(f"{origin}{row['doc']}".split())
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=left, subsequent_indent=indent, break_long_words=False
            )
    return "\n".join(lines)


def task_of(tree: Tree.Params, *, assets_dir: str | None = None) -> Any:
    """Builds the task of a tree without its data.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of a run, if there was one. Sizes that only its data
        determines are those of its newest checkpoint.

    Raises:
      ValueError: a size, such as that of the vocabulary, is not set, and only the data determines
        it.
    """
    input: Any = UnreadInput(tree.input)
    if assets_dir is not None:
        input = _known(tree, assets_dir) or input
    try:
        params = task_results.complete(tree.task, input)
    except ValueError:  # an open size that only the data, or a checkpoint, determines
        if assets_dir is None or (filled := stored_sizes.filled(tree.task, assets_dir)) is None:
            raise
        params = task_results.complete(filled, input)
    task = params.instantiate()
    foreign_variables.check(task)
    return task


def known_input(tree: Tree.Params, assets_dir: str) -> Any:
    """Returns what is known of the input without its data, or else builds the training input.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of the run.

    Raises:
      InputError: the data is needed, but cannot be read.
      OSError: the data is needed, but a file is missing.
    """
    known = _known(tree, assets_dir)
    if known is not None:
        return known
    return tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir)


def input_if_readable(tree: Tree.Params, assets_dir: str) -> Any:
    """Returns `known_input`; if its data cannot be read, returns what the Params determine.

    The latter suffices only if the task has no open sizes; otherwise the error is raised.
    """
    try:
        return known_input(tree, assets_dir)
    except (InputError, OSError):
        if any(value is REQUIRED for _, value, _ in params_tree.walk(tree.task)):
            raise
        return UnreadInput(tree.input)


def _known(tree: Tree.Params, assets_dir: str) -> Any:
    with contextlib.suppress(InputError, OSError):  # the run did not write its assets
        return tree.input.owner.known(tree.input, assets_dir=assets_dir)
    return None


def batch_of(tree: Tree.Params, *, assets_dir: str | None = None) -> Signature:
    """Returns shape and dtype of every array of the largest training batch.

    The data is read only if the Params do not determine them.

    Args:
      tree: the Params.
      assets_dir: folder of the assets of a run, if there was one.
    """
    known: Any = tree.input.owner.signature(tree.input)
    if known is not None:
        found: Signature = known
        return found
    input = tree.input.instantiate(seed=tree.run.seed, assets_dir=assets_dir)
    return signature_of(input.largest_batch())


def known_parts(
    tree: Tree.Params, assets_dir: str, *, one_task: str | None
) -> tuple[Any, Signature]:
    """Returns `known_input` and `batch_of`.

    Args:
      tree: the Params, whose sizes are complete.
      assets_dir: folder of the assets of the run.
      one_task: name of a task of several. Data of others is not read, and the batch has none.
    """
    if one_task is None:
        return known_input(tree, assets_dir), batch_of(tree, assets_dir=assets_dir)
    tasks: Any = tree.task
    inputs: Any = tree.input
    own = tree.copy().set(task=tasks.tasks[one_task], input=inputs.inputs[one_task])
    folder = files.join(assets_dir, one_task)
    known = {name: UnreadInput(params) for name, params in inputs.inputs.items()}
    known[one_task] = known_input(own, folder)
    return KnownTasks(inputs, known), named(one_task, batch_of(own, assets_dir=folder))


def model_record(model: str, task: Task) -> dict[str, Any]:
    """Returns the weight table of a task and its sums, as JSON data."""
    specs = list(task.specs().values())
    return {
        "model": model,
        "total_weights": sum(spec.size for spec in specs),
        "trainable_weights": sum(spec.size for spec in specs if spec.trainable),
        "total_bytes": sum(spec.size_bytes for spec in specs),
        "parts": [
            {"part": part, "weights": count, "tensors": tensors}
            for part, (count, tensors) in _parts(specs).items()
        ],
        "shared": [part._asdict() for part in getattr(task, "shared_parts", ())],
        "weights": [
            {
                "path": spec.path,
                "shape": list(spec.shape),
                "dims": list(spec.dims),
                "size": spec.size,
                "dtype": spec.dtype,
                "trainable": spec.trainable,
            }
            for spec in specs
        ],
    }


def model_text(record: Mapping[str, Any], *, max_rows: int = 400, width: int | None = None) -> str:
    """Returns the weight table as text, for a terminal of `width` columns if given."""
    weights = [
        (
            weight["path"],
            " × ".join(map(str, weight["shape"])) or "scalar",
            ", ".join(dim or "-" for dim in weight["dims"]),
            f"{weight['size']:,}",
            weight["dtype"] + ("" if weight["trainable"] else ", not trained"),
        )
        for weight in record["weights"]
    ]
    lines = [record["model"], ""]
    half, left_out = max_rows // 2, len(weights) - max_rows
    shown = weights if left_out <= 0 else weights[:half] + weights[-half:]
    noted = f"… {left_out} more rows; --format=json has all of them …"
    lines += table(
        ("weight", "shape", "dims", "size", "dtype"), shown, right=(3,), width=width,
        remarks={half - 1: [noted]} if left_out > 0 else None,
    )  # fmt: skip
    parts = [
        (part["part"], f"{part['weights']:,}", _share(part["weights"], record["total_weights"]),
         str(part["tensors"]))
        for part in record["parts"]
    ]  # fmt: skip
    header = ("part", "weights", "share", "tensors")
    lines += ["", *table(header, parts, right=(1, 2, 3), width=width), ""]
    if record["shared"]:
        shared = [
            (part["path"], part["stored_at"], f"{part['weights']:,}", str(part["tensors"]))
            for part in record["shared"]
        ]
        header = ("shared part", "stored at", "weights", "tensors")
        lines += [*table(header, shared, right=(2, 3), width=width), ""]
    fixed = record["total_weights"] - record["trainable_weights"]
    lines.append(
        f"total: {record['total_weights']:,} weights in {len(weights)} tensors, "
        + bytes_text(record["total_bytes"])
        + (f"; {fixed:,} of them are not trained" if fixed else "")
    )
    return "\n".join(lines)


def list_record(entry: Any) -> dict[str, Any]:
    """Returns the entry of a registered experiment in the list of experiments."""
    record = {
        "key": entry.key,
        "task": None,
        "total_weights": None,
        "summary": entry.summary,
        "file": relative(entry.file),
        "line": entry.line,
        "result": None,
        "result_is_current": None,
    }
    try:
        record["result"] = results.read(entry.key, entry.file)
    except results.NoResultError as error:
        record["result_problem"] = str(error)
    try:
        tree = entry.cls().tree()
        record["task"] = type_name(tree.task.owner)
        if record["result"] is not None:
            record["result_is_current"] = results.is_current(record["result"], tree)
        record["total_weights"] = sum(spec.size for spec in task_of(tree).specs().values())
    except Exception as error:  # one failing experiment must not hide the others
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        record["problem"] = f"{kind}{error}".splitlines()[0]
    return record


def list_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a list of experiments as text."""
    lines = []
    for row in rows:
        total = row["total_weights"]
        count = f"{total:,} weights" if total is not None else f"- weights: {_reason(row)}"
        lines.append(f"{row['key']}  ({row['task'] or '-'}, {count})")
        lines.append(f"{_INDENT}{row['summary']}")
        lines.append(f"{_INDENT}{row['file']}:{row['line']}")
        if "result_problem" in row:
            lines.append(f"{_INDENT}measured: {row['result_problem']}")
        if row["result"] is not None:
            old = "" if row["result_is_current"] else " (before its Params changed)"
            text = f"measured{old}: {results.figures(row['result'])}; {results.cost(row['result'])}"
            if changes := row["result"]["changes"]:
                text += f" ({'; '.join(changes)})"
            lines += textwrap.wrap(
                text, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT * 2
            )
    return "\n".join(lines)


_PLACE = re.compile(r" \(\S+\.py:\d+\)")


def _reason(row: Mapping[str, Any]) -> str:
    """Returns a short reason why the weights were not counted; --format=json has all of it."""
    first = re.match(r"(?:[\w.]+: )*[^:;]+", _PLACE.sub("", row.get("problem", "")))
    return textwrap.shorten(first[0] if first else "unknown", 80, placeholder=" …")


def relative(path: str) -> str:
    """Returns a path relative to the working directory, if it is inside of it."""
    path = os.path.realpath(path)
    inside = os.path.relpath(path)
    return path if inside.startswith("..") else inside


def _nodes(tree: Params) -> Iterable[tuple[str, Params]]:
    yield "", tree
    for path, value, _ in params_tree.walk(tree):
        if isinstance(value, Params):
            yield path, value


def _owner(node: Params) -> str:
    owner = type(node).owner
    if owner is None:
        return type_name(type(node))
    return f"{owner.__module__}:{owner.__qualname__}"


def _shown(value: Any) -> str:
    try:
        return literal(value)
    except TypeError:
        return repr(value)


def _parts(specs: Sequence[Any]) -> dict[str, tuple[int, int]]:
    """Returns {part: (weights, tensors)}; a part is the first level below the common prefix."""
    paths = [spec.path.split("/") for spec in specs]
    depth = 0
    while paths and all(len(p) > depth + 1 for p in paths) and len({p[depth] for p in paths}) == 1:
        depth += 1
    parts: dict[str, tuple[int, int]] = {}
    for path, spec in zip(paths, specs, strict=True):
        name = "/".join(path[: depth + 1])
        count, tensors = parts.get(name, (0, 0))
        parts[name] = (count + spec.size, tensors + 1)
    return parts


def _share(count: int, total: int) -> str:
    return f"{100 * count / total:.1f}%" if total else "-"
