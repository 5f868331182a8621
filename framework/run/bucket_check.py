"""Checks that the loss of an example does not depend on the padding of its bucket.

It computes the loss of a few examples in the rows of their bucket, and padded to those of the next
bucket. They differ if the model averages over padding, for example, or if `BatchNorm` has no mask.
So they do if padding is masked, but a convolution with strides and "SAME" padding is aligned with
the end of the rows: how much it pads at their begin depends on their length.

    dropout             none, because its masks depend on the length of the rows
    batch statistics    of training, if a layer couples examples; otherwise as in evaluations
    matrices of zeros   replaced by random ones: at first, a last layer of zeros hides everything

Not checked: the inputs of several tasks, and weights that training changes so that they depend on
padding only later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import Form, Mode, StepContext
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.input.input import Batch, Input
from tekso.framework.path_patterns import listed
from tekso.framework.run.loss_trial import Trial, different_repetition

_MOST_EXAMPLES = 2
_OTHER_EXAMPLES = 1000
"""Position in the global batch at which the examples have other random numbers."""


def warnings(trial: Trial, input: Input) -> list[str]:
    """Returns a warning if the loss of some examples depends on the bucket that they are in.

    Args:
      trial: has the weights.
      input: the training input.
    """
    rows = input.inner
    if not isinstance(rows, BucketedInput):
        return []
    try:
        found = rows.in_two_buckets(_MOST_EXAMPLES)
        losses = None if found is None else _losses(trial, *found)
    except Exception:  # in user code, which may not build rows of another bucket
        return []
    if found is None or losses is None:
        return []
    lengths = [_text(_padded(one, other)) for one, other in (found, found[::-1])]
    return [
        f"the loss of {type(trial.task).__name__} depends on the padding of a bucket: for the "
        f"same {len(next(iter(found[0].values())))} examples it is {losses[0]:g} with "
        f"{lengths[0]}, and {losses[1]:g} with {lengths[1]}. Mask the padding of "
        f"{listed(list(_padded(*found)))} in means, maxima, attention and convolutions over the "
        "positions, and pass BatchNorm a mask, or choose bucket bounds that are multiples of the "
        "model's total stride"
    ]


def _losses(trial: Trial, one: Batch, other: Batch) -> tuple[float, float] | None:
    """Returns the losses of examples in two buckets; None if they differ at most by rounding."""
    couples = any(layer.couples_examples for layer in trial.task.walk())
    mode: Mode = "train" if couples else "eval"
    calm = Trial(trial.task, {p: _not_zero(w) for p, w in trial.weights.items()}, forms=FORMS)
    before, after = (calm.sums(batch, mode=mode).loss for batch in (one, other))
    if not calm.differ(before, after, scale=abs(before)):
        return None
    again = (calm.sums(one, mode=mode, offset=offset).loss for offset in (0, _OTHER_EXAMPLES))
    return (before, after) if different_repetition(before, after, again) is None else None


def _no_dropout(ctx: StepContext, x: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
    del ctx, args, kwargs
    return x


def _attend(ctx: StepContext, *args: Any, **kwargs: Any) -> tf.Tensor:
    return ops.attend.plain(ctx, *args, **{**kwargs, "dropout_rate": 0.0})


FORMS: Mapping[str, Form] = {"dropout": _no_dropout, "attend": _attend}
"""{primitive: how it is computed without dropout}."""


def _not_zero(weight: tf.Tensor) -> tf.Tensor:
    """Returns a weight, or small random numbers if it is a matrix of zeros."""
    if weight.shape.rank < 2 or not weight.dtype.is_floating or np.any(weight.numpy()):
        return weight
    scale = 1 / np.sqrt(np.prod(weight.shape[:-1]))
    numbers = np.random.default_rng(0).normal(scale=scale, size=weight.shape)
    return tf.cast(tf.constant(numbers, tf.float32), weight.dtype)


def _padded(one: Batch, other: Batch) -> dict[str, list[int]]:
    """Returns {name: shape of an example} of the arrays that have another shape in `other`."""
    return {
        name: list(array.shape[1:])
        for name, array in one.items()
        if array.shape != other[name].shape
    }


def _text(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} of {shape}" for name, shape in shapes.items())
