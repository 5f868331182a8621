"""Tables of checkpoints, as `tekso-ckpt list` prints them."""

from __future__ import annotations

from typing import Any

from tekso.framework.run.checkpoint_tables import list_text


def row(step: int) -> dict[str, Any]:
    return {
        "name": f"step_{step:08d}", "step": step, "created": "2026-11-28T10:57:45Z",
        "size_bytes": 129_700, "state": "good", "reason": "", "averaged": [],
        "metrics": {"dev/loss": 0.4, "dev/accuracy": 0.9, "dev/sensitivity": 0.8},
    }  # fmt: skip


def test_a_narrow_terminal_has_fewer_metrics_and_whole_times() -> None:
    rows = [row(50), row(100)]
    for width, last in ((None, "dev/sensitivity"), (79, "dev/loss"), (60, "state")):
        lines = list_text(rows, width=width).splitlines()
        assert lines[0].endswith(f"  {last}") and len(lines) == 3
        assert all("2026-11-28T10:57:45Z" in line for line in lines[1:])
