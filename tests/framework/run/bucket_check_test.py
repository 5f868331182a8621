"""Before the first step: a loss that depends on the bucket of an example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from wrong_losses import OnHost

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Normal, Zeros
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import Batch
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import param
from tekso.framework.run import bucket_check, loss_check
from tekso.framework.schedules import Constant
from tekso.framework.task import LossSums, Task
from tekso.models.layers.normalization import BatchNorm

LENGTHS = [3, 9, 10, 13, 14, 15, 20]


class Rows(BucketedInput):
    """Rows of numbers above 0, in buckets up to 4, 10, 16 and 24."""

    class Params(BucketedInput.Params):
        """Params of Rows."""

        bounds: list[int] = param("Longest row of each bucket.", default=[4, 10, 16, 24])

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        sizes = [self.params.batch_size] * len(self.params.bounds)
        self.assign(LENGTHS, self.params.bounds, sizes)

    def bucket_rows(self, examples: Any, bound: int) -> Batch:
        x = np.zeros([len(examples), bound], np.float32)
        for row, example in zip(x, examples, strict=True):
            rng = np.random.default_rng(example)
            row[: LENGTHS[example]] = rng.uniform(0.5, 1.5, LENGTHS[example])
        return {"x": x, "y": np.zeros([len(x), 2]), "weights": np.ones(len(x), np.float32)}


class OwnBucketOnly(Rows):
    """Cannot build rows that are longer than their bucket."""

    def bucket_rows(self, examples: Any, bound: int) -> Batch:
        if bound != min(b for b in self.params.bounds if b >= LENGTHS[examples[0]]):
            raise ValueError("of another bucket")
        return super().bucket_rows(examples, bound)


class Means(Task):
    """The square of a mean over a row, computed in the way of the test."""

    class Params(Task.Params):
        """Params of Means."""

        way: str = param("How.", default="masked")

    norm: BatchNorm

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [1, 3], dims=("embed", "mlp"), init=Normal.Params(stddev=1.0))
        init = Zeros.Params() if "zeros" in self.params.way else Normal.Params(stddev=1.0)
        self.weight("head", [3, 1], dims=("mlp", None), init=init)
        if "norm" in self.params.way:
            self.child("norm", BatchNorm.Params(dim=3))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        way = self.params.way
        is_real = batch["x"] > 0
        x = tf.einsum("bl,cd->bld", batch["x"], theta.w) + 1.0
        x = ops.dropout(ctx, x, 0.5, self)
        if "strides" in way:  # "SAME" pads 1 in front of 10, 0 in front of 12 and 15
            x *= tf.cast(is_real, tf.float32)[:, :, tf.newaxis]
            x = tf.nn.conv1d(x, tf.fill([4, 3, 3], 0.05), 3, "SAME")
            is_real = is_real[:, ::3]
        if "norm" in way:
            x = self.norm.fprop(theta.norm, x, ctx, mask=is_real if "masked" in way else None)
        if "noise" in way and ctx.is_training:
            x += ctx.uniform(self, x.shape, name="noise")
        if "mean" in way:
            mean = tf.reduce_mean(x, 1)
        else:
            counts = tf.cast(is_real, tf.float32)[:, :, tf.newaxis]
            mean = tf.reduce_sum(x * counts, 1) / tf.reduce_sum(counts, 1)
        y = tf.squeeze(tf.nn.tanh(mean) @ theta.head, 1)
        return LossSums(tf.reduce_sum(batch["weights"] * tf.square(y - 2.0)))


def check(way: str, kind: type[Rows] = Rows, **fields: Any) -> list[str]:
    """Returns the warnings of the check before the first step."""
    task = Means.Params(way=way).instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    inputs = {"input": kind.Params(batch_size=2, **fields).instantiate()}
    found = loss_check.check(task, learner.instantiate(), OnHost(task), inputs)
    assert not found.unchecked
    return found.warnings


@pytest.mark.parametrize("way", ["mean", "mean, head of zeros", "norm"])
def test_a_model_that_counts_padding_of_a_bucket_is_a_warning_with_the_array(way: str) -> None:
    (warning,) = check(way)
    assert warning.startswith(
        "the loss of Means depends on the padding of a bucket: for the same 2"
    )
    assert "with x of [10], and " in warning
    assert "with x of [16]. Mask the padding of 'x' in means" in warning


@pytest.mark.parametrize("way", ["masked", "masked, head of zeros", "masked norm"])
def test_a_model_that_masks_padding_is_no_warning_though_it_has_dropout(way: str) -> None:
    assert check(way) == []


def test_strides_that_the_bounds_are_no_multiple_of_are_a_warning_that_says_so() -> None:
    (warning,) = check("strides", bounds=[10, 15, 24])
    assert "or choose bucket bounds that are multiples of the model's total stride" in warning
    assert check("strides", bounds=[12, 15, 24]) == []


def test_noise_of_the_length_of_a_row_is_not_taken_for_padding() -> None:
    assert check("masked norm, noise") == []


def test_nothing_is_compared_with_one_bucket_or_rows_of_one_bucket() -> None:
    assert check("mean", bounds=[24]) == []
    assert check("mean", bounds=[24, 30]) == []
    assert check("mean", OwnBucketOnly) == []


def test_the_shortest_rows_with_a_middle_are_compared_with_the_next_bucket() -> None:
    def lengths(*bounds: int) -> list[tuple[int, ...]]:
        found = Rows.Params(batch_size=2, bounds=list(bounds)).instantiate().in_two_buckets(2)
        return [batch["x"].shape for batch in found]

    assert lengths(4, 10, 16, 24) == [(2, 10), (2, 16)]
    assert lengths(4, 10, 11, 12, 24) == [(2, 10), (2, 24)]  # no example has 11 or 12
    assert lengths(4, 24) == [(1, 4), (1, 24)]


def test_attention_has_no_dropout_in_the_check() -> None:
    ctx, layer = StepContext(mode="train", num_examples=2), Means.Params().instantiate()
    q = tf.random.stateless_normal([2, 5, 1, 4], seed=[1, 2])
    out = bucket_check.FORMS["attend"](ctx, q, q, q, scale=1.0, dropout_rate=0.9, layer=layer)
    np.testing.assert_allclose(out, ops.attend(ctx, q, q, q, scale=1.0), rtol=1e-6)
