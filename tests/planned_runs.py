"""Plans of runs of a small language model, and speeds of a machine for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import tensorflow as tf

from tekso.framework import registry
from tekso.framework.costs.this_machine import THIS_MACHINE, MachineSpeed
from tekso.framework.run import (
    run_plan,
    step_parts,
    step_plan,
)
from tekso.framework.run.forward_flops import forward_flops
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.feed_forward import FeedForward

MODEL = "lm.python_source.Tiny"


class Block(FeedForward):
    """x + feed_forward(x), without attention, which takes most of the time of a trace.

    Steps with attention are planned in forward_flops_test.py, by the test that counts the forward
    pass by part of the model, and in mesh_stages_plan_test.py.
    """

    class Params(FeedForward.Params):
        """Params of Block."""

    def fprop(
        self, theta: Theta, x: tf.Tensor, ctx: Any, *, mask: Any = None, positions: Any = None
    ) -> tf.Tensor:
        return x + super().fprop(theta, x, ctx)


BFLOAT16 = {"run.activation_dtype": "bfloat16"}


def tree(**settings: Any) -> Any:
    found = registry.get(MODEL)().tree()
    found.task.model.stack.layer = Block.Params(input_dim=found.task.model.dim, hidden_dim=512)
    found.set({"task.model.stack.num_layers": 2, "input.batch_size": 8, **settings})
    return found


def planned(tmp_path: Path, found: Any = None, **options: Any) -> RunPlan:
    """Returns a plan; equal steps of modelled devices are traced once."""
    options = {"device": "cpu", "logdir": str(tmp_path / "none" / "run"), **options}
    with (
        mock.patch.object(run_plan, "step_plan", _step_plan),
        mock.patch.object(step_parts, "forward_flops", _forward_flops),
    ):
        return run_plan.plan(MODEL, found or tree(), **options)


def _step_plan(parts: StepParts, num_devices: int | None = None) -> StepPlan:
    if parts.device.name == THIS_MACHINE:  # whose speeds tests replace
        return step_plan.step_plan(parts, num_devices)
    found = parts.tree
    read = (found.task, found.input, found.learner, found.execution)
    texts = [params.to_text() for params in read]
    key = (*texts, found.run.steps, found.run.activation_dtype, str(parts.device), num_devices)
    if key not in _steps:
        _steps[key] = step_plan.step_plan(parts, num_devices)
    return _steps[key]


def _forward_flops(task: Task, batch: Any) -> Any:
    key = task.params.to_text(), str(batch)
    if key not in _flops:
        _flops[key] = forward_flops(task, batch)
    return _flops[key]


_steps: dict[Any, StepPlan] = {}
_flops: dict[Any, Any] = {}


def speed_of(factor: float) -> MachineSpeed:
    points = [(1.0, factor * 1e9), (100.0, factor * 1e11)]
    streams, rate, fixed = [(1.0, factor * 1e9)], factor * 1e9, 1e-5 / factor
    return MachineSpeed(
        points, points, points, points, points, points, streams, rate, {}, rate, streams, rate,
        streams, rate, rate, rate, streams, rate,
        rate, {}, rate, rate, streams, streams, streams, 1.0,
        0.1 * fixed, fixed, fixed, fixed, 0.0, 0.0,
    )  # fmt: skip
