"""Finds the metric that decides which checkpoint of a run is best, and whether larger is better."""

from __future__ import annotations

from typing import Any

from tekso.framework.task import LOSS, Goal


def metric_of_best(tree: Any) -> str:
    """Returns the "evaluation/metric" by which the best checkpoint is chosen, or "".

    Raises:
      ValueError: the experiment does not have the evaluation input.
    """
    names, keep_best = list(tree.eval_inputs), tree.run.keep_best
    eval_input = keep_best.eval_input or (names[0] if names else "")
    if eval_input and eval_input not in names:
        raise ValueError(
            f"run.keep_best.eval_input is {eval_input!r}, but the evaluation inputs are: "
            f"{', '.join(names) or 'none'}"
        )
    return f"{eval_input}/{keep_best.metric}" if eval_input else ""


def goal_of_best(tree: Any) -> Goal:
    """Returns "min" or "max": `run.keep_best.goal` if it is set, otherwise what the task declares.

    Raises:
      ValueError: neither is set.
    """
    keep_best, task = tree.run.keep_best, tree.task.owner
    if keep_best.goal is not None:
        goal: Goal = keep_best.goal
        return goal
    known: dict[str, Goal] = {LOSS: "min"}
    for cls in reversed(getattr(task, "__mro__", ())):
        known |= vars(cls).get("goals", {})
    metric = keep_best.metric
    for name in (metric, metric.partition("/")[0]):  # "bleu/de": BLEU of one language
        if name in known:
            return known[name]
    name = getattr(task, "__name__", "the task")
    goals = ", ".join(f"{metric} ({goal})" for metric, goal in sorted(known.items()))
    raise ValueError(
        f"run.keep_best.metric is {metric!r}, and {name} does not declare whether larger or "
        "smaller values are better: --set run.keep_best.goal=max or --set run.keep_best.goal=min, "
        f"or set goals = {{{metric!r}: 'max'}} in {name}; declared are {goals}"
    )
