"""Standardization: subtracts a mean from each feature, and divides by a standard deviation."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Values
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta


class Standardization(Layer):
    """Standardizes the last dim of the input: y = (x - mean) / scale, with given numbers.

    The numbers are weights that are not trained. So checkpoints have them, and a run that
    continues from a checkpoint, or evaluates it on other data, uses those of the checkpoint.

    Shapes:
      x: [..., dim], numbers of any type
      returns: [..., dim] float32
    Weights:
      mean, scale: [dim] float32, not trained
    Raises:
      ValueError: the Params have different numbers of means and scales, or a scale is not above 0;
        the last dim of x is not dim.
    """

    class Params(Layer.Params):
        """Params of Standardization."""

        mean: list[float] = param("A mean for each element of the last dim.", default=REQUIRED)
        scale: list[float] = param("A standard deviation for each element.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not p.mean or len(p.mean) != len(p.scale):
            raise ValueError(
                f"{p.path_of('mean')} has {len(p.mean)} numbers and {p.path_of('scale')} "
                f"{len(p.scale)}, but they must be equally many, at least 1"
            )
        scales = np.float32(p.scale)
        if not (np.isfinite(np.float32(p.mean)).all() and np.isfinite(scales).all()):
            raise ValueError(
                f"{p.path_of('mean')} or {p.path_of('scale')} has a number that is not finite in "
                "float32"
            )
        if not (scales > 0).all():
            raise ValueError(
                f"{p.path_of('scale')} has {min(p.scale)}, but scales must be above 0 in float32"
            )
        for name, values in (("mean", p.mean), ("scale", p.scale)):
            init = Values.Params(values=list(values))
            self.weight(
                name, [len(values)], dims=(None,), init=init, trainable=False, dtype="float32"
            )

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """See the class."""
        del ctx
        x = tf.cast(x, tf.float32)
        dim = len(self.params.mean)
        if not x.shape.rank or x.shape[-1] != dim:
            raise ValueError(
                f"Standardization: x is {list(x.shape)}, but its last dim must be {dim}, as many "
                "as there are means"
            )
        return (x - theta.mean) / theta.scale

    def inverse(self, theta: Theta, y: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns x, given the result of `fprop`.

        Shapes:
          y: [..., dim] float32
          returns: [..., dim] float32
        """
        del ctx
        return y * theta.scale + theta.mean
