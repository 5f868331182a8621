"""An evaluation counts every example once: it has an end, and padding has no weight."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.input import ExampleInput, Input
from tekso.framework.params import param
from tekso.framework.run import input_checks
from tekso.framework.task import Task


class Numbers(ExampleInput):
    """11 numbers."""

    class Params(ExampleInput.Params):
        """Params of Numbers."""

        weighted: bool = param("Whether an array marks what counts.", default=True)

    @property
    def num_examples(self) -> int:
        return 11

    def examples(self, index: Any, epoch: Any) -> Any:
        batch = {"x": index.astype(np.float32)}
        return batch | (
            {"weights": np.ones(len(index), np.float32)} if self.params.weighted else {}
        )


class Weighted(Task):
    """Counts what has a weight."""

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])


class Counting(Task):
    """Counts rows."""

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)


def numbers(batch_size: int, order: str = "once", **changes: Any) -> Any:
    return Numbers.Params(batch_size=batch_size, order=order, **changes).instantiate()


def check(input: Any, task: type[Task]) -> None:
    input_checks.check_weights({"eval_inputs.dev": input}, task.Params().instantiate())


def test_padding_is_known() -> None:
    np.testing.assert_array_equal(numbers(4).is_padding(2), [False, False, False, True])
    assert not numbers(4).is_padding(1).any()
    assert not numbers(4, "sequential").is_padding(2).any()
    params = HeldOut.Params(batch_size=4, max_batches=1)
    held_out = params.instantiate(train=Numbers.Params(batch_size=3))
    assert not held_out.is_padding(0).any()
    whole = HeldOut.Params(batch_size=4).instantiate(train=Numbers.Params(batch_size=3))
    assert whole.is_padding(2).sum() == 1


class PaddedFirst(Numbers):
    """Pads the first of two batches, as the last batch of a bucket may be."""

    def batch(self, step: int) -> Any:
        index = np.array([[0, 1, 1, 1], [2, 3, 4, 5]])[step]
        return self.examples(index, index)

    def is_padding(self, step: int) -> Any:
        return np.array([False, False, True, True]) & (step == 0)

    @property
    def num_batches(self) -> int:
        return 2


def test_padding_before_the_last_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    input: Any = PaddedFirst.Params(batch_size=4, order="once").instantiate()
    with pytest.raises(InputError, match="2 of the 4 examples of a batch are padding"):
        check(input, Counting)
    monkeypatch.setattr(input_checks, "MOST_BATCHES", 1)
    check(input, Counting)


def test_task_that_counts_weights_passes() -> None:
    check(numbers(4), Weighted)
    check(numbers(4, "shuffled"), Counting)


def test_task_that_counts_rows_is_refused_where_rows_are_padding() -> None:
    with pytest.raises(InputError) as error:
        check(numbers(4), Counting)
    message = str(error.value)
    assert message.startswith("eval_inputs.dev: 1 of the 4 examples of a batch are")
    assert re.search(
        r"Counting.loss_weight \(.*\) counts them: for these examples alone it is 1 instead of 0",
        message,
    )
    check(numbers(11), Counting)


def test_input_without_a_mask_is_refused_unless_its_batches_are_full() -> None:
    with pytest.raises(InputError) as error:
        check(numbers(4, weighted=False), Counting)
    message = str(error.value)
    assert "the 11 examples of Numbers pads its last batch of 4 with 1 copies" in message
    assert (
        "'weights'" in message
        and "batch_size of this input to a divisor of 11, for example 1" in message
    )
    check(numbers(1, weighted=False), Counting)


class Endless(Input):
    """Has batches without an end, and no order to choose."""


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_evaluation_input_without_an_end_is_refused(order: str) -> None:
    input_checks.check_ends({"dev": numbers(4)})
    with pytest.raises(InputError) as error:
        input_checks.check_ends({"test": numbers(4), "dev": numbers(4, order)})
    message = str(error.value)
    assert f"eval_inputs.dev.order is {order!r}" in message
    assert "set eval_inputs.dev.order='once'" in message
    with pytest.raises(InputError, match=r"eval_inputs.dev \(Endless\) is infinite.*num_batches"):
        input_checks.check_ends({"dev": Endless.Params().instantiate()})


def test_training_input_that_ends_before_the_run_is_refused() -> None:
    input_checks.check_lasts(numbers(4, "shuffled"), 10**9)
    input_checks.check_lasts(numbers(4), 3)
    message = "has 3 batches, but run.steps is 4: set input.order='shuffled'"
    with pytest.raises(InputError, match=message):
        input_checks.check_lasts(numbers(4), 4)
    short: Any = PaddedFirst.Params(batch_size=4).instantiate()
    with pytest.raises(InputError, match=r"has 2 batches, but run.steps is 3: "):
        input_checks.check_lasts(short, 3)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "eval_inputs.dev: Numbers.examples() returns a NoneType, expected {name:"),
        ([np.ones(4)], "eval_inputs.dev: Numbers.examples() returns a list, expected"),
        ({}, "returns a dict, expected"),
        ({"x": [1.0, 2.0]}, "'x' of Numbers.examples(): it is a list; np.asarray() makes an array"),
        (
            {"x": [[1], [1, 2]]},
            "it has rows of different lengths: pad them to one length. Expected",
        ),
        ({"x": tf.ones(3)}, "it is a EagerTensor; np.asarray()"),
        ({1: np.ones(3)}, "1 of Numbers.examples(): a name must be a str"),
        ({"x": np.float32(3)}, "it is a float32; np.asarray()"),
        ({"x": np.array(3.0)}, "it has no dim of examples"),
        ({"x": np.array([[1], [1, 2]], object)}, "it has rows of different lengths: pad them to"),
        ({"x": np.array([{"a": 1}, {"b": 2}])}, "it contains dicts with the keys 'a', 'b': make"),
        ({"x": np.ones(3), "y": np.ones(4)}, "has arrays of {'x': 3, 'y': 4} examples"),
        ({"x": np.ones((0, 2))}, "has arrays of {'x': 0} examples"),
    ],
)
def test_batch_that_is_no_arrays_is_refused_with_the_method(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        input_checks.check_batch("eval_inputs.dev", numbers(4), batch)


def test_batches_of_arrays_pass_and_padding_is_marked_in_a_copy() -> None:
    class Shared(Numbers):
        def examples(self, index: Any, epoch: Any) -> Any:
            weights = np.broadcast_to(np.float32(1), (len(index),))
            return {"x": index.astype(np.float32), "weights": weights}

    input: Any = Shared.Params(batch_size=4, order="once").instantiate()
    input_checks.check_batch("input", input, input.batch(2))
    np.testing.assert_array_equal(input.batch(2)["weights"], [1, 1, 1, 0])


def test_held_out_data_without_an_end_is_refused() -> None:
    params = HeldOut.Params(batch_size=4, changes={"order": "shuffled"})
    with pytest.raises(ValueError, match="changes gives the evaluation input no end"):
        params.instantiate(train=Numbers.Params(batch_size=3))


def test_batch_larger_than_the_data_is_reported_by_its_path() -> None:
    assert input_checks.repeats(numbers(11, "shuffled")) is None
    assert input_checks.repeats(numbers(12)) is None
    message = input_checks.repeats(numbers(12, "shuffled"))
    assert message is not None
    assert "batch_size is 12, but there are only 11 examples: every batch contains some" in message


class Buckets(BucketedInput):
    """Ten examples of length 3, and forty of length 8."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([3] * 10 + [8] * 40, [4, 8], [self.params.batch_size] * 2)

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        return {"x": np.ones([len(examples), bound]), "weights": np.ones(len(examples))}


def test_buckets_with_fewer_examples_than_a_batch_are_reported_if_they_waste_many_rows() -> None:
    def warnings(size: int, **fields: Any) -> list[str]:
        return input_checks.warnings(
            {"input": Buckets.Params(batch_size=size, **fields).instantiate()}
        )

    assert warnings(40) == [
        "input: 30 of the 80 rows of an epoch are padding of weight 0, because the bucket up to 4 "
        "has 10 examples and batches of 40. Set a smaller batch size"
    ]
    assert warnings(13) == []  # 15 of 65
    assert warnings(10) == []
    assert warnings(7) == []
    assert warnings(40, order="once") == []


def test_examples_of_weight_0_are_not_counted() -> None:
    task = Task.Params().instantiate()
    assert task.count({"x": np.ones([5, 2])}) == (5, "examples")
    assert task.count({"x": np.ones([3, 2]), "weights": np.array([1.0, 0.5, 0.0])})[0] == 2
    tokens = np.array([[1, 0], [0, 0], [0, 1]])
    assert task.count({"x": np.ones([3, 2]), "weights": tokens})[0] == 2
    batch = Buckets.Params(batch_size=40).instantiate().batch(0)
    assert len(batch["x"]) == 40 and task.count(batch)[0] in (10, 40)


class InMemory(Arrays):
    """Thirty numbers; of those of "test", as many are in the training split as the size says."""

    class Params(Arrays.Params):
        """Params of InMemory."""

        shared: int = param("Numbers of the test split that are in the training split.", default=0)

    def load(self, split: str) -> Any:
        return {"x": np.arange(30.0) + (30 - self.params.shared) * (split == "test")}


@pytest.mark.parametrize(("shared", "is_reported"), [(2, False), (3, True), (29, True)])
def test_held_out_examples_that_are_training_examples_are_a_warning(
    shared: int, is_reported: bool
) -> None:
    train = InMemory.Params(batch_size=2, shared=shared).instantiate()
    test = HeldOut.Params(split="test").instantiate(train=train.params)
    lines = input_checks.warnings({"input": train, "eval_inputs.test": test})
    said = f"eval_inputs.test: {shared} of 30 examples are training examples too"
    assert [line.startswith(said) for line in lines] == [True] * is_reported


def test_a_split_of_the_same_examples_as_training_is_a_warning() -> None:
    train = InMemory.Params(batch_size=2).instantiate()
    splits: Any = ("dev", "test", "train")
    inputs = {
        f"eval_inputs.{split}": HeldOut.Params(split=split).instantiate(train=train.params)
        for split in splits
    }
    (line,) = input_checks.warnings({"input": train, **inputs})
    assert line.startswith("eval_inputs.dev: 30 of 30 examples are training examples too, although")
    assert input_checks.warnings({"input": numbers(12, "shuffled"), "eval_inputs.dev": numbers(4)})
