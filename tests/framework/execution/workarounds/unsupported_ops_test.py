"""What a mesh cannot compute in a layer's code is refused with its line, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.execution import ExecutionError
from tekso.framework.execution.workarounds.unsupported_ops import refuse_unsupported


def graph(function: Callable[[tf.Tensor], Any]) -> tf.Graph:
    traced = tf.function(function, autograph=False)
    spec = tf.TensorSpec([3, 4], tf.float32)
    return traced.get_concrete_function(spec).graph


def stacked(x: tf.Tensor) -> tf.Tensor:
    """Returns [2, 3, 4, 5]."""
    return tf.einsum("ab,kc->kabc", x, tf.ones([2, 5]))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x[:, None] * 2.0, r"write tf.expand_dims\(x, 1\)"),
        (lambda x: x[:, :, None] * 2.0, r"write tf.expand_dims\(x, 2\)"),
        (lambda x: x[..., None] * 2.0, r"write tf.expand_dims\(x, 2\)"),
        (lambda x: x[..., None, :] * 2.0, r"write tf.expand_dims\(x, 1\)"),
        (lambda x: x[..., None, 0] * 2.0, r"write tf.expand_dims\(x, 1\)"),
        (lambda x: x[0, :, None] * 2.0, r"write tf.expand_dims\(x, 1\)"),
        (lambda x: x[:, ::-1], r"workarounds\.reverse"),
        (lambda x: x + tf.random.normal([3, 4]), r"RandomStandardNormal .* with ctx\.uniform"),
        (lambda x: x + tf.random.stateless_uniform([3, 4], [1, 2]), "StatelessRandom"),
        (lambda x: x + tf.random.truncated_normal([3, 4]), "TruncatedNormal"),
        (lambda x: tf.random.stateless_categorical(x, 2, [1, 2]), "StatelessMultinomial"),
        (lambda x: tf.where(x[0, 0] > 0, x, -x), r"write tf.where\(tf.reshape"),
        (lambda x: tf.cond(x[0, 0] > 0, lambda: x[:, ::-1], lambda: x), r"workarounds\.reverse"),
        (lambda x: tf.function(lambda x: x[:, ::-1])(x), r"workarounds\.reverse"),
        (lambda x: tf.map_fn(lambda row: row[:, None] * 2.0, x), "write tf.expand_dims"),
        (lambda x: tf.einsum("ab,abc->c", x, stacked(x)[1]), r"tf\.squeeze"),
        (lambda x: tf.einsum("abc,ab->c", stacked(x)[:, 0], tf.ones([2, 4])), r"tf\.squeeze"),
        (lambda x: tf.einsum("ab,cd->ac", x, x), r"dims 'b' and 'd' of .*tf\.reduce_sum"),
        (lambda x: tf.einsum("ab,cb->c", x, x), "dim 'a' of one operand"),
        (lambda x: tf.einsum("...b,bc->...c", x, tf.ones([4, 2])), "a letter for each dim"),
        (lambda x: tf.einsum("a...->...a", x), r"'a\.\.\.->\.\.\.a', does not compile"),
        (lambda x: tf.concat([x, x], -1), "write axis 1"),
        (lambda x: tf.concat([x, x], axis=-2), "write axis 0"),
        (lambda x: tf.split(x, 2, -1), "write axis 1"),
        (lambda x: tf.split(x, [1, 3], -1), "write axis 1"),
        (lambda x: tf.linalg.diag(x), r"MatrixDiagV3 .* use tf\.expand_dims\(x, -1\)"),
        (lambda x: tf.linalg.diag_part(x), r"MatrixDiagPartV3 .* use tf\.reduce_sum"),
        (lambda x: tf.linalg.set_diag(x, x[:, 0]), r"MatrixSetDiagV3 .* use tf\.where"),
        (lambda x: tf.linalg.band_part(x, -1, 0), r"MatrixBandPart .* use x \* mask"),
        (lambda x: tf.linalg.tensor_diag(x[0]), r"Diag .* use tf\.expand_dims\(x, -1\)"),
        (lambda x: tf.linalg.inv(x[:, :3]), r"MatrixInverse .* use --execution=data_parallel"),
        (lambda x: tf.linalg.band_part(tf.ones([3, 4]) * x[0, 0], 0, 0), "MatrixBandPart"),
        (lambda x: tf.linalg.cross(x[:, :3], x[:, 1:]), r"Cross .* use tf\.gather\(x, \[1, 2, 0\]"),
        (lambda x: tf.linalg.tridiagonal_matmul(x, tf.transpose(x)), "TridiagonalMatMul .* pipe"),
        (lambda x: tf.math.bessel_i0(x), "BesselI0 .* use --execution=data_parallel"),
        (lambda x: tf.math.reduce_euclidean_norm(x, 1), r"EuclideanNorm .* use tf\.norm"),
        (lambda x: tf.math.cumulative_logsumexp(x, 1), r"CumulativeLogsumexp .*cumsum"),
        (lambda x: tf.math.segment_mean(x, [0, 0, 1]), r"SegmentMean .*unsorted_segment_mean"),
        (lambda x: tf.nn.space_to_depth(stacked(x)[:, 1:], 2), r"SpaceToDepth .*tf\.transpose"),
        (lambda x: tf.pad(x, [[1, 0], [0, 0]], "REFLECT"), r"MirrorPad .*constant indices"),
        (lambda x: tf.image.resize(stacked(x), [2, 2], "bicubic"), "ResizeBicubic .* pipelined"),
        (lambda x: tf.image.resize(stacked(x), [2, 2], "lanczos3"), "ScaleAndTranslate .* pipel"),
    ],
)
def test_traps_are_refused_with_their_line(function: Any, reason: str) -> None:
    pattern = rf"unsupported_ops_test\.py:\d+: \(lambda.*on a mesh, .*{reason}"
    with pytest.raises(ExecutionError, match=pattern):
        refuse_unsupported(graph(function))


def test_of_a_gradient_the_line_of_the_layer_is_named() -> None:
    def step(x: tf.Tensor) -> Any:
        w = tf.ones([5, 6])
        with tf.GradientTape() as tape:
            tape.watch(w)
            row = stacked(x)[0]
            y = tf.einsum("abc,cd->abd", row, w)
        return tape.gradient(y, w)

    with pytest.raises(
        ExecutionError, match=r"row = stacked.x.\[0\]: .*gradient.*every mesh.*tensordot"
    ):
        refuse_unsupported(graph(step))


def test_of_the_gradient_of_a_matrix_the_line_of_the_layer_is_named() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.linalg.cholesky(tf.matmul(x, x, transpose_b=True))
        return tape.gradient(y, x)

    with pytest.raises(ExecutionError, match=r"a gradient near .*tf\.linalg\.cholesky\(.*Matrix"):
        refuse_unsupported(graph(step))


@pytest.mark.parametrize("differentiated", [True, False])
def test_of_a_differentiated_condition_the_line_is_named(differentiated: bool) -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(x[0, 0] > 0, lambda: tf.tanh(x), lambda: x)
        return tape.gradient(y, x) if differentiated else y

    if differentiated:
        with pytest.raises(ExecutionError, match=r": y = tf\.cond\(.*: on a mesh, .*tf\.where$"):
            refuse_unsupported(graph(step))
    else:
        refuse_unsupported(graph(step))


def test_a_gradient_that_has_no_layout_is_refused_and_its_function_is_not() -> None:
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.math.softsign(x * 2.0)
        return tape.gradient(y, x)

    refuse_unsupported(graph(tf.math.softsign))
    with pytest.raises(ExecutionError, match=r"a gradient near .*softsign\(.*: .*tf\.abs\(x\)"):
        refuse_unsupported(graph(step))


@pytest.mark.parametrize("function", [lambda x: tf.math.top_k(x, 2)[0], lambda x: tf.sort(x, 1)])
def test_the_gradient_of_sorted_values_is_refused_and_their_indices_are_not(function: Any) -> None:
    def gradient(x: tf.Tensor, sort: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = sort(x)
        return tape.gradient(y, x)

    with pytest.raises(
        ExecutionError, match=r"_test\.py:\d+: @pytest.* on a mesh, the gradient of tf"
    ):
        refuse_unsupported(graph(lambda x: gradient(x, function)))
    refuse_unsupported(graph(function))
    indices = [lambda x: tf.math.top_k(x, 2)[1], lambda x: tf.argsort(x, 1)]
    for index in indices:
        refuse_unsupported(
            graph(
                lambda x, index=index: gradient(x, lambda x: tf.gather(x, index(x), batch_dims=1))
            )
        )


def test_a_gather_nd_that_is_vectorized_over_stages_is_refused() -> None:
    places = tf.constant([[0], [2]])

    def vectorized(x: tf.Tensor) -> tf.Tensor:
        return tf.vectorized_map(lambda row: tf.gather_nd(row, places), x)

    with pytest.raises(ExecutionError, match=r"write tf\.gather\(x, indices, batch_dims"):
        refuse_unsupported(graph(vectorized))


def test_other_slices_are_not() -> None:
    def harmless(x: tf.Tensor) -> tf.Tensor:
        places = tf.range(4)[tf.newaxis]  # a constant
        turned = tf.gather(x, [3, 2, 1, 0], axis=1)
        turned = tf.where(tf.reshape(x[0, 0] > 0, [1]), turned, 0.0)
        turned *= tf.where(x[0, 0] > 0, 1.0, 2.0)  # a scalar
        turned += tf.concat(tf.split(x, 2, 1), 1)
        turned += tf.einsum("ka,kac->ac", stacked(x)[:, :, 0, 0], stacked(x)[..., :4, 0])
        turned += tf.einsum("abc->ac", tf.expand_dims(x, 1))  # of one operand
        turned += tf.concat([tf.ones([3, 1]), tf.zeros([3, 3])], -1)  # a constant
        turned += tf.linalg.band_part(tf.ones_like(x), -1, 0) * tf.eye(4)[1:]  # constants
        turned += tf.linalg.set_diag(tf.zeros(tf.shape(x)), tf.cast(tf.range(3), tf.float32))
        turned += tf.gather_nd(x, tf.zeros([3, 4, 1], tf.int32), batch_dims=1)
        turned += tf.einsum("ab,abc->c", x, tf.squeeze(stacked(x)[:1], 0))[0]
        turned = tf.reshape(turned, tf.concat([tf.shape(x)[:1], [4]], -1))  # a shape
        return turned[:, 1:] + x[:, ::2][:, :1] + tf.cast(places[:, :1], tf.float32)

    refuse_unsupported(graph(harmless))
