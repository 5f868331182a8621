"""Traces a loss that fails once more, to report which layer returned what.

A traceback has only the calls that did not end. A layer whose output has a wrong shape has ended:
the error is in a later layer. So the calls of `fprop` are recorded while the loss is traced again.
"""

from __future__ import annotations

import contextlib
import dis
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import graph_errors, task_results
from tekso.framework.context import StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.layer import Layer
from tekso.framework.run.assembly import Assembly
from tekso.framework.task import Task
from tekso.framework.theta import SEPARATOR

_OF_SHAPES = re.compile(r"(?i)dim|shape|rank")


def same_failure(
    task: Task, batch: Mapping[str, np.ndarray], error: BaseException
) -> Exception | None:
    """Returns the error of the loss if it has the type and the place of an error, else None.

    It has a note about a layer that returned before it, if there is one to blame.
    """
    found, calls = _traced(task, batch)
    if found is None or _kind(found) != _kind(error):
        return None
    _add_note(found, calls)
    return found


@contextlib.contextmanager
def explaining(parts: Assembly, step: int, unchecked: Sequence[str]) -> Iterator[None]:
    """Adds a note to an error of the loss: which layer returned None, or which shapes.

    Nothing is added if the loss, traced alone on this host, does not fail in the same way.

    Args:
      parts: have the task and the training input.
      step: number of a batch.
      unchecked: empty as soon as the loss has been computed.
    """
    try:
        yield
    except Exception as error:
        found = same_failure(parts.task, parts.input.batch(step), error) if unchecked else None
        for note in getattr(found, "__notes__", ()):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


class _Call(NamedTuple):
    """A call of `fprop` that ended.

    Attributes:
      path: of the layer in the task.
      name: path and class.
      inputs: shapes of the tensors that it was given.
      output: what it returned.
    """

    path: str
    name: str
    inputs: list[str]
    output: Any


def _traced(task: Task, batch: Mapping[str, np.ndarray]) -> tuple[Exception | None, list[_Call]]:
    """Traces the loss; returns its error and the calls of layers that ended before."""
    specs = {path: tf.TensorSpec(spec.shape, spec.dtype) for path, spec in task.specs().items()}
    arrays = {name: tf.TensorSpec(*kind) for name, kind in signature_of(batch).items()}

    def loss(weights: Mapping[str, tf.Tensor], examples: Mapping[str, tf.Tensor]) -> tf.Tensor:
        ctx = StepContext(num_examples=len(next(iter(batch.values()))), example_offset=0)
        return task_results.loss(task, task.theta(weights), examples, ctx).loss_sum

    recorder = _Recorder()
    before = sys.getprofile()
    sys.setprofile(recorder)
    try:
        tf.function(loss, autograph=False).get_concrete_function(specs, arrays)
    except Exception as error:  # in the code of the task
        return error, recorder.calls
    finally:
        sys.setprofile(before)
    return None, []


class _Recorder:
    """A profile function that records the calls of `fprop` that end."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self._inputs: dict[FrameType, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Records a call."""
        code = frame.f_code
        if code.co_name != "fprop" or event not in ("call", "return"):
            return
        layer = frame.f_locals.get("self")
        if not isinstance(layer, Layer):
            return
        if event == "call":
            names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            self._inputs[frame] = _shapes([frame.f_locals.get(n) for n in names if n != "theta"])
            return
        inputs = self._inputs.pop(frame, [])
        if dis.opname[code.co_code[frame.f_lasti]] == "RETURN_VALUE":  # not by an error
            name = f"{layer.path} ({type(layer).__name__})" if layer.path else type(layer).__name__
            self.calls.append(_Call(layer.path, name, inputs, value))


def _shapes(values: Any) -> list[str]:
    """Returns the shapes of the tensors in a nest."""
    return [str(x.shape.as_list()) for x in tf.nest.flatten(values) if _is_known(x)]


def _is_known(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and value.shape.rank is not None


def _add_note(error: BaseException, calls: Sequence[_Call]) -> None:
    """Adds a note: the layer that returned None, or the shapes of the last one that returned."""
    text, before = str(error), graph_errors.BEFORE_THAT
    if "None" in text and (found := [call for call in calls if call.output is None]):
        error.add_note(f"{before}{found[0].name} returned None: is a return missing in its fprop?")
        return
    failed = _failed_path(error)
    ended = [call for call in calls if failed is None or not _is_below(call.path, failed)]
    if ended and _OF_SHAPES.search(text):
        inputs, outputs = ", ".join(ended[-1].inputs), ", ".join(_shapes(ended[-1].output))
        if inputs and outputs:
            error.add_note(
                f"{before}{ended[-1].name} returned the shape {outputs} for inputs {inputs}"
            )


def _is_below(path: str, above: str) -> bool:
    return path == above or not above or path.startswith(f"{above}{SEPARATOR}")


def _failed_path(error: BaseException) -> str | None:
    """Returns the path of the innermost layer whose `fprop` an error ended."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        layer = frame.f_locals.get("self")
        if frame.f_code.co_name == "fprop" and isinstance(layer, Layer):
            found = layer.path
    return found


def _kind(error: BaseException) -> tuple[type, str, int]:
    """Returns the type of an error, and the innermost line outside of libraries."""
    places = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    own = [place for place in places if not graph_errors.is_library_file(place[0])]
    return (type(error), *(own or places)[-1])
