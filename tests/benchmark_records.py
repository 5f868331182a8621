"""Records and results of benchmarks, as processes and the command write them."""

from __future__ import annotations

from typing import Any

from benchmarks.machine import machine

Record = dict[str, Any]


def record(*step_ms: float, **changes: Any) -> Record:
    """Returns what a process reports."""
    found: Record = {
        "step_ms": list(step_ms),
        "cpu_ms": list(step_ms),
        "time_to_first_step_s": 2.0,
        "peak_memory_bytes": 2**30,
        "losses": [4.0, 3.0, 2.0],
        "num_weights": 10,
        "expected_weights": 10,
        "versions": {"python": "3.11"},
    }
    return {**found, **changes}


def result(by_peer: dict[str, list[Record]], **changes: Any) -> Record:
    """Returns what the command writes."""
    return {
        "date": "2026-01-02 03-04",
        "machine": {**machine(), "load_before": 0.1},
        "turns": 3,
        "steps": 5,
        "sizes": {"lstm": "dim 512"},
        "workloads": {"lstm": by_peer},
        **changes,
    }
