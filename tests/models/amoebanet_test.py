"""AmoebaNets: published numbers of weights, tables of the cells, and a cell in plain TensorFlow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.amoebanet import AmoebaNet
from tekso.models.layers.amoeba_cell import CELLS, AmoebaCell, FactorizedReduction


def num_trainable(**sizes: Any) -> int:
    specs = AmoebaNet.Params(**sizes).instantiate().specs().values()
    return sum(math.prod(spec.shape) for spec in specs if spec.trainable)


@pytest.mark.parametrize(
    ("layers", "filters", "count"),
    [
        (6, 64, 3_701_096),
        (18, 128, 31_694_440),
        (18, 208, 81_505_540),
        (18, 256, 122_470_120),
        (18, 416, 319_024_120),
    ],
)
def test_published_networks_of_gpipe(layers: int, filters: int, count: int) -> None:
    assert num_trainable(num_layers=layers, filters=filters, classes=1000) == count
    if layers == 6:
        assert num_trainable(num_layers=6, filters=64, classes=10) == 2_686_346


def test_published_networks_of_the_tensorflow_code() -> None:
    sizes = {"layout": "tensorflow", "classes": 1001, "num_layers": 18}
    assert num_trainable(variant="B", filters=512, **sizes) == 557_286_057
    millions = {208: 81.1, 416: 317.6 - 0.1, 544: 540.2, 256: 121.9}
    for filters, count in millions.items():
        assert num_trainable(filters=filters, **sizes) / 1e6 == pytest.approx(count, abs=0.06)


def test_outputs_of_a_cell_are_the_states_that_no_operation_reads() -> None:
    for (variant, kind), table in CELLS.items():
        assert len(table.operations) == len(table.inputs) == 10
        assert all(state < 2 + i // 2 for i, state in enumerate(table.inputs))
        unread = tuple(i for i in range(7) if i not in table.inputs)
        # The public code also gives on the first state of a normal cell of D.
        assert table.outputs in (unread, (0, *unread)), (variant, kind)


def test_factorized_reduction_is_two_shifted_convolutions() -> None:
    for size in ((6, 4), (5, 4), (5, 3)):
        x = np.random.default_rng(0).normal(size=(2, *size, 3))
        layer = FactorizedReduction.Params(input_dim=3, output_dim=5, dtype="float64")
        layer.norm.dtype = "float64"
        built = layer.instantiate()
        theta = built.init(0)
        relu = np.maximum(x, 0)
        odd = np.pad(relu[:, 1:, 1:], [(0, 0), (0, 1), (0, 1), (0, 0)])
        parts = [
            relu[:, ::2, ::2] @ theta.even.numpy()[0, 0],
            odd[:, ::2, ::2] @ theta.odd.numpy()[0, 0],
        ]
        wanted = np.concatenate(parts, -1) / np.sqrt(1 + 1e-3)
        found = built.fprop(theta, tf.constant(x), StepContext())
        np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)


def convolved(x: tf.Tensor, theta: Theta, stride: int = 1) -> tf.Tensor:
    """ReLU, convolution and batch norm at its first statistics."""
    w = theta.conv.w
    strides = [1, *(stride if n > 1 or w.shape[:2] == (1, 1) else 1 for n in w.shape[:2]), 1]
    return tf.nn.conv2d(tf.nn.relu(x), w, strides, "SAME") / math.sqrt(1 + 1e-3)


def separated(x: tf.Tensor, theta: Theta, stride: int, dilation: int) -> tf.Tensor:
    y, dilations = tf.nn.relu(x), [dilation, dilation]
    strides = [1, stride, stride, 1]
    y = tf.nn.depthwise_conv2d(y, theta.conv.depthwise.w, strides, "SAME", dilations=dilations)
    return tf.nn.conv2d(y, theta.conv.pointwise.w, 1, "SAME") / math.sqrt(1 + 1e-3)


def operated(name: str, x: tf.Tensor, theta: Theta, stride: int) -> tf.Tensor:
    if name == "none":
        return x
    if name == "1x1":
        return convolved(x, theta, stride)
    if name.startswith("max"):
        return tf.nn.max_pool2d(x, int(name[3]), stride, "SAME")
    if name.startswith("avg"):
        return tf.nn.avg_pool2d(x, int(name[3]), stride, "SAME")
    if "sep" in name:
        dilation = 2 if name.startswith("dil2") else 1
        x = separated(x, theta.layers["0"], stride, dilation)
        return separated(x, theta.layers["1"], 1, dilation)
    for i in range(len(theta.layers)):
        at = theta.layers[str(i)]
        x = convolved(x, at, stride if 0 < i < len(theta.layers) - 1 else 1)
    return x


@pytest.mark.parametrize(("variant", "kind"), CELLS)
def test_a_cell_follows_its_table(variant: Any, kind: Any) -> None:
    cell = AmoebaCell.Params(
        variant=variant, kind=kind, dim=4, previous_dim=3, before_dim=5
    ).instantiate()
    theta = cell.init(1)
    rng = np.random.default_rng(0)
    x, before = (tf.constant(rng.normal(size=(2, 6, 4, c)), tf.float32) for c in (3, 5))
    states = [convolved(x, theta.first), convolved(before, theta.second)]
    table = CELLS[variant, kind]
    for i in range(5):
        pair = []
        for j in (2 * i, 2 * i + 1):
            stride = 2 if kind == "reduction" and table.inputs[j] < 2 else 1
            state, own = states[table.inputs[j]], theta.operations[str(j)]
            pair.append(operated(table.operations[j], state, own, stride))
        states.append(pair[0] + pair[1])
    wanted = tf.concat([states[i] for i in table.outputs], -1)
    found = cell.fprop(theta, x, StepContext(), before=before)
    assert found.shape[-1] == cell.output_dim
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_pieces_are_the_published_sequence() -> None:
    model = AmoebaNet.Params(num_layers=6, filters=8, classes=3, drop_path_rate=0.3).instantiate()
    assert len(model.pieces()) == 6 + 6
    kinds = [(cell.params.kind[0], cell.params.dim) for cell in model.cells]
    first, second, third = [[("n", d)] * 2 for d in (8, 16, 32)]
    assert kinds == [
        ("r", 4), ("r", 8), *first, ("r", 16), *second, ("r", 32), *third
    ]  # fmt: skip
    rates = [cell.params.drop_path_rate for cell in model.cells]
    assert rates == pytest.approx(np.linspace(0, 0.3, 10))
    assert model.classifier.params.input_dim == 16 * 8
    logits = model.fprop(model.init(0), tf.ones([2, 32, 24, 3]), StepContext(mode="train"))
    assert logits.shape == (2, 3)


@pytest.mark.parametrize("sizes", [(4, 8), (0, 8), (6, 6)])
def test_other_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"multiple of 3.*multiple of 4"):
        AmoebaNet.Params(num_layers=sizes[0], filters=sizes[1], classes=2).instantiate()
