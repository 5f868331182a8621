"""LabelLimits: which arrays a loss reads as classes; labels that are too large are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.batch_part import BatchPart
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Zeros
from tekso.framework.input.arrays import Arrays
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run.label_limits import LabelLimits
from tekso.framework.run.session import Session
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task

LABELS = np.array([[0, 2, -1], [4, 1, 0]])


def limits_of(loss: Any, **arrays: Any) -> dict[str, int]:
    batch = {name: tf.constant(array) for name, array in {"labels": LABELS, **arrays}.items()}
    limits = LabelLimits()
    with limits.watching(batch):
        loss(batch)
    loss(batch)  # not seen
    return limits.found


def test_arrays_that_become_one_hot_are_labels_of_as_many_classes() -> None:
    assert limits_of(lambda batch: tf.one_hot(batch["labels"], 5)) == {"labels": 5}

    def changed_in_form(batch: Any) -> None:
        labels = tf.transpose(tf.reshape(tf.cast(batch["labels"], tf.int32), [3, 2]))
        tf.one_hot(tf.squeeze(tf.expand_dims(labels, 1)), 7)
        tf.one_hot(batch["labels"], 9)

    assert limits_of(changed_in_form) == {"labels": 7}


def test_labels_of_a_sparse_cross_entropy_have_as_many_classes_as_there_are_scores() -> None:
    def loss(batch: Any) -> None:
        labels, scores = tf.abs(batch["labels"]), tf.zeros([2, 3, 6])
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)  # of other values
        tf.nn.sparse_softmax_cross_entropy_with_logits(batch["other"], scores)

    assert limits_of(loss, other=abs(LABELS).astype(np.int32)) == {"other": 6}


@pytest.mark.parametrize("computed", [lambda x: x + 1, lambda x: x[:, 1:], lambda x: x % 5])
def test_values_that_were_computed_from_an_array_are_not_its_labels(computed: Any) -> None:
    assert limits_of(lambda batch: tf.one_hot(computed(batch["labels"]), 5)) == {}


class Tagged(Arrays):
    """The label of row 6 is larger than those of the other rows."""

    def load(self, split: str) -> dict[str, Any]:
        tags = np.arange(8) % 3
        tags[6] = 9
        return {"x": np.ones((8, 2), np.float32), "tags": tags}


class Tagging(Task):
    """The loss of a wrong label is 0, if nothing refuses it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 3], dims=(None, None), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        target = tf.one_hot(batch["tags"], 3)
        nats = tf.reduce_sum(target * -tf.nn.log_softmax(tf.matmul(batch["x"], theta.w)), 1)
        return LossSums(tf.reduce_sum(batch["weights"] * nats))


class OwnCheck(Tagging):
    """Accepts all labels."""

    def check_batch(self, what: str, batch: Any) -> None:
        pass


class Tags(Experiment):
    """Labels of which one is wrong."""

    kind: Any = Tagging

    def task(self) -> Any:
        return self.kind.Params()

    def input(self) -> Any:
        return Tagged.Params(batch_size=4, order="sequential")

    def learner(self) -> Any:
        return Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))

    def run(self) -> Any:
        return Run.Params(steps=4)


def test_a_label_that_is_too_large_is_refused_with_its_place_and_the_number_of_classes() -> None:
    session = Session(Tags)
    session.train(1)
    with pytest.raises(ValueError) as error:
        session.train(1)
    assert str(error.value).startswith(
        "'tags' (example 2 of input.batch(1)) has the label 9, but the loss of Tagging has 3 "
        "classes for it: labels are 0 to 2, or -1 for"
    )
    part = BatchPart({"tags": np.array([0, 3])}, ((5, 7),), 8)
    with pytest.raises(ValueError, match=r"'tags' \(example 6 of input\.batch\(1\)\) has the lab"):
        session.task.check_batch("input.batch(1)", part)
    session.task.check_batch("input.batch(1)", {"tags": np.array([-1, 2])})


def test_a_task_with_an_own_check_accepts_what_it_wants() -> None:
    class Own(Tags):
        kind = OwnCheck

    assert len(Session(Own).train(2)) == 2
