"""Tries `Task.decode` before the first step, although a run calls it only after the last one.

    decode(program, input)      the task's own code runs, with the training input
      program.call(function)    traced with the shapes of the weights, not computed; returns zeros
      Decoded(text, records)    its type is checked, its values are not used

An error before the first result, in a traced function, or of the type that `decode` returns ends
the run. Later code may fail only for zeros, so its errors are warnings. So are random numbers that
are the same in each iteration of a loop. The program keeps the traces, so that decoding at the end
does not trace these functions again.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import draws, error_advice, out_of_memory, task_results
from tekso.framework.execution import ExecutionProgram
from tekso.framework.input.input import Input
from tekso.framework.run import loss_retrace
from tekso.framework.task import Task, TaskError

_MOST_CALLS = 20  # of `program.call`; without real results, a loop might not end


class DecodingError(ValueError):
    """`decode` of a task fails."""


def check(task: Task, program: ExecutionProgram, input: Input, *, setting: str) -> list[str]:
    """Tries `decode` of a task without computing; returns warnings.

    Args:
      task: the task.
      program: traces the functions that `decode` calls.
      input: the training input.
      setting: where `run.decode_at_end` was set, for messages.

    Raises:
      DecodingError: `decode` fails.
      Exception: the loss fails in the same way: its error.
      TaskError: it returns neither `Decoded` nor None.
    """
    if type(task).decode is Task.decode:
        return []
    trial = _Trial(program)
    warnings: list[str] = []
    try:
        with draws.warning_of_repeats("in decode", warnings.append):
            task_results.decode(task, trial, input)
    except _EndOfTrial:
        return warnings
    except TaskError:
        raise
    except Exception as error:  # in the code of the task
        if not trial.has_results and out_of_memory.shortage_of(error) is not None:
            raise  # the run says what to do
        if not trial.has_results:
            of_loss = loss_retrace.same_failure(task, input.batch(0), error)
            if of_loss is not None:  # not an error of `decode`
                raise of_loss from None
        method = task_results.method_of(task, "decode")
        what = f"{type(error).__name__}: {error_advice.text_of(error).rstrip('.')}"
        if trial.has_results and isinstance(error, _OF_TYPES):
            return [
                *warnings,
                f"{method} fails in its trial with the results of program.call, whose types are "
                f"those of the run: {what}{_place(error)}. The run calls it after its last step, "
                "and it would fail then, too",
            ]
        if trial.has_results:
            return [
                *warnings,
                f"{method} fails if all results of program.call are zeros: {what}{_place(error)}. "
                "The run calls it after its last step; unless only zeros are a problem, it fails "
                "then, too",
            ]
        now = "it is True by default" if setting == "default" else f"True was set in {setting}"
        text = (
            f"{method} fails with {what}. The run calls it after its last step, and tries it "
            f"before the first one. To train without it, --set run.decode_at_end=False ({now})"
        )
        # With the traceback of the error, so that the line and the layer are reported.
        raise DecodingError(text).with_traceback(error.__traceback__) from error
    return warnings


_OF_TYPES = (TypeError, AttributeError, NameError)  # hardly ever about values


class _EndOfTrial(BaseException):
    """Ends a trial without an error; `except Exception` in a task does not catch it."""


class _Trial:
    """A program that traces the functions that it is called with, and returns zeros.

    Attributes:
      serialize_calls: as of the program.
      has_results: whether a call has returned, so that later values are invented.
    """

    def __init__(self, program: ExecutionProgram) -> None:
        self._program = program
        self.serialize_calls = program.serialize_calls
        self.has_results = False
        self._num_calls = 0

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Traces a function; returns zeros of the shapes of its results."""
        self._num_calls += 1
        if self._num_calls > _MOST_CALLS:
            raise _EndOfTrial
        found = tf.nest.map_structure(_zeros, self._program.trace(function, *inputs))
        self.has_results = True
        return found

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the program."""
        return getattr(self._program, name)


def _zeros(spec: tf.TypeSpec | None) -> tf.Tensor | None:
    """Returns zeros of a shape and type; a dim of unknown size has size 1."""
    if spec is None:
        return None
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None:
        raise _EndOfTrial
    if spec.dtype in (tf.resource, tf.variant):
        raise _EndOfTrial
    shape = [1 if size is None else size for size in spec.shape]
    if math.prod(shape) * spec.dtype.size > _MOST_BYTES:
        raise _EndOfTrial
    return tf.zeros(shape, spec.dtype)


_MOST_BYTES = 256 * 1024**2  # of a result


def _place(error: Exception) -> str:
    """Returns " (file:line)" where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
