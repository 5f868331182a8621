"""Tests of the operations of a forward pass by part of the model, against formulas."""

from __future__ import annotations

from pathlib import Path

from tekso.framework import registry
from tekso.framework.initializers import Zeros
from tekso.framework.pieces import Piece
from tekso.framework.run import plan_text, run_plan
from tekso.framework.run.forward_flops import forward_flops
from tekso.framework.signature import Signature
from tekso.framework.task import Task


def test_the_forward_pass_is_counted_by_part_of_the_model(tmp_path: Path) -> None:
    tree = registry.get("lm.python_source.Tiny")().tree()
    tree.set({"input.batch_size": 8, "input.length": 8, "task.model.dim": 16})
    layer = {"attention.num_heads": 2, "feed_forward.hidden_dim": 24}
    tree.set({f"task.model.stack.layer.{name}": value for name, value in layer.items()})
    tree.set({"task.model.stack.num_layers": 2})
    plan = run_plan.plan("m", tree, device="cpu", logdir=str(tmp_path / "none"))
    assert [*plan.forward_flops] == [
        "model/embedding",
        "2 × model/stack/layers",
        "model/final_norm",
        "model/softmax",
        "loss",
    ]
    tokens = 8 * 8
    # Four projections of the attention, its scores and means over all 8 positions, two products of
    # the feed-forward layer. A byte is one of 256 tokens or a few more. Elementwise ops take less.
    products = 2 * tokens * (4 * 16 * 16 + 2 * 8 * 16 + 2 * 16 * 24)
    assert 2 * products < plan.forward_flops["2 × model/stack/layers"] < 4 * products
    assert 2 * tokens * 16 * 256 < plan.forward_flops["model/softmax"] < 4 * tokens * 16 * 256
    (line,) = [x for x in plan_text.text(plan).split("\n") if "2 × model/stack/layers" in x]
    assert "FLOP" in line and line.endswith("%")
    assert plan_text.record(plan)["forward_flops"] == plan.forward_flops
    assert plan.step is not None
    assert sum(plan.forward_flops.values()) < plan.step.flops


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
