"""Detects a notebook, which shows results and stderr below its cells."""

from __future__ import annotations

import sys
from typing import Any


def ipython_of_notebook() -> Any:
    """Returns the module IPython of a notebook in which this process runs cells; else None."""
    ipython: Any = sys.modules.get("IPython")  # a notebook has imported it
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return ipython
