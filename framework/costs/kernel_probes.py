"""Probes of the speed of single kernels of TensorFlow; see `machine_probes.py`.

Some are slower than their bytes: copies of an Einsum, gradients of slices, which compute the place
of each element from all dims, cross-entropies, running sums and Fourier transforms.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tekso.framework.costs.probe_runs import TIMES, ProbeRuns, array, rest

_ELEMENTS = 1 << 20  # of an array of functions
_SCALED, _CHANNELS = 1 << 16, 16  # elements that are scaled, and number of scales
_IMAGES = (4, 32, 32, 64)  # whose middle dims change places
_TURNED = (6, 421, 421)  # whose last two dims do
_SLICED = ((65, 256), (33, 32, 16), (17, 16, 8, 8), (17, 8, 8, 4, 4), (17, 4, 4, 4, 4, 4))
"""Of each, a slice is all but the last along the first dim."""
_SHORT: dict[str, Any] = {"run_s": 0.01, "paused": False}  # so are the measurements of slices
_LOGITS = (512, 512)
_SUMMED = (512, 64)
_TRANSFORMED = (128, 512)


def speeds(probes: ProbeRuns) -> dict[str, Any]:
    """Returns fields of `MachineSpeed`, with an array for each number."""
    import tensorflow as tf

    scaled, scale = array(_SCALED // _CHANNELS, _CHANNELS), array(_CHANNELS)
    small = array(4)

    def move(_: Any, x: Any) -> Any:
        return tf.transpose(x, [0, 2, 1, 3])

    def turn(_: Any, x: Any) -> Any:
        return tf.raw_ops.Einsum(inputs=[x], equation="abc->acb")

    def slice_gradient(_: Any, x: Any) -> Any:
        zeros, ones = [0] * x.shape.rank, [1] * x.shape.rank
        whole = [x.shape[0] + 1, *x.shape[1:]]
        return tf.raw_ops.StridedSliceGrad(
            shape=whole, begin=zeros, end=x.shape, strides=ones, dy=x
        )

    def cross_entropy(_: Any, x: Any) -> Any:
        labels = tf.zeros([x.shape[0]], tf.int32)
        function = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits
        return function(features=x, labels=labels).backprop

    def transform(_: Any, x: Any) -> Any:
        return tf.math.real(tf.signal.rfft(x))

    def rate(elements: int, function: Any, x: Any, **how: Any) -> Any:
        return elements / probes.of_each(function, small, x, **how)

    def streams(copy: Any, *shape: int) -> list[tuple[float, Any]]:
        """Returns [(distance, bytes per second)] of a copy of an array just written, and of others.

        What was just written is in a cache, where a copy takes a fifth to a half of the time. If it
        takes longer, its measurement was disturbed.
        """
        x, moved = array(*shape), 8 * math.prod(shape)
        both = probes.of_series(lambda a, b: copy(None, a) - b, x)
        near = rest(both, probes.of_series(tf.subtract, x), least=0.1)
        far = rate(moved, copy, x)
        return [(float(moved), np.maximum(moved / near, far)), (float(TIMES * moved), far)]

    return {
        "functions_per_s": _ELEMENTS / probes.of_chain(tf.tanh, array(_ELEMENTS)),
        "broadcasts_per_s": 2 * _SCALED / probes.of_chain(lambda x: x * scale + scale, scaled),
        "copy_streams": streams(move, *_IMAGES),
        "turned_streams": streams(turn, *_TURNED),
        "slice_gradients": [
            (float(len(shape)), rate(math.prod(shape), slice_gradient, array(*shape), **_SHORT))
            for shape in ((first - 1, *others) for first, *others in _SLICED)
        ],
        "cross_entropies_per_s": rate(math.prod(_LOGITS), cross_entropy, array(*_LOGITS)),
        "running_sums_per_s": rate(
            math.prod(_SUMMED), lambda _, x: tf.cumsum(x, 1), array(*_SUMMED)
        ),
        "transforms_per_s": rate(
            math.prod(_TRANSFORMED) * int(math.log2(_TRANSFORMED[-1])),
            transform,
            array(*_TRANSFORMED),
        ),
    }
