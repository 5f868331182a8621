"""Primitives that layers call only because of defects of DTensor: on one device, they are one op.

`execution/workarounds/forms.py` has their forms on a mesh, and describes the defects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.ops import WORKAROUNDS
from tekso.framework.primitive import primitive


@primitive(mesh=WORKAROUNDS, planning=None)
def capture(ctx: StepContext, nest: Any) -> Any:
    """Makes outer tensors usable in the body of a custom `tf.while_loop` or `tf.cond`.

    Pass weights, other outer tensors and the state of the loop through it at the body's beginning.
    """
    return nest


@primitive(mesh=WORKAROUNDS, planning=None)
def take_row(ctx: StepContext, x: tf.Tensor, index: int) -> tf.Tensor:
    """Returns x[index], for example the weights of one layer from stacked weights.

    Shapes:
      x: [rows, ...]
      returns: [...], dtype of x
    """
    return tf.gather(x, index)


@primitive(mesh=WORKAROUNDS, planning=WORKAROUNDS)
def concat(
    ctx: StepContext, xs: Sequence[tf.Tensor], axis: int, *, dims: Sequence[str | None]
) -> tf.Tensor:
    """Concatenates tensors along a dim; `dims` is the sharding constraint of the result.

    Shapes:
      xs: tensors [batch, ...], the same except for the dim `axis`
      returns: [batch, ...]; `dims` has a name for each dim
    """
    return ctx.constrain(tf.concat(xs, axis % len(dims)), dims)


@primitive(mesh=WORKAROUNDS, planning=WORKAROUNDS)
def reverse(
    ctx: StepContext, x: tf.Tensor, axis: int, *, dims: Sequence[str | None] | None = None
) -> tf.Tensor:
    """Reverses a dim; `dims` is the sharding constraint of the result.

    Without `dims`, dim 0 is the batch. If x is time-major, name its dims: (None, "batch", None).

    Shapes:
      x: any shape; `dims` has a name, or None, for each dim
      returns: shape and dtype of x
    """
    y = tf.gather(x, tf.range(x.shape[axis] - 1, -1, -1), axis=axis)
    return y if dims is None else ctx.constrain(y, dims)
