"""tekso-decode for a model of several tasks: `--task` names one of them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from tekso.tools.command_errors import UsageError

if TYPE_CHECKING:  # slow to import
    from tekso.framework.run.assembly import Assembly


def path_of(tree: Any, model: str, task: str | None) -> str:
    """Returns the path of the task to decode with: "task", or "task.tasks.NAME".

    Args:
      tree: Params of the run.
      model: name of the experiment.
      task: name of the task; None: the only one.

    Raises:
      UsageError: the model has several tasks and none is named, or it has not the named one.
    """
    tasks = list(tree.task.tasks) if "tasks" in tree.task else []
    if task is None and not tasks:
        return "task"
    if task is None:
        raise UsageError(f"{model} has several tasks: add --task={' or --task='.join(tasks)}")
    if task not in tasks:
        there = f"its tasks are {', '.join(tasks)}" if tasks else "it is a single task"
        raise UsageError(f"--task={task}: {model} has no such task; {there}")
    return f"task.tasks.{task}"


def tree_of(tree: Any, task: str | None) -> Any:
    """Returns Params of a run as those of one of its tasks alone."""
    if task is None:
        return tree
    return tree.copy().set(task=tree.task.tasks[task], input=tree.input.inputs[task])


def of_task(parts: Assembly, task: str | None) -> Assembly:
    """Returns the parts of an experiment as one of its tasks sees them."""
    if task is None:
        return parts
    several: Any = parts.task
    inputs: Any = parts.input
    return dataclasses.replace(
        parts,
        tree=tree_of(parts.tree, task),
        task=several.tasks[task],
        input=inputs.inputs[task],
        program=several.program_of(parts.program, task),
    )
