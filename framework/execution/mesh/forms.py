"""Mesh forms of primitives whose plain form would gather a sharded tensor.

DTensor propagates layouts through the ops of a layer. The forms here keep a tensor sharded where
propagation would not. `workarounds/forms.py` has those that avoid defects of DTensor. The plain
forms of all other primitives work on a mesh.
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import loops, ops
from tekso.framework.draws import HasStream
from tekso.framework.execution.mesh import control_flow, unrolled, vocab, windows
from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.primitives.batch_normalization import BatchNormed
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta

# --- products and elementwise functions ---


def project(
    ctx: MeshContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    num_contracted: int = 1,
) -> tf.Tensor:
    """See `ops.project`; without reshapes, so that any dim may be sharded.

    DTensor sums over devices in the dtype of a product, so the gradients of w and b are computed in
    float32 at least, and rounded to 16 bits once.
    """
    names = string.ascii_lowercase
    first, last = x.shape.rank - num_contracted, x.shape.rank - num_contracted + w.shape.rank
    lead, inner = names[:first], names[first : x.shape.rank]
    outer = names[x.shape.rank : last]
    axes = ctx.layout_of(w)

    @custom_gradient
    def run(x: tf.Tensor, w: tf.Tensor) -> Any:
        y = tf.einsum(f"{lead}{inner},{inner}{outer}->{lead}{outer}", x, w)

        def grad(dy: tf.Tensor) -> list[tf.Tensor]:
            dx = tf.einsum(f"{lead}{outer},{inner}{outer}->{lead}{inner}", dy, w)
            wide = f"{lead}{inner},{lead}{outer}->{inner}{outer}", widen(x), widen(dy)
            dw = tf.cast(tf.einsum(*wide), w.dtype)
            return [dx, dw if axes is None else ctx.reshard(dw, axes)]

        return y, grad

    y = run(x, w)
    return y if b is None else tf.cast(widen(y) + widen(b), y.dtype)


def batch_norm(
    ctx: MeshContext,
    x: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor,
    counted: tf.Tensor | None,
    *,
    epsilon: float,
    layer: HasStream,
) -> BatchNormed:
    """See `ops.batch_norm`; without reshapes, so that any dim may be sharded.

    A device takes one sum over all dims: sums over one dim after the other, which lose fewer
    digits, would be all-reduced over each sharded dim.
    """
    wide, outer = widen(x), list(range(x.shape.rank - 1))
    ones = tf.ones_like(wide[..., :1])
    flags = ones if counted is None else tf.cast(counted, wide.dtype) * ones
    count = tf.reduce_sum(flags)
    # The sums of several replicas on meshes, of which each computes a part of the batch.
    all_counted = tf.maximum(ops.sum_over_replicas(ctx, count, layer), 1)
    total = tf.reduce_sum(wide * flags, outer)
    mean = ops.sum_over_replicas(ctx, total, layer) / all_counted
    squares = tf.reduce_sum(tf.square(wide - mean) * flags, outer)
    variance = ops.sum_over_replicas(ctx, squares, layer) / all_counted
    factor = tf.math.rsqrt(variance + epsilon) * tf.cast(scale, wide.dtype)
    y = tf.cast(wide * factor + (tf.cast(bias, wide.dtype) - mean * factor), x.dtype)
    return BatchNormed(y, *map(tf.stop_gradient, (mean, count, total, squares)))


def lstm_update(
    ctx: MeshContext,
    inputs: tf.Tensor,
    recurrent: tf.Tensor,
    memory: tf.Tensor,
    *,
    forget_bias: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `ops.lstm_update`."""
    # Without the constraint, the other operand would determine the sharding of the gates.
    i, f, g, o = [
        ctx.constrain(gate, ("batch", "mlp")) for gate in tf.unstack(inputs + recurrent, axis=1)
    ]
    after = tf.sigmoid(f + forget_bias) * memory + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(after), after


# --- attention ---


def attend(ctx: MeshContext, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, **rest: Any) -> tf.Tensor:
    """See `ops.attend`; keys and values are not sharded along their length."""
    q = ctx.constrain(q, ("batch", "length", "heads", "head_dim"))
    k, v = (_of_every_head(ctx, x, q.shape[2]) for x in (k, v))
    return ops.attend.plain(ctx, q, k, v, **rest)


def _of_every_head(ctx: MeshContext, x: tf.Tensor, num_heads: int) -> tf.Tensor:
    """Repeats the heads of keys or values to the number of query heads; shards them as queries.

    Shapes:
      x: [batch, keys, kv_heads, head_dim]
      returns: [batch, keys, heads, head_dim]
    """
    kv_heads = x.shape[2]
    if kv_heads != num_heads:
        x = ctx.constrain(x, ("batch", None, None, "head_dim"))
        copies = tf.ones([1, 1, 1, num_heads // kv_heads, 1], x.dtype)
        x = tf.expand_dims(x, 3) * copies
        x = tf.reshape(x, [*x.shape[:2], num_heads, x.shape[-1]])
    return ctx.constrain(x, ("batch", None, "heads", "head_dim"))


def rotate(ctx: MeshContext, x: tf.Tensor, sine: Any, cosine: Any) -> tf.Tensor:
    """See `ops.rotate`; rotates a sharded head by a matrix product, without splitting it."""
    if ctx.axes((None, None, None, "head_dim"), x.shape)[-1] is None:
        return ops.rotate.plain(ctx, x, sine, cosine)
    half = x.shape[-1] // 2
    swap = np.zeros([2 * half, 2 * half], np.float32)  # (a, b) -> (-b, a)
    swap[np.arange(half) + half, np.arange(half)] = -1
    swap[np.arange(half), np.arange(half) + half] = 1
    # Constrained: otherwise DTensor joins shards of the halves if the product is sharded.
    sine, cosine = (tf.cast(tf.concat([s, s], s.shape.rank - 1), x.dtype) for s in (sine, cosine))
    dims = ("batch", "length", None, None)[-sine.shape.rank :]
    sine, cosine = ctx.constrain(sine, dims), ctx.constrain(cosine, dims)
    turned = tf.einsum("btnh,hk->btnk", x, tf.cast(swap, x.dtype))
    return x * cosine + turned * sine


# --- vocabularies ---


def lookup_shared(
    ctx: MeshContext, table: tf.Tensor, ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `ops.lookup_shared`."""
    return vocab.lookup(ctx, table, ids), table


def logits(ctx: MeshContext, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """See `ops.logits`."""
    dims = ("batch", "length", None, None)[: x.shape.rank - 1]
    return ctx.constrain(ops.logits.plain(ctx, x, table), (*dims, "vocab"))


# --- windows over images ---


def constrain_image(ctx: MeshContext, x: tf.Tensor) -> tf.Tensor:
    """See `window_ops.constrain_image`."""
    return ctx.images.constrain_image(x)


def concat_channels(ctx: MeshContext, xs: Sequence[tf.Tensor]) -> tf.Tensor:
    """See `window_ops.concat_channels`; the channels are gathered for it."""
    return ctx.images.concat_channels(xs)


def convolution(
    ctx: MeshContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    window: Window,
) -> tf.Tensor:
    """See `window_ops.convolution`."""
    return windows.convolution(x, w, b, window=window, mesh=ctx.images)


def depthwise_convolution(
    ctx: MeshContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    window: Window,
) -> tf.Tensor:
    """See `window_ops.depthwise_convolution`."""
    return windows.depthwise_convolution(x, w, b, window=window, mesh=ctx.images)


def average_pool(ctx: MeshContext, x: tf.Tensor, window: Window) -> tf.Tensor:
    """See `window_ops.average_pool`."""
    return windows.average_pool(x, window=window, mesh=ctx.images)


def max_pool(ctx: MeshContext, x: tf.Tensor, window: Window) -> tf.Tensor:
    """See `window_ops.max_pool`."""
    return windows.max_pool(x, window=window, mesh=ctx.images)


# --- control flow ---


def scan(
    ctx: MeshContext,
    body: Callable[[Theta, Any, Any, Any], tuple[Any, Any]],
    theta: Theta,
    state: Any,
    xs: Any,
    *,
    first: int = 0,
) -> tuple[Any, Any]:
    """See `ops.scan`."""
    over_depth = any(axes is not None for axes in ctx.layouts_of(xs))
    form = unrolled if over_depth else control_flow
    found: tuple[Any, Any] = form.scan(ctx, body, theta, state, xs, first)
    return found


def rematerialize(
    ctx: MeshContext, function: Callable[..., Any], theta: Theta, *inputs: Any
) -> Any:
    """See `ops.rematerialize`."""
    if ctx.is_iteration:  # all of it is recomputed from the state before the iteration
        return function(theta, *inputs, ctx)
    axes = ctx.layouts_of(theta)

    @functools.wraps(function)
    def known(theta: Theta, *rest: Any) -> Any:
        rest[-1].register_layouts(theta, axes)
        return function(theta, *rest)

    return loops.rematerialize(ctx, known, theta, *inputs)
