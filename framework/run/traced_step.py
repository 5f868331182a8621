"""Runs a training step eagerly on one device, and records every layer and every failing op.

    fprop of every layer ─► calls: largest absolute inputs, outputs and their gradients
    every TensorFlow op  ─► ops: finite inputs, an output that is not finite; and explosions

Layers are observed by replacing the `fprop` of each layer object, ops by TensorFlow's callbacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from tekso.framework import task_results
from tekso.framework.batch_sums import part_sums
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.step import Step, unscaled
from tekso.framework.task import Task
from tekso.framework.theta import SEPARATOR

EXPLODED = 1e6
"""An output or gradient above this limit has exploded, if the inputs have not."""
_LIBRARIES = ("site-packages", "<")


@dataclasses.dataclass
class Call:
    """A call of the `fprop` of a layer; numbers are the largest absolute values.

    Attributes:
      layer: path of the layer, or "task".
      kind: name of its class.
      inputs, outputs: of the forward pass.
      outputs_gradient, gradient: of the backward pass; `gradient` is that of the inputs and of the
        layer's weights. None: the loss does not depend on them.
    """

    layer: str
    kind: str
    inputs: float
    outputs: float = 0.0
    outputs_gradient: float | None = None
    gradient: float | None = None


@dataclasses.dataclass(frozen=True)
class Op:
    """An op with finite inputs and an output that is not, or with one that has exploded.

    Attributes:
      layer: path of the layer whose `fprop` was running; "" in the backward pass.
      op: type of the op, such as "Log".
      line: the line of code that called it; "" if it is in a library.
    """

    layer: str
    op: str
    line: str


@dataclasses.dataclass
class TracedStep:
    """What a step computed.

    Attributes:
      loss: the total loss.
      calls: the calls of all layers, in the order in which they returned.
      forward, backward: the failing ops, in their order.
      exploded_forward, exploded_backward: the ops whose output, but no input, has exploded.
      gradients: {path of a weight: largest absolute gradient}.
      scale: factor of the loss in the backward pass, which the gradients of calls contain.
    """

    loss: float = 0.0
    calls: list[Call] = dataclasses.field(default_factory=list)
    forward: list[Op] = dataclasses.field(default_factory=list)
    backward: list[Op] = dataclasses.field(default_factory=list)
    exploded_forward: list[Op] = dataclasses.field(default_factory=list)
    exploded_backward: list[Op] = dataclasses.field(default_factory=list)
    gradients: dict[str, float] = dataclasses.field(default_factory=dict)
    scale: float = 1.0


def trace(
    step: Step,
    weights: Mapping[str, tf.Tensor],
    batch: Mapping[str, np.ndarray],
    *,
    number: int,
    scale: float | None,
) -> TracedStep:
    """Runs the forward and backward pass of a step on the global batch.

    Args:
      step: the step of the run.
      weights: {path: tensor} of all weights.
      batch: the global batch.
      number: number of the step, for random numbers.
      scale: factor of the loss in the backward pass; None: no factor.
    """
    found = TracedStep(scale=1.0 if scale is None else scale)
    size = len(next(iter(batch.values())))
    ctx = StepContext(
        mode="train", seed=step.seed, step=number, example_offset=0, num_examples=size
    )
    trained = {path: weights[path] for path in step.trained}
    running: list[str] = []
    tensors: list[tuple[list[tf.Tensor], list[tf.Tensor]]] = []
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        tape.watch(trained)
        with (
            _observed(step.task, found, running, tensors, tape),
            _ops(found.forward, found.exploded_forward, running),
        ):
            theta = step.task.theta(step.cast(weights))
            total_weight = step.loss_weight(batch)
            sums = task_results.loss(step.task, theta, batch, ctx)
            total = part_sums(sums, ctx, total_weight).total
    found.loss = float(total)
    seed = tf.cast(found.scale, total.dtype)
    factor = None if scale is None else tf.constant(scale)
    with _ops(found.backward, found.exploded_backward, [], limit=EXPLODED * found.scale):
        nest = (trained, [inputs for inputs, _ in tensors], [outputs for _, outputs in tensors])
        of_weights, of_inputs, of_outputs = tape.gradient(total, nest, output_gradients=seed)
    for path, gradient in of_weights.items():
        if gradient is not None:
            gradient = unscaled(tf.convert_to_tensor(gradient), factor)
            found.gradients[path] = largest([gradient])
    for call, inputs, outputs in zip(found.calls, of_inputs, of_outputs, strict=True):
        head = "" if call.layer == "task" else f"{call.layer}{SEPARATOR}"
        own = [g for path, g in of_weights.items() if path.startswith(head) and g is not None]
        call.outputs_gradient = largest(outputs) if _some(outputs) else None
        call.gradient = largest([*inputs, *own]) if _some([*inputs, *own]) else None
    return found


def largest(tensors: Any) -> float:
    """Returns the largest absolute value of tensors; NaN or inf if one is not finite."""
    found = 0.0
    for tensor in tf.nest.flatten(tensors):
        if tensor is not None:
            values = np.abs(np.asarray(tf.convert_to_tensor(tensor)).astype(np.float64))
            found = float(np.maximum(found, values.max(initial=0.0)))  # NaN stays NaN
    return found


def _some(tensors: list[Any]) -> bool:
    return any(tensor is not None for tensor in tensors)


def _floats(nest: Any) -> list[tf.Tensor]:
    return [x for x in tf.nest.flatten(nest) if tf.is_tensor(x) and x.dtype.is_floating]


@contextlib.contextmanager
def _observed(
    task: Task, found: TracedStep, running: list[str], tensors: list[Any], tape: Any
) -> Iterator[None]:
    """Records the calls of all layers of a task in the block."""
    layers = [layer for layer in task.walk() if layer is not task]
    for layer in layers:
        observer = functools.partial(_call, layer, layer.fprop, found, running, tensors, tape)
        layer.__dict__["fprop"] = observer
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["fprop"]


def _call(
    layer: Layer,
    fprop: Callable[..., Any],
    found: TracedStep,
    running: list[str],
    tensors: list[Any],
    tape: Any,
    theta: Any,
    *args: Any,
    **options: Any,
) -> Any:
    with tape.stop_recording():
        inputs = _floats((args, options))
        call = Call(layer.path, type(layer).__name__, largest(inputs))
    running.append(layer.path)
    try:
        output = fprop(theta, *args, **options)
    finally:
        running.pop()
    with tape.stop_recording():
        outputs = _floats(output)
        call.outputs = largest(outputs)
    found.calls.append(call)
    tensors.append((inputs, outputs))
    return output


@contextlib.contextmanager
def _ops(
    failed: list[Op], exploded: list[Op], running: list[str], *, limit: float = EXPLODED
) -> Iterator[None]:
    """Records the ops of the block that fail, and those that explode.

    A mask of large negative numbers is an input, so an op that applies it does not count.
    """

    def observe(kind: str, inputs: Any, attrs: Any, outputs: Any, *args: Any, **rest: Any) -> None:
        after = largest(_floats(list(outputs)))
        if after <= limit:
            return
        before = largest(_floats(list(inputs)))
        if np.isfinite(before) and not np.isfinite(after):
            failed.append(Op(running[-1] if running else "", str(kind), _line()))
        elif before <= limit:
            exploded.append(Op(running[-1] if running else "", str(kind), _line()))

    op_callbacks.add_op_callback(observe)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(observe)


def _line() -> str:
    """Returns the line of code that called an op; "" if TensorFlow did, as in a backward pass."""
    for frame in reversed(traceback.extract_stack()[:-2]):  # without this function and `observe`
        if frame.filename == __file__:
            break
        if not any(name in frame.filename for name in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""
