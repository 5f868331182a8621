"""Trains a shrunk experiment under several executions, and prints what came out; for tests.

All executions of an experiment run in one process, with one input. They are compared with the first
one, one device. TensorFlow's graph optimizer is off, and LLVM does not optimize, because both take
more time than the steps; the values do not depend on them.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import sys
import tempfile
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import compiled_steps
import shrunk_experiments
import tensorflow as tf

from tekso.framework import registry, schedules, task_results
from tekso.framework.execution import (
    DataParallel,
    ExecutionError,
    MeshSharded,
    Pipelined,
    SpmdPipelined,
    devices,
)
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.loss_scale import LossScale
from tekso.framework.params import tree as params_tree
from tekso.models.layers.normalization import BatchNorm

DEVICES = 4
SEEDS = {"image.unet.Folders": 8}
"""{experiment: its seed; of all others: SEED}. With 7, the input of a ReLU is 0 but for rounding,
so its gradient depends on the order of sums. Noise of 1e-6 in the images makes all steps equal."""
SEED = 7
STEPS = (3, 4)  # the learning rate of step 0 may be 0
STEPS_SEARCHED = 8
METRICS = ("loss", "total_loss", "gradient_norm")

ALONE, COMPILED, SPMD = "one device", "compiled whole", "SPMD pipeline"

EXECUTIONS: dict[str, Any] = {
    ALONE: lambda: DataParallel.Params(towers=1, xla="none"),
    COMPILED: lambda: DataParallel.Params(towers=1, xla="none"),
    "mesh": lambda: MeshSharded.Params(mesh="data:2;model:2", rules="2d", xla="none"),
    "pipeline": lambda: Pipelined.Params(num_stages=2, num_micro_batches=4),
    SPMD: lambda: SpmdPipelined.Params(num_micro_batches=4),
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


class Shrunk:
    """A shrunk experiment with its input.

    Args:
      key: key of the experiment.
      dtype: type of the activations.
      steps: after which the learning rate ends.
    """

    def __init__(self, key: str, dtype: str, steps: int) -> None:
        self._tree = shrunk_experiments.shrunk(registry.get(key)().tree())
        self._dtype, self._seed = dtype, SEEDS.get(key, SEED)
        with tempfile.TemporaryDirectory() as assets_dir:
            self.input = self._tree.input.instantiate(seed=self._seed, assets_dir=assets_dir)
            self._first = self.input.batch(0)
            self._task = task_results.complete(self._tree.task, self.input)
            self._repeated_tree = shrunk_experiments.repeated(self._tree)
            if self._repeated_tree is not None:
                params = task_results.complete(self._repeated_tree.task, self.input)
                self._repeated_task = params
        self.learner = schedules.end_with_run(self._tree.learner, steps)
        if dtype == "float16":
            self.learner.loss_scale = LossScale.Params(initial=256.0)

    def task(self) -> Any:
        """Returns the task, with what the input knows of the data."""
        return self._task.instantiate()

    def repeated(self) -> Shrunk | None:
        """Returns the experiment with a repeated stack of two layers; None: it has none or one."""
        if self._repeated_tree is None:
            return None
        found = copy.copy(self)
        found._tree, found._task = self._repeated_tree, self._repeated_task
        return found

    def program(self, name: str) -> Any:
        """Returns the program of an execution, with initial weights.

        Raises:
          ExecutionError: the execution rejects the experiment.
        """
        execution = self._execution(name)
        if name == "replicas":
            execution.setup_devices(cpu_devices=2)
        program = execution.build(
            self.task(),
            self.learner.instantiate(),
            seed=self._seed,
            batch=signature_of(self._first),
            dtype=self._dtype,
        )
        program.initialize()
        return program

    def _execution(self, name: str) -> Any:
        params = EXECUTIONS[name]()
        nodes = params_tree.walk(self._tree.task)
        if any(isinstance(value, BatchNorm.Params) for _, value, _ in nodes):
            params.set(OF_BATCH_NORM.get(name, {}))
            if "source" in self._tree.input and "teacher" not in self._tree.task:
                params.set(OF_IMAGES.get(name, {}))
        return params.instantiate()

    @functools.cached_property
    def two_batches(self) -> list[Any]:
        """Returns the batch of step 0 and another one, of another shape if there are several."""
        others = [self.input.batch(step) for step in range(1, STEPS_SEARCHED)]

        def form(batch: Any) -> tuple[Any, Any]:
            return sorted(batch), next(iter(batch.values())).shape

        names, shape = form(self._first)
        other = min(others, key=lambda b: (form(b)[0] == names, form(b)[1] == shape))
        return [self._first, other]


def result(shrunk: Shrunk, name: str) -> dict[str, Any]:
    """Returns losses and gradient norms of two steps, or {"refused": the reason}.

    On one device also an evaluation after the first step, with which the compiled steps end. An
    SPMD pipeline needs a repeated stack: if the experiment gets one for it, the results of one
    device with this stack are added as "alone".
    """
    other = shrunk.repeated() if name == SPMD else None
    if other is None:
        return _trained(shrunk, name)
    found = _trained(other, name)
    return found if "refused" in found else {**found, "alone": _trained(other, ALONE)}


def _trained(shrunk: Shrunk, name: str) -> dict[str, Any]:
    batches = shrunk.two_batches
    # The reference is computed op by op, which takes less time than to trace its steps.
    tf.config.run_functions_eagerly(name == ALONE)
    try:
        program = shrunk.program(name)
    except ExecutionError as error:
        return {"refused": str(error)}
    if name == COMPILED:
        steps = compiled_steps.CompiledSteps(program, batches[0])
        contents = steps.contents()
        metrics = [steps.train_step(STEPS[0])]
        return {**contents, "steps": _numbers(metrics), "evaluation": _sums(steps.eval_step())}
    found: dict[str, Any] = {}
    metrics = [program.train_step(batches[0], STEPS[0])]
    if name == ALONE:
        found["evaluation"] = _sums(program.eval_step(batches[0]))
    metrics.append(program.train_step(batches[1], STEPS[1]))
    return {**found, "steps": _numbers(metrics)}


def losses(shrunk: Shrunk, name: str, steps: int) -> dict[str, Any]:
    """Returns the losses of many steps on four batches in turn."""
    program = shrunk.program(name)
    batches = [shrunk.input.batch(step) for step in range(4)]
    metrics = [program.train_step(batches[i % 4], i) for i in range(steps)]
    return {"losses": [float(m["loss"]) for m in metrics]}


def _numbers(steps: list[Any]) -> list[dict[str, float]]:
    return [{name: float(metrics[name]) for name in METRICS} for metrics in steps]


def _sums(evaluation: Any) -> dict[str, list[float]]:
    return {name: [float(x) for x in pair] for name, pair in evaluation.items()}


def main() -> None:
    """Prints {execution: result} in a line for each execution of a job.

    The job is {"key", "executions", "dtype", "changes", "steps"}. Changes are those of the learner.
    With steps, the results are `losses`. An error is {"crash": its text}, as other executions may
    have none.
    """
    job = json.loads(sys.argv[1])
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    MeshSharded.Params(mesh=f"devices:{DEVICES}").instantiate().setup_devices()
    devices.set_graph_optimizer(False)
    shrunk = Shrunk(job["key"], job["dtype"], job["steps"] or 10)
    shrunk.learner.set(job["changes"])
    for name in job["executions"]:
        start = time.process_time()
        try:
            found = losses(shrunk, name, job["steps"]) if job["steps"] else result(shrunk, name)
        except Exception:
            found = {"crash": traceback.format_exc()[-3000:]}
        found["cpu_s"] = round(time.process_time() - start, 1)
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
