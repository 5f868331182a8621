"""Defects of DTensor in contractions, and in sums over shards."""

from __future__ import annotations

import contextlib
import types
from typing import Any, cast

import numpy as np
import tensorflow as tf
from reproducing import ROWS, Compiled, Place, computed, equal, values

from tekso.framework.execution import ExecutionError
from tekso.framework.execution.mesh import forms as mesh_forms
from tekso.framework.execution.mesh import step_errors, vocab
from tekso.framework.execution.mesh.layouts import Layout
from tekso.framework.execution.workarounds import tensors
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported
from tekso.framework.primitives.fusion import no_fusion


def sums_in_16_bits(place: Place, avoided: bool) -> bool:
    """DTensor sums the shards of a bfloat16 product in bfloat16, in which 257 is 256."""
    rows = np.zeros([1024, 1], np.float32)
    rows[:257] = rows[-1] = 1  # the first device sums 257, and the second 1
    x, w, b = (tf.cast(one, tf.bfloat16) for one in (rows, np.ones([1, 2]), np.zeros(2)))
    context = cast(Any, types.SimpleNamespace(layout_of=lambda _: None))

    def gradients(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch([w, b])
            if avoided:
                y = mesh_forms.project(context, x, w, b)
            else:
                y = tf.einsum("ab,bc->ac", x, w) + b
            total = tf.reduce_sum(tf.cast(y * x, tf.float32))
        dw, db = tape.gradient(total, [w, b])
        return tf.cast(tf.stack([dw[0], db]), tf.float32)

    y = computed(gradients, place.put(x, ROWS), place.put(w), place.put(b))
    return equal(place, y, np.full([2, 2], 258, np.float32))


def softmax_sums_in_16_bits(place: Place, avoided: bool) -> bool:
    """The same for the table and the bias of a softmax; 128.5 is 128 in bfloat16."""
    rows = np.zeros([1024, 1], np.float32)
    rows[:257] = rows[-1] = 1
    x, table, bias = (tf.cast(v, tf.bfloat16) for v in (rows, np.zeros([2, 1]), np.zeros(2)))
    context = types.SimpleNamespace(
        layout_of=lambda _: None, axes=lambda *_: ("m",), reshard=place.reshard, fuse=no_fusion
    )
    labels = np.zeros([1024], np.int32)

    def gradients(x: tf.Tensor, labels: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            if avoided:
                nats = vocab.cross_entropy(
                    cast(Any, context), x, weights[0], labels, bias=weights[1]
                )
            else:
                log_p = tf.nn.log_softmax(tf.einsum("ad,vd->av", x, weights[0]) + weights[1])
                nats = -tf.reduce_sum(tf.one_hot(labels, 2, dtype=x.dtype) * log_p, 1)
            total = tf.reduce_sum(tf.cast(nats * tf.cast(x[:, 0], nats.dtype), tf.float32))
        dtable, dbias = tape.gradient(total, weights)
        return tf.cast(tf.stack([dtable[:, 0], dbias]), tf.float32)

    weights = place.put(table), place.put(bias)
    y = computed(gradients, place.put(x, ROWS), place.put(labels, ("m",)), *weights)
    return equal(place, y, np.array([[-129, 129]] * 2, np.float32))


def contraction_of_two_dims(place: Place, avoided: bool) -> bool:
    """An einsum over two dims, of which an axis shards one in x and the other in w.

    x is constrained, or a weight like w.
    """
    x, w = values(8, 4, 2), values(4, 2, 6)
    variable = tensors.new_variable(place.put(w, ("m", None, None)))

    def contracted(axes: Layout, *, is_weight: bool) -> bool:
        weight = tensors.new_variable(place.put(x, axes))

        def contract(x: tf.Tensor) -> tf.Tensor:
            given = weight if is_weight else tf.identity(place.reshard(x, axes))
            y = tf.einsum("abc,bcd->ad", given, variable)
            if avoided:
                refuse_unsupported(tf.compat.v1.get_default_graph())
            return y

        return equal(place, computed(contract, place.put(x)), np.einsum("abc,bcd->ad", x, w))

    wrong, right = (None, None, "m"), (None, "m", None)
    if not avoided:
        return contracted(wrong, is_weight=False) or contracted(wrong, is_weight=True)
    for is_weight in (False, True):
        with contextlib.suppress(ExecutionError):
            contracted(wrong, is_weight=is_weight)
            return False
    return contracted(right, is_weight=False) and contracted(right, is_weight=True)


def contraction_of_activations(place: Place, avoided: bool) -> bool:
    """The same if no operand was constrained: the result is doubled. Also in a loop or a sum."""
    x, w = values(8, 4, 2), values(4, 2, 6)
    once = np.einsum("abc,bcd->ad", np.tanh(x), np.tanh(w))

    def product(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.einsum("abc,bcd->ad", tf.tanh(x), tf.tanh(w))

    def in_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, _: tf.Tensor) -> Any:
            return i + 1, product(*tensors.loop_inputs([x, w]))

        return tf.while_loop(lambda i, _: i < 1, body, (0, tf.zeros([8, 6])))[1]

    def in_sum(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return product(x, w) + product(-x, -w)

    def in_sum_of_loop(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, y: tf.Tensor) -> Any:
            return i + 1, y + product(*tensors.loop_inputs([x, w]))

        return tf.while_loop(lambda i, _: i < 2, body, (0, tf.zeros([8, 6])))[1]

    def is_right(function: Compiled, *, axes: Layout) -> bool:
        run = step_errors.compiled(function, "a mesh") if avoided else tf.function(function)
        y = run(place.put(x, axes), place.put(w, ("m", None, None)))
        return equal(place, y, once * (2 if function in (in_sum, in_sum_of_loop) else 1))

    wrong, right = (None, None, "m"), (None, "m", None)
    for function in (product, in_loop, in_sum, in_sum_of_loop):
        if not avoided and is_right(function, axes=wrong):
            return True
        if avoided:
            with contextlib.suppress(ExecutionError):
                is_right(function, axes=wrong)
                return False
            if function is not in_loop and not is_right(function, axes=right):
                return False
    return avoided


def sums_over_dims_of_one_operand(place: Place, avoided: bool) -> bool:
    """An einsum over a dim of x and another one of y, which one axis shards."""
    x, y = values(8, 4), values(3, 4)

    def product(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if avoided:
            return tf.einsum("a,c->ac", tf.reduce_sum(x, 1), tf.reduce_sum(y, 1))
        return tf.einsum("ab,cd->ac", x, y)

    z = computed(product, place.put(x, (None, "m")), place.put(y, (None, "m")))
    return equal(place, z, np.einsum("ab,cd->ac", x, y))


REPRODUCTIONS = (
    contraction_of_activations,
    contraction_of_two_dims,
    softmax_sums_in_16_bits,
    sums_in_16_bits,
    sums_over_dims_of_one_operand,
)
