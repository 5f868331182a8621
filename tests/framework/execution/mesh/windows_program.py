"""Runs windowed ops and image layers on a mesh and on one device, and prints the differences.

Arguments: mesh, rules and a pattern of cases, as "model:4" "height:model" "conv .*". For each case:
the largest difference of the value and of every gradient, relative to the largest number where that
is above 1; and how the value lies on the mesh.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tekso.framework import window_ops

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["DTENSOR_USE_ALL_TO_ALL_RELAYOUT"] = "0"  # its default gives wrong values on CPU

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from tekso.framework.context import StepContext
from tekso.framework.execution import devices
from tekso.framework.execution.mesh import windows
from tekso.framework.execution.mesh.layouts import Layout, MeshLayout, MeshShape, Rules
from tekso.framework.primitive import PRIMITIVES
from tekso.framework.primitives import windows as windows_of_images
from tekso.framework.primitives.windows import Window
from tekso.framework.theta import Theta, flatten
from tekso.models.layers.convolution import Conv2D, DepthwiseConv2D
from tekso.models.layers.convolution_3d import Conv3D
from tekso.models.layers.convolution_transpose import ConvTranspose2D
from tekso.models.layers.convolution_transpose_3d import ConvTranspose3D
from tekso.models.layers.drop_block import DropBlock
from tekso.models.layers.group_norm import GroupNorm
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.pooling import (
    AveragePool,
    AveragePool3D,
    GlobalAveragePool,
    MaxPool,
    MaxPool3D,
)

BATCH, HEIGHT, WIDTH, CHANNELS, OUTPUTS = 4, 16, 24, 8, 12
VOLUMES = (2, 8, 12, 16, 4)

LAYOUT = MeshLayout(MeshShape.parse(sys.argv[1]), Rules.parse(sys.argv[2]))
NAMES = [f"CPU:{i}" for i in range(LAYOUT.mesh.size)]

Function = Callable[..., Any]


class Case(NamedTuple):
    """A function of a context and of inputs, these by name, and the dims of those that have any."""

    function: Function
    inputs: dict[str, np.ndarray]
    dims: dict[str, tuple[str | None, ...]] = {}  # noqa: RUF012


def reshard(x: tf.Tensor, axes: Layout) -> tf.Tensor:
    return dtensor.relayout(x, dtensor_layout(axes))


def dtensor_layout(axes: Layout) -> Any:
    return dtensor.Layout([axis or dtensor.UNSHARDED for axis in axes], MESH)


def put(value: np.ndarray, axes: Layout) -> tf.Tensor:
    whole = dtensor.copy_to_mesh(tf.constant(value), dtensor_layout((None,) * value.ndim))
    return reshard(whole, axes)


def fetched(value: tf.Tensor) -> np.ndarray:
    return dtensor.unpack(reshard(value, (None,) * value.shape.rank))[0].numpy()


class MeshContext(StepContext):
    """The windowed ops and the pins of a context on a mesh."""

    images = windows.ImageMesh.of(LAYOUT, reshard, reshard)

    def constrain(self, x: tf.Tensor, dims: Sequence[str | None]) -> tf.Tensor:
        return reshard(x, LAYOUT.of(dims, x.shape))

    def constrain_image(self, x: tf.Tensor) -> tf.Tensor:
        return self.images.constrain_image(x)

    def concat_channels(self, xs: Sequence[tf.Tensor]) -> tf.Tensor:
        return self.images.concat_channels(xs)

    def convolution(self, x: Any, w: Any, b: Any = None, *, window: Window) -> tf.Tensor:
        return windows.convolution(x, w, b, window=window, mesh=self.images)

    def depthwise_convolution(self, x: Any, w: Any, b: Any = None, *, window: Window) -> tf.Tensor:
        return windows.depthwise_convolution(x, w, b, window=window, mesh=self.images)

    def average_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        return windows.average_pool(x, window=window, mesh=self.images)

    def max_pool(self, x: tf.Tensor, window: Window) -> tf.Tensor:
        return windows.max_pool(x, window=window, mesh=self.images)


MeshContext.forms = {n: form for n, form in vars(MeshContext).items() if n in PRIMITIVES}


def same(kernel: int | tuple[int, int], stride: int | tuple[int, int] = 1, **rest: Any) -> Window:
    pair = lambda n: n if isinstance(n, tuple) else (n, n)  # noqa: E731
    return Window(
        pair(kernel), pair(stride), pair(rest.get("dilation", 1)), rest.get("padding", "SAME")
    )


def fixed(kernel: Any, stride: Any = 1, **rest: Any) -> Window:
    return same(kernel, stride, padding="FIXED", **rest)


def valid(kernel: Any, stride: Any = 1, **rest: Any) -> Window:
    return same(kernel, stride, padding="VALID", **rest)


CONVOLUTIONS = {
    "1x1": same(1),
    "3x3": same(3),
    "5x5": same(5),
    "1x7": same((1, 7)),
    "3x3 stride 2": same(3, 2),
    "5x3 strides 2, 1": same((5, 3), (2, 1)),
    "2x2 stride 2": same(2, 2),
    "1x1 stride 2": same(1, 2),
    "3x3 dilated": same(3, dilation=2),
    "3x2 dilated 1, 3": same((3, 2), dilation=(1, 3)),
    "3x3 dilated, stride 2": same(3, 2, dilation=2),
    "3x3 stride 2 fixed": fixed(3, 2),
    "7x7 stride 2 fixed": fixed(7, 2),
    "3x3 valid": valid(3),
    "2x2 stride 2 valid": valid(2, 2),
    "3x3 stride 2 valid": valid(3, 2),
    "5x5 dilated valid": valid(5, dilation=2),
    "13x13, beyond the neighbour": same(13),
}
DEPTHWISE = ("3x3", "3x3 stride 2", "3x3 dilated", "1x7", "3x3 valid", "5x3 strides 2, 1")
POOLS = {
    "2x2 stride 2": same(2, 2),
    "3x3 stride 2": same(3, 2),
    "3x3 stride 2 fixed": fixed(3, 2),
    "3x2": same((3, 2)),
    "1x2 strides 3": same((1, 2), 3),
    "3x3 stride 2 valid": valid(3, 2),
    "2x3 valid": valid((2, 3)),
}


def cases() -> dict[str, Case]:
    """Returns all cases by name."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, fan_in: int = 1) -> np.ndarray:
        return (rng.normal(size=shape) / math.sqrt(fan_in)).astype(np.float32)

    def conv(window: Window, size: tuple[int, int] = (HEIGHT, WIDTH), groups: int = 1) -> Case:
        inputs = CHANNELS // groups
        return Case(
            lambda ctx, x, w, b: window_ops.convolution(ctx, x, w, b, window=window),
            {
                "x": normal(BATCH, *size, CHANNELS),
                "w": normal(
                    *window.shape, inputs, OUTPUTS, fan_in=math.prod(window.shape) * inputs
                ),
                "b": normal(OUTPUTS),
            },
            {"w": (None, None, "in_channels", "out_channels"), "b": ("out_channels",)},
        )

    def depthwise(window: Window, multiplier: int) -> Case:
        area = math.prod(window.shape)
        return Case(
            lambda ctx, x, w, b: window_ops.depthwise_convolution(ctx, x, w, b, window=window),
            {
                "x": normal(BATCH, HEIGHT, WIDTH, CHANNELS),
                "w": normal(*window.shape, CHANNELS, multiplier, fan_in=area),
                "b": normal(CHANNELS * multiplier),
            },
            {"w": (None, None, "channels", None), "b": ("channels",)},
        )

    def pool(name: str, window: Window) -> Case:
        # Few different numbers: of equal elements the same one has to get the gradient.
        x = rng.integers(-3, 4, size=(BATCH, HEIGHT, WIDTH, CHANNELS)).astype(np.float32)
        return Case(lambda ctx, x: getattr(window_ops, name)(ctx, x, window), {"x": x})

    found = {f"conv {name}": conv(window) for name, window in CONVOLUTIONS.items()}
    found["conv 3x3 in groups"] = conv(same(3), groups=4)
    found["conv 3x3 stride 2 in groups"] = conv(same(3, 2), groups=2)
    found["conv 3x3, odd sizes"] = conv(same(3), (15, 22))
    found["conv 3x3 stride 2, odd parts"] = conv(same(3, 2), (12, 20))
    for i, name in enumerate(DEPTHWISE):
        found[f"depthwise {name}"] = depthwise(CONVOLUTIONS[name], 1 + i % 2)
    for name, window in POOLS.items():
        found[f"max {name}"] = pool("max_pool", window)
        found[f"average {name}"] = pool("average_pool", window)
    found["joined channels"] = Case(
        lambda ctx, x, y: tf.nn.relu(window_ops.concat_channels(ctx, [x, 2 * y, x])),
        {"x": normal(BATCH, HEIGHT, WIDTH, CHANNELS), "y": normal(BATCH, HEIGHT, WIDTH, 4)},
        {"y": windows_of_images.image_dims(4)},
    )
    found["batch norm"] = of_layers(BatchNorm.Params(dim=CHANNELS))
    found["transposed 2x2"] = of_layers(ConvTranspose2D.Params(input_dim=CHANNELS, output_dim=4))
    found["transposed 3x4"] = of_layers(
        ConvTranspose2D.Params(input_dim=CHANNELS, output_dim=4, kernel_shape=(3, 4))
    )
    found["group norm"] = of_layers(GroupNorm.Params(dim=CHANNELS, num_groups=4))
    found["drop block"] = of_layers(DropBlock.Params(rate=0.2, block_size=3))
    found["network"] = of_layers(
        Conv2D.Params(input_dim=CHANNELS, output_dim=8, activation="relu"),
        BatchNorm.Params(dim=8),
        MaxPool.Params(window_shape=(3, 3)),
        DepthwiseConv2D.Params(input_dim=8, strides=(2, 2)),
        Conv2D.Params(input_dim=8, output_dim=8, kernel_shape=(1, 1), activation="relu"),
        AveragePool.Params(),
        Conv2D.Params(input_dim=8, output_dim=8),
        GlobalAveragePool.Params(),
    )
    return found


def volumes() -> dict[str, Case]:
    """Returns the cases of volumes, [batch, depth, height, width, channels], by name."""
    channels = VOLUMES[-1]
    sizes: Any = {"input_dim": channels, "output_dim": 6}
    layers = {
        "conv 3x3x3": Conv3D.Params(**sizes),
        "conv 3x2x1 strides 2, 1, 2": Conv3D.Params(
            **sizes, kernel_shape=(3, 2, 1), strides=(2, 1, 2)
        ),
        "conv 3x3x3 valid": Conv3D.Params(**sizes, padding="VALID"),
        "conv 3x3x3 dilated in groups": Conv3D.Params(**sizes, dilations=(2, 1, 2), num_groups=2),
        "transposed 2x2x2": ConvTranspose3D.Params(**sizes),
        "transposed 3x2x4": ConvTranspose3D.Params(**sizes, kernel_shape=(3, 2, 4)),
        "max 3x3x3": MaxPool3D.Params(window_shape=(3, 3, 3)),
        "average 3x2x3": AveragePool3D.Params(window_shape=(3, 2, 3)),
    }
    found = {f"volume {name}": of_layers(one, shape=VOLUMES) for name, one in layers.items()}
    found["volume network"] = of_layers(
        Conv3D.Params(input_dim=channels, output_dim=4, activation="relu"),
        BatchNorm.Params(dim=4),
        MaxPool3D.Params(),
        Conv3D.Params(input_dim=4, output_dim=4, activation="relu"),
        ConvTranspose3D.Params(input_dim=4, output_dim=4),
        shape=VOLUMES,
    )
    return found


def of_layers(*params: Any, shape: tuple[int, ...] = (BATCH, HEIGHT, WIDTH, CHANNELS)) -> Case:
    """Layers one after the other, and the sums of the statistics that they collect.

    In float64, so that no rounding decides which element is the largest, or above 0.
    """
    layers = [p.instantiate() for p in params]
    x = np.random.default_rng(1).normal(size=shape) + 1
    weights, dims = {}, {}
    for i, layer in enumerate(layers):
        for path, value in flatten(layer.init(7 + i)).items():
            weights[f"{i}/{path}"] = value.numpy().astype(np.float64)
            dims[f"{i}/{path}"] = layer.specs()[path].dims

    def run(ctx: StepContext, x: tf.Tensor, *values: tf.Tensor) -> tf.Tensor:
        x = window_ops.constrain_image(ctx, x)
        for i, layer in enumerate(layers):
            mine = zip(weights, values, strict=True)
            theta = Theta((p.split("/")[1], v) for p, v in mine if p.startswith(f"{i}/"))
            x = layer.fprop(theta, x, ctx)
        for value, weight in ctx.collected.sums["statistic"].values():
            # Statistics are of float32: a quotient of float32 would be rounded.
            mean = tf.cast(value, x.dtype) / tf.cast(weight, x.dtype)
            x += tf.reduce_sum(tf.stop_gradient(mean))
        return x

    return Case(run, {"x": x} | weights, dims)


def value_and_gradients(function: Function, ctx: Any, *inputs: tf.Tensor) -> list[Any]:
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        y = function(ctx, *inputs)
        loss = tf.reduce_sum(tf.sin(y))
    zero = tf.UnconnectedGradients.ZERO
    return [y, *tape.gradient(loss, inputs, unconnected_gradients=zero)]


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    if found.shape != wanted.shape:
        return math.inf
    return float(np.abs(found - wanted).max() / max(1.0, np.abs(wanted).max()))


def axes_of(case: Case, name: str) -> Layout:
    """Returns how an input is laid out; whole where a size does not divide."""
    shape = case.inputs[name].shape
    if name == "x":
        return MeshContext.images.image_axes(tf.TensorShape(shape))
    axes = LAYOUT.of(case.dims[name])
    sizes = [LAYOUT.mesh.size_of(axis) if axis else 1 for axis in axes]
    return tuple(a if n % k == 0 else None for a, n, k in zip(axes, shape, sizes, strict=True))


def main() -> None:
    results = {}
    for name, case in (cases() | volumes()).items():
        if not re.fullmatch(sys.argv[3], name):
            continue
        plain = [tf.constant(value) for value in case.inputs.values()]
        # Op by op, because tracing takes longer than the ops; on a mesh, only graphs are supported.
        wanted = value_and_gradients(case.function, StepContext(mode="train"), *plain)
        placed = [put(value, axes_of(case, part)) for part, value in case.inputs.items()]
        try:
            traced = tf.function(value_and_gradients, autograph=False)
            found = traced(case.function, MeshContext(mode="train"), *placed)
            results[name] = {
                "differences": {
                    part: difference(fetched(a), b.numpy())
                    for part, a, b in zip(["value", *case.inputs], found, wanted, strict=True)
                },
                "layout": list(dtensor.fetch_layout(found[0]).sharding_specs),
            }
        except Exception as error:  # the next cases are of interest too
            results[name] = {"error": f"{type(error).__name__}: {error}"[-1000:]}
    print(json.dumps(results))


if __name__ == "__main__":
    devices.setup_cpu(logical_devices=LAYOUT.mesh.size, threads_per_op=1)
    devices.set_graph_optimizer(False)  # it takes longer than the ops themselves
    MESH = dtensor.create_mesh(list(LAYOUT.mesh.axes), devices=NAMES)
    main()
