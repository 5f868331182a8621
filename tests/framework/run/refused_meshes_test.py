"""Plans of models that a mesh cannot compute: no mesh is planned, and other executions are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from wrong_losses import Points

from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.initializers import Normal
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import run_plan
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task


class Triangular(Task):
    """A product with a matrix whose diagonal is one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [3, 3], dims=(None, None), init=Normal.Params(stddev=1.0))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        w = theta.w - tf.linalg.diag(tf.linalg.diag_part(theta.w)) + tf.eye(3)
        return LossSums(tf.reduce_sum(batch["weights"] * tf.reduce_sum(batch["x"] @ w, 1)))


TASKS = {Triangular: r"w = theta\.w - tf.*: on a mesh, MatrixDiagPartV3 .*: use tf\.reduce_sum"}


def planned(tmp_path: Path, kind: type[Task], execution: Any, *, searches: bool) -> RunPlan:
    tree = Tree.Params(
        task=kind.Params(),
        input=Points.Params(batch_size=8),
        learner=Learner.Params(
            optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1)
        ),
        execution=execution,
    )  # fmt: skip
    return run_plan.plan(
        "m", tree, logdir=str(tmp_path), device="cpu", num_devices=2, searches=searches
    )


@pytest.mark.parametrize("kind", TASKS)
def test_the_plan_of_a_mesh_that_training_refuses_has_the_problem(
    tmp_path: Path, kind: type[Task]
) -> None:
    mesh = MeshSharded.Params(mesh="data:2", rules="batch:data")
    problem = str(planned(tmp_path, kind, mesh, searches=False).problem)
    assert re.search(rf"refused_meshes_test\.py:\d+: {TASKS[kind]}", problem), problem


@pytest.mark.parametrize("kind", TASKS)
def test_a_ranking_refuses_the_mesh_and_has_the_other_executions(
    tmp_path: Path, kind: type[Task]
) -> None:
    plan = planned(tmp_path, kind, DataParallel.Params(), searches=True)
    assert "data_parallel, 2 devices" in [step.name for step in plan.others]
    assert not any(step.name.startswith("mesh") for step in plan.others)
    problem = plan.rejected["mesh_sharded"]
    assert re.search(rf"refused_meshes_test\.py:\d+: {TASKS[kind]}", problem), problem
