"""Differences of the Params of a run from those of the checkpoint that it resumes from."""

from __future__ import annotations

import re

from tekso.framework.params import Params
from tekso.framework.params import tree as params_tree
from tekso.framework.params.containers import Node, holds_nodes, same_value
from tekso.framework.run.checkpoint_description import Description

_NO_FIELD = "(no field)"
_OF_CLASS = re.compile(r"""Params\("[^":]*:([^"]*)"[^)]*\)""")


def since(description: Description, now: Params) -> list[str]:
    """Returns the differences of Params from those of a checkpoint, a line for each.

    Fields that only one of two classes has are not listed.

    Args:
      description: of the checkpoint.
      now: the Params.
    """
    try:
        return lines(Params.from_text(description.params), now)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        return [f"the Params of the checkpoint can no longer be read: {error}"]


def lines(before: Params, now: Params) -> list[str]:
    """Returns the differences, a line for each, without fields that only one of two classes has."""
    found = []
    for line in before.diff(now).splitlines():
        if line.endswith(f"-> {_NO_FIELD}") or f" : {_NO_FIELD} -> " in line:
            continue
        found.append(_OF_CLASS.sub(r"\1", line))
    return found


def reset(before: Params, now: Params, registered: Params) -> list[str]:
    """Returns the paths of settings that `before` has, and `now` has as registered.

    Settings that a flag gives are not among them.
    """
    found = []
    for path, value, _ in params_tree.walk(now):
        if isinstance(value, Node) or holds_nodes(value) or now.origin(path).startswith("--"):
            continue
        if path not in before or path not in registered:
            continue
        if same_value(value, registered.get(path)) and not same_value(value, before.get(path)):
            found.append(path)
    return found
