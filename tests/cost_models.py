"""Cost models of tasks on a device with round figures, and what they send."""

from __future__ import annotations

from typing import Any

from tekso.framework import schedules
from tekso.framework.costs import device_types
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.planning import tracing
from tekso.framework.planning.cost_model import Cost, CostModel
from tekso.framework.planning.step_work import alike
from tekso.framework.task import Task

DEVICE = device_types.DeviceType(
    "test", {"float32": 1e9, "bfloat16": 2e9}, 1e9, 1e8, 1e6, 1e-3, reached=0.5
)


def model_of(
    task: Task, batch: Any, *, parts: int = 1, dtype: str = "float32", recomputes_loops: bool = True
) -> CostModel:
    learner = Learner.Params(
        optimizer=Adam.Params(), schedule=schedules.Constant.Params(value=1.0)
    ).instantiate()
    specs = task.specs()
    weights = alike(specs.values(), trained=learner.trainable(specs))
    work = tracing.trace(
        task, weights, batch, activation_dtype=dtype, recomputes_loops=recomputes_loops
    )
    slots = alike(learner.slots(specs).values())
    size = 2 if dtype == "bfloat16" else 4
    return CostModel(work, weights, slots, DEVICE, parts=parts, activation_bytes=size)


def sent(cost: Cost, *, least_bytes: int = 100) -> dict[tuple[str, str, str], tuple[int, float]]:
    """{(kind, axes, of): (count, bytes)}, without single numbers such as the loss."""
    return {
        (c.kind, "+".join(c.axes), c.of): (c.count, c.bytes)
        for c in cost.collectives
        if c.bytes >= least_bytes
    }
