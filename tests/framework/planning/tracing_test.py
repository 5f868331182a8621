"""Costs of convolutions, and of products that a task computes without a layer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tensorflow as tf
from cost_models import model_of, sent

from tekso.framework import window_ops
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.initializers import Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.planning.cost_model import Cost
from tekso.framework.task import LossSums, Task
from tekso.models.layers.convolution import Conv2D

B = 8  # batch


class Images(Task):
    """images -> two convolutions -> their sum."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        sizes = {"kernel_shape": (3, 3), "use_bias": False}
        self.child("first", Conv2D.Params(input_dim=2, output_dim=6, **sizes))
        self.child("second", Conv2D.Params(input_dim=6, output_dim=4, strides=(2, 2), **sizes))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        x = self.first.fprop(theta.first, window_ops.constrain_image(ctx, batch["x"]), ctx)
        return LossSums(tf.reduce_sum(self.second.fprop(theta.second, x, ctx)))


def image_cost(mesh: str, rules: str) -> Cost:
    model = model_of(Images.Params().instantiate(), {"x": ((B, 8, 12, 2), "float32")})
    return model.cost(MeshLayout(MeshShape.parse(mesh), Rules.parse(rules)))


def test_convolutions_compute_the_products_of_all_windows() -> None:
    first = 2 * B * 8 * 12 * 9 * 2 * 6 * 2  # the images get no gradient
    second = 2 * B * 4 * 6 * 9 * 6 * 4 * 3
    assert image_cost("data:1", "").flops == first + second
    assert image_cost("data:4", "batch:data").flops == (first + second) / 4


def test_split_images_send_gradients_of_kernels_and_rows_to_neighbours() -> None:
    kernels = 4 * 9 * (2 * 6 + 6 * 4)
    assert sent(image_cost("data:4", "batch:data")) == {
        ("all-reduce", "data", "gradients"): (2, kernels)
    }
    # Two rows of the images forwards; one of the first output both ways, since the stride is 2.
    rows = 4 * B * 12 * (2 * 2 + 2 * 1 * 6)
    assert sent(image_cost("space:2", "height:space")) == {
        ("all-reduce", "space", "gradients"): (2, kernels),
        ("all-gather", "space", "activations"): (3, 2 * rows),  # of both parts
    }


class Plain(Task):
    """A weight and a batch, which a function of TensorFlow multiplies without a layer."""

    class Params(Task.Params):
        filters: list[int] = param("Shape of the weight.", default=REQUIRED)
        compute: Any = param("The function.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.weight("w", p.filters, dims=(None,) * len(p.filters), init=Zeros.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(1.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        return LossSums(tf.reduce_sum(self.params.compute(batch["x"], theta.w)))


def looped(x: Any, w: Any) -> Any:
    return tf.while_loop(lambda i, x: i < 6, lambda i, x: (i + 1, x @ w), (0, x))[1]


def looped_from_zeros(x: Any, w: Any) -> Any:
    body = lambda i, y: (i + 1, y @ w + x)  # noqa: E731
    return tf.while_loop(lambda i, y: i < 6, body, (0, tf.zeros([B, 5])))[1]


def chosen(x: Any, w: Any) -> Any:
    branches = lambda: tf.zeros([B, 5]), lambda: x @ w
    return tf.switch_case(tf.shape(x)[0] - 2, branches)


PIXELS = 4 * 6  # of the results


@pytest.mark.parametrize(
    ("shape", "filters", "compute", "products", "passes"),
    [
        ([3, 7], [7, 5], tf.matmul, B * 3 * 7 * 5, 2),
        ([3, 7], [7, 5], lambda x, w: tf.einsum("...i,io->...o", x, w), B * 3 * 7 * 5, 2),
        ([5], [5, 5], looped, 6 * B * 5 * 5, 3),
        ([5], [5, 5], looped_from_zeros, 6 * B * 5 * 5, 3),
        ([7], [7, 5], chosen, B * 7 * 5, 2),
        ([7], [7, 5], tf.function(tf.matmul, autograph=False), B * 7 * 5, 2),
        (
            [8, 12, 6],
            [3, 1, 6, 5],
            lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"),
            B * PIXELS * 3 * 6 * 5,
            2,
        ),
        (
            [6, 8, 12],
            [3, 1, 6, 5],
            lambda x, w: tf.nn.conv2d(x, w, 2, "SAME", data_format="NCHW"),
            B * PIXELS * 3 * 6 * 5,
            2,
        ),
        (
            [4, 6, 6],
            [3, 1, 2, 9],
            lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"),
            B * PIXELS * 3 * 2 * 9,
            2,
        ),
        (
            [4, 6, 6],
            [3, 1, 6, 5],
            lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"),
            B * PIXELS * 3 * 6 * 5,
            2,
        ),
        (
            [4, 6, 6],
            [3, 1, 5, 6],
            lambda x, w: tf.nn.conv2d_transpose(x, w, [B, 8, 12, 5], 2, "SAME"),
            B * PIXELS * 3 * 6 * 5,
            2,
        ),
        (
            [2, 4, 6, 6],
            [1, 3, 2, 6, 5],
            lambda x, w: tf.nn.conv3d(x, w, [1, 1, 1, 1, 1], "SAME"),
            B * 2 * PIXELS * 6 * 6 * 5,
            2,
        ),
    ],
    ids=[
        "product of a repeated matrix", "einsum of ...", "loop", "loop from zeros", "switch",
        "function", "conv2d", "channels first", "groups", "depthwise", "transposed", "conv3d",
    ],
)  # fmt: skip
def test_products_without_layers_are_counted(
    shape: list[int], filters: list[int], compute: Any, products: int, passes: int
) -> None:
    """The state of a loop gets a gradient, a batch none."""
    task = Plain.Params(filters=filters, compute=compute).instantiate()
    model = model_of(task, {"x": ((B, *shape), "float32")})
    for mesh, rules, devices in (("data:1", "", 1), ("data:4", "batch:data", 4)):
        cost = model.cost(MeshLayout(MeshShape.parse(mesh), Rules.parse(rules)))
        assert cost.flops == passes * 2 * products / devices
    gradient = 4 * math.prod(filters)
    assert sent(cost, least_bytes=5) == {("all-reduce", "data", "gradients"): (1, gradient)}
