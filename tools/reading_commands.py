"""The commands of tekso-ckpt that only read. They import neither TensorFlow nor the experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tekso.framework.counting import counted
from tekso.framework.exit_codes import ExitCode
from tekso.framework.run.report.lines import number
from tekso.framework.tables import table, terminal_width
from tekso.framework.units import bytes_text
from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # they import NumPy, which takes a while
    from tekso.framework.run.stored_state import StoredState
    from tekso.framework.run.stored_tensors import TensorInFiles


class NothingFoundError(Exception):
    """No tensor matches."""


class Found(NamedTuple):
    """What a command found.

    Attributes:
      record: for --format=json.
      text: for a person.
      exit_code: of the command.
    """

    record: Any
    text: str
    exit_code: ExitCode = ExitCode.OK


class Command(NamedTuple):
    """A command that only reads.

    Attributes:
      usage: its arguments.
      counts: the numbers of arguments that it takes.
      run: the function; its arguments are those of the command.
    """

    usage: str
    counts: tuple[int, ...]
    run: Callable[..., Found]


def run(name: str, words: Sequence[str], **options: Any) -> Found:
    """Runs a command.

    Args:
      name: one of COMMANDS.
      words: its arguments.
      options: its flags.

    Raises:
      UsageError: the number of arguments is wrong.
      CheckpointError: a checkpoint cannot be read.
    """
    command = COMMANDS[name]
    if len(words) not in command.counts:
        given = f", given {counted(len(words), 'argument')}: {' '.join(words)}" if words else ""
        raise UsageError(f"{name} takes {command.usage}{given}")
    return command.run(*words, **options)


def verify(path: str) -> Found:
    """Verifies a checkpoint, all checkpoints of a run, or safetensors files."""
    from tekso.framework.run import stored_state, verification
    from tekso.framework.run.checkpoint_errors import DeletedCheckpointError

    found: dict[str, list[str]] = {}
    for one in stored_state.checkpoints_of(path):
        with contextlib.suppress(DeletedCheckpointError):  # by a run in progress
            found[one] = list(verification.problems(stored_state.read_stored(one)))
    lines = [f"{one}: {text}" for one, texts in found.items() for text in texts]
    lines += [f"{one}: good" for one, texts in found.items() if not texts]
    record = [{"path": one, "problems": texts} for one, texts in found.items()]
    code = ExitCode.DAMAGED if any(found.values()) else ExitCode.OK
    return Found(record, "\n".join(lines), code)


def grep(pattern: str, path: str) -> Found:
    """Lists the weights and slots whose paths a regular expression matches."""
    from tekso.framework.run.stored_state import open_stored

    chosen = _expression(pattern)
    stored = open_stored(path)
    found = [t for key, t in sorted(stored.tensors.items()) if chosen.search(key)]
    if not found:
        raise NothingFoundError(_no_match(pattern, stored))
    rows = [_about(tensor, stored) for tensor in found]
    cells = [
        (row["key"], _shape(row["shape"]), ", ".join(d or "-" for d in row["dims"]), row["dtype"],
         bytes_text(row["size_bytes"]))
        for row in rows
    ]  # fmt: skip
    header = ("tensor", "shape", "dims", "dtype", "size")
    lines = table(header, cells, right=(4,), width=terminal_width())
    elements, size_bytes = (sum(row[name] for row in rows) for name in ("size", "size_bytes"))
    lines += ["", f"{elements:,} numbers in {len(rows)} tensors, {bytes_text(size_bytes)}"]
    return Found({"path": stored.path, "tensors": rows}, "\n".join(lines))


def show(path: str) -> Found:
    """Shows what a checkpoint is, with totals by module."""
    from tekso.framework.run.module_totals import module_totals
    from tekso.framework.run.stored_state import open_stored

    stored = open_stored(path)
    about = stored.description
    totals = module_totals(list(stored.tensors.values()))
    lines = [stored.path]
    record: dict[str, Any] = {"path": stored.path}
    if about is not None:
        record |= {
            "model": about.model, "step": about.step, "created": about.created,
            "metrics": dict(about.metrics), "averaged": list(about.averaged),
            "versions": dict(about.versions),
        }  # fmt: skip
        lines = [f"{stored.path}: {about.model}, step {about.step}, written {about.created}"]
        lines += [f"the average of {', '.join(about.averaged)}"] if about.averaged else []
        lines += [f"{name} {number(value)}" for name, value in about.metrics.items()]
    every = totals[0]
    cells = [
        (
            "  " * row.depth + row.module,
            f"{row.weights:,}",
            f"{100 * row.weights / max(every.weights, 1):.1f}%",
            str(row.tensors),
            bytes_text(row.weight_bytes),
            bytes_text(row.slot_bytes),
        )
        for row in totals
    ]
    header = ("module", "weights", "share", "tensors", "size", "slots")
    lines += ["", *table(header, cells, right=(1, 2, 3, 4, 5), width=terminal_width())]
    record["modules"] = [row._asdict() for row in totals]
    return Found(record, "\n".join(lines))


def stats(path: str, pattern: str = "", *, not_finite: bool = False) -> Found:
    """Computes figures of tensors."""
    from tekso.framework.run.stored_state import open_stored
    from tekso.framework.run.stored_tensors import TensorReader
    from tekso.framework.run.tensor_figures import figures

    chosen = _expression(pattern)
    stored = open_stored(path)
    keys = [key for key in sorted(stored.tensors) if chosen.search(key)]
    if not keys:
        raise NothingFoundError(_no_match(pattern, stored))
    rows = []
    with TensorReader() as reader:
        for key in keys:
            tensor = stored.tensors[key]
            found = dataclasses.asdict(figures(tensor, reader))
            if found["not_finite"] or not not_finite:
                rows.append(_about(tensor, stored) | found)
    names = ("mean", "std", "min", "max", "norm")
    cells = [
        (
            row["key"], _shape(row["shape"]), row["dtype"],
            *("-" if row[name] is None else number(row[name]) for name in names),
            f"{row['not_finite']:,}",
        )
        for row in rows
    ]  # fmt: skip
    lines = []
    if rows:
        header = ("tensor", "shape", "dtype", *names, "not finite")
        lines = [*table(header, cells, right=range(3, 9), width=terminal_width()), ""]
    wrong = sum(row["not_finite"] for row in rows)
    lines.append(
        f"{wrong:,} numbers of {sum(row['not_finite'] > 0 for row in rows)} tensors are not finite"
        if wrong
        else f"all numbers of {len(keys)} tensors are finite"
    )
    return Found({"path": stored.path, "tensors": rows}, "\n".join(lines))


def diff(path: str, other: str, pattern: str = "") -> Found:
    """Compares the tensors of two checkpoints or safetensors files."""
    from tekso.framework.run.stored_state import open_stored

    chosen = _expression(pattern)
    both = [open_stored(path), open_stored(other)]
    a, b = ({k: t for k, t in one.tensors.items() if chosen.search(k)} for one in both)
    if not a and not b:
        raise NothingFoundError(_no_match(pattern, both[0]))
    only = [sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())]
    rows = [row for key in sorted(a.keys() & b.keys()) if (row := _compared(a[key], b[key]))]
    equal = len(a.keys() & b.keys()) - len(rows)
    lines = [
        f"only in {one.path}: {key}" for one, keys in zip(both, only, strict=True) for key in keys
    ]
    if rows:
        lines += ["", *_differences(rows), ""] if lines else [*_differences(rows), ""]
    differ = f"{len(rows)} tensors differ, " if rows else ""
    lines.append(f"{differ}{equal} tensors are equal to the last bit")
    finite = [
        {name: "inf" if value == math.inf else value for name, value in row.items()} for row in rows
    ]
    record = {
        "paths": [one.path for one in both],
        "only_in_first": only[0],
        "only_in_second": only[1],
        "different": finite,
        "equal": equal,
    }
    are_same = not (rows or only[0] or only[1])
    return Found(record, "\n".join(lines), ExitCode.OK if are_same else ExitCode.FAILED)


COMMANDS = {
    "verify": Command("PATH", (1,), verify),
    "show": Command("PATH", (1,), show),
    "grep": Command("PATTERN PATH", (2,), grep),
    "stats": Command("PATH [PATTERN]", (1, 2), stats),
    "diff": Command("PATH PATH [PATTERN]", (2, 3), diff),
}


def _compared(one: TensorInFiles, other: TensorInFiles) -> dict[str, Any] | None:
    """Returns how two tensors differ, as JSON data; None if they are equal to the last bit."""
    from tekso.framework.run.stored_tensors import TensorReader
    from tekso.framework.run.tensor_figures import difference

    both = (one, other)
    row: dict[str, Any] = {
        "key": one.key,
        "shapes": [list(tensor.shape) for tensor in both],
        "dtypes": [tensor.dtype for tensor in both],
        "size": one.size,
        "different": None,
        "largest_absolute": None,
        "largest_relative": None,
        "relative_norm": None,
    }
    if one.shape != other.shape:
        return row
    with TensorReader() as reader:
        found = difference(one, other, reader)
    if found is None and one.dtype == other.dtype:
        return None
    row["different"] = found.different if found else 0
    row["largest_absolute"] = found.absolute if found else 0.0
    row["largest_relative"] = found.relative if found else 0.0
    row["relative_norm"] = found.of_norm if found else 0.0
    return row


def _differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for row in rows:
        shapes, dtypes = row["shapes"], row["dtypes"]
        figures = ("-", "-", "-")
        if row["different"] is not None:
            figures = (
                f"{row['different']:,} of {row['size']:,}",
                f"{row['largest_absolute']:.3g}",
                f"{row['relative_norm']:.3g}",
            )
        shape = " → ".join(dict.fromkeys(map(_shape, shapes)))
        cells.append((row["key"], shape, " → ".join(dict.fromkeys(dtypes)), *figures))
    header = ("tensor", "shape", "dtype", "different", "max abs", "rel norm")
    return table(header, cells, right=(3, 4, 5), width=terminal_width())


def _about(tensor: TensorInFiles, stored: StoredState) -> dict[str, Any]:
    described = stored.description.tensors if stored.description is not None else {}
    dims = described.get(tensor.key, {}).get("dims")
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dims": [str(dim or "") for dim in dims] if isinstance(dims, list) else [],
        "dtype": tensor.dtype,
        "size": tensor.size,
        "size_bytes": tensor.size_bytes,
    }


def _shape(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape)) or "scalar"


def _expression(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{pattern!r} is not a regular expression: {error}") from None


def _no_match(pattern: str, stored: StoredState) -> str:
    first = ", ".join(sorted(stored.tensors)[:3])
    return f"no tensor of {stored.path} matches {pattern!r}; there are {first}, …"
