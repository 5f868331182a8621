"""Names of tasks and inputs, and paths of settings in the errors of one task of several."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any


def check_names(tasks: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Checks that there is one input for every task.

    Raises:
      ValueError: a task has no input, or an input no task.
    """
    missing, unknown = (sorted(one.keys() - other.keys()) for one, other in (
        (tasks, inputs), (inputs, tasks)
    ))  # fmt: skip
    if missing:
        raise ValueError(
            f"there is no input for the task {missing[0]!r}: add it to input.inputs, which has "
            f"{', '.join(inputs) or 'none'}"
        )
    if unknown:
        raise ValueError(
            f"input.inputs has {unknown[0]!r}, but the tasks are {', '.join(tasks) or 'none'}: "
            "add the task to task.tasks, or remove the input"
        )


def with_task(text: str, name: str) -> str:
    """Returns a text in which paths of settings of a task alone are those of the whole tree."""
    text = re.sub(r"(?<![\w.])task\.(?!tasks\.)", f"task.tasks.{name}.", text)
    return re.sub(r"(?<![\w.])input\.(?!inputs\.)", f"input.inputs.{name}.", text)


@contextlib.contextmanager
def in_task(name: str) -> Iterator[None]:
    """Corrects the paths of settings in the errors of a task."""
    try:
        yield
    except ValueError as error:
        text = with_task(str(error), name)
        if text == str(error):
            raise
        raise type(error)(text) from error
