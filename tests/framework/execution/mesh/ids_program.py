"""Trains on a mesh on an id for which a table has no row; prints the error.

python ids_program.py MESH RULES
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.experiment import Experiment
from tekso.framework.input.arrays import Arrays
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.run.session import Session
from tekso.framework.schedules import Constant
from tekso.models.layers.embedding import Embedding
from tekso.tasks.classification.task import Classification


class Ids(Arrays):
    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.arange(8) + 1, "labels": np.arange(8) % 3}


class Scores(Layer):
    class Params(Layer.Params):
        output_dim: int = param("Classes.", default=3)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("table", Embedding.Params(vocab_size=8, dim=self.params.output_dim))

    def fprop(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        return self.table.fprop(theta.table, tf.cast(x, tf.int32), ctx)


class Classes(Experiment):
    def task(self) -> Any:
        return Classification.Params(model=Scores.Params())

    def input(self) -> Any:
        return Ids.Params(batch_size=8)

    def learner(self) -> Any:
        return Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))

    def execution(self) -> Any:
        mesh, rules = sys.argv[1:]
        return MeshSharded.Params(mesh=mesh, rules=rules)


if __name__ == "__main__":
    session = Session(Classes, cpu_devices=4)
    unchecked = BatchCheck(session.task)
    session._check_task = lambda: unchecked  # type: ignore[method-assign]  # which finds it first
    print(int(np.flatnonzero(session.input.batch(0)["x"] == 8)[0]))
    try:
        session.train(1)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
