"""Lists the checkpoints of a folder, as records and as text."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tekso.framework import files
from tekso.framework.run.checkpoint_check import check_files
from tekso.framework.run.checkpoint_description import describe
from tekso.framework.run.checkpoint_errors import DamagedCheckpointError, DeletedCheckpointError
from tekso.framework.run.lease import Lease
from tekso.framework.run.report.lines import number
from tekso.framework.run.stored_state import read_stored
from tekso.framework.tables import table
from tekso.framework.units import bytes_text

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
        about = describe(path)
        record |= {"step": about.step, "created": about.created, "metrics": dict(about.metrics)}
        record["averaged"] = list(about.averaged)
        check_files(path, about)
        if wrong := read_stored(path).problems:
            raise DamagedCheckpointError(wrong[0])
    except DamagedCheckpointError as error:
        record |= {"state": DAMAGED, "reason": str(error)}
    lease.release()
    return record


def _size_bytes(path: str) -> int:
    return sum(files.size_bytes(files.join(path, name)) for name in files.names(path))


def list_text(rows: Sequence[Mapping[str, Any]], *, width: int | None = None) -> str:
    """Returns records of checkpoints as text: a row for each, then why some are damaged.

    It has as many metrics as fit in `width`, at most three.
    """
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))[:_MOST_METRICS]
    lines = _table(rows, names, None)
    while names and width is not None and max(map(len, lines)) > width:
        names = names[:-1]
        lines = _table(rows, names, None)
    lines = _table(rows, names, width)
    lines += [f"{row['name']} is damaged: {row['reason']}" for row in rows if row["reason"]]
    lines += [
        f"{row['name']} is the average of {', '.join(row['averaged'])}"
        for row in rows
        if row["averaged"]
    ]
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]], names: Sequence[str], width: int | None) -> list[str]:
    cells = [
        (
            row["name"],
            "-" if row["step"] is None else str(row["step"]),
            row["created"] or "-",
            bytes_text(row["size_bytes"]),
            row["state"],
            *(number(row["metrics"][n]) if n in row["metrics"] else "-" for n in names),
        )
        for row in rows
    ]
    header = ("checkpoint", "step", "written", "size", "state", *names)
    return table(header, cells, right=(1, 3, *range(5, 5 + len(names))), width=width)
