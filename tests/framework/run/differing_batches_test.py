"""Pipelines of inputs whose batches differ in their number of examples, whichever is the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry, schedules
from tekso.framework.context import StepContext
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.arrays import Arrays
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.run import assembly, batch_kinds, pipeline_plan, run_plan
from tekso.framework.run.session import Session
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear

EIGHT = {"execution": Pipelined.Params(num_stages=1, num_micro_batches=8)}  # on one device


class Rows(BucketedInput):
    """A batch of 4 rows of 9 numbers is the first; then come batches of 6 rows of 3."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([9] * 4 + [3] * 18, [3, 9], [6, 4])

    def bucket_batch(self, step: int) -> Any:
        return super().bucket_batch([3, 0, 1, 2][step % 4])

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        values = np.random.default_rng(0).normal(size=[22, 9]).astype(np.float32)
        return {"x": values[examples, :bound], "weights": np.ones(len(examples), np.float32)}


class BatchesOfOneSize(BucketedInput):
    """Batches of 6 rows of 3 or 9 numbers; the bucket for 5 numbers has no rows."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([9] * 6 + [3] * 12, [3, 5, 9], [6, 7, 6])

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        count = len(examples)
        return {"x": np.ones([count, bound], np.float32), "weights": np.ones(count, np.float32)}


class RowsOfOneSize(Arrays):
    """Four rows."""

    def load(self, split: str) -> Any:
        return {"x": np.ones([4, 9], np.float32), "weights": np.ones(4, np.float32)}


class Curve(Task):
    """Fits a line to the mean of each row."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("first", Linear.Params(input_dim=1, output_dim=3))
        self.child("last", Linear.Params(input_dim=3, output_dim=1))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.reduce_sum(batch["weights"])

    def pieces(self) -> list[Piece]:
        return [
            Piece("first", {"first": self.first}, self._first),
            Piece("last", {"last": self.last}, self._last),
        ]

    def _first(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        means = tf.reduce_mean(flow["x"], axis=1, keepdims=True)
        return {**flow, "y": self.first.fprop(theta.first, means, ctx)}

    def _last(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        y = self.last.fprop(theta.last, flow["y"], ctx)[:, 0]
        loss_sum = tf.reduce_sum(flow["weights"] * tf.square(y - 1.0))
        return {**flow, LOSS_SUM: loss_sum, METRICS: {}}


class Curves(Experiment):
    """Rows of two lengths."""

    def task(self) -> Task.Params:
        return Curve.Params()

    def input(self) -> Rows.Params:
        return Rows.Params(batch_size=4, order="sequential")

    def learner(self) -> Learner.Params:
        return Learner.Params(
            optimizer=Adam.Params(), schedule=schedules.Constant.Params(value=0.01)
        )

    def run(self) -> Run.Params:
        return Run.Params(steps=4)


def test_a_first_batch_that_the_micro_batches_do_not_divide_is_split_into_fewer() -> None:
    session, alone = Session(Curves, EIGHT), Session(Curves)
    assert [len(session.input.batch(step)["x"]) for step in range(4)] == [4, 6, 6, 6]
    counts = []
    for _ in range(3):
        (found,), (wanted,) = session.train(1), alone.train(1)
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
        program: Any = session.program
        counts.append(program.plan.num_micro_batches)
    assert counts == [4, 6, 6]


def test_a_first_batch_that_is_split_into_fewer_is_a_warning(tmp_path: Path) -> None:
    def warnings(count: int, steps: int) -> list[str]:
        tree = Curves().tree()
        tree.execution = Pipelined.Params(num_stages=1, num_micro_batches=count)
        tree.learner.accumulation_steps = steps
        found = assembly.assemble(tree, assets_dir=str(tmp_path)).warnings
        return [text for text in found if "micro-batch" in text]

    (warning,) = warnings(8, 1)
    assert warning == (
        "8 micro-batches (execution.num_micro_batches) do not divide the first batch of 4 "
        "examples, so it is split into 4 micro-batches, which may be slower and need more memory. "
        "To avoid it, choose batch sizes that are multiples of 8"
    )
    (warning,) = warnings(3, 2)
    assert "3 micro-batches (execution.num_micro_batches) and 2 accumulation steps do" in warning
    assert "split into 2 micro-batches in 2 accumulation steps, which" in warning
    assert "multiples of 6" in warning
    assert warnings(2, 2) == []


def test_buckets_whose_batches_have_one_size_need_micro_batches_that_divide_it() -> None:
    one_size = {"input": BatchesOfOneSize.Params(batch_size=6, order="sequential")}
    with pytest.raises(ExecutionError, match="6 does not divide evenly over 8 micro-batches"):
        Session(Curves, {**EIGHT, **one_size})
    three = Pipelined.Params(num_stages=1, num_micro_batches=3)
    session = Session(Curves, {"execution": three, **one_size})
    assert len({session.input.batch(step)["x"].shape[1] for step in range(3)}) == 2
    session.train(3)
    program: Any = session.program
    assert program.plan.num_micro_batches == 3


def test_whether_the_batches_of_buckets_differ_is_known_from_the_params_if_they_say_so() -> None:
    tree = registry.get("asr.prompts.Ctc")().tree()
    for fill, differ in (("examples", False), ("seconds", True)):
        tree.input.fill = fill
        assert batch_kinds.differ_in_size(tree) == differ
    tree.input = BatchesOfOneSize.Params(batch_size=6)
    assert batch_kinds.differ_in_size(tree), "only the input knows"
    tree.set(EIGHT)
    assert not batch_kinds.differ_in_size(tree, tree.input.instantiate())
    assert batch_kinds.differ_in_size(Curves().tree().set(EIGHT), Curves().input().instantiate())


def test_the_plan_splits_every_kind_of_batch_as_training_does(tmp_path: Path) -> None:
    def planned(found: Any) -> run_plan.RunPlan:
        return run_plan.plan("m", found, logdir=str(tmp_path / "none"), device="cpu")

    tree = Curves().tree().set(EIGHT)
    plan = planned(tree)
    assert plan.problems == [] and plan.step is not None
    assert "2 sizes: 6 × 3 75%" in plan.step.notes[0]
    assert "at most 8 micro-batches" in plan.step.name
    tree.input = RowsOfOneSize.Params(batch_size=4)
    assert "batch_size 4 does not divide evenly over 8 micro-batches" in planned(tree).problem


def test_the_figures_of_stages_on_a_mesh_split_a_batch_as_training_does() -> None:
    on_mesh = StagesOnMesh.Params(mesh="model:1", rules="tensor")
    tree = Curves().tree().set({**EIGHT, "execution.stages_on": on_mesh})
    found = pipeline_plan.figures(tree)
    assert found.on_mesh is not None and found.plan.num_micro_batches == 4


def test_accumulation_steps_become_fewer_and_replicas_do_not() -> None:
    for kind in (Pipelined, SpmdPipelined):
        execution: Any = kind.Params(num_micro_batches=8, num_replicas=2).instantiate()
        with pytest.raises(ExecutionError, match="does not divide evenly over 8 micro-batches"):
            execution.division(12, 5)
        execution.batches_differ = True
        assert execution.division(12, 5) == (3, 2)
        assert execution.division(80, 5) == (5, 8)
        with pytest.raises(ExecutionError, match="choose 1 replica"):
            execution.division(7, 5)
