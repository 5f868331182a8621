"""Plans of models that a mesh cannot compute: no mesh is planned, and other executions are."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from wrong_losses import Points

from tekso.framework.execution import DataParallel, MeshSharded
from tekso.framework.experiment import Tree
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import run_plan
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.schedules import Constant
from tekso.framework.task import Task

LAYERS = """\
import tensorflow as tf
from tekso.framework.initializers import Normal
from tekso.framework.task import LossSums, Task

NORMAL = Normal.Params(stddev=1.0)

class Product(Task):
    def __init__(self, params):
        super().__init__(params)
        self.weight("w", [3, 3], dims=(None, None), init=NORMAL)
        self.weight("qkv", [3, 3, 2, 5], dims=(None, None, "heads", None), init=NORMAL)

    def loss_weight(self, batch):
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta, batch, ctx):
        x = self.run(batch["x"], theta)
        return LossSums(tf.reduce_sum(batch["weights"] * tf.reduce_sum(x, 1)))

    def run(self, x, theta):
        return x @ theta.w

class Triangular(Product):
    def run(self, x, theta):
        w = theta.w - tf.linalg.diag(tf.linalg.diag_part(theta.w)) + tf.eye(3)
        return x @ w

class Crossed(Product):
    def run(self, x, theta):
        return tf.linalg.cross(x @ theta.w, x)

class Squashed(Product):
    def run(self, x, theta):
        return tf.math.softsign(x @ theta.w)

class Attention(Product):
    def run(self, x, theta):
        q = theta.qkv[:, 1]
        return tf.reduce_sum(tf.einsum("bd,dnh->bnh", x @ theta.w, q), 2)

class Orthogonal(Product):
    def run(self, x, theta):
        return x @ tf.linalg.qr(theta.w)[0]
"""
REFUSED = {
    "Triangular": r"w = theta\.w - tf.*: on a mesh, MatrixDiagPartV3 .*: use tf\.reduce_sum",
    "Crossed": r"return tf\.linalg\.cross.*: on a mesh, Cross does not compile: use tf\.gather",
    "Squashed": r"return tf\.math\.softsign.*: on a mesh, SoftsignGrad .*tf\.abs",
    "Attention": r"q = theta\.qkv\[:, 1\]: on a mesh, an einsum, or its gradient, sums over two",
    "Orthogonal": r"return x @ tf\.linalg\.qr.*: on a mesh, Matrix",
}


@pytest.fixture
def kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> type[Task]:
    """A task in a file of a user."""
    (tmp_path / "my_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_layers", raising=False)
    found: type[Task] = getattr(importlib.import_module("my_layers"), request.param)
    return found


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
        "m", tree, logdir=str(tmp_path / "run"), device="cpu", num_devices=2, searches=searches
    )


@pytest.mark.parametrize("kind", REFUSED, indirect=True)
def test_the_plan_of_a_mesh_that_training_refuses_has_the_problem(
    tmp_path: Path, kind: type[Task]
) -> None:
    mesh = MeshSharded.Params(mesh="data:2", rules="batch:data")
    problem = str(planned(tmp_path, kind, mesh, searches=False).problem)
    assert re.search(rf"my_layers\.py:\d+: {REFUSED[kind.__name__]}", problem), problem


@pytest.mark.parametrize("kind", REFUSED, indirect=True)
def test_a_ranking_refuses_the_mesh_and_has_the_other_executions(
    tmp_path: Path, kind: type[Task]
) -> None:
    plan = planned(tmp_path, kind, DataParallel.Params(), searches=True)
    assert "data_parallel, 2 devices" in [step.name for step in plan.others]
    assert not any(step.name.startswith("mesh") for step in plan.others)
    problem = plan.rejected["mesh_sharded"]
    assert re.search(rf"my_layers\.py:\d+: {REFUSED[kind.__name__]}", problem), problem


@pytest.mark.parametrize("kind", ["Product"], indirect=True)
def test_a_ranking_has_a_mesh_for_a_layer_without_such_ops(
    tmp_path: Path, kind: type[Task]
) -> None:
    plan = planned(tmp_path, kind, DataParallel.Params(), searches=True)
    assert any(step.name.startswith("mesh_sharded, data:2") for step in plan.others)
