"""Prints, as JSON, what the cost model and DTensor's own program say that a step exchanges.

Started by a test in a process of its own: `cost_model_program.py 'KEY MESH RULES [slots_axis]'`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from tekso.framework import registry, schedules
from tekso.framework.costs import device_types
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.planning import collectives, tracing
from tekso.framework.planning.cost_model import CostModel
from tekso.framework.planning.step_work import alike
from tekso.framework.run import inspection


def compare(case: str) -> dict[str, dict[str, float]]:
    """Returns {"model": {"all-reduce data": bytes, …}, "program": the same}."""
    key, mesh, rules, *slots_axis = case.split(" ")
    tree = registry.get(key)().tree()
    tree.set({"input.batch_size": 8, "input.length": 16})
    task = inspection.task_of(tree)
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    batch = tree.input.owner.signature(tree.input)
    layout = MeshLayout(MeshShape.parse(mesh), Rules.parse(rules))
    if slots_axis:
        layout = dataclasses.replace(layout, slots_axis=slots_axis[0])
    specs = task.specs()
    weights = alike(specs.values(), trained=learner.trainable(specs))
    slots = alike(learner.slots(specs).values())
    work = tracing.trace(task, weights, batch)
    model = CostModel(work, weights, slots, device_types.find("cpu"))
    found: dict[str, collections.Counter[str]] = {
        name: collections.Counter() for name in ("model", "program")
    }
    for cost in model.cost(layout).collectives:
        # On CPU and GPU, DTensor reduces where a TPU would reduce and scatter at once.
        kind = "all-reduce" if cost.kind == "reduce-scatter" else cost.kind
        found["model"][f"{kind} {'+'.join(cost.axes)}"] += int(cost.bytes)
    for counted in collectives.of_step(task, learner, layout, batch).collectives:
        found["program"][f"{counted.kind} {counted.axis}"] += counted.bytes
    return {name: dict(sums) for name, sums in found.items()}


if __name__ == "__main__":
    print(json.dumps(compare(sys.argv[1])))
