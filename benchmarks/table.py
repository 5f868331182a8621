"""Turns records into rows, and rows into text and Markdown."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks import instruction_sets
from benchmarks.machine import described
from benchmarks.peers import PEERS, TEKSO
from benchmarks.workloads import Workload

TOLERANCE = 1e-3
"""Largest relative difference of the first losses from Tekso's, for the same function. A workload
may have another one for all losses but the first: `worker.LATER_TOLERANCES`."""

BUSY = 0.5
"""Load average before the start above which a machine does not count as idle."""

HEADER = ("", "ms", "range, ms", "time / Tekso", "first step, s", "peak, MiB", "check")


def wrong_model(record: Mapping[str, Any], reference: Mapping[str, Any] | None) -> str | None:
    """Returns why a record is of another model than Tekso's; None: it is the same.

    Args:
      record: figures of a process.
      reference: figures of Tekso's process; None: only the number of weights is checked.
    """
    if record["num_weights"] != record["expected_weights"]:
        return f"{record['num_weights']:,} weights, expected {record['expected_weights']:,}"
    if reference is None:
        return None
    later = reference.get("later_tolerance") or TOLERANCE
    limits = [TOLERANCE, *[later] * len(record["losses"])]
    found = _differences(record, reference)
    if any(one > limit for one, limit in zip(found, limits, strict=False)):
        difference = max(found)
        return f"losses {record['losses']}, Tekso's {reference['losses']} ({difference:.0e})"
    return None


def rows(by_peer: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """Returns the rows of a workload, a tuple of HEADER's length for each peer.

    The time of a turn is the median of its steps. The first figure is the median of the turns, the
    range is that of the turns. A single turn has no range.
    """
    tekso = finished(by_peer.get(TEKSO, ()))
    reference = tekso[0] if tekso else None
    base = _median(tekso) if tekso else None
    found: list[tuple[str, ...]] = []
    for peer, records in by_peer.items():
        title, done = PEERS[peer].title, finished(records)
        skipped = next((str(one["skipped"]) for one in records if "skipped" in one), None)
        if not done:
            reason = f"skipped: {skipped or 'not measured'}"
            found.append((title, "–", "–", "–", "–", "–", reason))
            continue
        times = [statistics.median(one["step_ms"]) for one in done]
        found.append(
            (
                title,
                f"{_median(done):.1f}",
                f"{min(times):.1f} to {max(times):.1f}" if len(times) > 1 else "–",
                "–" if base is None else f"{_median(done) / base:.2f}",
                f"{statistics.median(one['time_to_first_step_s'] for one in done):.1f}",
                f"{max(one['peak_memory_bytes'] for one in done) / 2**20:,.0f}",
                _check(done, reference, skipped),
            )
        )
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """Returns the whole result as Markdown."""
    lines = [*_about(result)]
    for workload, by_peer in result["workloads"].items():
        table = [HEADER, ("---",) * len(HEADER), *rows(by_peer)]
        lines += ["", f"### {workload}", "", result["sizes"][workload], ""]
        lines += ["| " + " | ".join(escaped(cell) for cell in row) + " |" for row in table]
    return "\n".join(lines) + "\n"


def text(result: Mapping[str, Any]) -> str:
    """Returns the whole result as aligned text."""
    lines = [*_about(result)]
    for workload, by_peer in result["workloads"].items():
        table = [HEADER, *rows(by_peer)]
        widths = [max(len(row[i]) for row in table) for i in range(len(HEADER) - 1)]
        lines += ["", f"{workload}: {result['sizes'][workload]}"]
        for row in table:
            numbers = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *numbers, row[-1]]).rstrip())
    return "\n".join(lines)


def faults(result: Mapping[str, Any]) -> list[str]:
    """Returns a line for each measurement of another model than Tekso's."""
    found = []
    for workload, by_peer in result["workloads"].items():
        tekso = finished(by_peer.get(TEKSO, ()))
        for peer, records in by_peer.items():
            for record in finished(records):
                if wrong := wrong_model(record, tekso[0] if tekso else None):
                    found.append(f"{workload}, {peer}: not Tekso's model: {wrong}")
                    break
    return found


def _about(result: Mapping[str, Any]) -> list[str]:
    lines = [f"{described(result['machine'])}. {result['date']}."]
    turns, steps = result["turns"], result["steps"]
    figure = f"the median of {turns} turns" if turns > 1 else "of a single turn, without a spread"
    turn = f"the median of {steps} steps" if steps > 1 else "the time of a single step"
    lines.append(f"Each figure is {figure}, and a turn is {turn} in a new process. float32.")
    if result.get("isa", instruction_sets.OWN) != instruction_sets.OWN:
        lines.append(instruction_sets.LIMITS)
    load = result["machine"]["load_before"]
    if load > BUSY:
        lines.append(f"The machine was not idle: the load average before the start was {load:.1f}.")
    commit = f" Commit of Tekso: {result['commit']}." if result.get("commit") else ""
    return [*lines, f"Versions: {versions(result['workloads'].values())}.{commit}"]


def versions(measurements: Iterable[Mapping[str, Sequence[Mapping[str, Any]]]]) -> str:
    """Returns the versions that were measured: "python 3.11.7, torch 2.12.0 / 2.13.0"."""
    found: dict[str, set[str]] = {}
    for by_peer in measurements:
        for records in by_peer.values():
            for record in finished(records):
                for name, version in record["versions"].items():
                    found.setdefault(name, set()).add(version)
    known = [f"{name} {' / '.join(sorted(each))}" for name, each in sorted(found.items())]
    return ", ".join(known) or "unknown"


def sizes(workload: Workload) -> str:
    """Returns the sizes of a workload, its weights and FLOPs."""
    fields = ", ".join(
        f"{field.name} {getattr(workload, field.name)}" for field in dataclasses.fields(workload)
    )
    return (
        f"{fields}; {workload.num_weights:,} weights, {workload.flops / 1e9:.1f} GFLOP and "
        f"{workload.units} {workload.unit} a step"
    )


def _check(
    done: Sequence[Mapping[str, Any]], reference: Mapping[str, Any] | None, skipped: str | None
) -> str:
    wrong = next((found for one in done if (found := wrong_model(one, reference))), None)
    if wrong:
        return f"not the same model: {wrong}"
    if skipped:
        return f"a turn {skipped}"
    if reference is None:
        return "number of weights"
    return f"losses within {max(_difference(one, reference) for one in done):.0e}"


def _difference(record: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """Returns the largest relative difference of the losses."""
    return max(_differences(record, reference))


def _differences(record: Mapping[str, Any], reference: Mapping[str, Any]) -> list[float]:
    """Returns the relative differences of the losses; NaN differs from everything."""
    pairs = zip(record["losses"], reference["losses"], strict=True)
    found: list[float] = [abs(one - other) / max(abs(other), 1e-9) for one, other in pairs]
    return [math.inf if math.isnan(value) else value for value in found]


def finished(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the records that have figures."""
    return [record for record in records if "skipped" not in record]


def _median(records: Sequence[Mapping[str, Any]]) -> float:
    found: float = statistics.median(statistics.median(one["step_ms"]) for one in records)
    return found


def escaped(cell: str) -> str:
    """Returns a cell of a Markdown table."""
    return cell.replace("|", "\\|")
