"""Computes convolutions and pooling over a table of windows, and prints what differs from NumPy.

Arguments: "tekso" for the forms of Tekso, "plain" for the gradients of TensorFlow's kernels alone;
the types to leave out.
The last line is JSON: whether oneDNN is on, the number of cases, and {case: what is wrong}. The
case that is being computed is the last line of stderr, in case a kernel ends the process.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from tekso.framework import onednn
from tekso.framework.context import StepContext
from tekso.framework.primitives import windows
from tekso.framework.primitives.windows import Window
from tekso.models.layers.convolution import Conv2D

KERNELS = ((1, 1), (2, 1), (2, 2), (1, 3), (3, 3), (5, 3))
STRIDES = ((1, 1), (2, 2), (1, 2), (2, 1), (3, 2), (9, 9))
DILATIONS = ((1, 1), (2, 2), (3, 1))
SIZES = ((8, 8), (7, 6), (4, 4), (5, 4), (9, 8), (12, 11), (1, 1))  # height, width
CHANNELS = ((1, 1, 1), (4, 6, 1), (4, 6, 2), (16, 8, 1), (8, 16, 8))  # inputs, outputs, groups
TYPES = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 3e-2}  # relative to the largest number
POOLS = ((1, 1), (2, 2), (3, 2), (9, 3))

Case = tuple[str, Window, tuple[int, int], tuple[int, int, int]]


def convolutions() -> Iterator[Case]:
    """Every kernel with all strides and dilations, and all images for kernels of one element."""
    images = itertools.cycle(itertools.product(SIZES, CHANNELS, ("SAME", "VALID"), TYPES))
    for kernel, strides, dilations in itertools.product(KERNELS, STRIDES, DILATIONS):
        size, channels, padding, dtype = next(images)
        window = Window(kernel, strides, dilations, padding)
        if padding == "VALID" and any(
            (n - 1) * d + 1 > s for n, d, s in zip(kernel, dilations, size, strict=True)
        ):
            window = window._replace(padding="SAME")
        yield dtype, window, size, channels
    for strides, size, channels in itertools.product(STRIDES[1:], SIZES, CHANNELS[:3]):
        yield "float32", Window((1, 1), strides, (1, 1), "SAME"), size, channels
    for kernel, channels in itertools.product(((2, 2), (3, 3)), CHANNELS[2:]):
        for strides, dilations in itertools.product(((1, 1), (2, 2)), DILATIONS[:2]):
            for dtype in TYPES:
                yield dtype, Window(kernel, strides, dilations, "SAME"), (8, 7), channels


def padded(x: np.ndarray, window: Window) -> tuple[np.ndarray, list[int], list[int]]:
    """Returns the padded images, the new height and width, and the zeros before each."""
    counts, before = [], []
    for d in (0, 1):
        size, stride = x.shape[1 + d], window.strides[d]
        reach = (window.shape[d] - 1) * window.dilations[d] + 1
        count = -(-size // stride) if window.padding == "SAME" else (size - reach) // stride + 1
        missing = 0 if window.padding == "VALID" else max((count - 1) * stride + reach - size, 0)
        counts.append(count)
        before.append(missing // 2)
        pad = (missing // 2, missing - missing // 2)
        x = np.pad(x, [pad if i == 1 + d else (0, 0) for i in range(4)])
    return x, counts, before


def held(window: Window, counts: list[int]) -> Iterator[tuple[tuple[int, int], Any]]:
    """Returns every element of the kernel and where it lies in the padded images."""
    for at in np.ndindex(*window.shape):
        starts = [i * d for i, d in zip(at, window.dilations, strict=True)]
        rows, columns = (
            slice(first, first + (n - 1) * s + 1, s)
            for first, n, s in zip(starts, counts, window.strides, strict=True)
        )
        yield at, (slice(None), rows, columns)


def expected_convolution(
    x: np.ndarray, w: np.ndarray, weights: Callable[[Any], np.ndarray], window: Window, groups: int
) -> list[np.ndarray]:
    """Returns a convolution and the gradients of its weighted sum, in float64."""
    size = x.shape[1:3]
    x, counts, before = padded(x, window)
    x = x.reshape(*x.shape[:3], groups, -1)
    kernel = w.reshape(*w.shape[:3], groups, -1)
    y = np.zeros((len(x), *counts, groups, kernel.shape[-1]))
    dy = weights((len(x), *counts, w.shape[3])).reshape(y.shape)
    dx, dw = np.zeros_like(x), np.zeros_like(kernel)
    for at, places in held(window, counts):
        y += np.einsum("bhwgc,cgo->bhwgo", x[places], kernel[at])
        dx[places] += np.einsum("bhwgo,cgo->bhwgc", dy, kernel[at])
        dw[at] = np.einsum("bhwgc,bhwgo->cgo", x[places], dy)
    dx = dx.reshape(*dx.shape[:3], -1)
    dx = dx[:, before[0] : before[0] + size[0], before[1] : before[1] + size[1]]
    return [y.reshape(*y.shape[:3], -1), dx, dw.reshape(w.shape)]


def value_and_gradients(
    function: Any, weights: Callable[[Any], np.ndarray], *args: np.ndarray
) -> list[np.ndarray]:
    tensors = [tf.constant(a) for a in args]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        y = function(*tensors)
    dy = tf.constant(weights(tuple(y.shape)).astype(args[0].dtype))
    return [t.numpy().astype(float) for t in (y, *tape.gradient(y, tensors, dy))]


class Report:
    """Collects what is wrong."""

    def __init__(self) -> None:
        self.cases = 0
        self.wrong: dict[str, str] = {}

    def compare(self, name: str, found: Any, expected: Any, allowed: float) -> None:
        """Computes a case by calling both, and notes differences and errors."""
        print(name, file=sys.stderr, flush=True)
        self.cases += 1
        try:
            pairs = zip(("value", "dx", "dw"), found(), expected())  # noqa: B905 (no dw in pools)
            for part, a, b in pairs:
                scale = max(np.abs(b).max(), 1e-3)
                if a.shape != b.shape or not np.abs(a - b).max() <= allowed * scale:
                    self.wrong[f"{name}: {part}"] = f"{np.abs(a - b).max() / scale:.0e}"
        except tf.errors.OpError as error:
            self.wrong[name] = type(error).__name__


def weights_like(dtype: Any) -> Callable[[Any], np.ndarray]:
    def weights(shape: Any) -> np.ndarray:
        return np.random.default_rng(1).normal(size=shape).astype(dtype).astype(float)

    return weights


def check_convolutions(report: Report, form: Callable[..., tf.Tensor]) -> None:
    for i, (dtype, window, size, (inputs, outputs, groups)) in enumerate(convolutions()):
        if dtype in sys.argv[2:]:
            continue
        rng, kind = np.random.default_rng(i), tf.as_dtype(dtype).as_numpy_dtype
        x = rng.normal(size=(1 + i % 2, *size, inputs)).astype(kind)
        w = rng.normal(size=(*window.shape, inputs // groups, outputs)).astype(kind)
        weights = weights_like(kind)
        report.compare(
            f"{dtype} {tuple(window)} x {x.shape} w {w.shape}",
            lambda x=x, w=w, window=window, weights=weights: value_and_gradients(
                lambda x, w: form(x, w, window=window), weights, x, w
            ),
            lambda x=x, w=w, window=window, groups=groups, weights=weights: expected_convolution(
                x.astype(float), w.astype(float), weights, window, groups
            ),
            TYPES[dtype],
        )


def compiled(x: tf.Tensor, w: tf.Tensor, *, window: Window) -> tf.Tensor:
    return tf.function(
        lambda x, w: windows.convolution(x, w, window=window), jit_compile=True, autograph=False
    )(x, w)


def check_compiled(report: Report) -> None:
    for window, inputs in (
        (Window((1, 1), (2, 1), (1, 1), "SAME"), 4),
        (Window((3, 3), (2, 2), (1, 1), "SAME"), 2),
        (Window((3, 2), (1, 1), (2, 2), "VALID"), 4),
    ):
        rng = np.random.default_rng(0)
        x, w = rng.normal(size=(2, 8, 7, 4)), rng.normal(size=(*window.shape, inputs, 6))
        report.compare(
            f"XLA {tuple(window)}",
            lambda x=x, w=w, window=window: value_and_gradients(
                lambda x, w: compiled(x, w, window=window), weights_like(float), x, w
            ),
            lambda x=x, w=w, window=window, inputs=inputs: expected_convolution(
                x, w, weights_like(float), window, 4 // inputs
            ),
            1e-12,
        )


def check_depthwise(report: Report) -> None:
    for i, (kernel, strides) in enumerate(itertools.product(KERNELS, STRIDES)):
        size, channels, multiplier = SIZES[i % len(SIZES)], (1, 4, 16)[i % 3], 1 + i % 2
        window = Window(kernel, strides, (1 + i % 5 // 4,) * 2, "SAME")
        rng = np.random.default_rng(i)
        x = rng.normal(size=(1 + i % 2, *size, channels)).astype(np.float32)
        w = rng.normal(size=(*kernel, channels, multiplier)).astype(np.float32)
        weights = weights_like(np.float32)

        def expected(x: Any = x, w: Any = w, window: Any = window, f: Any = weights) -> Any:
            grouped = w.reshape(*w.shape[:2], 1, -1).astype(float)  # a group for each channel
            found = expected_convolution(x.astype(float), grouped, f, window, x.shape[-1])
            return [*found[:2], found[2].reshape(w.shape)]

        report.compare(
            f"depthwise {tuple(window)} x {x.shape} w {w.shape}",
            lambda x=x, w=w, window=window, weights=weights: value_and_gradients(
                lambda x, w: windows.depthwise_convolution(x, w, window=window), weights, x, w
            ),
            expected,
            1e-5,
        )


def expected_pool(
    name: str, x: np.ndarray, weights: Callable[[Any], np.ndarray], window: Window
) -> list[np.ndarray]:
    size, x = x.shape[1:3], x.astype(float)
    real, counts, before = padded(np.ones_like(x), window)
    values = padded(x, window)[0]
    places = [place for _, place in held(window, counts)]
    inside = np.stack([real[place] for place in places])
    if name == "average_pool":
        parts = inside / inside.sum(0)
    else:
        masked = np.where(inside == 1, np.stack([values[place] for place in places]), -np.inf)
        parts = (np.arange(len(places))[:, None, None, None, None] == masked.argmax(0)).astype(
            float
        )
    y = sum(values[place] * part for place, part in zip(places, parts, strict=True))
    dy, dx = weights(y.shape), np.zeros_like(values)
    for place, part in zip(places, parts, strict=True):
        dx[place] += dy * part
    return [y, dx[:, before[0] : before[0] + size[0], before[1] : before[1] + size[1]]]


def check_pools(report: Report) -> None:
    pools = itertools.product(("average_pool", "max_pool"), POOLS, STRIDES)
    for i, (name, shape, strides) in enumerate(pools):
        window = Window(shape, strides, (1, 1), "SAME")
        x = np.random.default_rng(i).normal(size=(1 + i % 2, *SIZES[i % len(SIZES)], 1 + i % 9))
        x, weights = x.astype(np.float32), weights_like(np.float32)
        report.compare(
            f"{name} {tuple(window)} x {x.shape}",
            lambda x=x, window=window, name=name, weights=weights: value_and_gradients(
                lambda x: getattr(windows, name)(x, window), weights, x
            ),
            lambda x=x, window=window, name=name, weights=weights: expected_pool(
                name, x, weights, window
            ),
            1e-5,
        )


def check_layer(report: Report) -> None:
    """Compiles a graph, in which TensorFlow fuses convolutions with what follows."""
    settings: tuple[dict[str, Any], ...] = (
        {"kernel_shape": (1, 1), "strides": (2, 2)},
        {"num_groups": 4, "strides": (2, 2)},
        {"dilations": (2, 2), "padding": "VALID"},
    )
    for options in settings:
        params = Conv2D.Params(input_dim=8, output_dim=12, activation="relu", **options)
        layer = params.instantiate()
        rng = np.random.default_rng(0)
        x = rng.normal(size=(2, 8, 8, 8)).astype(np.float32)
        w = rng.normal(size=layer.specs()["w"].shape).astype(np.float32)
        b = np.full(12, 100, np.float32)  # every output is above 0

        @tf.function(autograph=False)
        def run(x: tf.Tensor, w: tf.Tensor, layer: Any = layer, b: Any = b) -> tf.Tensor:
            return layer.fprop(layer.theta({"w": w, "b": b}), x, StepContext())

        def expected(x: Any = x, w: Any = w, layer: Any = layer) -> list[np.ndarray]:
            groups, weights = layer.params.num_groups, weights_like(np.float32)
            found = expected_convolution(
                x.astype(float), w.astype(float), weights, layer.window, groups
            )
            return [found[0] + 100, *found[1:]]

        report.compare(
            f"Conv2D {options}",
            lambda x=x, w=w, run=run: value_and_gradients(run, weights_like(np.float32), x, w),
            expected,
            1e-5,
        )


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    report = Report()
    if sys.argv[1] == "plain":

        def plain(x: tf.Tensor, w: tf.Tensor, *, window: Window) -> tf.Tensor:
            return tf.nn.conv2d(x, w, window.strides, window.padding, dilations=window.dilations)

        check_convolutions(report, plain)
    else:
        check_convolutions(report, windows.convolution)
        check_compiled(report)
        check_depthwise(report)
        check_pools(report)
        check_layer(report)
    print(
        json.dumps({"one_dnn": onednn.is_enabled(), "cases": report.cases, "wrong": report.wrong})
    )


if __name__ == "__main__":
    main()
