"""Errors in the code of users have advice as a note, which a notebook shows below them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.error_advice import IdError
from tekso.framework.experiment import Experiment
from tekso.framework.input.arrays import Arrays
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import param
from tekso.framework.run.session import Session
from tekso.framework.run.session_batches import SessionError
from tekso.framework.schedules import Constant, Schedule
from tekso.models.layers.embedding import Embedding
from tekso.tasks.classification.task import Classification


class Ids(Arrays):
    def load(self, split: str) -> dict[str, Any]:
        return {"x": np.arange(8) % 4, "labels": np.arange(8) % 3}


class Scores(Layer):
    class Params(Layer.Params):
        """Params of Scores."""

        output_dim: int = param("Classes.", default=3)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("table", Embedding.Params(vocab_size=4, dim=self.params.output_dim))

    def fprop(self, theta: Any, x: tf.Tensor, ctx: Any) -> tf.Tensor:
        return self.table.fprop(theta.table, tf.cast(x, tf.int32), ctx)


class Stepwise(Schedule):
    def after_warmup(self, step: tf.Tensor) -> Any:
        return 0.1 if step < 3 else 0.01


class Classes(Experiment):
    def task(self) -> Any:
        return Classification.Params(model=Scores.Params())

    def input(self) -> Any:
        return Ids.Params(batch_size=4)

    def learner(self) -> Any:
        return Learner.Params(optimizer=Adam.Params(), schedule=Constant.Params(value=0.1))


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def test_a_schedule_with_a_branch_is_told_to_use_where() -> None:
    class Branching(Classes):
        def learner(self) -> Any:
            return super().learner().set(schedule=Stepwise.Params())

    with pytest.raises(Exception, match="as a Python") as caught:
        Session(Branching).train(1)
    assert notes(caught.value).count("write tf.where(condition, a, b)") == 1


def test_an_id_without_a_row_is_an_error_of_the_batch_and_of_the_line_that_looks_up() -> None:
    session = Session(Classes)
    said = (
        r"^'x' \(example 1\) has the id 9, but the table, .* has the rows 0 to 3: set its size "
        r".*\n  \(at .*:\d+, in \w+\)\n    return "
    )
    batch = {"x": np.array([1, 9])}
    with pytest.raises(IdError, match=said) as caught:
        session.predict(batch)
    assert caught.value.__suppress_context__ and not notes(caught.value)
    with pytest.raises(IdError, match=r"^model/table \(Embedding\): the data has the id 9, but"):
        session.task.predict(session.theta(), batch, StepContext(mode="eval"))


def test_an_execution_by_name_is_answered_with_its_params() -> None:
    with pytest.raises(SessionError, match=r"'pipelined', but must be Params, as in \{'execution'"):
        Session(Classes, {"execution": "pipelined"})
