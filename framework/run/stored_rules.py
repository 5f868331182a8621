"""Reads from the text of Params which metric a rule of a run compares, without any class.

The rules are `run.keep_best` and `run.early_stopping`; `metric_choice` reads them from a tree.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # both load TensorFlow
    from tekso.framework.run.metric_choice import Rule
    from tekso.framework.task import Goal

_LOSS = "loss"


@dataclasses.dataclass(frozen=True)
class StoredRule:
    """What a rule compares.

    Attributes:
      evaluation: name of the evaluation input; "": the run has none.
      metric: name of the metric.
      goal: whether the smallest or the largest value is best; None: unknown.
    """

    evaluation: str
    metric: str
    goal: Goal | None


def stored_rule(params: Mapping[str, str], rule: Rule, *, best_goal: str) -> StoredRule:
    """Returns what a rule compares.

    Args:
      params: {path: text of the value}, as `texts` returns it.
      rule: the rule.
      best_goal: the goal of `run.keep_best`, which checkpoints store, as the class of the task
        declares it; "": unknown.
    """
    metric = _metric(params, rule)
    evaluation = literal(params, f"run.{rule}.eval_input") or _first_key(params, "eval_inputs")
    goal = literal(params, f"run.{rule}.goal")
    if not goal and metric == _metric(params, "keep_best"):
        goal = best_goal
    if not goal and metric == _LOSS:
        goal = "min"
    known: Mapping[Any, Goal] = {"min": "min", "max": "max"}
    return StoredRule(evaluation or "", metric, known.get(goal))


def texts(params: str) -> dict[str, str]:
    """Returns {path: text of the value} of the text of Params."""
    lines = (line.partition(" : ") for line in params.splitlines())
    return {path: value for path, colon, value in lines if colon}


def literal(params: Mapping[str, str], path: str) -> Any:
    """Returns the number, the text or the like at a path; None: there is none."""
    node = _node(params, path)
    return node.value if isinstance(node, ast.Constant) else None


def _metric(params: Mapping[str, str], rule: Rule) -> str:
    return literal(params, f"run.{rule}.metric") or _LOSS


def _first_key(params: Mapping[str, str], path: str) -> Any:
    node = _node(params, path)
    keys = node.keys if isinstance(node, ast.Dict) else []
    return keys[0].value if keys and isinstance(keys[0], ast.Constant) else None


def _node(params: Mapping[str, str], path: str) -> ast.expr | None:
    """Returns the syntax of the literal at a path; None: there is none."""
    try:
        return ast.parse(params.get(path, ""), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
