"""Writes the tables of stored results into README.md and docs/speed.md, between two markers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import instruction_sets, table
from benchmarks.machine import processor
from benchmarks.peers import PEERS, TEKSO
from benchmarks.stored import Stored, level

BEGIN = "<!-- The next lines are written by `python -m benchmarks.publish`. -->"
END = "<!-- Here they end. -->"

_WORKLOADS_IN_README = ("transformer_small", "transformer_wide", "lstm")
_PEERS_IN_README = (TEKSO, "pytorch", "pytorch_malloc")
_NONE = "No result is stored yet."
_HEADER = ("workload", "framework", *table.HEADER[1:-1], "measured", "load before")
_WIDTH = 120

Lines = list[str]


class MarkerError(Exception):
    """A document has no place for its tables; the message is one line."""


def written(results: Sequence[Stored], root: Path) -> dict[Path, str]:
    """Returns {document: its text with the tables of stored results}.

    Args:
      results: the stored results, in the order of the tables.
      root: the checkout.

    Raises:
      MarkerError: a document does not have both markers.
    """
    forms: dict[str, Callable[[Sequence[Stored]], Lines]] = {
        "README.md": in_readme,
        "docs/speed.md": in_speed,
    }
    return {root / name: _replaced(root / name, form(results)) for name, form in forms.items()}


def in_readme(results: Sequence[Stored]) -> Lines:
    """Returns the lines of README.md: language models in Tekso and in PyTorch."""
    found: Lines = []
    for result in results:
        measurements = [
            (name, {**one, "peers": peers})
            for name in _WORKLOADS_IN_README
            for one in result["workloads"].get(name, ())
            if len(peers := _in_readme(one)) > 1
        ]
        if result["isa"] != instruction_sets.OWN or not measurements:
            continue
        titles = [PEERS[peer].title for peer in _PEERS_IN_README]
        rows = [("ms per step", *titles, "measured", "load before")]
        rows += [(f"`{name}`", *_cells(one), *_when(one)) for name, one in measurements]
        found += [*_about(result, [one for _, one in measurements]), "", *_table(rows), ""]
    return found[:-1] or [_NONE]


def in_speed(results: Sequence[Stored]) -> Lines:
    """Returns the lines of docs/speed.md: all workloads in all frameworks."""
    found: Lines = []
    for result in results:
        isa, by_name = result["isa"], result["workloads"]
        found += [f"#### {processor(result['machine'])}, {level(result['machine'], isa)}", ""]
        found += [*_about(result, [one for each in by_name.values() for one in each]), ""]
        if isa != instruction_sets.OWN:
            found += [*textwrap.wrap(instruction_sets.LIMITS, _WIDTH), ""]
        rows: list[tuple[str, ...]] = [_HEADER]
        for name, each in by_name.items():
            for one in each:
                done = [row for peer, row in _rows(one).items() if _is_measured(one, peer)]
                rows += [(f"`{name}`", *row[:-1], *_when(one)) for row in done]
        found += [*_table(rows), ""]
        if skipped := _skipped(result):
            found += [*textwrap.wrap(f"Without figures: {'; '.join(skipped)}.", _WIDTH), ""]
    return found[:-1] or [_NONE]


def _about(result: Stored, measurements: Sequence[Stored]) -> Lines:
    """Returns the machine, what the figures are, and the versions, as lines of text."""
    machine = result["machine"]
    peers: list[dict[str, Any]] = [one["peers"] for one in measurements]
    turns = {len(table.finished(records)) for each in peers for records in each.values()}
    steps = {one["steps"] for one in measurements}
    commits = sorted({one["commit"] for one in measurements} - {""})
    sentences = [
        f"{processor(machine)}, {machine['cores']} cores; {machine['features']}. float32.",
        f"Each figure is the median of {_numbers(turns - {0})} turns, and a turn is the median of "
        f"{_numbers(steps)} steps in a new process.",
        f"Versions: {table.versions(peers)}.",
    ]
    if commits:
        sentences.append(f"Commit of Tekso: {', '.join(commits)}.")
    return textwrap.wrap(" ".join(sentences), _WIDTH, break_on_hyphens=False)


def _numbers(values: set[int]) -> str:
    return " or ".join(str(value) for value in sorted(values))


def _rows(measurement: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns {peer: row of the table of a run}."""
    peers = measurement["peers"]
    return dict(zip(peers, table.rows(peers), strict=True))


def _is_measured(measurement: Mapping[str, Any], peer: str) -> bool:
    return bool(table.finished(measurement["peers"].get(peer, ())))


def _in_readme(measurement: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {peer: records} of the frameworks of README.md that were measured."""
    found = [peer for peer in _PEERS_IN_README if _is_measured(measurement, peer)]
    return {peer: measurement["peers"][peer] for peer in found}


def _cells(measurement: Mapping[str, Any]) -> list[str]:
    """Returns a cell for each framework of README.md: "523.0 (502.1 to 580.3), × 1.35"."""
    found, rows = [], _rows(measurement)
    for peer in _PEERS_IN_README:
        if peer not in rows:
            found.append("–")
            continue
        _, time, spread, ratio, *_ = rows[peer]
        found.append(f"{time} ({spread})" + ("" if peer == TEKSO else f", × {ratio}"))
    return found


def _skipped(result: Stored) -> Lines:
    """Returns a text for each reason for which workloads have no figures."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, each in result["workloads"].items():
        for one in each:
            reasons: dict[str, list[str]] = {}
            for peer, records in one["peers"].items():
                if not table.finished(records):
                    reasons.setdefault(records[0]["skipped"], []).append(f"`{peer}`")
            for reason, peers in reasons.items():
                found.setdefault((", ".join(peers), reason), []).append(f"`{name}`")
    return [f"{', '.join(each)} in {peers} ({why})" for (peers, why), each in found.items()]


def _when(measurement: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the date, and the load average with a note if the machine was not idle."""
    load: float = measurement["load_before"]
    note = " (not idle)" if load > table.BUSY else ""
    return measurement["date"].partition(" ")[0], f"{load:.1f}{note}"


def _table(rows: Sequence[Sequence[str]]) -> Lines:
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return ["| " + " | ".join(table.escaped(cell) for cell in line) + " |" for line in lines]


def _replaced(document: Path, lines: Lines) -> str:
    """Returns the text of a document with other lines between the markers."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise MarkerError(f"{document} does not have the lines {BEGIN!r} and {END!r}")
    return "\n\n".join([before + begin, "\n".join(lines), end + after])
