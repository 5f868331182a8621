"""Meshes, rules and layouts: how they are read, what they give, and what they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework import initializers
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh import legality
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout, MeshShape, Rules
from tekso.framework.optimizers.adafactor import Adafactor
from tekso.framework.optimizers.adam import Adam
from tekso.framework.weight_spec import WeightSpec

DIMS = ("batch", "embed", "mlp", "vocab")
AXES = ("data", "model", "third")


def spec(path: str = "w", *, stacked: int = 0, **sizes: int) -> WeightSpec:
    init = initializers.Constant.Params(value=0.0).instantiate()
    shape, dims = tuple(sizes.values()), ("layers",) * stacked + tuple(sizes)[stacked:]
    return WeightSpec(path, shape, dims, init, stacked=stacked, template=path)


def layout_of(mesh: str, rules: str = "", **axes: str) -> MeshLayout:
    return MeshLayout(MeshShape.parse(mesh), Rules.parse(rules), **axes)


def refusal(layout: MeshLayout, *specs: WeightSpec, **activations: Any) -> str:
    with pytest.raises(LayoutError) as caught:
        layout.check({s.path: s for s in specs}, activations=activations)
    return str(caught.value)


# --- reading ---


@pytest.mark.parametrize(
    "text", ["data:2;model:4", "data:2,model:4", "data:2 model:4", " data:2 ;\n model:4; "]
)
def test_separators_of_mesh_tensorflow_are_read_alike(text: str) -> None:
    mesh = MeshShape.parse(text)
    assert mesh.axes == (("data", 2), ("model", 4))
    assert (mesh.names, mesh.size, mesh.size_of("model")) == (("data", "model"), 8, 4)
    assert Rules.parse(text).pairs == (("data", "2"), ("model", "4"))


@given(
    st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_-]{4,8}", fullmatch=True), st.integers(1, 512)),
    st.sampled_from([";", ",", " ", "; ", " , "]),
)
@settings(max_examples=40)
def test_text_of_mesh_and_rules_reads_back(sizes: dict[str, int], separator: str) -> None:
    pairs = [f"{name}:{size}" for name, size in sizes.items()]
    rules = Rules.parse(separator.join(pairs))
    assert str(rules) == ";".join(pairs)
    if sizes and "unsharded" not in sizes and "scalar" not in sizes:
        mesh = MeshShape.parse(separator.join(pairs))
        assert dict(mesh.axes) == sizes
        assert MeshShape.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no axis"),
        ("data", "'data' is not two parts"),
        ("data:2:3", "'data:2:3' is not two parts"),
        ("data: 2", "'data:' is not two parts"),
        (":2", "':2' is not two parts"),
        ("data=2", "'data=2' is not two parts"),
        ("data:two", "axis data has size 'two', but must be a whole number"),
        ("data:2.0", "axis data has size '2.0', but must be a whole number"),
        ("data:0", "axis data has size 0, but must be at least 1"),
        ("data:-2", "axis data has size -2, but must be at least 1"),
        ("data:2;data:4", "axis data is named twice"),
        ("a|b:2", "axis 'a|b' needs another name"),
        ("unsharded:2", "axis 'unsharded' needs another name"),
    ],
)
def test_mesh_that_is_not_written_right_is_refused(text: str, reason: str) -> None:
    with pytest.raises(LayoutError) as caught:
        MeshShape.parse(text)
    assert str(caught.value).startswith(f"execution.mesh is {text!r}: {reason}")
    assert "example: 'data:2;model:4'" in str(caught.value)
    assert isinstance(caught.value, ExecutionError)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("batch", "'batch' is not two parts"),
        ("batch:data:model", "'batch:data:model' is not two parts"),
        ("batch:data;:model", "':model' is not two parts"),
        ("batch:data;batch:model", "dim batch is given 2 times, for data and model"),
        ("batch:data,batch:data", "dim batch is given 2 times, for data and data"),
    ],
)
def test_rules_that_are_not_written_right_are_refused(text: str, reason: str) -> None:
    with pytest.raises(LayoutError, match=r"^execution\.rules is ") as caught:
        Rules.parse(text)
    assert reason in str(caught.value)


def test_axes_that_nothing_names_are_idle() -> None:
    assert layout_of("data:2;model:4;third:1", "batch:data").idle_axes() == ["model"]
    assert layout_of("data:2;model:4", "mlp:model", slots_axis="data").idle_axes() == []
    assert layout_of("data:2;model:4", weights_axis="model").idle_axes() == ["data"]


def test_all_problems_of_a_text_are_named_at_once() -> None:
    with pytest.raises(LayoutError, match=r"'a' is not two parts.*; 'b' is not two parts"):
        Rules.parse("a;x:y;b")


def test_mesh_with_more_devices_than_there_are_is_refused_with_those_that_fit() -> None:
    mesh = MeshShape.parse("data:4;model:4")
    mesh.check_devices(16)
    mesh.check_devices(17)
    with pytest.raises(LayoutError) as caught:
        mesh.check_devices(8)
    assert str(caught.value) == (
        "execution.mesh is 'data:4;model:4': 16 devices, but there are 8; nearest that fit: "
        "data:2;model:4 or data:4;model:2; --cpu_devices=16 creates this many logical CPU devices"
    )


# --- placing ---


def test_layout_follows_the_rules() -> None:
    layout = layout_of("data:2;model:4", "batch:data;mlp:model")
    assert layout.of(("batch", None, "mlp")) == ("data", None, "model")
    assert layout.of_weight(spec(embed=3, mlp=8)) == (None, "model")
    assert layout.of(()) == ()
    assert layout.shard_shape((3, 8), (None, "model")) == (3, 2)


def test_activation_of_any_size_is_split_where_it_can_be() -> None:
    layout = layout_of("data:2;model:4", "batch:data;length:model;embed:model")
    assert layout.fitting(("batch", "length", "embed"), (6, 1, 8)) == ("data", None, "model")
    assert layout.fitting(("batch", "length", "embed"), (3, 4, 8)) == (None, "model", None)
    assert str(layout.without("batch", "embed").rules) == "length:model"


def test_layout_for_512_devices_needs_none() -> None:
    layout = layout_of("batch:16;model:32", "batch:batch;mlp:model", weights_axis="batch")
    stored = layout.of_stored_weight(spec(embed=1024, mlp=262144))
    assert stored == ("batch", "model")
    assert layout.shard_shape((1024, 262144), stored) == (64, 8192)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (spec(embed=4, vocab=8), (None, "data")),  # the largest
        (spec(embed=8, vocab=8), ("data", None)),  # the first of the largest
        (spec(embed=4, vocab=9), ("data", None)),  # the largest that divides
        (spec(embed=4, mlp=8), ("data", "model")),  # the largest that is whole
        (spec(embed=3, vocab=5), (None, None)),  # none divides
        (spec(), ()),
        (spec(batch=4, vocab=8), ("data", None)),  # the axis is used already
        (spec(stacked=1, layers=64, embed=4), (None, "data")),
        (spec(stacked=1, layers=64, embed=3), ("data", None)),  # nothing else is left
        (WeightSpec("w", (8, 4), (None, "embed"), Any), (None, "data")),  # no name: never split
    ],
)
def test_weights_axis_splits_the_largest_dim_that_it_can(
    weight: WeightSpec, expected: tuple[str | None, ...]
) -> None:
    layout = layout_of("data:2;model:4", "batch:data;mlp:model", weights_axis="data")
    assert layout.of_stored_weight(weight) == expected
    assert layout.of_slot(weight) == expected


def test_slots_axis_leaves_the_weight_and_adds_to_the_weights_axis() -> None:
    weight = spec(embed=6, mlp=8)
    slots = layout_of("data:2;model:4", "mlp:model", slots_axis="data")
    assert slots.of_stored_weight(weight) == (None, "model")
    assert slots.of_slot(weight) == ("data", "model")
    both = layout_of("a:2;b:4", "", weights_axis="a", slots_axis="b")
    assert both.of_stored_weight(weight) == (None, "a")
    assert both.of_slot(spec(embed=4, mlp=8)) == ("b", "a")


def test_factored_slots_lie_by_their_own_dims() -> None:
    weight = spec(stacked=1, layers=3, embed=4, mlp=8)
    optimizer = Adafactor.Params(min_dim_to_factor=2, beta1=0.9).instantiate()
    layout = layout_of("data:2;model:4", "mlp:model", slots_axis="data")
    lain = {
        name: (slot.shape, layout.of_slot(slot)) for name, slot in optimizer.slots(weight).items()
    }
    assert lain == {
        "row_second_moment": ((3, 4), (None, "data")),
        "column_second_moment": ((3, 8), (None, "model")),  # 3 layers cannot be split over 2
        "first_moment": ((3, 4, 8), (None, "data", "model")),
    }


MESHES = st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3).map(
    lambda sizes: MeshShape(tuple(zip(AXES, sizes, strict=False)))
)
SIZES = st.dictionaries(st.sampled_from(DIMS), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))


@st.composite
def layouts(draw: st.DrawFn) -> MeshLayout:
    mesh = draw(MESHES)
    axes = st.sampled_from(mesh.names)
    rules = draw(st.dictionaries(st.sampled_from(DIMS), axes, max_size=3))
    extra = {name: draw(st.none() | axes) for name in ("weights_axis", "slots_axis")}
    return MeshLayout(mesh, Rules(tuple(rules.items())), **extra)


@given(layouts(), st.lists(SIZES, min_size=1, max_size=5), st.booleans())
def test_bytes_of_a_device_are_what_the_division_says(
    layout: MeshLayout, tensors: list[dict[str, int]], stacked: bool
) -> None:
    for sizes in tensors:
        weight = spec(stacked=stacked, **({"layers": 6} if stacked else {}), **sizes)
        if layout.problems({"w": weight}, activations={"x": (DIMS, [24] * 4)}):
            continue
        for slot in (weight, *Adam.Params().instantiate().slots(weight).values()):
            lain, used = layout.of_slot(slot), layout.of_weight(slot)
            axes = [axis for axis in lain if axis is not None]
            assert len(set(axes)) == len(axes)
            assert all(n == u for n, u in zip(lain, used, strict=True) if u is not None)
            division = math.prod(layout.mesh.size_of(axis) for axis in axes)
            assert math.prod(layout.shard_shape(slot.shape, lain)) * division == slot.size
            for extra in {layout.weights_axis, layout.slots_axis} - {None, *axes}:
                # An axis is left out only where no dim that is whole divides over it.
                whole = [n for n, axis in zip(slot.shape, lain, strict=True) if axis is None]
                assert all(n % layout.mesh.size_of(str(extra)) for n in whole)


@pytest.mark.parametrize("name", ["weights_axis", "slots_axis"])
def test_a_device_holds_its_share_of_all_slots(name: str) -> None:
    layout = layout_of("data:4;model:2", "mlp:model;vocab:model", **{name: "data"})
    weights = [
        spec(vocab=40, embed=12),
        spec(stacked=1, layers=3, embed=12, mlp=24),
        spec(stacked=1, layers=3, mlp=24),
        spec(embed=12),
    ]
    slots = [s for w in weights for s in Adam.Params().instantiate().slots(w).values()]
    held = sum(math.prod(layout.shard_shape(s.shape, layout.of_slot(s))) for s in slots)
    # Both axes split the matrices; the data axis finds nothing in [3, 24] beside mlp, and the model
    # axis nothing in [12].
    assert held == 2 * (40 * 12 // 8 + 3 * 12 * 24 // 8 + 3 * 24 // 2 + 12 // 4)


def test_layout_says_which_settings_made_it() -> None:
    assert str(layout_of("data:2", "batch:data")) == "mesh 'data:2', rules 'batch:data'"
    assert str(layout_of("a:2;b:2", "mlp:a", weights_axis="b", slots_axis="a")) == (
        "mesh 'a:2;b:2', rules 'mlp:a', weights_axis 'b', slots_axis 'a'"
    )


# --- legality ---


def is_legal(layout: MeshLayout, tensors: list[dict[str, int]]) -> bool:
    """Says by the definition alone whether all rules can be applied."""
    rules, sizes_of = dict(layout.rules.pairs), dict(layout.mesh.axes)
    named = {dim for sizes in tensors for dim in sizes}
    divides = all(
        sizes[dim] % sizes_of[rules[dim]] == 0 for sizes in tensors for dim in sizes if dim in rules
    )
    apart = all(
        rules.get(a) is None or rules.get(a) != rules.get(b)
        for sizes in tensors
        for a, b in itertools.combinations(sizes, 2)
    )
    return divides and apart and set(rules) <= named


@given(layouts(), st.lists(SIZES, max_size=4), SIZES)
def test_check_refuses_what_is_illegal_and_nothing_else(
    layout: MeshLayout, weights: list[dict[str, int]], activation: dict[str, int]
) -> None:
    specs = {f"w{i}": spec(f"w{i}", **sizes) for i, sizes in enumerate(weights)}
    activations = {"x": (tuple(activation), tuple(activation.values()))}
    if is_legal(layout, [*weights, activation]):
        layout.check(specs, activations=activations)
        assert layout.problems(specs, activations=activations) == []
    else:
        with pytest.raises(LayoutError):
            layout.check(specs, activations=activations)


def test_size_that_does_not_divide_is_refused_with_the_nearest_choices() -> None:
    layout = layout_of("data:2;model:4", "heads:model;mlp:model")
    names = [spec(f"layers/{i}/q", embed=16, heads=6) for i in range(3)]
    assert refusal(layout, *names, spec("ffn", mlp=64)) == (
        "execution.mesh 'data:2;model:4' and execution.rules 'heads:model;mlp:model' do not fit "
        "the model:\n"
        "  rule heads:model: heads of 6 does not divide evenly over the 4 devices of axis model: "
        "layers/0/q [embed=16, heads=6] and 2 other tensors; alternatives: axis model of 2 or 3 "
        "or 6 (2 for all dims that the rules shard over it), or heads of 4 or 8, or heads:data, "
        "or no rule for heads (execution.rules='mlp:model')"
    )


def test_vocab_that_does_not_divide_may_be_padded() -> None:
    text = refusal(layout_of("model:8", "vocab:model"), spec("table", vocab=1003, embed=4))
    assert "vocab_multiple=8, which pads vocab to 1008" in text


def test_two_dims_of_a_weight_on_one_axis_are_refused() -> None:
    text = refusal(layout_of("data:2;model:4", "embed:model;mlp:model"), spec(embed=8, mlp=16))
    assert (
        "rules embed:model and mlp:model would shard two dims of one tensor over axis model: "
        "w [embed=8, mlp=16]; alternatives: embed:data, or no rule for embed "
        "(execution.rules='mlp:model'), or mlp:data, or no rule for mlp"
    ) in text


def test_two_dims_of_an_activation_on_one_axis_are_refused() -> None:
    x = (("batch", "length", "embed"), (4, None, 8))
    text = refusal(layout_of("data:2", "batch:data;embed:data"), spec(embed=8, mlp=3), x=x)
    assert "x [batch=4, length=?, embed=8]" in text
    apart = {"y": (("batch",), (4,)), "z": (("length", "embed"), (None, 8))}
    layout_of("data:2", "batch:data;length:data").check({}, activations=apart)


@pytest.mark.parametrize("dim", legality.MAY_STAY_WHOLE)
def test_a_rule_for_images_is_refused_only_where_it_splits_none(dim: str) -> None:
    images = {f"activation {n}": (("batch", dim), (4, n)) for n in (18, 16, 7)}
    layout_of("a:4", f"{dim}:a").check({}, activations=images)
    text = refusal(layout_of("a:5", f"{dim}:a"), **images)
    assert f"{dim} of 18 does not divide evenly over the 5 devices of axis a: activation 18" in text
    assert text.count("does not divide") == 1


def test_one_dim_twice_in_a_tensor_is_refused() -> None:
    scores = (("batch", "length", "length"), (4, 6, 6))
    text = refusal(layout_of("data:2", "length:data"), scores=scores)
    assert "rule length:data would shard two dims length of one tensor" in text
    assert "alternatives: no rule for length (execution.rules='')" in text


def test_axis_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    layout = layout_of("data:2;model:4", "mlp:modle", weights_axis="dat", slots_axis="x")
    text = refusal(layout, spec(mlp=8))
    assert "rule mlp:modle: the mesh has no axis modle; did you mean model?" in text
    assert "execution.weights_axis is 'dat': the mesh has no axis dat; did you mean data?" in text
    assert "execution.slots_axis is 'x': the mesh has no axis x; there are: data, model" in text
    with pytest.raises(LayoutError, match="no axis modle; did you mean model"):
        layout.mesh.size_of("modle")


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("vocabulary:model", "did you mean vocab? there are: embed, vocab, mlp, batch"),
        ("d_ff:model", "did you mean mlp?"),
        ("model:mlp", "a rule is dim:axis, did you mean mlp:model?"),
        ("experts:model", "no tensor of the model has a dim experts; there are: embed, vocab"),
    ],
)
def test_rule_that_names_no_dim_of_the_model_is_refused(rule: str, hint: str) -> None:
    layout = layout_of("data:2;model:4", rule)
    batch = (("batch",), (4,))
    text = refusal(layout, spec(embed=8, vocab=16), spec("v", mlp=4), x=batch)
    assert hint in text


def test_all_problems_are_named_in_a_fixed_order_and_after_eight_counted() -> None:
    rules = ";".join(f"dim{i}:data" for i in range(11))
    text = refusal(layout_of("data:2", rules), spec(embed=8))
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines[1:9]] == [f"  rule dim{i}" for i in range(8)]
    assert lines[9:] == ["  and 3 more"]


def test_layout_of_a_single_tensor_is_checked_as_well() -> None:
    layout = layout_of("data:2", "batch:data;embed:data")
    with pytest.raises(LayoutError, match=r"a tensor \[batch=3\]"):
        layout.of(("batch",), (3,))
    with pytest.raises(LayoutError, match=r"a tensor \[batch=\?, embed=\?\]"):
        layout.of(("batch", "embed"))
    with pytest.raises(ValueError, match=r"dims \['batch'\] do not fit shape \[4, 5\]"):
        layout.of(("batch",), (4, 5))


@given(st.integers(1, 3000), st.integers(1, 64))
def test_divisors_nearest_to_a_number_are_found(size: int, near: int) -> None:
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    found = legality.near_divisors(size, near)
    assert set(found) <= set(divisors)
    assert min(divisors, key=lambda d: (abs(d - near), d == 1)) in (*found, 1)
    assert [d for d in divisors if d > near][:1] == [d for d in found if d > near]
    assert any(d <= near for d in found)


def test_the_batch_of_experts_lies_as_the_batch_where_the_axis_is_left() -> None:
    dims, shape = ("experts", "expert_batch", None, "embed"), (4, 8, 2, 16)
    mesh = MeshShape.parse("data:2;model:2")
    apart = MeshLayout(mesh, Rules.parse("batch:data;experts:model"))
    assert apart.fitting(dims, shape) == ("model", "data", None, None)
    assert apart.fitting(("token_experts", "batch"), (4, 8)) == ("model", "data")
    together = MeshLayout(mesh, Rules.parse("batch:data;experts:data"))
    assert together.fitting(dims, shape) == ("data", None, None, None)
    assert together.fitting(("token_experts", "batch"), (4, 8)) == (None, "data")
    written = MeshLayout(mesh, Rules.parse("batch:data;experts:data;expert_batch:model"))
    assert written.fitting(dims, shape) == ("data", "model", None, None)
