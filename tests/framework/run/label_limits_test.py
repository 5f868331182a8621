"""LabelWatch: which arrays a loss reads as classes; labels that are too large are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.batch_part import BatchPart
from tekso.framework.context import StepContext
from tekso.framework.experiment import Experiment, Run
from tekso.framework.initializers import Zeros
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.run import loss_check
from tekso.framework.run.label_limits import BatchCheck, LabelLimit, LabelWatch
from tekso.framework.run.session import Session
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.tasks.multi.task import MultiTask

LABELS = np.array([[0, 2, -1], [4, 1, 0]])


def limits_of(loss: Any, **arrays: Any) -> list[tuple[str, int, Any]]:
    """The limits of a loss, with the elements of an example that are labels."""
    batch = {name: tf.constant(array) for name, array in {"labels": LABELS, **arrays}.items()}
    watch = LabelWatch()
    with watch.watching(batch):
        loss(batch)
    loss(batch)  # not seen
    return [
        (one.name, one.classes, one.elements if one.elements is None else one.elements.tolist())
        for one in watch.found
    ]


def test_arrays_that_become_one_hot_are_labels_of_as_many_classes() -> None:
    assert limits_of(lambda batch: tf.one_hot(batch["labels"], 5)) == [("labels", 5, None)]

    def changed_in_form(batch: Any) -> None:
        labels = tf.transpose(tf.reshape(tf.cast(batch["labels"], tf.int32), [3, 2]))
        tf.one_hot(tf.squeeze(tf.expand_dims(tf.identity(labels), 1)), 7)
        tf.one_hot(batch["labels"], 9)

    assert limits_of(changed_in_form) == [("labels", 7, None)]


def test_labels_of_a_sparse_cross_entropy_have_as_many_classes_as_there_are_scores() -> None:
    def loss(batch: Any) -> None:
        labels, scores = tf.abs(batch["labels"]), tf.zeros([2, 3, 6])
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores)  # of other values
        tf.nn.sparse_softmax_cross_entropy_with_logits(batch["other"], scores)

    assert limits_of(loss, other=abs(LABELS).astype(np.int32)) == [("other", 6, None)]


def test_a_sparse_cross_entropy_takes_no_negative_label_also_of_weight_0() -> None:
    def sparse(labels: Any) -> None:
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.zeros([2, 7]))

    batch = {"labels": tf.constant(abs(LABELS)), "tags": tf.constant(abs(LABELS))}
    watch = LabelWatch()
    with watch.watching(batch):
        tf.one_hot(batch["labels"], 5)
        tf.one_hot(batch["tags"], 5)
        sparse(batch["tags"][:, 2])
    third = np.array([False, False, True])
    of_labels, of_tags, of_cut = watch.found
    assert of_labels == LabelLimit("labels", 5) and of_tags == LabelLimit("tags", 5)
    assert (of_cut.classes, of_cut.takes_negative) == (7, False)
    assert of_cut.elements is not None and (of_cut.elements == third).all()
    for weights in ([1.0, 1.0], [0.0, 0.0]):
        wrong = {"tags": LABELS, "labels": LABELS, "weights": np.array(weights)}
        assert of_cut.first_wrong(wrong) == (0, 2)
        assert of_labels.first_wrong(wrong) is None


def test_an_array_of_both_kinds_of_cross_entropy_has_the_limits_of_both() -> None:
    batch = {"labels": tf.constant(abs(LABELS[0]))}
    watch = LabelWatch()
    with watch.watching(batch):
        tf.one_hot(batch["labels"], 5)
        tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], tf.zeros([3, 7]))
    assert watch.found == (LabelLimit("labels", 5, takes_negative=False),)


@pytest.mark.parametrize("computed", [lambda x: x + 1, lambda x: x % 5, tf.abs])
def test_values_that_were_computed_from_an_array_are_not_its_labels(computed: Any) -> None:
    assert limits_of(lambda batch: tf.one_hot(computed(batch["labels"]), 5)) == []


@pytest.mark.parametrize(
    ("before", "after", "is_checked"),
    [
        ("uint8", "int8", False),  # 255 becomes -1
        ("int32", "uint8", False),
        ("uint32", "int32", False),
        ("uint8", "int32", True),
        ("int64", "int32", True),
    ],
)
def test_a_cast_is_followed_only_if_it_keeps_every_label(
    before: str, after: str, is_checked: bool
) -> None:
    labels = np.array([[0, 1, 2], [4, 1, 0]], before)
    found = limits_of(lambda batch: tf.one_hot(tf.cast(batch["labels"], after), 5), labels=labels)
    assert found == ([("labels", 5, None)] if is_checked else [])


LONG = np.arange(24).reshape(2, 4, 3)


@pytest.mark.parametrize(
    "taken",
    [
        lambda x: x[:, 1:],
        lambda x: x[:, :-1, 0],
        lambda x: x[:, -1, ..., ::2],
        lambda x: x[:, ::-2, None, 1:2],
        lambda x: x[..., 1],
        lambda x: tf.slice(x, [0, 1, 0], [-1, 2, 2]),
        lambda x: tf.slice(x, [0, 0, 1], [2, 4, -1]),
        lambda x: tf.strided_slice(x, [0, 1, 0], [2, 4, 3], [1, 2, 1]),
        lambda x: tf.reshape(x[:, 1:], [-1])[3:],  # drops a position of the first example only
        lambda x: tf.reshape(x, [2, 12])[:, 5:7],
        lambda x: tf.squeeze(tf.transpose(x, [2, 0, 1])[:1], 0),
        lambda x: tf.unstack(x, axis=2)[1],
        lambda x: tf.split(x, 2, axis=1)[1],
        lambda x: tf.cast(tf.identity(x)[:, 2], tf.int32),
    ],
)
def test_a_slice_is_followed_to_the_elements_that_every_example_has_in_it(taken: Any) -> None:
    ((name, classes, elements),) = limits_of(
        lambda batch: tf.one_hot(taken(batch["long"]), 30), long=LONG
    )
    read = np.isin(LONG, np.asarray(taken(tf.constant(LONG))))
    assert (name, classes) == ("long", 30)
    assert elements == read.all(0).tolist()
    assert 0 < np.sum(elements) < 12


def test_parts_of_an_array_may_have_different_numbers_of_classes() -> None:
    def loss(batch: Any) -> None:
        kinds, sizes = tf.unstack(batch["labels"][:, :2], axis=1)
        tf.one_hot(kinds, 5)
        tf.one_hot(sizes, 4)
        tf.one_hot(batch["labels"], 9)

    first, second, third = limits_of(loss)
    assert first == ("labels", 9, None)
    assert second == ("labels", 5, [True, False, False])
    assert third == ("labels", 4, [False, True, False])


def test_only_elements_that_are_labels_are_checked() -> None:
    limit = LabelLimit("ids", 5, np.array([False, True, True]))
    ids = np.array([[9, 1, 2], [9, 4, 0]])
    assert limit.first_wrong({"ids": ids}) is None
    assert limit.first_wrong({"ids": np.where(ids == 4, 5, ids)}) == (1, 1)


@pytest.mark.parametrize(
    ("taken", "is_checked"),
    [
        (lambda x: x, True),
        (lambda x: tf.reshape(x, [-1])[:, None], True),
        (lambda x: x[..., None], True),
        (lambda x: x[:, :3], False),  # all three elements, but not the fourth of a longer row
        (lambda x: x[:, 1:3], False),
        (lambda x: tf.stack(tf.unstack(x, axis=1), 1), False),
    ],
)
def test_of_rows_of_another_length_only_arrays_that_were_read_whole_are_checked(
    taken: Any, is_checked: bool
) -> None:
    def found(ids: Any) -> bool:
        return any(limit.first_wrong({"ids": np.array(ids)}) is not None for limit in watch.found)

    watch, batch = LabelWatch(), {"ids": tf.constant(LABELS)}
    with watch.watching(batch):
        for part in tf.unstack(batch["ids"], axis=1):
            tf.one_hot(part, 5)
        tf.one_hot(taken(batch["ids"]), 5)
    assert found([[0, 5, 0]])
    assert found([[0, 0, 0, 5]]) == found([[5]]) == is_checked


def test_positions_in_a_row_and_indices_of_examples_have_no_limit() -> None:
    def loss(batch: Any) -> None:
        scores = tf.reduce_sum(batch["x"], 2)  # of each position
        tf.nn.sparse_softmax_cross_entropy_with_logits(batch["answer"], scores)
        tf.one_hot(batch["partner"], len(batch["x"]))
        tf.one_hot(batch["is_large"], 2)  # as many as examples, in one of the blocks
        tf.one_hot(batch["kind"], 7)

    watch = LabelWatch()
    for rows, length in ((1, 16), (2, 16), (2, 64)):
        numbers = tf.zeros([rows], tf.int32)
        batch = {"x": tf.zeros([rows, length, 3]), "answer": numbers}
        names = ("partner", "kind", "is_large")
        batch |= {name: tf.identity(numbers) for name in names}
        with watch.watching(batch):
            loss(batch)
    assert set(watch.found) == {LabelLimit("kind", 7), LabelLimit("is_large", 2)}


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


class Unchecked(Tagging):
    """Accepts all labels."""

    unchecked_labels = frozenset({"tags"})


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
    check = BatchCheck(session.task, [LabelLimit("tags", 3)])
    with pytest.raises(ValueError, match=r"'tags' \(example 6 of input\.batch\(1\)\) has the lab"):
        check("input.batch(1)", part)
    check("input.batch(1)", {"tags": np.array([-1, 2])})
    check = BatchCheck(session.task, [LabelLimit("tags", 3, takes_negative=False)])
    with pytest.raises(ValueError) as error:
        check("input.batch(1)", {"tags": np.array([2, -1])})
    assert str(error.value).startswith(
        "'tags' (example 1 of input.batch(1)) has the label -1, but the loss of Tagging has 3 "
        "classes for it: labels are 0 to 2. Correct the input or the number of classes. tf.nn."
    )
    check("input.batch(1)", {"other": np.array([7])})


@pytest.mark.parametrize("task", ["", "a/"])
def test_labels_of_examples_of_weight_0_are_not_checked(task: str) -> None:
    limit, labels = LabelLimit(f"{task}labels", 3), np.array([[7, 0], [0, 1], [5, 4]])

    def first(weights: Any, name: str = f"{task}weights") -> Any:
        return limit.first_wrong({f"{task}labels": labels, name: np.array(weights)})

    assert first([0, 1, 0.5]) == (2, 0)
    assert first([0.0, 1, 0]) is None
    assert first([[0, 1]] * 3) == (0, 0)  # of elements
    assert first([0.0, 1, 0], "b/weights") == (0, 0)  # of another task


def test_a_task_may_exclude_labels_from_the_check() -> None:
    class Own(Tags):
        kind = Unchecked

    assert len(Session(Own).train(2)) == 2


class Several(Tags):
    """Two tasks of tags, which take turns, or are trained together."""

    unit: Any = "one_task"
    other: Any = Tagging

    def task(self) -> Any:
        return MultiTask.Params(tasks={"a": Unchecked.Params(), "b": self.other.Params()})

    def input(self) -> Any:
        tags = Tagged.Params(batch_size=4)
        return TaskInputs.Params(inputs={"a": tags, "b": tags.copy()}, unit=self.unit)


class Together(Several):
    """Both in every step."""

    unit = "all_tasks"


@pytest.mark.parametrize("kind", [Several, Together])
def test_labels_of_each_of_several_tasks_are_checked(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"'b/tags' \(example \d of input\.batch\(\d\)\) has th"):
        Session(kind).train(4)

    class Accepting(kind):
        other = Unchecked

    assert len(Session(Accepting).train(4)) == 4


def test_a_task_of_tasks_may_exclude_labels_too() -> None:
    class Own(MultiTask):
        unchecked_labels = frozenset({"b/tags"})

    task = Own.Params(tasks={"a": Unchecked.Params(), "b": Tagging.Params()}).instantiate()
    assert task.unchecked_labels == {"a/tags", "b/tags"}


class OnHost:
    """A program that computes op by op."""

    serialize_calls = False

    def __init__(self, task: Any) -> None:
        self.task = task

    def call(self, function: Any, *inputs: Any) -> Any:
        return function(self.task.init(0), *inputs, StepContext(mode="eval"))


class NeedsFullBatches(Tagging):
    """Fails on a few examples, after it has read the labels."""

    def loss(self, theta: Any, batch: Any, ctx: Any) -> Any:
        tf.one_hot(batch["tags"], 6 - batch["tags"].shape.rank)
        raise ValueError("a batch must be full")


@pytest.mark.parametrize(("kind", "classes"), [(Tagging, 3), (NeedsFullBatches, 5)])
@pytest.mark.parametrize("path", ["input", "eval_inputs.dev"])
def test_a_restored_task_has_its_labels_too(kind: Any, classes: int, path: str) -> None:
    task = kind.Params().instantiate()
    input = Tagged.Params(batch_size=4).instantiate()
    found = loss_check.check_restored(task, OnHost(task), {path: input})
    assert found == loss_check.Findings(label_limits=(LabelLimit("tags", classes),))


def test_a_task_that_needs_full_batches_has_its_labels_of_all_inputs() -> None:
    task = NeedsFullBatches.Params().instantiate()
    learner = Tags.learner(Tags()).instantiate()
    train, dev = (Tagged.Params(batch_size=4).instantiate() for _ in range(2))
    other = {name: array[:, None] for name, array in dev.batch(0).items()}
    dev.batch = lambda step: other
    found = loss_check.check(task, learner, OnHost(task), {"input": train, "eval_inputs.dev": dev})
    assert len(found.unchecked) == 1
    assert "NeedsFullBatches could not be checked" in found.unchecked[0]
    assert found.label_limits == (LabelLimit("tags", 4),)  # of dev; of input it is 5
