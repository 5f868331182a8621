"""Trains a small classifier under several executions, on 4 devices, and prints what came out.

Started by tests in a process of its own, because a process has one set of devices.
"""

from __future__ import annotations

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.execution import DataParallel, MeshSharded, Pipelined, StagesOnMesh
from tekso.framework.execution.base import signature_of
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.loss_scale import LossScale
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.pieces import Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.theta import Theta
from tekso.models.layers.normalization import BatchNorm
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification

FEATURES, CLASSES, EXAMPLES = 3, 2, 8
MESH = {"mesh": "data:2", "rules": "batch:data"}
EXECUTIONS: dict[str, Any] = {
    "alone": lambda: DataParallel.Params(towers=1, xla="none"),
    "mesh": lambda: MeshSharded.Params(**MESH),
    "half": lambda: MeshSharded.Params(**MESH, activation_dtype="bfloat16"),
    "stages": lambda: Pipelined.Params(num_stages=2, num_micro_batches=1),
    "stages on meshes": lambda: Pipelined.Params(
        num_stages=2,
        num_micro_batches=1,
        rematerialize="all",
        stages_on=StagesOnMesh.Params(**MESH),
    ),
}


class Net(Layer):
    """Batch statistics before a perceptron."""

    norm: BatchNorm
    mlp: Mlp

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        dtype = self.params.dtype
        self.child("norm", BatchNorm.Params(dim=FEATURES, dtype=dtype))
        sizes = {"input_dim": FEATURES, "output_dim": CLASSES, "hidden_dims": [5]}
        self.child("mlp", Mlp.Params(dtype=dtype, **sizes))

    def fprop(self, theta: Theta, x: Any, ctx: Any) -> Any:
        return self.mlp.fprop(theta.mlp, self.norm.fprop(theta.norm, x, ctx), ctx)

    def pieces(self) -> list[Piece]:
        def norm(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": self.norm.fprop(theta.norm, flow["x"], ctx)}

        own = [piece.below("mlp") for piece in self.mlp.pieces()]
        return [Piece("norm", {"norm": self.norm}, norm), *own]


def batch(dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(2.0, 3.0, (EXAMPLES, FEATURES)).astype(dtype),
        "labels": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
        "weights": rng.integers(1, 3, EXAMPLES).astype(dtype) + 0.1,
    }


def run(
    execution: str,
    *,
    dtype: str,
    frozen: list[str],
    activation_dtype: str,
    loss_scale: dict[str, Any] | None,
    steps: int,
    poisoned: list[int],
) -> dict[str, Any]:
    """Returns the losses of some steps, the weights after them, and what changed.

    In the steps of `poisoned`, the last example is not finite, so only one part of the batch is.
    """
    task = Classification.Params(num_classes=CLASSES, model=Net.Params(dtype=dtype)).instantiate()
    learner = Learner.Params(
        optimizer=SGD.Params(),
        schedule=Constant.Params(value=0.1),
        frozen=frozen,
        loss_scale=None if loss_scale is None else LossScale.Params(**loss_scale),
    ).instantiate()
    examples = batch(dtype)
    program = (
        EXECUTIONS[execution]()
        .instantiate()
        .build(task, learner, seed=3, batch=signature_of(examples), dtype=activation_dtype)
    )
    program.initialize()
    before = program.state()
    broken = {**examples, "x": np.where(np.arange(EXAMPLES)[:, None] < 7, examples["x"], np.nan)}
    broken["x"] = broken["x"].astype(dtype)
    metrics = [program.train_step(broken if i in poisoned else examples, i) for i in range(steps)]
    losses = [float(one["loss"]) for one in metrics]
    evaluated = program.eval_step(examples)
    after = program.state()
    weights = [key for key in sorted(after) if key.startswith("weights/")]
    return {
        "scales": [float(one["loss_scale"]) for one in metrics if "loss_scale" in one],
        "skipped": int(metrics[-1]["nonfinite_total"]),
        "skipped_in_a_row": [int(one["nonfinite_consecutive"]) for one in metrics],
        "losses": [*losses, *(float(x) for x in evaluated["loss"])],
        "weights": {key: after[key].astype("float64").tolist() for key in weights},
        "changed": [key for key in weights if (before[key] != after[key]).any()],
    }


def main() -> None:
    """Prints a result for each execution of a job.

    The job is {"executions": [names], "dtype", "frozen", "activation_dtype", "loss_scale",
    "steps", "poisoned"}.
    """
    job = json.loads(sys.argv[1])
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    MeshSharded.Params(mesh="data:4").instantiate().setup_devices()
    defaults: dict[str, Any] = {"dtype": "float32", "frozen": [], "activation_dtype": "float32"}
    defaults |= {"loss_scale": None, "steps": 3, "poisoned": []}
    rest = {name: job.get(name, default) for name, default in defaults.items()}
    print(json.dumps([run(name, **rest) for name in job["executions"]]))


if __name__ == "__main__":
    main()
