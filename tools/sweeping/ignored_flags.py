"""Rejects flags of a sweep that are ignored, because a later one sets the same fields."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tekso.framework.params.tree import places
from tekso.tools.command_errors import UsageError


def check(tree: Any, varied: Sequence[str], *, settings: Sequence[str], steps: int | None) -> None:
    """Checks that each flag sets a field that no later one sets again.

    A wildcard may set more fields than a later flag changes.

    Args:
      tree: the Params with all settings.
      varied: paths of --sweep.
      settings: values of --set.
      steps: value of --steps.

    Raises:
      UsageError: a flag sets only fields that another one sets again.
    """
    given = [(text.partition("=")[0].strip(), f"--set {text}") for text in settings]
    given += [(path, f"--sweep {path}") for path in varied]
    if steps is not None:
        given.append(("run.steps", f"--steps={steps}"))
    fields = [(_fields(tree, path), flag) for path, flag in given]
    for (before, flag), (after, later) in itertools.combinations(fields, 2):
        if before <= after:
            raise UsageError(f"{flag} and {later} set the same field: leave out one of them")


def _fields(tree: Any, path: str) -> set[str]:
    """Returns the paths that a path, with or without wildcards, sets."""
    try:
        return {place.path for place in places(tree, path)}
    except (AttributeError, ValueError):  # a later setting has replaced its part
        return {path}
