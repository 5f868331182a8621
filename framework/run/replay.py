"""Runs the step of an incident again on one device, and names what was not finite first.

    incidents/step_00000110/ ─► Params, batch, state ─► traced_step ─► table of layers, first cause

If the incident has no state, the nearest earlier checkpoint of its run is used; if it has no batch,
the training input builds the batch again.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import files, schedules
from tekso.framework.loss_scale import SCALE
from tekso.framework.path_patterns import listed
from tekso.framework.run import incidents, inspection, traced_step
from tekso.framework.run.checkpoints import CheckpointError, Checkpoints
from tekso.framework.run.incidents import IncidentError
from tekso.framework.run.opened import OpenedRun, open_run
from tekso.framework.run.traced_step import EXPLODED, TracedStep
from tekso.framework.state import LEARNER, WEIGHTS
from tekso.framework.step import Step
from tekso.framework.tables import table

_LARGEST_NORM = float(np.finfo(np.float32).max) ** 0.5  # whose square is still finite


def replay(path: str, *, warn: Callable[[str], None]) -> dict[str, Any]:
    """Runs the step of an incident again; returns a record of what it computed.

    Args:
      path: folder of the incident.
      warn: called with the text of a warning.

    Raises:
      IncidentError: the folder is not one of an incident, its files are damaged, or no state is
        left to replay it from.
      CheckpointError: the checkpoint is damaged, or its Params cannot be read.
    """
    path = os.path.expanduser(path).rstrip("/")
    incident = incidents.read(path)
    number, position = incident.step, incident.position
    run = _run(path, number, warn)
    tree, task = run.completed_tree(), run.task()
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    step = Step(task, learner, seed=incident.seed, dtype=tree.run.activation_dtype)
    checkpoint = run.checkpoint
    if checkpoint.step != number:
        warn(
            f"the state after step {number} is not saved: the weights are those of step "
            f"{checkpoint.step}"
        )
    weights = {p: tf.constant(checkpoint.read(WEIGHTS + p)) for p in step.specs.weights}
    scale = None
    if learner.loss_scale is not None:
        scale = float(checkpoint.read(LEARNER + SCALE))
    batch = _batch(path, position, tree, run)
    traced = traced_step.trace(step, weights, batch, number=number, scale=scale)
    bad = [p for p, value in weights.items() if not math.isfinite(traced_step.largest([value]))]
    return {
        "model": run.model,
        "step": number,
        "batch": position,
        "checkpoint": checkpoint.path,
        "loss": traced.loss,
        "cause": cause(traced, bad, incidents.first_not_finite(batch)),
        "nonfinite_weights": bad,
        "nonfinite_gradients": [p for p, g in traced.gradients.items() if not math.isfinite(g)],
        "layers": [
            [c.layer, c.kind, c.inputs, c.outputs, c.outputs_gradient, c.gradient]
            for c in traced.calls
        ],
    }


def explanation(path: str | None, imports: Sequence[str] = ()) -> str:
    """Returns sentences that name what was not finite first in an incident, and how to replay it.

    Args:
      path: folder of the incident; None: there is none.
      imports: packages of the user that the experiment needs.
    """
    if path is None:
        return ""
    advice = f"To see every layer: {incidents.replay_command(path, imports)}"
    if not Checkpoints(path).steps():
        return advice
    try:
        record = replay(path, warn=lambda text: None)
    except (ValueError, OSError, CheckpointError, tf.errors.OpError):
        return advice  # the error that ends the run matters more
    bad = [
        f"{kind} that are not finite: {listed(names, 3)}"
        for kind in ("weights", "gradients")
        if (names := record[f"nonfinite_{kind}"])
    ]
    return ". ".join([*bad, record["cause"], advice])


def _run(path: str, step: int, warn: Callable[[str], None]) -> OpenedRun:
    """Opens the state of an incident, or the nearest checkpoint before it."""
    own = Checkpoints(path, warn=warn)
    if own.steps():
        return open_run(own.path(own.steps()[-1]), warn=warn)
    logdir = os.path.dirname(os.path.dirname(os.path.abspath(path)))
    checkpoints = Checkpoints(files.join(logdir, "checkpoints"), warn=warn)
    earlier = [one for one in checkpoints.steps() if one <= step]
    if not earlier:
        raise IncidentError(
            f"{path} has no state, and {checkpoints.directory} has no checkpoint before step "
            f"{step}: the incident cannot be replayed"
        )
    return open_run(checkpoints.path(earlier[-1]), warn=warn)


def _batch(path: str, position: int, tree: Any, run: OpenedRun) -> Mapping[str, np.ndarray]:
    if (batch := incidents.read_batch(path)) is not None:
        return batch
    input = inspection.known_input(tree, run.logdir.assets)
    found: Mapping[str, np.ndarray] = input.batch(position)
    return found


# --- the cause ---


def cause(
    traced: TracedStep, nonfinite_weights: list[str], in_batch: tuple[str, int] | None = None
) -> str:
    """Returns the sentence that names the first layer and op that were not finite.

    Args:
      traced: what the step computed.
      nonfinite_weights: paths of the weights that were not finite before the step.
      in_batch: the first array of the batch that is not finite, and its first such example.
    """
    if nonfinite_weights:
        return f"the weight {nonfinite_weights[0]} was not finite before the step"
    for call in traced.calls:
        if not math.isfinite(call.inputs):
            continue
        if not math.isfinite(call.outputs):
            ops = [op for op in traced.forward if op.layer == call.layer]
            return f"forward: the output of {_named(call)} is not finite{_op(ops)}"
    if traced.calls and not math.isfinite(traced.calls[0].inputs):
        what = f"forward: the input of {_named(traced.calls[0])} is not finite"
        if in_batch is not None:
            return f"{what}: see {in_batch[0]!r} of the batch, example {in_batch[1]}"
        maker = next((op.layer for op in traced.forward), "") or "the task"
        return f"{what}, but the batch is: {maker} makes it before that layer{_op(traced.forward)}"
    if not math.isfinite(traced.loss):
        ops = [op for op in traced.forward if not op.layer] or traced.forward
        return f"forward: the loss is not finite, and the output of every layer is{_op(ops)}"
    return _backward_cause(traced)


def _backward_cause(traced: TracedStep) -> str:
    for call in reversed(traced.calls):  # the backward pass has the reverse order
        above = call.outputs_gradient
        if above is not None and not math.isfinite(above):
            return (
                "backward: the gradient of the loss with respect to the output of "
                f"{_named(call)} is not finite{_op(traced.backward)}"
            )
        if above is not None and call.gradient is not None and not math.isfinite(call.gradient):
            inner = [c for c in traced.calls if c.layer.startswith(f"{call.layer}/")]
            if any(c.gradient is not None and not math.isfinite(c.gradient) for c in inner):
                continue
            return f"backward: a gradient in {_named(call)} is not finite{_op(traced.backward)}"
    bad = [path for path, value in traced.gradients.items() if not math.isfinite(value)]
    if bad:
        return f"backward: the gradient of the weight {bad[0]} is not finite{_op(traced.backward)}"
    return _explosion(traced)


def _explosion(traced: TracedStep) -> str:
    """Returns the sentence about a step in which everything is finite."""
    top = max(traced.gradients.values(), default=0.0)
    skipped = (
        f", but the largest gradient, {top:.3g}, has a square that is not a float32 number"
        if top > _LARGEST_NORM
        else ""
    )
    for call in traced.calls:
        if call.inputs <= EXPLODED < call.outputs:
            ops = [op for op in traced.exploded_forward if op.layer == call.layer]
            return (
                f"everything is finite{skipped}; forward: the first output above {EXPLODED:g} is "
                f"that of {_named(call)}, {call.outputs:.3g}{_op(ops)}"
            )
    limit = EXPLODED * traced.scale
    for call in reversed(traced.calls):  # the backward pass has the reverse order
        if (call.outputs_gradient or 0.0) <= limit < (call.gradient or 0.0):
            inner = [c for c in traced.calls if c.layer.startswith(f"{call.layer}/")]
            if any((c.gradient or 0.0) > limit for c in inner):
                continue
            return (
                f"everything is finite{skipped}; backward: the first gradient above {EXPLODED:g} "
                f"is in {_named(call)}{_op(traced.exploded_backward)}"
            )
    return f"everything is finite on one device{skipped}"


def _named(call: traced_step.Call) -> str:
    return f"{call.layer or 'the task'} ({call.kind})"


def _op(ops: list[traced_step.Op]) -> str:
    if not ops:
        return ""
    line = f"\n  at {ops[0].line}" if ops[0].line else ""
    return f"; first op: {ops[0].op}{line}"


def text(record: Mapping[str, Any], *, width: int | None = None) -> str:
    """Returns the result of `replay` as text."""
    rows = [
        [layer, kind, *("" if value is None else f"{value:.3g}" for value in values)]
        for layer, kind, *values in record["layers"]
    ]
    header = ["layer", "class", "input", "output", "output gradient", "gradient"]
    lines = [
        f"the step after step {record['step']} of {record['model']}, batch {record['batch']}, "
        f"with the state in {record['checkpoint']}",
        "largest absolute values, in the order of the forward pass:",
        "",
        *table(header, rows, right=(2, 3, 4, 5), width=width),
        "",
        f"loss {record['loss']:.6g}",
        record["cause"],
    ]
    for kind in ("weights", "gradients"):
        bad = record[f"nonfinite_{kind}"]
        if bad:
            lines.append(f"{kind} that are not finite: {len(bad)}, the first is {bad[0]}")
    return "\n".join(lines)
