"""Finds the metric that a rule of a run compares, and whether larger or smaller values are better.

The rules are `run.keep_best` and `run.early_stopping`; searches of tekso-sweep use the same goals.
"""

from __future__ import annotations

from typing import Any, Literal

from tekso.framework import task_results
from tekso.framework.spelling import close_matches
from tekso.framework.task import LOSS, Goal

Rule = Literal["keep_best", "early_stopping"]


def rules_of(tree: Any) -> list[Rule]:
    """Returns the rules that a run follows."""
    found: list[Rule] = ["keep_best"] if tree.run.keep_best.count else []
    return [*found, "early_stopping"] if tree.run.early_stopping.patience else found


def metric_of(tree: Any, rule: Rule) -> str:
    """Returns the "evaluation/metric" that a rule compares, or "" without evaluation inputs.

    Raises:
      ValueError: the experiment does not have the evaluation input.
    """
    names, choice = list(tree.eval_inputs), tree.run.get(rule)
    eval_input = choice.eval_input or (names[0] if names else "")
    if eval_input and eval_input not in names:
        raise ValueError(
            f"run.{rule}.eval_input is {eval_input!r}, but the evaluation inputs are: "
            f"{', '.join(names) or 'none'}"
        )
    return f"{eval_input}/{choice.metric}" if eval_input else ""


def deciding_metrics(tree: Any) -> frozenset[str]:
    """Returns the "evaluation/metric" by which the run keeps checkpoints or ends early.

    Raises:
      ValueError: the experiment does not have an evaluation input that a rule names.
    """
    return frozenset(filter(None, (metric_of(tree, rule) for rule in rules_of(tree))))


def declared_metrics(tree: Any) -> frozenset[str]:
    """Returns the metrics for which the task declares whether larger or smaller is better."""
    has_goals = hasattr(tree.task.owner, "goals_of")
    return frozenset(task_results.goals_of(tree.task) if has_goals else ())


def where(tree: Any, rule: Rule) -> str:
    """Returns the path of the metric of a rule, and where it was set, for messages."""
    path = f"run.{rule}.metric"
    origin = tree.origin(path)
    return path if origin == "default" else f"{path} ({origin})"


def goal_of_best(tree: Any) -> str:
    """Returns the goal of `run.keep_best`; "" if the run keeps no best checkpoint, or none known.

    Checkpoints have it, for commands that do not import the class of the task.
    """
    try:
        keeps = tree.run.keep_best.count and metric_of(tree, "keep_best")
        return goal_of(tree, "keep_best") if keeps else ""
    except ValueError:
        return ""


def goal_of(tree: Any, rule: Rule) -> Goal:
    """Returns "min" or "max": the `goal` of a rule if it is set, otherwise what the task declares.

    Raises:
      ValueError: neither is set.
    """
    choice = tree.run.get(rule)
    if choice.goal is not None:
        goal: Goal = choice.goal
        return goal
    metric = choice.metric
    found = declared_goal(tree, metric)
    if found:
        return found
    raise ValueError(
        undeclared(
            tree, metric, f"{where(tree, rule)} is {metric!r}, and", f"--set run.{rule}.goal"
        )
    )


def declared_goal(tree: Any, metric: str) -> Goal | None:
    """Returns "min" or "max", as the task declares for a metric; None: it does not declare it."""
    known, name = _goals(tree), metric
    while name:  # "bleu/de": BLEU of one language
        if name in known:
            return known[name]
        name = name.rpartition("/")[0]
    return None


def undeclared(tree: Any, metric: str, what: str, setting: str) -> str:
    """Returns a message that the task does not declare the goal of a metric, and what to write.

    Args:
      tree: the Params of the experiment.
      metric: the metric, without the evaluation.
      what: the beginning of the message, up to the name of the task.
      setting: what sets the goal, "--goal".
    """
    known, name = _goals(tree), getattr(tree.task.owner, "__name__", "the task")
    goals = ", ".join(f"{metric} ({goal})" for metric, goal in sorted(known.items()))
    longer = [one for one in known if one.endswith(f"_{metric}") or one.startswith(f"{metric}_")]
    close = close_matches(metric, known, count=1) or longer
    digits = "0123456789"
    same = [one for one in known if one.rstrip(digits) == metric.rstrip(digits) != ""]
    close = close or same  # "r3" for "r2"
    hint = f"did you mean {close[0]}? Otherwise " if close else ""
    return (
        f"{what} {name} does not declare whether larger or smaller values are better: {hint}"
        f"{setting}=min if smaller values are better, as of an error, else max; or declare it in "
        f"{name}, with goals = {{{metric!r}: …}}, where … is 'min' or 'max'; the declared ones are "
        f"{goals}"
    )


def _goals(tree: Any) -> dict[str, Goal]:
    known: dict[str, Goal] = {LOSS: "min"}
    if hasattr(tree.task.owner, "goals_of"):
        known |= task_results.goals_of(tree.task)
    return known
