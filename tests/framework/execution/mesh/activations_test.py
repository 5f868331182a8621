"""Which activations layers constrain, and which rules are rejected for them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution import MeshSharded
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.mesh import activations
from tekso.framework.execution.mesh.layouts import LayoutError, MeshLayout
from tekso.framework.initializers import Ones
from tekso.framework.layer import Layer
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.layers.stack import RepeatedStack

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_models import BATCH, DIM, LENGTH, MLP, MODELS, SIDE, VOCAB, batch


def layout(model: str, mesh: str, rules: str) -> MeshLayout:
    execution = MeshSharded.Params(mesh=mesh, rules=rules).instantiate()
    task = MODELS[model]().instantiate()
    return execution.layout(task, signature_of(batch(model, 0)), num_devices=8)


class Mix(Layer):
    """y = x + x w, with a product that sums over two dims of the weight, as attention has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [2, 3, 2, 3], dims=("heads", None, None, None), init=Ones.Params())

    def fprop(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return x + tf.einsum("bhd,hdkc->bkc", x, theta.w)


class Mixed(Task):
    """A repeated stack of such products."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("stack", RepeatedStack.Params(num_layers=2, layer=Mix.Params()))

    def loss(self, theta: Theta, batch: Any, ctx: StepContext) -> LossSums:
        y = self.stack.fprop(theta.stack, ctx.constrain(batch["x"], ("batch", "heads", None)), ctx)
        return LossSums(tf.reduce_sum(y), {})


def test_a_custom_layer_of_a_repeated_stack_may_sum_over_two_dims() -> None:
    found = activations.of_task(Mixed.Params().instantiate(), {"x": ((4, 2, 3), "float32")})
    assert found["activation batch/heads/-"] == (("batch", "heads", None), (4, 2, 3))


LAYER = """\
import tensorflow as tf
from tekso.framework import workarounds
from tekso.framework.task import LossSums, Task

class Backwards(Task):
    def loss(self, theta, batch, ctx):
        x = tf.transpose(batch["x"], [1, 0, 2])  # time-major
        y = workarounds.reverse(ctx, x, 2)
        return LossSums(tf.reduce_sum(y), {})

class Named(Task):
    def loss(self, theta, batch, ctx):
        x = tf.transpose(batch["x"], [1, 0, 2])
        y = workarounds.reverse(ctx, x, 2, dims=(None, "batch", None))
        return LossSums(tf.reduce_sum(workarounds.reverse(ctx, y, 0)), {})
"""


def test_the_line_of_a_custom_layer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_backwards.py").write_text(LAYER)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("my_backwards")
    task, named = (kind.Params().instantiate() for kind in (module.Backwards, module.Named))
    execution = MeshSharded.Params(mesh="data:2", rules="batch:data").instantiate()
    place = re.escape(f"({tmp_path}/my_backwards.py:8: y = workarounds.reverse(ctx, x, 2))")
    with pytest.raises(LayoutError, match=rf"activation batch/-/- {place} \[batch=15, 4, 3\]"):
        execution.layout(task, {"x": ((4, 15, 3), "float32")}, num_devices=2)
    found = activations.of_task(named, {"x": ((4, 15, 3), "float32")})
    assert (("-", "batch", "-"), (15, 4, 3)) in [
        (tuple(dim or "-" for dim in dims), shape) for dims, shape in found.values()
    ]
    execution.layout(named, {"x": ((4, 15, 3), "float32")}, num_devices=2)


def test_activations_are_named_by_their_dims() -> None:
    found = activations.of_task(MODELS["dense"]().instantiate(), signature_of(batch("dense", 0)))
    assert found["activation batch/length/mlp"] == (
        ("batch", "length", "mlp"), (BATCH, LENGTH, MLP)
    )  # fmt: skip
    assert found["activation batch/-/vocab"] == (("batch", None, "vocab"), (BATCH, LENGTH, VOCAB))
    assert found["activation batch/length/embed"][1] == (BATCH, LENGTH, DIM)
    images = activations.of_task(MODELS["images"]().instantiate(), signature_of(batch("images", 0)))
    name = "activation batch/height/width/channels"
    assert images[name][1] == (BATCH, SIDE, SIDE, 3)
    assert images[f"{name} (2)"][1] == (BATCH, SIDE, SIDE, 8)


@pytest.mark.parametrize(
    ("model", "mesh", "rules", "tensor"),
    [
        ("dense", "data:2", "batch:data;mlp:data", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("gated", "data:2", "batch:data;mlp:data", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("dense", "m:2", "length:m;mlp:m", "batch/length/mlp [batch=8, length=8, mlp=32]"),
        ("dense", "data:2", "batch:data;vocab:data", "batch/-/vocab [batch=8, 8, vocab=32]"),
        ("untied", "data:2", "batch:data;vocab:data", "batch/-/vocab [batch=8, 8, vocab=32]"),
        ("images", "a:3", "height:a", "[batch=8, height=16, width=16, channels=3]"),
        (
            "images",
            "a:2;b:3",
            "height:a;width:b",
            "width of 16 does not divide evenly over the 3 devices",
        ),
    ],
)
def test_rules_that_no_activation_can_follow_are_refused(
    model: str, mesh: str, rules: str, tensor: str
) -> None:
    with pytest.raises(LayoutError) as caught:
        layout(model, mesh, rules)
    assert tensor in str(caught.value)


@pytest.mark.parametrize(
    ("model", "mesh", "rules"),
    [
        ("dense", "m:2", "length:m;vocab:m"),
        ("dense", "a:2;b:2", "batch:a;length:b;vocab:b"),
        ("images", "a:4", "height:a"),
    ],
)
def test_rules_that_look_as_if_they_clashed_are_legal(model: str, mesh: str, rules: str) -> None:
    assert str(layout(model, mesh, rules).rules) == rules


@pytest.mark.parametrize("model", ["dense", "gated", "translation"])
def test_the_length_of_keys_is_no_dim(model: str) -> None:
    with pytest.raises(LayoutError, match="no tensor of the model has a dim memory_length"):
        layout(model, "a:2", "memory_length:a")
