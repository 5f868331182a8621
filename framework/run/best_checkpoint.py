"""Which checkpoint of a run is best: the metric that decides, and which end of it is good."""

from __future__ import annotations

from typing import Any

from tekso.framework.task import LOSS, Goal


def metric_of_best(tree: Any) -> str:
    """Returns "evaluation/metric" that says which checkpoint of an experiment is best, or "".

    Raises:
      ValueError: the experiment has no such evaluation.
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
    """Returns which end of the metric is good: what `goal` says, or else the task.

    Raises:
      ValueError: neither says it.
    """
    keep_best, task = tree.run.keep_best, tree.task.owner
    if keep_best.goal is not None:
        goal: Goal = keep_best.goal
        return goal
    known: dict[str, Goal] = {LOSS: "min"}
    for cls in reversed(getattr(task, "__mro__", ())):
        known |= vars(cls).get("goals", {})
    metric = keep_best.metric
    for name in (metric, metric.partition("/")[0]):  # "bleu/de": of one language
        if name in known:
            return known[name]
    name = getattr(task, "__name__", "the task")
    goals = ", ".join(f"{metric} ({goal})" for metric, goal in sorted(known.items()))
    raise ValueError(
        f"run.keep_best.metric is {metric!r}, and {name} does not say whether large or small "
        "values of it are good: --set run.keep_best.goal=max or --set run.keep_best.goal=min, or "
        f"set goals = {{{metric!r}: 'max'}} in {name}; known are {goals}"
    )
