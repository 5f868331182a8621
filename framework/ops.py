"""Primitives: the ops that layers compute with, functions of the step context and tensors.

    y = ops.project(ctx, x, theta.w, theta.b)

An op is a primitive because it has a custom gradient, a fast implementation, or a different
implementation for sharded tensors. This file has the implementations for one device; `ctx.forms`
has those of an execution, by name: on a mesh, a lookup reduces over the shards of the vocabulary.

Those with windows over images are in `window_ops.py`.

To add a primitive, write a function with `@primitive` here (or in your package). The decorator says
where its form for meshes is, and the form that records its work for the cost model, if layout
propagation and reading the graph are not enough. Nothing else registers them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tekso.framework import loops
from tekso.framework.context import StepContext
from tekso.framework.draws import HasStream
from tekso.framework.primitive import primitive
from tekso.framework.primitives import (
    activations,
    attention,
    batch_normalization,
    normalization,
    projection,
    recurrence,
    rotation,
    softmax_cross_entropy,
)
from tekso.framework.primitives import dropout as dropouts
from tekso.framework.primitives import lookup as lookups
from tekso.framework.primitives.batch_normalization import BatchNormed
from tekso.framework.theta import Theta

MESH = "tekso.framework.execution.mesh.forms"
VOCAB = "tekso.framework.execution.mesh.vocab"
WORKAROUNDS = "tekso.framework.execution.workarounds.forms"
RECORDED = "tekso.framework.planning.tracing_context:TracingContext"


# --- products and elementwise functions ---


@primitive(mesh=MESH, planning=RECORDED)
def project(
    ctx: StepContext,
    x: tf.Tensor,
    w: tf.Tensor,
    b: tf.Tensor | None = None,
    *,
    num_contracted: int = 1,
) -> tf.Tensor:
    """Contracts the last `num_contracted` dims of x with the first dims of w, and adds b.

    Shapes:
      x: [..., *inner], w: [*inner, *outer], b: [*outer]
      returns: [..., *outer]
    """
    return projection.project(x, w, b, num_contracted=num_contracted, fuse=ctx.fuse)


@primitive(mesh=None, planning=RECORDED)
def layer_norm(
    ctx: StepContext,
    x: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor | None,
    *,
    epsilon: float,
) -> tf.Tensor:
    """Returns (x - mean) / sqrt(variance + epsilon) * scale + bias over the last dim.

    Shapes:
      x: [..., dim], scale, bias: [dim]
      returns: shape and dtype of x
    """
    return normalization.layer_norm(x, scale, bias, epsilon=epsilon, fuse=ctx.fuse)


@primitive(mesh=None, planning=RECORDED)
def rms_norm(ctx: StepContext, x: tf.Tensor, scale: tf.Tensor, *, epsilon: float) -> tf.Tensor:
    """Returns x / sqrt(mean(x**2) + epsilon) * scale over the last dim.

    Shapes:
      x: [..., dim], scale: [dim]
      returns: shape and dtype of x
    """
    return normalization.rms_norm(x, scale, epsilon=epsilon, fuse=ctx.fuse)


@primitive(mesh=MESH, planning=None)
def batch_norm(
    ctx: StepContext,
    x: tf.Tensor,
    scale: tf.Tensor,
    bias: tf.Tensor,
    counted: tf.Tensor | None,
    *,
    epsilon: float,
    layer: HasStream,
) -> BatchNormed:
    """Normalises x with the mean and variance of all examples that run at the same time.

    Returns y = (x - mean) / sqrt(variance + epsilon) * scale + bias, the mean of all replicas, and
    of the elements of this replica that count their number, their sum, and the sum of squares of
    (x - mean). The statistics are in float32 at least; only y has a gradient. `layer` is the layer
    that calls it.

    Shapes:
      x: [batch, ..., dim], scale, bias: [dim]
      counted: bool [batch, ..., 1], elements that count in the statistics; None: all
      returns: y like x; mean, total, squares [dim]; count []
    Source: Ioffe & Szegedy 2015, algorithm 1.
    """
    return batch_normalization.batch_norm(
        x,
        scale,
        bias,
        counted,
        epsilon=epsilon,
        sum_over_replicas=lambda value: sum_over_replicas(ctx, value, layer),
        fuse=ctx.fuse,
    )


@primitive(mesh=None, planning=RECORDED)
def activate(ctx: StepContext, name: str, x: tf.Tensor) -> tf.Tensor:
    """Applies a named activation (see primitives/activations.py) to every element."""
    return activations.activate(name, x, fuse=ctx.fuse)


@primitive(mesh=MESH, planning=None)
def lstm_update(
    ctx: StepContext,
    inputs: tf.Tensor,
    recurrent: tf.Tensor,
    memory: tf.Tensor,
    *,
    forget_bias: float,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the output and the next memory of an LSTM; see LstmCell for the formula.

    Shapes:
      inputs, recurrent: [batch, 4, units], the two products that are added to the gates i, f, g, o
      memory: [batch, units]
      returns: output [batch, units], memory [batch, units]
    """
    return recurrence.lstm_update(inputs, recurrent, memory, forget_bias=forget_bias, fuse=ctx.fuse)


@primitive(mesh=None, planning=RECORDED)
def dropout(
    ctx: StepContext, x: tf.Tensor, rate: float, layer: HasStream, name: str = ""
) -> tf.Tensor:
    """Sets elements to 0 with probability `rate` and scales the others by 1 / (1 - rate).

    Returns x itself outside of training. The mask depends on the global position of each element.

    Shapes:
      x: [batch, ...]
      returns: shape and dtype of x
    """
    if not ctx.is_training or rate == 0.0:
        return x
    key = ctx.random_key(layer, name)
    return dropouts.dropout(x, key, ctx.example_offset, rate=rate, fuse=ctx.fuse)


# --- attention ---


@primitive(mesh=MESH, planning=RECORDED)
def attend(
    ctx: StepContext,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    *,
    scale: float,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
    dropout_rate: float = 0.0,
    layer: HasStream | None = None,
) -> tf.Tensor:
    """Returns softmax(scale * q k^T + bias) v for every head; the softmax is over unmasked keys.

    Shapes:
      q: [batch, queries, heads, head_dim]
      k, v: [batch, keys, kv_heads, head_dim]; kv_heads divides heads (grouped queries)
      mask: bool, broadcastable to [batch, heads, queries, keys]; False: not attended to
      bias: float, broadcastable to [batch, heads, queries, keys]; differentiable
      returns: [batch, queries, heads, head_dim]
    """
    key = None
    if ctx.is_training and dropout_rate:
        if layer is None:
            raise ValueError("attend: dropout requires the argument layer, for its random numbers")
        key = ctx.random_key(layer, "attention")
    return attention.attend(
        q,
        k,
        v,
        scale=scale,
        mask=mask,
        bias=bias,
        dropout=None if key is None else (key, ctx.example_offset, dropout_rate),
        fuse=ctx.fuse,
    )


@primitive(mesh=None, planning=None)
def attend_known(
    ctx: StepContext,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    *,
    scale: float,
    mask: tf.Tensor | None = None,
    bias: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns the attention output for cached keys and values, without dropout.

    Shapes:
      q: [batch, queries, heads, head_dim]
      k, v: [batch, kv_heads, keys, head_dim]; kv_heads divides heads (grouped queries)
      mask, bias: as in `attend`
      returns: [batch, queries, heads, head_dim]
    """
    return attention.attend_known(q, k, v, scale=scale, mask=mask, bias=bias)


@primitive(mesh=MESH, planning=RECORDED)
def rotate(ctx: StepContext, x: tf.Tensor, sine: Any, cosine: Any) -> tf.Tensor:
    """Rotates each pair (x[i], x[i + head_dim/2]) by an angle, given its sine and cosine.

    Shapes:
      x: [batch, length, heads, head_dim]
      sine, cosine: broadcastable to [batch, length, heads, head_dim/2]
      returns: shape and dtype of x
    """
    return rotation.rotate(x, sine, cosine, fuse=ctx.fuse)


# --- vocabularies ---


@primitive(mesh=VOCAB, planning=RECORDED)
def lookup(ctx: StepContext, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table: [vocab, embed], ids [...] -> [..., embed]."""
    return lookups.lookup(table, ids)


@primitive(mesh=MESH, planning=RECORDED)
def lookup_shared(
    ctx: StepContext, table: tf.Tensor, ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns rows of a table, and the table itself for further use, for example a tied softmax.

    The rows are the same as from `lookup`. Use the returned table for a cheaper gradient.

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed], [vocab, embed]
    """
    return lookups.lookup_shared(table, ids)


@primitive(mesh=MESH, planning=RECORDED)
def logits(ctx: StepContext, x: tf.Tensor, table: tf.Tensor) -> tf.Tensor:
    """Returns x table^T: [..., embed] and [vocab, embed] -> [..., vocab]."""
    lead = "abcdefgh"[: x.shape.rank - 1]
    return tf.einsum(f"{lead}y,zy->{lead}z", x, table)


@primitive(mesh=VOCAB, planning=RECORDED)
def cross_entropy(
    ctx: StepContext,
    x: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    *,
    bias: tf.Tensor | None = None,
    label_smoothing: float = 0.0,
    classes: int | None = None,
) -> tf.Tensor:
    """Returns -log softmax(x table^T + bias)[label] for every position, in nats.

    With label smoothing e, the target distribution is (1 - e) on the label plus e / classes on
    each of the first `classes` ids (Szegedy et al. 2016, section 7). None: on all of them.

    Shapes:
      x: [..., embed], table: [vocab, embed], labels: [...] int, bias: [vocab]
      returns: [...] float32
    """
    return softmax_cross_entropy.cross_entropy(
        x, table, labels, bias=bias, label_smoothing=label_smoothing, classes=classes, fuse=ctx.fuse
    )


# --- control flow ---


@primitive(mesh=MESH, planning=RECORDED)
def scan(
    ctx: StepContext,
    body: Callable[[Theta, Any, Any, Any], tuple[Any, Any]],
    theta: Theta,
    state: Any,
    xs: Any,
    *,
    first: int = 0,
) -> tuple[Any, Any]:
    """Runs `state, y = body(theta, state, x, ctx)` over the leading dim of xs.

    Use it to loop over layers (xs: stacked weights) or time (xs: inputs, time first). `first` is
    the number of the first iteration, if earlier iterations run elsewhere.

    Shapes:
      state: nest of tensors, arrays or numbers, with the same shapes after every iteration
      xs: nest of [iterations, …], tensors or arrays
      returns: last state, nest of stacked ys [iterations, …] (None where the body returns None)
    """
    return loops.scan(ctx, body, theta, state, xs, first=first)


@primitive(mesh=MESH, planning=RECORDED)
def rematerialize(
    ctx: StepContext, function: Callable[..., Any], theta: Theta, *inputs: Any
) -> Any:
    """Returns `function(theta, *inputs, ctx)`, and recomputes it in the backward pass.

    Only theta, the inputs, and what else the function reads are saved for the backward pass, and
    have gradients. Random numbers are the same both times. Eagerly, nothing is recomputed.
    Source: Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    return loops.rematerialize(ctx, function, theta, *inputs)


# --- devices ---


@primitive(mesh=None, planning=None)
def sum_over_replicas(ctx: StepContext, x: tf.Tensor, layer: HasStream) -> tf.Tensor:
    """Returns the sum of x over replicas: the parts of the batch that run concurrently.

    `layer` is the layer that calls it, `self` in its fprop: a layer that couples examples, but is
    not named in a sum, is rejected on several devices.

    Shapes:
      x: any
      returns: shape and dtype of x
    """
    return x


# --- buffers of decoding ---


@primitive(mesh=WORKAROUNDS, planning=None)
def fill_rows(ctx: StepContext, buffer: tf.Tensor, index: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Returns a buffer in which some rows are filled; in the given buffer they must be 0.

    Shapes:
      buffer: [buffer rows, ...], index: [rows, 1] int, without duplicates; rows: [rows, ...]
      returns: shape and dtype of the buffer
    """
    return tf.tensor_scatter_nd_update(buffer, index, rows)
