"""Two small classification tasks on numbers, for tests of tasks of several tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.datasets import load_iris

from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import OneTask, TaskInputs
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params, param
from tekso.framework.registry import register
from tekso.framework.schedules import Constant
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification
from tekso.tasks.multi.task import MultiTask


class Flowers(Arrays):
    """Iris: every fifth flower is held out."""

    class Params(Arrays.Params):
        """Params of Flowers."""

        two_classes: bool = param("Whether to ask for class 2 only.", default=False)

    def load(self, split: Any) -> Any:
        """Returns features and classes, or whether a flower is of class 2."""
        x, labels = load_iris(return_X_y=True)
        x = ((x - x.mean(0)) / x.std(0)).astype(np.float32)
        held_out = np.arange(len(x)) % 5 == 0
        rows = ~held_out if split == "train" else held_out
        x, labels = x[rows], labels[rows].astype(np.int32)
        if self.params.two_classes:
            labels = (labels == 2).astype(np.int32)
        return {"x": x, "labels": labels}


def classifier(classes: int, **model: Any) -> Classification.Params:
    """Returns a classifier with one shared-sized hidden layer and one of its own."""
    return Classification.Params(
        model=Mlp.Params(input_dim=4, hidden_dims=[6, 5], output_dim=classes, **model),
        num_classes=classes,
    )


def multi_task(**changes: Any) -> MultiTask.Params:
    """Returns two tasks that share the first layer."""
    tasks = {"kind": classifier(3), "virginica": classifier(2)}
    shared = {"virginica/model/layers/0": "kind/model/layers/0"}
    return MultiTask.Params(tasks=tasks, shared=shared).set(changes)


def task_inputs(**changes: Any) -> TaskInputs.Params:
    """Returns their training inputs."""
    one = Flowers.Params(batch_size=8)
    other = Flowers.Params(batch_size=8, two_classes=True)
    return TaskInputs.Params(inputs={"kind": one, "virginica": other}).set(changes)


@register
class Iris(Experiment):
    """Two questions about one flower."""

    def task(self) -> Params:
        """They share the first layer."""
        return multi_task()

    def input(self) -> Params:
        """In turns."""
        return task_inputs()

    def eval_inputs(self) -> dict[str, Params]:
        """Held-out flowers, in batches with padding."""
        return {
            f"{task}_dev": OneTask.Params(task=task, input=HeldOut.Params(batch_size=16))
            for task in ("kind", "virginica")
        }

    def learner(self) -> Params:
        """Adam."""
        return Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.02))

    def run(self) -> Params:
        """A few steps."""
        return Run.Params(steps=60, eval_every_steps=0, checkpoint_every_steps=0).set(
            {"keep_best.metric": "virginica/accuracy", "keep_best.eval_input": "virginica_dev"}
        )
