"""Finds the rule by which an experiment ends its training early."""

from __future__ import annotations

from typing import Any

from tekso.framework.run.early_stopping_rule import EarlyStoppingRule
from tekso.framework.run.metric_choice import goal_of, metric_of


def early_stopping_of(tree: Any) -> EarlyStoppingRule | None:
    """Returns the rule of an experiment; None if its training does not end early.

    Raises:
      ValueError: there is no such evaluation input, or the goal of the metric is unknown.
    """
    params = tree.run.early_stopping
    if not params.patience:
        return None
    metric = metric_of(tree, "early_stopping")
    if not metric:
        raise ValueError(
            f"run.early_stopping.patience is {params.patience}, but the experiment has no "
            "eval_inputs: add one, or set run.early_stopping.patience=0"
        )
    goal = goal_of(tree, "early_stopping")
    return EarlyStoppingRule(metric, goal, params.patience, params.min_improvement)
