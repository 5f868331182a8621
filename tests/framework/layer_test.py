"""Layer: what it declares, its paths, stacks and first values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import foreign_variables
from tekso.framework import theta as theta_lib
from tekso.framework.context import StepContext
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.initializers import GlorotUniform, Normal, Ones, Zeros
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, Configurable, param


class Scale(Layer):
    class Params(Layer.Params):
        """Params of Scale."""

        dim: int = param("Size.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        dim = self.params.dim
        self.weight("w", [dim, 5], dims=("embed", "mlp"), init=Normal.Params())
        self.weight("seen", [dim], dims=("embed",), init=Zeros.Params(), trainable=False)

    def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        ctx.collect_statistic(self, "seen", tf.reduce_sum(x, 0), x.shape[0])
        return x @ theta.w

    def updated_statistics(self, theta: Any, statistics: Any) -> dict[str, tf.Tensor]:
        return {"seen": theta.seen + statistics["seen"]}


class Empty(Layer):
    pass


class Pair(Layer):
    class Params(Layer.Params):
        """Params of Pair."""

        stacked: bool = param("Whether one child is stacked.", default=False)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("b", [3], dims=(None,), init=Ones.Params(), dtype="bfloat16")
        if self.params.stacked:
            self.child_stack("inner", Scale.Params(dim=2), 3)
        else:
            self.child_list("inner", [Scale.Params(dim=2)] * 3)
        self.child("empty", Empty.Params())


class Outer(Layer):
    class Params(Layer.Params):
        """Params of Outer."""

        stacked: bool = param("Whether the children are stacked.", default=False)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        pair = Pair.Params(stacked=self.params.stacked)
        if self.params.stacked:
            self.child_stack("pairs", pair, 2)
        else:
            self.child_list("pairs", [pair] * 2)


def test_weight_spec_says_what_was_declared() -> None:
    spec = Scale.Params(dim=2).instantiate().specs()["w"]
    assert (spec.path, spec.shape, spec.dims) == ("w", (2, 5), ("embed", "mlp"))
    assert (spec.dtype, spec.trainable, spec.stacked) == ("float32", True, 0)
    assert (spec.size, spec.size_bytes) == (10, 40)
    assert (spec.fans.fan_in, spec.fans.fan_out) == (2, 5)


def test_dtype_comes_from_the_params_or_the_weight() -> None:
    specs = Pair.Params(dtype="float64").instantiate().specs()
    assert specs["b"].dtype == "bfloat16"
    assert specs["b"].size_bytes == 6
    assert specs["inner/0/w"].dtype == "float32"  # a child has its own Params
    scale = Scale.Params(dim=2, dtype="float64").instantiate()
    assert scale.init().w.dtype == tf.float64


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ([2, 3], ("a",), "each needs a dim name"),
        ([2, 0], ("a", "b"), "sizes must be positive"),
        ([2, -1], ("a", "b"), "sizes must be positive"),
        ([2, 3], ("a", "a"), "contain a name twice"),
    ],
)
def test_weight_refuses_shapes_that_its_dims_do_not_name(
    shape: list[int], dims: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Empty.Params().instantiate().weight("w", shape, dims=dims, init=Zeros.Params())


def test_what_is_no_params_is_refused_as_init_and_as_child() -> None:
    layer = Empty.Params().instantiate()
    given = "an object of type Zeros, but must be Params, for example Normal.Params"
    with pytest.raises(TypeError, match=rf"^Empty.weight\('w'\): init is {given}"):
        layer.weight("w", [2], dims=("a",), init=Zeros.Params().instantiate())
    with pytest.raises(TypeError, match="init is Zeros, but must be Params"):
        layer.weight("w", [2], dims=("a",), init=Zeros)
    with pytest.raises(TypeError, match=r"^Empty: child 'c' is an object of type Empty, but must"):
        layer.child("c", Empty.Params().instantiate())


def test_an_init_that_does_not_call_that_of_its_base_is_named() -> None:
    class Forgetful(Layer):
        def __init__(self, params: Any) -> None:
            self.size = 3

    with pytest.raises(TypeError, match=r"^Forgetful.__init__ must begin with super\(\)"):
        Forgetful.Params().instantiate()


def test_an_init_that_calls_its_base_too_late_is_named() -> None:
    class Hasty(Layer):
        def __init__(self, params: Any) -> None:
            self.weight("w", [3], dims=("embed",), init=Zeros.Params())
            super().__init__(params)

    with pytest.raises(AttributeError, match=r"^Hasty.__init__ must begin with super\(\)"):
        Hasty.Params().instantiate()


def test_weights_and_children_of_a_layer_that_is_built_are_refused() -> None:
    class Late(Empty):
        def fprop(self, theta: Any, x: Any, ctx: Any) -> Any:
            if x == "child":
                self.child("late", Empty.Params())
            self.weight("late", [3], dims=("embed",), init=Zeros.Params())

    outer = Empty.Params().instantiate()
    layer = outer.child("inner", Late.Params())
    for what in ("weight", "child"):
        with pytest.raises(ValueError, match=r"inner is already built.* declare .* in __init__"):
            layer.fprop(None, what, None)


def test_two_dims_may_both_have_no_name() -> None:
    layer = Empty.Params().instantiate()
    layer.weight("w", [2, 3], dims=(None, None), init=Zeros.Params())
    assert layer.specs()["w"].dims == (None, None)


@pytest.mark.parametrize("name", ["a/b", "a*", "0", "", "values", "update", "__w"])
def test_names_that_theta_could_not_give_as_attributes_are_refused(name: str) -> None:
    layer = Empty.Params().instantiate()
    with pytest.raises(ValueError, match="Python identifier"):
        layer.weight(name, [2], dims=("a",), init=Zeros.Params())
    with pytest.raises(ValueError, match="Python identifier"):
        layer.child(name, Empty.Params())


def test_names_are_taken_once() -> None:
    layer = Empty.Params().instantiate()
    layer.weight("w", [2], dims=("a",), init=Zeros.Params())
    layer.child("inner", Empty.Params())
    for declare in (
        lambda: layer.weight("w", [2], dims=("a",), init=Zeros.Params()),
        lambda: layer.weight("inner", [2], dims=("a",), init=Zeros.Params()),
        lambda: layer.child("w", Empty.Params()),
        lambda: layer.child_list("inner", [Empty.Params()]),
    ):
        with pytest.raises(ValueError, match="is taken"):
            declare()
    layer.size = 3
    for name, kind in {
        "params": "an attribute",
        "size": "an attribute",
        "walk": "a method",
    }.items():
        expected = f"child '{name}' has the name of {kind} of Empty: rename it"
        with pytest.raises(ValueError, match=expected):
            layer.child(name, Empty.Params())


def test_children_must_be_layers_and_stacks_must_not_be_empty() -> None:
    class Other(Configurable):
        pass

    layer = Empty.Params().instantiate()
    with pytest.raises(TypeError, match="Other is not a Layer"):
        layer.child("other", Other.Params())
    with pytest.raises(ValueError, match="0 layers"):
        layer.child_stack("stack", Empty.Params(), 0)


def test_paths_and_patterns_of_lists_and_stacks() -> None:
    unrolled = Outer.Params().instantiate()
    layer = unrolled.pairs[1].inner[2]
    assert unrolled.path == ""
    assert layer.path == "pairs/1/inner/2"
    assert layer.pattern == "pairs/*/inner/*"
    repeated = Outer.Params(stacked=True).instantiate()
    assert repeated.pairs.inner.path == "pairs/inner"
    assert repeated.pairs.inner.pattern == layer.pattern  # so that dropout draws the same
    assert len(list(unrolled.walk())) == 1 + 2 * (1 + 3 + 1)


def test_specs_of_a_stack_lead_with_the_layers() -> None:
    specs = Outer.Params(stacked=True).instantiate().specs()
    assert list(specs) == ["pairs/b", "pairs/inner/w", "pairs/inner/seen"]
    w = specs["pairs/inner/w"]
    assert w.shape == (2, 3, 2, 5)
    assert w.dims == ("layers", "layers", "embed", "mlp")
    assert (w.stacked, w.template) == (2, "pairs/*/inner/*/w")
    assert tuple(w.fans) == (2, 5)  # those of one layer
    assert not specs["pairs/inner/seen"].trainable


def test_theta_mirrors_the_tree_with_a_place_for_every_child() -> None:
    layer = Pair.Params().instantiate()
    theta = layer.init()
    assert set(theta) == {"b", "inner", "empty"}
    assert theta.empty == {}
    assert set(theta.inner) == {"0", "1", "2"}
    flat = theta_lib.flatten(theta)
    assert {k: tuple(v.shape) for k, v in flat.items()} == {
        k: s.shape for k, s in layer.specs().items()
    }
    assert layer.theta(flat) == theta


def test_first_values_depend_on_seed_and_path_only() -> None:
    layer = Pair.Params().instantiate()
    first, again, other = layer.init(seed=3), layer.init(seed=3), layer.init(seed=4)
    np.testing.assert_array_equal(first.inner["0"].w, again.inner["0"].w)
    assert np.abs(first.inner["0"].w - other.inner["0"].w).min() > 0
    assert np.abs(first.inner["0"].w - first.inner["1"].w).min() > 0


def test_a_stack_starts_as_its_unrolled_layers() -> None:
    stacked = Outer.Params(stacked=True).instantiate().init(seed=7)
    unrolled = Outer.Params().instantiate().init(seed=7)
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(
                stacked.pairs.inner.w[i, j], unrolled.pairs[str(i)].inner[str(j)].w
            )


@pytest.mark.parametrize(
    "slices",
    [
        (slice(0, 2), slice(1, 3), slice(0, 2), slice(0, 5)),
        (slice(1, 2), slice(0, 1), slice(1, 2), slice(2, 4)),
        (slice(None), slice(2, 3), slice(None), slice(None)),
    ],
)
def test_a_part_of_a_stacked_weight_is_drawn_as_the_whole(slices: tuple[slice, ...]) -> None:
    spec = Outer.Params(stacked=True).instantiate().specs()["pairs/inner/w"]
    np.testing.assert_array_equal(
        spec.initial_value(5, slices), spec.initial_value(5)[slices], strict=True
    )


def test_scalar_weight_has_first_values_also_by_slices() -> None:
    layer = Empty.Params().instantiate()
    layer.weight("gain", [], dims=(), init=Normal.Params())
    spec = layer.specs()["gain"]
    assert spec.initial_value(1).shape == ()
    assert spec.initial_value(1, ()) == spec.initial_value(1)


def test_fans_can_be_given() -> None:
    layer = Empty.Params().instantiate()
    layer.weight(
        "w", [2, 4, 3], dims=("a", None, "b"), init=GlorotUniform.Params(), fan_in=2, fan_out=3
    )
    assert tuple(layer.specs()["w"].fans) == (2, 3)
    layer.weight("v", [2, 4, 3], dims=("a", None, "b"), init=GlorotUniform.Params())
    assert tuple(layer.specs()["v"].fans) == (8, 3)


def test_new_statistics_reach_the_layer_that_collected_them() -> None:
    layer = Pair.Params().instantiate()
    theta = layer.init()
    ctx = StepContext(mode="train")
    x = tf.constant([[1.0, 2.0], [3.0, 6.0], [5.0, 1.0]])
    for i in (0, 2):
        layer.inner[i].fprop(theta.inner[str(i)], x * (i + 1), ctx)
    means = {name: v / w for name, (v, w) in ctx.collected.sums["statistic"].items()}
    assert set(means) == {"inner/0/seen", "inner/2/seen"}
    new = layer.new_statistics(theta_lib.flatten(theta), means)
    assert set(new) == {"inner/0/seen", "inner/2/seen"}
    np.testing.assert_allclose(new["inner/0/seen"], [3.0, 3.0])
    np.testing.assert_allclose(new["inner/2/seen"], [9.0, 9.0])
    assert layer.new_statistics(theta_lib.flatten(theta), {}) == {}


def test_new_statistics_of_the_root_itself() -> None:
    layer = Scale.Params(dim=2).instantiate()
    theta, ctx = layer.init(), StepContext(mode="train")
    layer.fprop(theta, tf.constant([[1.0, 2.0], [3.0, 6.0]]), ctx)
    means = {name: v / w for name, (v, w) in ctx.collected.sums["statistic"].items()}
    new = layer.new_statistics(theta_lib.flatten(theta), means)
    np.testing.assert_allclose(new["seen"], [2.0, 4.0])


def test_a_layer_without_its_own_method_says_so() -> None:
    layer = Empty.Params().instantiate()
    with pytest.raises(NotImplementedError, match=r"Empty has no fprop\(\)"):
        layer.fprop(layer.init(), tf.ones([2]), StepContext())
    with pytest.raises(NotImplementedError, match=r"Empty collects statistics \['mean'\]"):
        layer.updated_statistics(layer.init(), {"mean": tf.ones([2])})


class OfTorch(Layer):
    def forward(self, x: tf.Tensor) -> tf.Tensor:
        return x


class OfKeras(Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x


class OfFlax(Layer):
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return x


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (OfTorch, r"OfTorch has no fprop\(\), but forward\(\), the method of PyTorch: define fpr"),
        (OfKeras, r"OfKeras has no fprop\(\), but call\(\), the method of Keras: define fprop\("),
        (OfFlax, r"OfFlax has no fprop\(\), but __call__\(\), the method of Flax and Haiku: def"),
    ],
)
def test_a_method_of_another_framework_is_answered_with_fprop(
    cls: type[Layer], expected: str
) -> None:
    layer = cls.Params().instantiate()
    with pytest.raises(NotImplementedError, match=expected):
        layer.fprop(layer.init(), tf.ones([2]), StepContext())
    with pytest.raises(
        ForeignVariableError, match=f"^{expected}.*The model has no weights: declare"
    ):
        foreign_variables.check(layer)


class OfLayers(Layer):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("one", Scale.Params(dim=2))
        self.child_list("more", [Scale.Params(dim=2)])


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        (lambda layer: layer, r"OfLayers is not called: .* write layer.fprop\(theta, x, ctx\)$"),
        (lambda layer: layer.one, r"write self.one.fprop\(theta.one, x, ctx\)$"),
        (lambda layer: layer.more[0], r"write self.more\[0\].fprop\(theta.more\[0\], x, ctx\)$"),
    ],
)
def test_a_layer_that_is_called_is_answered_with_fprop(called: Any, expected: str) -> None:
    with pytest.raises(TypeError, match=expected):
        called(OfLayers.Params().instantiate())(tf.ones([2]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("register_buffer", r"declare a weight .* init=…, trainable=False\)$"),
        ("add_weight", r"self\.weight\(name, shape"),
        ("add_loss", r"ctx\.collect_loss\(name, value\) in fprop"),
        ("add_metric", r"ctx\.collect_metric\(name, sum, weight\) in fprop$"),
        ("requires_grad_", r"learner\.frozen"),
        ("parameters", r"are an argument of fprop, theta"),
        ("train", r"ctx.is_training$"),
        ("cuda", r"an execution places the weights"),
    ],
)
def test_attributes_of_layers_of_other_frameworks_are_answered(name: str, expected: str) -> None:
    layer = OfLayers.Params().instantiate()
    with pytest.raises(AttributeError, match=rf"^'OfLayers' object has no .*{name}': .*{expected}"):
        getattr(layer, name)


class WithoutParams(Layer):
    def __init__(self) -> None:
        super().__init__(Layer.Params())


class WithSizes(Layer):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__(Layer.Params())


@pytest.mark.parametrize("cls", [WithoutParams, WithSizes])
def test_an_init_without_params_is_answered_with_the_one_to_write(cls: type[Layer]) -> None:
    name = cls.__name__
    expected = (
        rf"^{name}.__init__\(self.*\(.*layer_test.py:\d+\) is called with Params: write "
        rf"__init__\(self, params\), begin .* as fields of {name}.Params$"
    )
    with pytest.raises(TypeError, match=expected):
        cls.Params().instantiate()


def test_a_type_error_inside_an_init_is_left_as_it_is() -> None:
    class Wrong(Layer):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match=r"^object of type 'int' has no len\(\)$"):
        Wrong.Params().instantiate()


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        (4, ("a",), r"shape is 4, but must be a list, as in \[3, 5\]$"),
        (None, ("a",), r"shape is None, but must be a list"),
        ([4, 3], "ab", r"""dims is 'ab', but must be a list, as in \("embed", "mlp"\)$"""),
        ([4, None], ("a", "b"), r"shape \[4, None\] has the size None, but a size must be a whole"),
        ([4, 2.5], ("a", "b"), r"shape \[4, 2.5\] has the size 2.5, but a size must be a whole"),
        (
            [REQUIRED],
            ("a",),
            r"shape \[REQUIRED\] has the size REQUIRED, but a size must be a whole number",
        ),
    ],
)
def test_a_weight_of_an_impossible_shape_is_named(shape: Any, dims: Any, expected: str) -> None:
    class Odd(Layer):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.weight("w", shape, dims=dims, init=Zeros.Params())

    with pytest.raises(TypeError, match=rf"^Odd.weight\('w'\): {expected}"):
        Odd.Params().instantiate()


def test_sizes_may_be_whole_numbers_of_other_types() -> None:
    class Sized(Layer):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            sizes = (np.int64(2), 3.0, *np.array([4.0]), *tf.TensorShape([5]))
            self.weight("w", sizes, dims=(None,) * 4, init=Zeros.Params())

            self.weight("v", tf.TensorShape([5, 2]), dims=("a", "b"), init=Zeros.Params())

    specs = Sized.Params().instantiate().specs()
    assert specs["w"].shape == (2, 3, 4, 5) and specs["v"].shape == (5, 2)


def test_a_weight_that_is_read_from_the_layer_is_in_theta() -> None:
    layer = Scale.Params(dim=2).instantiate()
    with pytest.raises(AttributeError, match=r"^Scale.seen is a weight: read it as theta.seen, of"):
        getattr(layer, "seen")  # noqa: B009
    assert not hasattr(layer, "nothing")


def test_a_layer_with_fprop_may_have_such_methods() -> None:
    class Own(OfTorch):
        def fprop(self, theta: Any, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
            return self.forward(x)

    foreign_variables.check(Own.Params().instantiate())
    foreign_variables.check(Empty.Params().instantiate())


def test_an_attribute_that_was_renamed_is_refused_with_its_new_name() -> None:
    with pytest.raises(TypeError, match=r"Old.mixes_examples was renamed to couples_examples"):

        class Old(Layer):
            mixes_examples = True

    class Later(Layer):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            self.mixes_examples = True

    with pytest.raises(
        AttributeError, match=r"Later: self.mixes_examples was renamed to self.couples"
    ):
        Later.Params().instantiate()


@pytest.mark.parametrize("name", ["trainable", "requires_grad"])
def test_freezing_a_layer_by_an_attribute_is_refused(name: str) -> None:
    layer = Empty.Params().instantiate()
    with pytest.raises(AttributeError, match=rf"Empty.{name} = False has no effect: .*frozen"):
        setattr(layer, name, False)
