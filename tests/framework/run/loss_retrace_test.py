"""An error of the loss names the layer that returned before it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from small_tasks import Flowers

from tekso.framework.execution import DataParallel
from tekso.framework.experiment import Run, Tree
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.params import param
from tekso.framework.run import loss_retrace, modes
from tekso.framework.run.job import Job
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.report.console import PlainConsole
from tekso.framework.schedules import Constant
from tekso.framework.task import Decoded, LossSums, Task
from tekso.models.layers.linear import Linear


class Odd(Layer):
    """A layer whose output is wrong."""

    class Params(Layer.Params):
        """Params of Odd."""

        mistake: str = param("What is wrong.", default="")

    def __init__(self, params: Odd.Params) -> None:
        super().__init__(params)
        self.child("inner", Linear.Params(input_dim=4, output_dim=4))

    def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
        """Returns half of the features, None or x."""
        y, mistake = self.inner.fprop(theta.inner, x, ctx), self.params.mistake
        if mistake == "if" and tf.reduce_sum(y) > 0:
            return x
        if mistake == "late":
            return y + tf.ones([5])
        return {"half": y[:, :2], "none": None}.get(mistake, y)


class Rows(Task):
    """Two layers; also decodes."""

    class Params(Task.Params):
        """Params of Rows."""

        mistake: str = param("What the first layer does wrong.", default="")
        decodes: bool = param("Whether it decodes.", default=True)

    def __init__(self, params: Rows.Params) -> None:
        super().__init__(params)
        self.child_list("rows", [Odd.Params(mistake=self.params.mistake), Odd.Params()])

    def loss_weight(self, batch: Any) -> Any:
        """See Task."""
        return tf.reduce_sum(batch["weights"])

    def run(self, theta: Any, x: Any, ctx: Any) -> Any:
        """Returns the output of the layers."""
        for i, row in enumerate(self.rows):
            x = row.fprop(theta.rows[i], x, ctx)
        return x

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        """See Task."""
        y = tf.reduce_sum(self.run(theta, batch["x"], ctx) ** 2, 1)
        return LossSums(tf.reduce_sum(y * batch["weights"]), {})

    def decode(self, program: Any, input: Any) -> Any:
        """See Task."""
        if self.params.decodes:
            return Decoded(str(program.call(self.run, input.batch(0)["x"])), [])
        return None


def failing(mistake: str, folder: Path, *, decodes: bool) -> Exception:
    """Returns the error that ends a run."""
    tree = Tree.Params(
        task=Rows.Params(mistake=mistake, decodes=decodes),
        learner=Learner.Params(optimizer=SGD.Params(), schedule=Constant.Params(value=0.1)),
        input=Flowers.Params(batch_size=3),
        execution=DataParallel.Params(towers=1, xla="none"),
        run=Run.Params(steps=1),
    )
    job = Job(
        model="a.B", tree=tree, registered=tree.copy(), logdir=Logdir(str(folder)),
        console=PlainConsole(io.StringIO()),
    )  # fmt: skip
    with pytest.raises(Exception) as caught:
        modes.train(job)
    return caught.value


@pytest.mark.parametrize("decodes", [False, True])
def test_an_error_of_the_loss_is_no_error_of_decoding_and_names_the_layer_before(
    decodes: bool, tmp_path: Path
) -> None:
    error = failing("half", tmp_path, decodes=decodes)
    assert "decode" not in str(error)
    assert error.__notes__ == [
        "in the layer rows/1/inner (Linear)",
        "before that, rows/0 (Odd) returned the shape [3, 2] for inputs [3, 4]",
    ]


def test_the_layer_that_returned_none_is_named(tmp_path: Path) -> None:
    error = failing("none", tmp_path, decodes=True)
    assert "decode" not in str(error)
    said = "before that, rows/0 (Odd) returned None: is a return missing in its fprop?"
    assert error.__notes__ == ["in the layer rows/1/inner (Linear)", said]


@pytest.mark.parametrize(
    ("mistake", "kind"), [("if", "OperatorNotAllowedInGraphError"), ("late", "ValueError")]
)
def test_other_errors_and_children_of_the_layer_that_fails_name_no_layer_before(
    mistake: str, kind: str, tmp_path: Path
) -> None:
    error = failing(mistake, tmp_path, decodes=True)
    assert type(error).__name__ == kind
    assert "decode" not in str(error)
    assert [note for note in error.__notes__ if not note.startswith("in the layer ")] == []


def test_an_error_at_another_place_is_not_that_of_the_loss() -> None:
    task: Any = Rows.Params(mistake="half").instantiate()
    batch = {"x": np.ones([3, 4], np.float32), "weights": np.ones(3, np.float32)}
    try:
        raise ValueError("another")
    except ValueError as error:
        assert loss_retrace.same_failure(task, batch, error) is None
