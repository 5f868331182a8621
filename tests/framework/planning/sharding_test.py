"""What a device holds is what the division says, for every layout; drawings show every axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from tekso.framework import initializers, schedules
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.planning import layout_drawing, sharding
from tekso.framework.weight_spec import WeightSpec


def spec(path: str, dtype: str = "float32", **sizes: int) -> WeightSpec:
    init = initializers.Constant.Params(value=0.0).instantiate()
    return WeightSpec(path, tuple(sizes.values()), tuple(sizes), init, template=path, dtype=dtype)


SPECS = {
    one.path: one
    for one in (
        spec("table", vocab=640, embed=96),
        spec("hidden", embed=96, mlp=256),
        spec("heads", embed=96, heads=8, head_dim=6),
        spec("scale", embed=96),
    )
}
MESHES = ["data:1", "data:4", "model:8", "data:2;model:4", "data:16;model:32", "a:2;data:2;model:2"]


def placed(
    mesh: str, rules: str, optimizer: object = None, **axes: str | None
) -> sharding.Sharding:
    learner = Learner.Params(
        optimizer=optimizer or AdamW.Params(), schedule=schedules.Constant.Params(value=1.0)
    ).instantiate()
    layout = MeshLayout(MeshShape.parse(mesh), Rules.parse(rules), **axes)
    return sharding.of_model(layout, SPECS, learner.slots(SPECS))


def share(sizes: Mapping[str, int], split: Mapping[str, int]) -> int:
    """Bytes of a float32 part: the product of the sizes, each divided by its devices."""
    return 4 * math.prod(n // split.get(dim, 1) for dim, n in sizes.items())


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("dims", [(), ("mlp",), ("vocab", "mlp"), ("vocab", "mlp", "heads")])
def test_bytes_are_those_of_the_division(mesh: str, dims: tuple[str, ...]) -> None:
    sizes = dict(MeshShape.parse(mesh).axes)
    count = sizes.get("model", 1)
    if count > 8:
        dims = tuple(dim for dim in dims if dim != "heads")
    rules = ";".join(f"{dim}:model" for dim in dims) if "model" in sizes else ""
    found = placed(mesh, rules)
    split = dict.fromkeys(dims, count)
    for weight in found.weights:
        dims_and_sizes = dict(zip(weight.spec.dims, weight.spec.shape, strict=True))
        want = share({d or "": n for d, n in dims_and_sizes.items()}, split)
        assert weight.bytes_per_device == want == 4 * math.prod(weight.shard_shape)
        assert weight.optimizer_bytes_per_device == 2 * want  # Adam keeps two of each
        assert weight.optimizer_bytes == 2 * weight.spec.size_bytes
    total = sum(weight.bytes_per_device for weight in found.weights)
    assert found.weight_bytes_per_device == total
    assert found.optimizer_bytes_per_device == 2 * total + 3 * 8  # and three int64 counters
    assert found.weight_bytes == sum(one.size_bytes for one in SPECS.values())


def test_everything_split_over_the_whole_mesh_is_divided_by_its_size() -> None:
    found = placed("x:2;y:4", "embed:x;vocab:y;mlp:y;heads:y")
    for weight in found.weights:
        factor = 2 if weight.spec.path == "scale" else 8
        assert weight.bytes_per_device * factor == weight.spec.size_bytes


def test_weights_axis_divides_what_is_stored_and_not_what_is_used() -> None:
    found = placed("data:4", "batch:data", weights_axis="data")
    assert found.weight_bytes_per_device * 4 == found.weight_bytes
    assert {weight.used_layout for weight in found.weights} == {(None,) * n for n in (1, 2, 3)}
    assert len(found.split_further()) == 4
    assert found.remarks() == []


def test_slots_axis_divides_the_slots_only() -> None:
    found = placed("data:4", "batch:data", slots_axis="data")
    assert found.weight_bytes_per_device == found.weight_bytes
    assert found.optimizer_bytes_per_device == 2 * found.weight_bytes // 4 + 3 * 8


def test_slots_that_lack_a_dim_are_laid_out_by_those_they_have() -> None:
    found = placed("model:4", "mlp:model", optimizer=Adafactor.Params(min_dim_to_factor=32))
    by_path = {weight.spec.path: weight for weight in found.weights}
    # Rows and columns of hidden [embed, mlp]: a column for each mlp, which is split.
    assert by_path["hidden"].optimizer_bytes_per_device == 4 * (96 + 256 // 4)
    assert by_path["scale"].optimizer_bytes_per_device == 4 * 96


def test_remarks_name_what_does_nothing() -> None:
    idle = placed("data:2;model:4", "batch:data").remarks()
    assert idle == ["no rule uses axis model: its 4 devices store and compute the same"]
    (weights,) = placed("data:7", "batch:data", weights_axis="data").remarks()
    assert weights.startswith("weights_axis data shards nothing")
    (slots,) = placed("data:4", "batch:data", weights_axis="data", slots_axis="data").remarks()
    assert slots.startswith("slots_axis data shards nothing")


def test_record_says_which_rule_splits_how_many_weights() -> None:
    record = sharding.record(placed("data:2;model:4", "batch:data;mlp:model;embed:data"))
    assert record["rules"] == [
        {"dim": "batch", "axis": "data", "weights": 0},
        {"dim": "mlp", "axis": "model", "weights": 1},
        {"dim": "embed", "axis": "data", "weights": 4},
    ]
    assert record["weights"][1] == {
        "path": "hidden",
        "dims": ["embed", "mlp"],
        "shape": [96, 256],
        "dtype": "float32",
        "layout": ["data", "model"],
        "used_layout": ["data", "model"],
        "shard_shape": [48, 64],
        "bytes_per_device": 4 * 48 * 64,
        "optimizer_bytes_per_device": 8 * 48 * 64,
    }


# --- drawings ---


def numbers(lines: list[str]) -> list[int]:
    return [int(n) for line in lines if "│" in line for n in line.split("│")[1].split()
            if n.isdecimal()]  # fmt: skip


def test_drawing_of_two_axes_has_the_last_to_the_right() -> None:
    assert layout_drawing.draw(MeshShape.parse("data:2;model:3")) == [
        "data ↓ │ model →  0  1  2",
        "     0 │          0  1  2",
        "     1 │          3  4  5",
    ]


def test_drawing_of_one_axis_is_a_line() -> None:
    assert layout_drawing.draw(MeshShape.parse("data:3")) == ["data →  0  1  2"]


def test_drawing_of_three_axes_repeats_the_picture() -> None:
    lines = layout_drawing.draw(MeshShape.parse("pod:2;data:2;model:2"))
    assert [line for line in lines if line.startswith("pod")] == ["pod 0", "pod 1"]
    assert numbers(lines) == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("mesh", ["d:512", "d:16;m:32", "p:8;d:16;m:32", "p:64;q:9;d:100;m:1000"])
@pytest.mark.parametrize("width", [60, 80, 100])
def test_large_meshes_are_abbreviated_and_end_with_the_last_device(mesh: str, width: int) -> None:
    shape = MeshShape.parse(mesh)
    lines = layout_drawing.draw(shape, width=width)
    assert len(lines) < 80
    assert max(map(len, lines)) <= width
    assert lines[-1].split()[-1] == str(shape.size - 1)
