"""Lists the checkpoints of a folder, and the tensors of a checkpoint, as records and as text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.run import checkpoint_files
from tekso.framework.run.checkpoint_errors import DeletedCheckpointError
from tekso.framework.run.checkpoint_files import Checkpoint, DamagedCheckpointError
from tekso.framework.run.lease import Lease
from tekso.framework.run.report.lines import number, size
from tekso.framework.tables import table

GOOD, DAMAGED = "good", "damaged"
_MOST_METRICS = 3  # columns


def records(folder: str) -> Iterator[dict[str, Any]]:
    """Yields a record for each checkpoint in a folder, by step; reads and verifies all files.

    Raises:
      OSError: the folder cannot be read.
    """
    paths = [files.join(folder, name) for name in files.names(folder) if not name.startswith(".")]
    found = []
    for path in filter(files.is_folder, paths):
        with contextlib.suppress(DeletedCheckpointError):  # by a run in progress
            found.append(_record(path))
    yield from sorted(found, key=lambda record: (record["step"] is None, record["step"]))


def _record(path: str) -> dict[str, Any]:
    lease = Lease(path)
    record: dict[str, Any] = {
        "name": files.base_name(path),
        "path": path,
        "step": None,
        "created": None,
        "size_bytes": _size_bytes(path),
        "state": GOOD,
        "reason": None,
        "averaged": [],
        "metrics": {},
    }
    try:
        about = checkpoint_files.describe(path)
        record |= {"step": about.step, "created": about.created, "metrics": dict(about.metrics)}
        record["averaged"] = list(about.averaged)
        checkpoint_files.open_verified(path)
    except DamagedCheckpointError as error:
        record |= {"state": DAMAGED, "reason": str(error)}
    lease.release()
    return record


def _size_bytes(path: str) -> int:
    return sum(files.size_bytes(files.join(path, name)) for name in files.names(path))


def list_text(rows: Sequence[Mapping[str, Any]], *, width: int | None = None) -> str:
    """Returns records of checkpoints as text: a row for each, then why some are damaged."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:_MOST_METRICS]
    cells = [
        (
            row["name"],
            "-" if row["step"] is None else str(row["step"]),
            row["created"] or "-",
            size(row["size_bytes"]),
            row["state"],
            *(number(row["metrics"][n]) if n in row["metrics"] else "-" for n in names),
        )
        for row in rows
    ]
    header = ("checkpoint", "step", "written", "size", "state", *names)
    lines = table(header, cells, right=(1, 3, *range(5, 5 + len(names))), width=width)
    lines += [f"{row['name']} is damaged: {row['reason']}" for row in rows if row["reason"]]
    lines += [
        f"{row['name']} is the average of {', '.join(row['averaged'])}"
        for row in rows
        if row["averaged"]
    ]
    return "\n".join(lines)


def tensor_records(checkpoint: Checkpoint, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields a record for each of some tensors of a checkpoint; has one in memory at a time.

    "norm" is the square root of the sum of squares, "rms" the square root of their mean, and
    "largest" the largest absolute value. All three are computed from the finite elements;
    "not_finite" counts the others.
    """
    for key in keys:
        about = checkpoint.description.tensors.get(key, {})
        value = checkpoint.read(key).astype(np.float64)
        finite = np.isfinite(value)
        kept = value if finite.all() else value[finite]
        squares = float(np.square(kept).sum())
        yield {
            "key": key,
            "shape": list(checkpoint.shape(key)),
            "dims": about.get("dims"),
            "dtype": checkpoint.dtype(key).name,
            "size": value.size,
            "norm": squares**0.5,
            "rms": (squares / kept.size) ** 0.5 if kept.size else 0.0,
            "largest": float(np.abs(kept).max()) if kept.size else 0.0,
            "not_finite": int(value.size - kept.size),
        }


def tensors_text(
    checkpoint: Checkpoint, rows: Sequence[Mapping[str, Any]], *, width: int | None = None
) -> str:
    """Returns records of tensors as text."""
    about = checkpoint.description
    lines = [f"{checkpoint.path}: {about.model}, step {about.step}, written {about.created}"]
    lines += [f"the average of {', '.join(about.averaged)}"] if about.averaged else []
    lines += [f"{name} {number(value)}" for name, value in about.metrics.items()]
    cells = [
        (
            row["key"],
            " × ".join(map(str, row["shape"])) or "scalar",
            ", ".join(dim or "-" for dim in row["dims"]) if row["dims"] else "-",
            row["dtype"],
            number(row["norm"]),
            number(row["rms"]),
            number(row["largest"]) + (f"; {row['not_finite']:,} !" if row["not_finite"] else ""),
        )
        for row in rows
    ]
    header = ("tensor", "shape", "dims", "dtype", "norm", "rms", "largest")
    lines += ["", *table(header, cells, right=(4, 5, 6), width=width), ""]
    count, norm = sum(row["size"] for row in rows), sum(row["norm"] ** 2 for row in rows) ** 0.5
    wrong = sum(row["not_finite"] for row in rows)
    lines.append(
        f"total: {count:,} numbers in {len(rows)} tensors, norm {number(norm)}"
        + (f"; {wrong:,} are not finite" if wrong else "")
    )
    return "\n".join(lines)
