"""Stored results: a file for each type of machine, in benchmarks/results/.

    runs/benchmarks/<date>.json  ─►  added  ─►  results/<machine>.json  ─►  documents.py

A stored result has the figures of every process, with the median of its steps instead of all
steps. Each workload has one or more measurements: runs of the command, with a date and a load
average of their own. A later measurement replaces the frameworks that it measured. A time is
divided by that of Tekso in the same run, so Tekso is in every measurement.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import instruction_sets, table
from benchmarks.peers import TEKSO
from benchmarks.workloads import WORKLOADS

FOLDER = "benchmarks/results"

Result = Mapping[str, Any]
"""What run.py writes."""
Stored = dict[str, Any]
"""{"machine", "isa", "workloads": {workload: measurements}}."""

_IDENTITY = ("processor", "family_model", "features", "cores")
_RECORD_DEPTH = 6  # of the JSON: a process has a line of its own


class StoreError(Exception):
    """A result cannot be stored; the message is one line."""


def check(result: Result) -> None:
    """Checks that a result can be stored.

    Raises:
      StoreError: it is not of the registered workloads, has no spread, no figures of Tekso, or
        figures of another model.
    """
    try:
        added(None, result)
        name_of(result["machine"], result["isa"])
        for name, by_peer in result["workloads"].items():
            if result["sizes"][name] != table.sizes(WORKLOADS[name]):
                raise StoreError(f"{name} has other sizes than those that are registered")
            if not table.finished(by_peer[TEKSO]):
                raise StoreError(f"{name} was not measured in Tekso")
            for peer, records in by_peer.items():
                _check_turns(f"{name}, {peer}", table.finished(records))
        if not result["workloads"]:
            raise StoreError("it has no workloads")
        if faults := table.faults(result):
            raise StoreError(faults[0])
    except (KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StoreError(f"it is not from `make benchmarks` of this version ({reason})") from None


def _check_turns(where: str, records: Sequence[Mapping[str, Any]]) -> None:
    if len(records) == 1:
        raise StoreError(f"{where}: a single turn has no spread; measure with --turns=3")
    times = [time for record in records for time in record["step_ms"]]
    if not all(0.0 < time < math.inf for time in times):
        raise StoreError(f"{where}: a time of a step is not a positive number")


def added(stored: Stored | None, result: Result) -> Stored:
    """Returns a stored result with the measurements of a run.

    Args:
      stored: the stored result of this type of machine; None: there is none.
      result: what the run wrote.
    """
    machine = result["machine"]
    workloads: dict[str, Any] = dict(stored["workloads"]) if stored else {}
    for name, by_peer in result["workloads"].items():
        sizes = result["sizes"][name]
        measurement = {
            "date": result["date"],
            "commit": result["commit"],
            "load_before": round(machine["load_before"], 2),
            "memory_bytes": machine["memory_bytes"],
            "system": machine["system"],
            "steps": result["steps"],
            "sizes": sizes,
            "peers": {peer: [_shortened(one) for one in each] for peer, each in by_peer.items()},
        }
        earlier = [one for one in workloads.get(name, ()) if one["sizes"] == sizes]
        workloads[name] = _newest([measurement, *earlier])
    return {
        "machine": {field: machine[field] for field in _IDENTITY},
        "isa": result["isa"],
        "workloads": {name: workloads[name] for name in WORKLOADS if name in workloads},
    }


def name_of(machine: Mapping[str, Any], isa: str) -> str:
    """Returns the name of the file for a type of machine, without its ending."""
    title = f"{machine['processor']}{machine['family_model']} {machine['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "_", f"{title} {level(machine, isa)}".lower()).strip("_")


def level(machine: Mapping[str, Any], isa: str) -> str:
    """Returns the best instruction set that was used."""
    if isa != instruction_sets.OWN:
        return f"limited to {isa.upper()}"
    best: str = machine["features"].partition(",")[0]
    return best


def read(path: Path) -> Stored:
    """Returns the stored result in a file.

    Raises:
      StoreError: it is no JSON, for example after a merge with conflicts.
    """
    try:
        found: Stored = json.loads(path.read_text())
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from None
    return found


def text(stored: Stored) -> str:
    """Returns a stored result as JSON that is readable in a diff: a line for each process."""
    return _text(stored, 0) + "\n"


def _text(value: Any, depth: int) -> str:
    if depth == _RECORD_DEPTH or not value or not isinstance(value, dict | list):
        return json.dumps(value)
    begin, separator, end = "\n" + " " * (depth + 1), ",\n" + " " * (depth + 1), "\n" + " " * depth
    if isinstance(value, list):
        inner = separator.join(_text(one, depth + 1) for one in value)
        return f"[{begin}{inner}{end}]"
    inner = separator.join(
        f"{json.dumps(name)}: {_text(one, depth + 1)}" for name, one in value.items()
    )
    return f"{{{begin}{inner}{end}}}"


def _newest(measurements: Sequence[Stored]) -> list[Stored]:
    """Returns the newest figures of every framework, each beside Tekso's of the same run."""
    found: list[Stored] = []
    named: set[str] = set()
    measured: set[str] = set()
    for one in sorted(measurements, key=lambda each: str(each["date"]), reverse=True):
        peers = {
            peer: records
            for peer, records in one["peers"].items()
            if peer == TEKSO or peer not in (measured if table.finished(records) else named)
        }
        if found and set(peers) == {TEKSO}:
            continue
        named |= set(peers)
        measured |= {peer for peer, records in peers.items() if table.finished(records)}
        found.append({**one, "peers": peers})
    return found[::-1]


def _shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a process, with the medians of its steps."""
    if "skipped" in record:
        return dict(record)
    return {
        **record,
        "step_ms": [round(statistics.median(record["step_ms"]), 3)],
        "cpu_ms": [round(statistics.median(record["cpu_ms"]), 3)],
        "time_to_first_step_s": round(record["time_to_first_step_s"], 2),
        "losses": [float(f"{loss:.7g}") for loss in record["losses"]],
    }
