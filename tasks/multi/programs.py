"""The program and the exported functions of one task, given those of several tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework.exports import ExportedFunction
from tekso.framework.task import Program


class TaskProgram:
    """A program whose functions get the theta of one task; see `Program`."""

    def __init__(
        self, program: Program, task: str, functions: dict[Any, Callable[..., Any]]
    ) -> None:
        """Wraps a program.

        Args:
          program: of all tasks.
          task: the task.
          functions: {function of the task: the same of all tasks}; `call` adds to it.
        """
        self.program, self._task, self._functions = program, task, functions

    @property
    def serialize_calls(self) -> bool:
        """See `Program`."""
        return self.program.serialize_calls

    @serialize_calls.setter
    def serialize_calls(self, value: bool) -> None:
        self.program.serialize_calls = value

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """See `Program`; one function has one trace."""
        if function not in self._functions:
            self._functions[function] = with_theta_of(self._task, function)
        return self.program.call(self._functions[function], *inputs)


class TaskPrograms:
    """The programs of tasks; their functions are kept, and with them the traces."""

    def __init__(self) -> None:
        self._functions: dict[str, dict[Any, Callable[..., Any]]] = {}

    def of(self, program: Program, task: str) -> TaskProgram:
        """Returns the program of one task."""
        return TaskProgram(program, task, self._functions.setdefault(task, {}))


def with_theta_of(task: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function(theta of a task, …)` as a function of the theta of all tasks."""

    def run(theta: Any, *inputs: Any) -> Any:
        return function(theta[task], *inputs)

    return run


def exported_for_task(
    task: str,
    exported: ExportedFunction,
    *,
    input_of: Callable[[Any], Any] = lambda input: input,
) -> ExportedFunction:
    """Returns an exported function of a task as one of all tasks.

    Args:
      task: name of the task.
      exported: its function.
      input_of: returns the input of the task, given that of the experiment.
    """
    function: Callable[..., Mapping[str, tf.Tensor]] = with_theta_of(task, exported.function)
    quantization = exported.quantization
    if quantization is not None:
        own = quantization.examples
        quantization = dataclasses.replace(
            quantization, examples=lambda input, split, most: own(input_of(input), split, most)
        )
    return dataclasses.replace(exported, function=function, quantization=quantization)
