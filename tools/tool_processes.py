"""Calls commands of Tekso that print JSON, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def record_of(tool: str, *words: str) -> dict[str, Any]:
    """Returns the JSON object that `python -m tekso.tools.TOOL WORDS` prints.

    Raises:
      subprocess.CalledProcessError: the command failed; see `why_failed`.
    """
    command = [sys.executable, "-m", f"tekso.tools.{tool}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def why_failed(error: subprocess.CalledProcessError) -> str:
    """Returns the last line of the errors of a command; its exit code if there is none."""
    lines = (error.stderr or "").strip().splitlines()
    return lines[-1] if lines else f"{error.cmd[2]} ended with exit code {error.returncode}"
