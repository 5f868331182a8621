"""Calls commands of Tekso that print JSON, each in a process of its own."""

from __future__ import annotations

import contextlib
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
    """Returns why a command failed: its first problem, or the last line of its errors.

    A command without both is named with its exit code.
    """
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        if problems := json.loads(error.stdout).get("problems"):
            return str(problems[0])
    lines = (error.stderr or "").strip().splitlines()
    return lines[-1] if lines else f"{error.cmd[2]} ended with exit code {error.returncode}"
