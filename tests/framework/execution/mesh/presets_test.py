"""Presets: what they stand for on a number of devices or a mesh, and what they refuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tekso.framework.execution.mesh import presets
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout

DENSE = ("vocab", "embed", "heads", "head_dim", "mlp", "batch", "length")
TENSOR = "mlp:model;heads:model;vocab:model"


def resolve(rules: str, mesh: str | None = None, n: int | None = 8, **rest: object) -> MeshLayout:
    return presets.resolve(rules, mesh, num_devices=n, **{"dims": DENSE, **rest})


@pytest.mark.parametrize(
    ("name", "mesh", "rules", "weights_axis"),
    [
        ("data", "data:8", "batch:data", None),
        ("fsdp", "data:8", "batch:data", "data"),
        ("tensor", "model:8", TENSOR, None),
        ("2d", "data:4;model:2", f"batch:data;{TENSOR}", None),
    ],
)
def test_preset_without_a_mesh_takes_all_devices(
    name: str, mesh: str, rules: str, weights_axis: str | None
) -> None:
    layout = resolve(name)
    assert (str(layout.mesh), str(layout.rules)) == (mesh, rules)
    assert (layout.weights_axis, layout.slots_axis) == (weights_axis, None)


def test_preset_keeps_to_a_mesh_that_is_given() -> None:
    layout = resolve("2d", "data:2;model:4", slots_axis="data")
    assert (str(layout.mesh), layout.slots_axis) == ("data:2;model:4", "data")
    assert str(resolve("data", "pods:2;data:2").rules) == "batch:data"
    assert resolve("fsdp", "data:2;other:2", weights_axis="other").weights_axis == "other"
    assert resolve("tensor", "model:512", n=None).mesh.size == 512


def test_rule_of_a_preset_for_a_dim_that_the_model_lacks_is_dropped() -> None:
    assert "experts:data" in str(resolve("2d", dims=(*DENSE, "experts")).rules)
    assert "experts:data" in str(resolve("2d", dims=None).rules)
    assert str(resolve("tensor", dims=("embed", "mlp")).rules) == "mlp:model"


def test_preset_that_would_leave_its_axis_without_use_is_refused() -> None:
    with pytest.raises(LayoutError, match="'2d' shards mlp, heads, vocab over axis model"):
        resolve("2d", dims=("batch", "in_channels", "out_channels"))
    assert str(resolve("2d", n=7, dims=("batch", "in_channels")).mesh) == "data:7;model:1"


def test_preset_on_a_mesh_without_its_axes_is_refused() -> None:
    with pytest.raises(LayoutError) as caught:
        resolve("2d", "x:4;model:2")
    assert str(caught.value) == (
        "execution.rules '2d' shards over the axis data, which execution.mesh 'x:4;model:2' does "
        "not have: name its axes as in 'data:4;model:2', or set explicit rules"
    )


def test_name_of_no_preset_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(LayoutError, match=r"data, fsdp, tensor, 2d.* did you mean tensor\?"):
        resolve("tensr")


def test_rules_written_out_are_kept_as_they_are_and_need_a_mesh() -> None:
    assert str(resolve("experts:x", "x:2").rules) == "experts:x"
    assert str(resolve("", "x:2").rules) == ""
    with pytest.raises(LayoutError, match=r"mesh is not set.* for example 'x:4;y:2'"):
        resolve("batch:x;mlp:y")
    with pytest.raises(LayoutError, match="mesh is not set"):
        resolve("")
    with pytest.raises(LayoutError, match="number of devices is not known"):
        resolve("data", n=None)


def test_mesh_with_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(LayoutError, match="16 devices, but there are 8; nearest that fit: data:8"):
        resolve("data", "data:16")


@given(st.integers(1, 2000))
def test_2d_takes_the_most_even_factors(n: int) -> None:
    pairs = [(n // d, d) for d in range(1, n + 1) if n % d == 0 and n // d >= d]
    assert presets.even_factors(n) == min(pairs, key=lambda pair: pair[0] - pair[1])
