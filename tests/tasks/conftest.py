"""Functions of the tests of tasks run as they were traced."""

from __future__ import annotations

from graph_optimizer import graph_optimizer_off

__all__ = ["graph_optimizer_off"]
