"""Rejects draws from the global random numbers of NumPy and of Python in a loss.

A step is traced once, so such numbers are constants of its graph: they are the same in every step.
A comparison of two losses does not find small ones, or a choice that was the same twice.

    loss, op by op      other states than before?  ─► compute it again from these states
    loss, line by line  three times the same line and the same new states?  ─► wait
    nothing             the same states?  ─► an error

The states must change each time: a library may draw numbers when it is imported, and a function
that sets the seed draws the same numbers each time. They must change at the same line and in the
same way, and stay as they are while nothing is computed, because another thread may draw numbers.
Generators of their own, such as `np.random.default_rng()`, have other states, which are not
compared. A loss with long loops is computed op by op only for an evaluation, so what it draws only
in training is not found.
"""

from __future__ import annotations

import os
import pickle
import random
import re
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import graph_errors, task_results
from tekso.framework.context import RANDOM_NUMBERS, Mode
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.run.loss_trial import Trial
from tekso.framework.task import Task
from tekso.framework.user_mistakes import MistakeError

_States = tuple[bytes, tuple[Any, ...]]
_CALLBACK = re.compile(r"\b(numpy_function|py_function|py_func)\b")
_FILE_OF_CALLBACKS = f"{os.sep}tensorflow{os.sep}python{os.sep}ops{os.sep}script_ops.py"
_REPETITIONS = 3
_SHORTEST_WAIT, _LONGEST_WAIT = 0.05, 1.0  # seconds
_NAMES = ("NumPy (np.random)", "Python (random)")


class DrawingTrial(Trial):
    """A trial that raises a ForeignVariableError if the task draws such random numbers."""

    def _run(
        self, weights: Any, batch: Mapping[str, tf.Tensor], offset: Any, **settings: Any
    ) -> Any:
        def compute() -> Any:
            return super(DrawingTrial, self)._run(weights, batch, offset, **settings)

        if not tf.executing_eagerly():  # the first computation of each kind is op by op
            return compute()
        before = _states()
        found = compute()
        if _states() != before and (lines := _drawing(compute)) is not None:
            self._refuse_others(batch, settings["mode"])
            raise ForeignVariableError(_message(self.task, lines))
        return found

    def _refuse_others(self, batch: Mapping[str, tf.Tensor], mode: Mode) -> None:
        """Raises an error about a layer of Keras, which draws seeds when it is made."""
        try:
            self.ops({name: tensor.numpy() for name, tensor in batch.items()}, mode)
        except MistakeError:
            raise
        except Exception:  # it cannot be traced
            return


def _states() -> _States:
    """Returns the states of the generators of NumPy and of Python."""
    return pickle.dumps(np.random.get_state(legacy=False)), random.getstate()


def _restore(states: _States) -> None:
    of_numpy, of_python = states
    np.random.set_state(pickle.loads(of_numpy))
    random.setstate(of_python)


def _drawing(compute: Callable[[], object]) -> _Lines | None:
    """Returns the line of a computation that changes the states; None: none does each time."""
    before, found, start = _states(), set[object](), time.monotonic()
    for _ in range(_REPETITIONS):
        try:
            _restore(before)
            lines = _traced(compute)
        except Exception:  # it did not fail before: the error of a later computation says why
            return None
        found.add((lines.drawn, lines.place, after := _states()))
        if not lines.drawn or after == before or len(found) > 1:
            return None
    seconds = time.monotonic() - start
    time.sleep(min(max(seconds, _SHORTEST_WAIT), _LONGEST_WAIT))
    return lines if _states() == after else None  # else another thread draws, also now


def _traced(compute: Callable[[], object]) -> _Lines:
    """Returns the first line of a computation that changes the states."""
    lines, tracing = _Lines(), sys.gettrace()
    sys.settrace(lines)
    try:
        compute()
    finally:
        sys.settrace(tracing)
    return lines


def _message(task: Task, lines: _Lines) -> str:
    draws = f"{task_results.source_of_loss(task)} draws random numbers of {lines.drawn}"
    place = graph_errors.place_in([lines.place])
    if lines.is_called_back or _CALLBACK.search(place):
        return (
            f"{draws} in tf.numpy_function or tf.py_function: each step draws others, but their "
            "state is in no checkpoint, so a run could not be repeated. Take them from "
            f"{RANDOM_NUMBERS}, and pass them to the function{place}"
        )
    return (
        f"{draws}: a step is traced once, so they would be the same numbers in every step. Take "
        f"them from {RANDOM_NUMBERS}; choose with "
        "tf.where(ctx.uniform(self, [1], shared=True) < 0.5, a, b) instead of if; draw constants "
        f"in __init__, with np.random.default_rng(0){place}"
    )


def _is_called_back(frame: FrameType | None) -> bool:
    """Whether tf.numpy_function or tf.py_function has called a function."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_FILE_OF_CALLBACKS):
            return True
        frame = frame.f_back
    return False


class _Lines:
    """A trace function that notes the first line of the user after which the states differ.

    Attributes:
      drawn: whose numbers were drawn; "": none.
      place: file, line and function.
      is_called_back: whether TensorFlow called the function of this line, as tf.numpy_function.
    """

    def __init__(self) -> None:
        self.drawn, self.place, self.is_called_back = "", ("", 0, ""), False
        self._states = _states()
        self._last: dict[FrameType, int] = {}  # the line that each frame runs

    def __call__(self, frame: FrameType, event: str, value: object) -> Any:
        """Compares the states after each line of a file that is no library."""
        del value
        if self.drawn or graph_errors.is_library_file(frame.f_code.co_filename):
            return None
        if (now := _states()) != self._states:
            changed = [one != other for one, other in zip(now, self._states, strict=True)]
            self.drawn = _NAMES[changed.index(True)]
            self.place = self._before(frame, event)
            self.is_called_back = _is_called_back(frame)
            return None
        self._last[frame] = frame.f_lineno
        return self

    def _before(self, frame: FrameType, event: str) -> tuple[str, int, str]:
        """Returns the line that ran before an event: of the frame, or of what called it."""
        line, caller = self._last.get(frame, frame.f_lineno), frame.f_back
        if event == "call":
            while caller is not None and graph_errors.is_library_file(caller.f_code.co_filename):
                caller = caller.f_back
            frame, line = caller or frame, (caller or frame).f_lineno
        return frame.f_code.co_filename, line, frame.f_code.co_name
