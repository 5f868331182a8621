"""Trains a shrunk experiment under several executions, and prints what came out; for tests."""

from __future__ import annotations

import json
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import shrunk_experiments

from tekso.framework import registry, schedules, task_results
from tekso.framework.execution import (
    DataParallel,
    ExecutionError,
    MeshSharded,
    Pipelined,
    SpmdPipelined,
)
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.loss_scale import LossScale
from tekso.framework.params import tree as params_tree
from tekso.models.layers.normalization import BatchNorm

SEED, DEVICES = 7, 4
STEPS_SEARCHED = 8

EXECUTIONS: dict[str, Any] = {
    "one device": lambda: DataParallel.Params(towers=1, xla="none"),
    "mesh": lambda: MeshSharded.Params(mesh="data:2;model:2", rules="2d", xla="none"),
    "pipeline": lambda: Pipelined.Params(num_stages=2, num_micro_batches=4),
    "SPMD pipeline": lambda: SpmdPipelined.Params(num_micro_batches=4),
    "stages on meshes": lambda: Pipelined.Params(
        num_stages=2,
        num_micro_batches=2,
        stages_on=StagesOnMesh.Params(mesh="model:2", rules="tensor"),
    ),
    "replicas": lambda: DataParallel.Params(xla="none"),
}
"""{execution: its Params}, in the order in which one process can run them."""

OF_BATCH_NORM: dict[str, Any] = {
    "pipeline": {"num_micro_batches": 1},
    "stages on meshes": {"num_micro_batches": 1},
}
"""Changes for models with BatchNorm, because statistics are those of a micro-batch."""

OF_IMAGES: dict[str, Any] = {
    "mesh": {"rules": "batch:data;height:model"},
    "stages on meshes": {"stages_on.rules": "height:model"},
}
"""Changes for image models with BatchNorm: images are split in height, not weights."""


def execution_of(name: str, tree: Any) -> Any:
    """Returns an execution for an experiment."""
    params = EXECUTIONS[name]()
    nodes = params_tree.walk(tree.task)
    if any(isinstance(value, BatchNorm.Params) for _, value, _ in nodes):
        params.set(OF_BATCH_NORM.get(name, {}))
        if "source" in tree.input and "teacher" not in tree.task:
            params.set(OF_IMAGES.get(name, {}))
    return params.instantiate()


def run(key: str, executions: list[str], *, dtype: str = "float32") -> dict[str, Any]:
    """Returns {execution: {"steps": losses and gradient norms} or {"refused": the reason}}."""
    tree = shrunk_experiments.shrunk(registry.get(key)().tree())
    MeshSharded.Params(mesh=f"devices:{DEVICES}").instantiate().setup_devices()
    with tempfile.TemporaryDirectory() as assets_dir:
        input = tree.input.instantiate(seed=SEED, assets_dir=assets_dir)
        batches = two_batches(input)
        params = task_results.complete(tree.task, input)
    learner = schedules.end_with_run(tree.learner, 10)
    if dtype == "float16":
        learner.loss_scale = LossScale.Params(initial=256.0)
    found: dict[str, Any] = {}
    for name in executions:
        execution = execution_of(name, tree)
        if name == "replicas":
            execution.setup_devices(cpu_devices=2)
        task = params.instantiate()
        try:
            program = execution.build(
                task,
                learner.instantiate(),
                seed=SEED,
                batch=signature_of(batches[0]),
                dtype=dtype,
            )
        except ExecutionError as error:
            found[name] = {"refused": str(error)}
            continue
        program.initialize()
        metrics = [program.train_step(batch, i) for i, batch in enumerate(batches)]
        names = ("loss", "total_loss", "gradient_norm")
        found[name] = {"steps": [{n: float(m[n]) for n in names} for m in metrics]}
    return found


def two_batches(input: Any) -> list[Any]:
    """Returns the batch of step 0 and another one, of another shape if the input has several."""
    first, *others = [input.batch(step) for step in range(STEPS_SEARCHED)]

    def form(batch: Any) -> tuple[Any, Any]:
        return sorted(batch), next(iter(batch.values())).shape

    names, shape = form(first)
    return [first, min(others, key=lambda b: (form(b)[0] == names, form(b)[1] == shape))]


def main() -> None:
    """Reads {"key", "executions", "dtype"} and prints the result of `run`."""
    job = json.loads(sys.argv[1])
    print(json.dumps(run(job["key"], job["executions"], dtype=job["dtype"])))


if __name__ == "__main__":
    main()
