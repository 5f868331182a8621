"""Runs the measurements in turns and collects their records."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS, Peer
from benchmarks.worker import STARTED

Record = dict[str, Any]
Measure = Callable[[str, str], Record]
"""(peer, workload) to the record of one process: its figures, or {"skipped": reason}."""

ROOT = Path(__file__).resolve().parent.parent
_MOST_SECONDS = 1800


class ExportError(Exception):
    """The initial weights of a workload could not be written; the message is one line."""


def measured(
    peers: Sequence[str],
    workloads: Sequence[str],
    turns: int,
    measure: Measure,
    say: Callable[[str], None],
) -> dict[str, dict[str, list[Record]]]:
    """Returns {workload: {peer: records}}.

    In every turn each peer runs once per workload, one process at a time. The order rotates, so
    that a machine that slows down affects all peers alike. What was skipped is not tried again.
    """
    found: dict[str, dict[str, list[Record]]] = {
        workload: {peer: [] for peer in peers} for workload in workloads
    }
    for turn in range(turns):
        shift = turn % max(len(peers), 1)
        for workload in workloads:
            for peer in [*peers[shift:], *peers[:shift]]:
                records = found[workload][peer]
                if records and "skipped" in records[-1]:
                    continue
                records.append(measure(peer, workload))
                say(f"turn {turn + 1} of {turns}, {workload}, {peer}: {_said(records[-1])}")
    return found


def _said(record: Record) -> str:
    if "skipped" in record:
        return f"skipped: {record['skipped']}"
    return f"{statistics.median(record['step_ms']):.1f} ms"


def process(python: Path, peer: Peer, workload: str, options: Sequence[str]) -> Record:
    """Measures in a new process; returns its record, or {"skipped": reason} if it fails."""
    # Links to the packages of this checkout precede an installed Tekso.
    paths = [str(ROOT), str(ROOT / ".typing")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [str(python), "-m", "benchmarks.worker", f"--framework={peer.framework}"]
    command += [f"--variant={peer.variant}", f"--workload={workload}", *options]
    if "--tiny" in options:  # threads that wait for each other would take most of the time
        variables["OMP_NUM_THREADS"] = "1"
    # Not in the checkout, whose folders would hide packages of the same name.
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command,
                cwd=folder,
                env={**os.environ, **variables, **peer.variables, STARTED: str(time.time())},
                capture_output=True,
                text=True,
                timeout=_MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"skipped": f"not finished after {_MOST_SECONDS} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reason = errors[-1].strip() if errors else "no output"
        return {"skipped": f"failed with exit code {done.returncode}: {reason}"}
    record: Record = json.loads(lines[-1])
    return record


def export_weights(python: Path, workload: str, file: Path, options: Sequence[str]) -> None:
    """Writes the initial weights of a workload, drawn by Tekso, for the other frameworks.

    Raises:
      ExportError: the process failed.
    """
    flags = [*options, "--steps=0", f"--export={file}"]
    record = process(python, PEERS["tekso"], workload, flags)
    if "skipped" in record:
        raise ExportError(f"the initial weights of {workload}: {record['skipped']}")
