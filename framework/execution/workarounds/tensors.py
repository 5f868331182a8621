"""Tensors and variables in the form that DTensor compiles correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.primitives.custom_gradient import custom_gradient

TOO_MANY_TO_FOLD = 32  # number of elements from which no tensor is compiled as a constant
_FOLDED = ("int32", "int64", "float32")  # types that DTensor compiles as constants


def loop_inputs(given: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Wraps loop inputs in `tf.identity`, so that DTensor treats them as created in the body.

    Defect: DTensor does not compile two uses of a loop input in the body. One is an IdentityN,
    which every custom gradient adds, of an input that the loop changes and one that it does not, or
    of an input and a constant ("operand does not dominate this use"). The other is the start value
    of an inner loop ("block argument must be enclosed by a function"). Also wrap constants that a
    custom gradient in the body returns: they are inputs of its IdentityN.
    """
    return [tf.identity(tensor) for tensor in given]


def separated(x: tf.Tensor) -> tf.Tensor:
    """Returns x itself, so that its layout and that of later ops do not influence each other.

    Defect: DTensor propagates the sharding constraints of later ops to a gather or a concatenation,
    which it then cannot compile, and through it to the input, where the dims have other positions.
    """
    return tf.identity(x)


def new_variable(value: tf.Tensor) -> Any:
    """Returns a variable with this value and its layout.

    Defect: DTensor compiles the op that creates a variable once for each name of a variable, so
    all variables have the same name.
    """
    return dtensor.DVariable(value, trainable=False, name="state")


def first_copy(x: tf.Tensor) -> tf.Tensor:
    """Returns a replicated tensor as an ordinary tensor, and waits until it is computed.

    Defect: `dtensor.unpack` waits for the values and keeps Python's lock meanwhile. No other thread
    of Python would continue during a step, such as those that write a checkpoint or read the next
    batch. `numpy` waits without the lock.
    """
    x.numpy()
    copy: tf.Tensor = dtensor.unpack(x)[0]
    return copy


def resharded_both_ways(reshard: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    """Returns `reshard(x)`; its gradient is resharded by the same function.

    Defect: DTensor's own gradient, by relayout_like, crashes the process in some loops, and the
    gradient it returns cannot be resharded to the layout of the slots. A later op may give the
    result of resharding another layout only if an identity is between them.
    """

    @custom_gradient
    def run(x: tf.Tensor) -> Any:
        return reshard(x), lambda dy: separated(reshard(dy))

    return run(x)


def copies(array: Any) -> np.ndarray:
    """Returns enough copies of an array that DTensor does not treat them as a constant.

    Defect: DTensor compiles a replicated tensor with few elements as a constant: int32, int64 and
    float32. When its value changes, the whole step is compiled again. The values are right.

    Shapes:
      array: any
      returns: [copies, *shape of the array]
    """
    array = np.asarray(array)
    count = max(1, -(-TOO_MANY_TO_FOLD // max(array.size, 1)))
    return np.repeat(array[np.newaxis], count, axis=0)


def is_folded(array: np.ndarray, layout: dtensor.Layout) -> bool:
    """Returns whether DTensor would compile an array of this layout as a constant; see `copies`."""
    is_small = 0 < array.size < TOO_MANY_TO_FOLD and array.dtype.name in _FOLDED
    return is_small and layout.is_fully_replicated()
