"""Convolutions, pooling and image layers on a mesh have one device's numbers, in every layout."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import tensorflow as tf
from sampling import sample

from tekso.framework.execution import ExecutionError
from tekso.framework.execution.mesh import halos, windows
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.primitives.windows import Window

PROGRAM = Path(__file__).with_name("windows_program.py")
SOME = (
    "conv (1x1|3x3|3x3 stride 2|3x3 stride 2 fixed|3x3 valid|3x3 stride 2 in groups)"
    "|depthwise 3x3|(max|average) 3x3 stride 2|batch norm|network"
    "|transposed 3x4|group norm|drop block|joined channels"
)
CHANNELS = (
    "conv (1x1|3x3|3x3 stride 2 in groups)|depthwise 3x3|(max|average) 3x3 stride 2"
    "|batch norm|network|transposed 3x4|group norm|joined channels"
)
"""Cases where channels are sharded, so that no window needs rows of another device."""
QUICK = "conv (1x1|3x3 stride 2 fixed|3x3 valid)|depthwise 3x3|max 3x3 stride 2|batch norm|network"
QUICK += "|transposed 3x4"
"""Cases of a quick test; a slow one has `SOME` of the same ops with height and width sharded."""
FLOAT64 = ("batch norm", "group norm", "drop block", "network", "transposed 2x2", "transposed 3x4")


def run(mesh: str, rules: str, cases: str) -> dict[str, Any]:
    done = processes.run([str(PROGRAM), mesh, rules, cases])
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_equal_numbers(results: dict[str, Any]) -> None:
    for case, result in results.items():
        assert "error" not in result, f"{case}: {result}"
        # Sums in another order: float32 rounding; the cases of layers are in float64.
        is_wide = case in FLOAT64 or case.startswith("volume")
        allowed = 1e-11 if is_wide else 5e-6
        for part, difference in result["differences"].items():
            assert difference < allowed, f"{case}: {part}"


SPARED = (
    "conv (5x5|1x1 stride 2|2x2 stride 2|3x2 dilated 1, 3|7x7 stride 2 fixed)"
    "|conv (2x2 stride 2 valid|3x3 stride 2 valid|3x3 in groups)"
    "|depthwise (3x3 dilated|1x7|5x3 strides 2, 1)"
    "|max (2x2 stride 2|3x3 stride 2 valid)"
    "|average (2x2 stride 2|3x3 stride 2 fixed|3x2|1x2 strides 3|3x3 stride 2 valid)"
)
"""Cases of `make test-matrix`: other numbers for what the slow test computes. Parts and halos of
many kernels, strides and dilations are in a quick test."""


@pytest.mark.parametrize(
    ("cases", "count"),
    [
        pytest.param(f"(?!volume|({SPARED})$).*", 31, marks=pytest.mark.slow, id="some"),
        pytest.param("(?!volume).*", 49, marks=pytest.mark.matrix, id="all"),
    ],
)
def test_images_split_over_space_have_the_same_numbers(cases: str, count: int) -> None:
    results = run("model:4", "height:model", cases)
    assert len(results) == count
    assert_equal_numbers(results)
    for case in ("conv 3x3", "conv 3x3 stride 2", "depthwise 3x3", "max 3x3 stride 2"):
        assert results[case]["layout"] == ["unsharded", "model", "unsharded", "unsharded"], case


def on_one_device(axes: dict[str, str], x: tf.Tensor, form: Any, *weights: tf.Tensor) -> Any:
    """Returns the result of a form on a mesh, and its gradients; the parts are on one device."""
    mesh = windows.ImageMesh(axes, dict.fromkeys(axes.values(), 2), keep, keep)
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        y = form(x, *weights, mesh=mesh)
        total = tf.reduce_sum(tf.cast(y, tf.float32))
    return [tf.cast(one, tf.float32).numpy() for one in (y, *tape.gradient(total, [x, *weights]))]


def keep(x: tf.Tensor, axes: Any) -> tf.Tensor:
    return x


@pytest.mark.parametrize("axes", [{"height": "y", "width": "z"}, {"height": "y", "channels": "z"}])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_sums_of_16_bit_images_are_computed_in_float32(
    axes: dict[str, str], dtype: tf.DType
) -> None:
    rng, window = np.random.default_rng(0), Window((9, 9), (1, 1), (1, 1), "SAME")
    kernel, each = rng.uniform(1, 2, (9, 9, 2, 2)), rng.uniform(1, 2, (9, 9, 2, 1))
    cases: list[tuple[Any, Any]] = [
        (windows.average_pool, []),
        (windows.depthwise_convolution, [each]),
        (windows.convolution, [kernel]),
    ]
    axes = {**axes, **({"in_channels": "z"} if "channels" in axes else {})}
    x = tf.cast(rng.uniform(1, 2, (1, 20, 20, 2)), dtype)
    for form, given in cases:
        weights = [tf.cast(w, dtype) for w in given]
        wide = [tf.cast(tensor, tf.float32) for tensor in (x, *weights)]
        apply = functools.partial(form, window=window)
        found = on_one_device(axes, x, apply, *weights)
        wanted = on_one_device(axes, wide[0], apply, *wide[1:])
        for one, other in zip(
            found, wanted, strict=True
        ):  # rounded where parts meet, and at the end
            np.testing.assert_allclose(
                one, other, rtol=2.0**-7 if dtype == tf.bfloat16 else 2.0**-10
            )


LAYOUTS = {
    ("data:2;model:2", "batch:data;height:model"): ["data", "unsharded"],
    ("data:2;model:2", "height:data;width:model"): ["unsharded", "unsharded"],
    ("model:4", "batch:model;out_channels:model"): ["model", "unsharded"],
    ("model:2", "channels:model;in_channels:model"): ["unsharded", "model"],
    ("data:2;model:2", "batch:data;channels:model;out_channels:model"): ["data", "model"],
    ("data:2;model:2", "in_channels:model;out_channels:data"): ["unsharded", "unsharded"],
    ("a:2;b:2;c:2", "batch:a;height:b;width:c"): ["a", "unsharded"],
}


# In the others, out_channels are split with other dims, in_channels alone, and height with the
# examples and with the width.
MATRIX = [
    ("model:4", "batch:model;out_channels:model"),
    ("data:2;model:2", "in_channels:model;out_channels:data"),
    ("a:2;b:2;c:2", "batch:a;height:b;width:c"),
]


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        *sample([key for key in LAYOUTS if key not in MATRIX], quick=[next(iter(LAYOUTS))]),
        *(pytest.param(*key, marks=pytest.mark.matrix) for key in MATRIX),
    ],
)
def test_images_in_other_layouts_have_the_same_numbers(mesh: str, rules: str) -> None:
    is_quick = (mesh, rules) == next(iter(LAYOUTS))
    is_in_space = "height" in rules or "width" in rules
    cases, count = (QUICK, 8) if is_quick else (SOME, 15) if is_in_space else (CHANNELS, 11)
    results = run(mesh, rules, cases)
    assert len(results) == count
    assert_equal_numbers(results)
    assert results["network"]["layout"] == LAYOUTS[mesh, rules]  # [batch, channels]


VOLUME_LAYOUTS = {
    ("model:2", "depth:model"): ["unsharded", "model", "unsharded", "unsharded"],
    ("model:2", "height:model"): ["unsharded", "unsharded", "model", "unsharded"],
    ("model:2", "width:model"): ["unsharded", "unsharded", "unsharded", "model"],
    ("a:2;b:2", "depth:a;height:b"): ["unsharded", "a", "b", "unsharded"],
    ("a:2;b:2", "depth:a;width:b"): ["unsharded", "a", "unsharded", "b"],
    ("a:2;b:2;c:2", "depth:a;height:b;width:c"): ["unsharded", "a", "b", "c"],
}


# Each of the three dims is split in one of these and whole in another.
SLOW_VOLUMES = ("height:model", "depth:a;width:b")


@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        pytest.param(*key, marks=pytest.mark.slow if key[1] in SLOW_VOLUMES else pytest.mark.matrix)
        for key in VOLUME_LAYOUTS
    ],
)
def test_volumes_split_over_any_dims_have_the_same_numbers(mesh: str, rules: str) -> None:
    results = run(mesh, rules, "volume .*")
    assert len(results) == 9
    assert_equal_numbers(results)
    assert results["volume network"]["layout"][:4] == VOLUME_LAYOUTS[mesh, rules]


def test_two_dims_of_a_volume_on_one_axis_are_refused() -> None:
    with pytest.raises(ExecutionError, match=r"depth:model and width:model.*\[2, 8, 6, 8, 1\]"):
        images("depth:model;width:model").image_axes(tf.TensorShape([2, 8, 6, 8, 1]))


def test_a_dim_that_cannot_be_cut_is_left_whole_for_a_reason() -> None:
    window = Window((5, 3), (2, 1), (1, 2), "SAME")
    assert halos.why_whole(16, window, 0, 4) is None
    assert halos.why_whole(15, window, 0, 4) == "height 15 is not divisible by 4 parts"
    why = halos.why_whole(12, window, 0, 4)
    assert why == "stride 2 does not divide a part of 3 (height 12 in 4 parts)"
    why = halos.why_whole(4, window, 1, 4)
    assert why == "a window of 5 reaches 2 beyond a part of 1 (width 4 in 4 parts)"
    whole = halos.cut(15, window, 0, axis="model", parts=4)
    assert (whole.axis, whole.parts, whole.outputs) == (None, 1, 8)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_parts_with_their_halos_hold_every_window(padding: Any) -> None:
    for parts in (2, 3, 4):
        for kernel, stride, dilation in ((1, 1, 1), (3, 1, 1), (4, 2, 1), (3, 2, 2), (1, 2, 1)):
            window = Window((kernel, 1), (stride, 1), (dilation, 1), padding)
            size = 24
            cut = halos.cut(size, window, 0, axis="model", parts=parts)
            assert cut.axis == "model"
            assert cut.total == window.output_size(size, 0) <= cut.parts * cut.outputs
            for i in range(cut.total):
                part, at = divmod(i, cut.outputs)
                first = i * stride - window.pads(size, 0)[0]  # in the image
                held = part * (size // parts) - cut.before + at * stride
                assert first == held
                last = held + (kernel - 1) * dilation
                assert last < (part + 1) * (size // parts) + cut.after


def images(rules: str) -> windows.ImageMesh:
    layout = MeshLayout(MeshShape.parse("data:2;model:4"), Rules.parse(rules))
    return windows.ImageMesh.of(layout, lambda x, axes: x, lambda w, axes: w)


def test_images_are_split_where_their_sizes_divide() -> None:
    mesh = images("batch:data;height:model;in_channels:model")
    assert mesh.image_axes(tf.TensorShape([2, 8, 6, 3])) == ("data", "model", None, None)
    assert mesh.image_axes(tf.TensorShape([2, 6, 6, 3])) == ("data", None, None, None)


def test_an_axis_of_one_device_splits_no_image() -> None:
    """Resharding between two spatial dims of which one is on such an axis ended the process."""
    layout = MeshLayout(
        MeshShape((("z", 2), ("y", 1))), Rules((("height", "z"), ("width", "y"), ("batch", "y")))
    )
    mesh = windows.ImageMesh.of(layout, keep, keep)
    assert mesh.image_axes(tf.TensorShape([8, 12, 8, 2])) == (None, "z", None, None)


def test_two_dims_of_an_image_on_one_axis_are_refused() -> None:
    with pytest.raises(ExecutionError, match=r"height:model and channels:model.*\[2, 8, 6, 4\]"):
        images("height:model;channels:model").image_axes(tf.TensorShape([2, 8, 6, 4]))


def test_images_of_unknown_size_are_refused() -> None:
    constrain = tf.function(images("height:model").constrain_image, autograph=False)
    with pytest.raises(ExecutionError, match=r"known sizes.*None"):
        constrain.get_concrete_function(tf.TensorSpec([2, None, 4, 3]))
