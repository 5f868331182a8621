"""Tests of the operations of a forward pass by part of the model, against formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tekso.framework import ops, registry
from tekso.framework.context import StepContext
from tekso.framework.initializers import Zeros
from tekso.framework.layer import Layer
from tekso.framework.pieces import Piece
from tekso.framework.run import inspection, layer_flops, plan_text, run_plan
from tekso.framework.run.forward_flops import forward_flops
from tekso.framework.signature import Signature
from tekso.framework.task import LossSums, Task
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear


def test_the_forward_pass_is_counted_by_part_of_the_model(tmp_path: Path) -> None:
    tree = registry.get("lm.python_source.Tiny")().tree()
    tree.set({"input.batch_size": 8, "input.length": 8, "task.model.dim": 16})
    layer = {"attention.num_heads": 2, "feed_forward.hidden_dim": 24}
    tree.set({f"task.model.stack.layer.{name}": value for name, value in layer.items()})
    tree.set({"task.model.stack.num_layers": 2})
    plan = run_plan.plan("m", tree, device="cpu", logdir=str(tmp_path / "none"))
    assert [*plan.forward_flops] == [
        "model/embedding",
        "model/stack/layers (sum of 2)",
        "model/final_norm",
        "model/softmax",
        "loss",
    ]
    tokens = 8 * 8
    # Four projections of the attention, its scores and means over all 8 positions, two products of
    # the feed-forward layer. A byte is one of 256 tokens or a few more. Elementwise ops take less.
    products = 2 * tokens * (4 * 16 * 16 + 2 * 8 * 16 + 2 * 16 * 24)
    assert 2 * products < plan.forward_flops["model/stack/layers (sum of 2)"] < 4 * products
    assert 2 * tokens * 16 * 256 < plan.forward_flops["model/softmax"] < 4 * tokens * 16 * 256
    (line,) = [x for x in plan_text.text(plan).split("\n") if "model/stack/layers (sum of 2)" in x]
    assert "FLOP" in line and line.endswith("%")
    assert plan_text.record(plan)["forward_flops"] == plan.forward_flops
    assert plan.step is not None
    assert sum(plan.forward_flops.values()) < plan.step.flops


class Net(Layer):
    """A layer, a list of layers, and layers in a loop, each as wide as its input."""

    class Params(Layer.Params):
        """Params of Net."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        square = Linear.Params(input_dim=6, output_dim=6, use_bias=False)
        self.child("encoder", Other.Params(input_dim=5, output_dim=6, use_bias=False))
        self.child_list("blocks", [square] * 3)
        self.child_stack("deep", square, 4)
        self.child("head", Head.Params())

    def _deep(self, theta: Any, x: Any, own: Any, ctx: StepContext) -> Any:
        return self.deep.fprop(own, x, ctx), None

    def fprop(self, theta: Any, x: Any, ctx: StepContext) -> Any:
        x = self.encoder.fprop(theta.encoder, x, ctx)
        for block, own in zip(self.blocks, theta.blocks.values(), strict=True):
            x = x + block.fprop(own, x, ctx)
        x, _ = ops.scan(ctx, self._deep, Theta(), x, theta.deep)
        return self.head.scores(theta.head, x, ctx)


class Other(Linear):
    """Its `fprop` has another name for the weights."""

    class Params(Linear.Params):
        """Params of Other."""

    def fprop(self, weights: Any, x: Any, ctx: StepContext) -> Any:  # type: ignore[override]
        del ctx
        return x @ weights.w


class Head(Layer):
    """Computes in a method that is not `fprop`."""

    class Params(Layer.Params):
        """Params of Head."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [6, 2], dims=("embed", None), init=Zeros.Params())

    def scores(self, theta: Any, x: Any, ctx: StepContext) -> Any:
        del ctx
        return x @ theta.w


class Own(Task):
    """A task without pieces."""

    class Params(Task.Params):
        """Params of Own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("model", Net.Params())

    def loss_weight(self, batch: Any) -> Any:
        return tf.reduce_sum(batch["weights"])

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        y = self.model.fprop(theta.model, batch["x"], ctx)
        return LossSums(tf.reduce_sum(y * batch["weights"][:, None]), {})


def test_the_parts_of_an_own_task_are_the_layers_of_its_model() -> None:
    batch: Signature = {"x": ((7, 5), "float32"), "weights": ((7,), "float32")}
    task = Own.Params().instantiate()
    assert forward_flops(task, batch) == {
        "model/encoder": 2 * 7 * 5 * 6,
        "model/blocks (sum of 3)": 3 * 2 * 7 * 6 * 6,
        "model": 3 * 7 * 6,  # three sums
        "model/deep": 4 * 2 * 7 * 6 * 6,
        "model/head": 2 * 7 * 6 * 2,
        "loss": 2 * 7 * 2,  # products and their sum
    }
    assert "fprop" not in vars(task.model)  # the task is as before


class Towers(Own):
    """Layers of the task itself, one of which has parts."""

    class Params(Own.Params):
        """Params of Towers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("scale", Linear.Params(input_dim=5, output_dim=5, use_bias=False))

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> LossSums:
        x = self.scale.fprop(theta.scale, batch["x"], ctx)
        return super().loss(theta, {**batch, "x": x}, ctx)


def test_a_model_with_a_layer_beside_it_is_one_part() -> None:
    batch: Signature = {"x": ((7, 5), "float32"), "weights": ((7,), "float32")}
    found = forward_flops(Towers.Params().instantiate(), batch)
    assert [*found] == ["scale", "model", "loss"]
    assert found["scale"] == 2 * 7 * 5 * 5
    assert found["model"] == 2 * 7 * 6 * (5 + 7 * 6 + 2) + 3 * 7 * 6


def test_layers_of_a_short_list_are_parts_of_their_own_and_of_a_long_one_are_one() -> None:
    short = {"model/layers/0": 3.0, "model/layers/1/norm": 1.0, "model/layers/1": 2.0, "loss": 1.0}
    assert layer_flops.by_part(short) == {"model/layers/0": 3, "model/layers/1": 3, "loss": 1}
    long = {f"model/layers/{i}/norm": 2.0 for i in range(9)}
    assert layer_flops.by_part(long) == {"model/layers (sum of 9)": 18}
    assert layer_flops.by_part({"loss": 4.0}) == {"loss": 4}


def test_pieces_follow_the_same_rule() -> None:
    tree = registry.get("image.digits.Mlp")().tree().set({"task.model.hidden_dims": [64, 32]})
    found = forward_flops(inspection.task_of(tree), inspection.batch_of(tree))
    assert [*found] == ["model/layers/0", "model/layers/1", "model/layers/2", "loss"]
    assert found["model/layers/0"] > found["model/layers/1"] > found["model/layers/2"]
    tree.set({"task.model.hidden_dims": [32] * 8})
    found = forward_flops(inspection.task_of(tree), inspection.batch_of(tree))
    assert [*found] == ["model/layers (sum of 9)", "loss"]


@pytest.mark.parametrize("key", ["image.digits.Cnn", "lm.python_source.TinyLstm"])
def test_layers_have_the_operations_of_pieces(key: str) -> None:
    tree = registry.get(key)().tree()
    task, batch = inspection.task_of(tree), inspection.batch_of(tree)
    by_layer = layer_flops.layer_flops(task, batch)
    assert sum(by_layer.values()) == sum(forward_flops(task, batch).values())


def test_a_task_whose_pieces_cannot_be_traced_has_no_parts() -> None:
    class Coupled(Task):
        """A value of its only piece does not count examples, so it cannot be part of a pipeline."""

        class Params(Task.Params):
            """Params of Coupled."""

        def __init__(self, params: Coupled.Params) -> None:
            super().__init__(params)
            self.weight("w", [3], dims=("embed",), init=Zeros.Params())

        def pieces(self) -> list[Piece]:
            return [Piece("all", {"": self}, lambda theta, flow, ctx: {**flow, "sum": theta.w})]

    batch: Signature = {"x": ((4, 3), "float32")}
    assert forward_flops(Coupled.Params().instantiate(), batch) == {}
