"""Stages read every row of stacked weights once, and mixing layers are refused."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.execution import ExecutionError, Pipelined, SpmdPipelined, StagesOnMesh
from tekso.framework.execution.pipeline.piece_coupling import check_pieces
from tekso.framework.execution.pipeline.schedule import OneFOneB
from tekso.framework.initializers import Constant
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import SGD
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, rows_of_stack
from tekso.framework.schedules import Constant as Schedule
from tekso.framework.task import Task
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear
from tekso.models.layers.stack import RepeatedStack

BATCH = {"x": ((8, 4), "float32")}


class Rows(Task):
    """A repeated stack, of which `times` says how often each row is run."""

    times: tuple[int, ...] = (1, 1, 1)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        layer = Linear.Params(input_dim=4, output_dim=4)
        self.child("stack", RepeatedStack.Params(num_layers=3, layer=layer))

    def pieces(self) -> list[Piece]:
        rows = rows_of_stack("stack", {"stack": self.stack}, 3, self._rows)
        chosen = [rows[i] for n in range(max(self.times)) for i in range(3) if self.times[i] > n]
        return [*chosen, Piece("last", {}, self._last)]

    def _rows(self, first: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, "x": self.stack.fprop(theta.stack, flow["x"], ctx, first=first)}

    def _last(self, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"]), METRICS: {"size": (1.0, 2)}}


class Mixing(Linear):
    """A layer that says that it mixes examples."""

    couples_examples = True


class Mean(Task):
    """Takes the mean over the batch in the middle."""

    def pieces(self) -> list[Piece]:
        def mean(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": tf.reduce_mean(flow["x"], 0, keepdims=True)}

        def last(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"]), METRICS: {}}

        return [Piece("mean", {}, mean), Piece("last", {}, last)]


def plan(task: Task, **params: Any) -> Any:
    execution = Pipelined.Params(num_stages=2, num_micro_batches=2, **params).instantiate()
    return execution.plan(task, BATCH, parts=1, devices=None)


def test_every_row_once_is_cut_between_rows() -> None:
    found = plan(Rows.Params().instantiate(), balance=[2, 2]).stage_plan
    assert found.stages[0].weights["stack/layers/w"] == (0, 2)
    assert found.stages[1].weights["stack/layers/w"] == (2, 3)


def test_loss_of_the_whole_runs_every_row_once() -> None:
    task = Rows.Params().instantiate()
    draw = np.random.default_rng(0).normal
    weights = {path: draw(size=spec.shape).astype("f4") for path, spec in task.specs().items()}
    x = batch = draw(size=(2, 4)).astype("f4")
    for w, b in zip(weights["stack/layers/w"], weights["stack/layers/b"], strict=True):
        x = x @ w + b
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    loss = task.loss(theta, {"x": tf.constant(batch)}, StepContext(mode="train", num_examples=2))
    np.testing.assert_allclose(loss.loss_sum, x.sum(), rtol=1e-5)


def test_loss_of_the_whole_is_refused_if_rows_lie_apart() -> None:
    class Apart(Rows):
        def pieces(self) -> list[Piece]:
            first, *rest = super().pieces()
            return [first, Piece("between", {}, lambda theta, flow, ctx: flow), *rest]

    task = Apart.Params().instantiate()
    theta = task.theta({path: tf.zeros(spec.shape) for path, spec in task.specs().items()})
    ctx = StepContext(mode="train", num_examples=2)
    with pytest.raises(ValueError, match=r"stack/0 reads rows 0 to 0 of .* stack of 3, but"):
        task.loss(theta, {"x": tf.ones([2, 4])}, ctx)


def test_a_stack_whose_rows_are_read_twice_is_shared_by_the_stages() -> None:
    task = Rows.Params().instantiate()
    task.times = (2, 1, 1)
    found = plan(task, balance=[3, 2]).stage_plan
    assert [stage.weights["stack/layers/w"] for stage in found.stages] == [None, None]
    assert found.is_shared("stack/layers/w")


def test_rows_that_are_never_read_are_refused() -> None:
    task = Rows.Params().instantiate()
    task.times = (1, 1, 0)
    with pytest.raises(ExecutionError, match=r"no piece .* reads the rows \[2\] of .*layers/"):
        plan(task, balance=[1, 2])


def test_what_mixes_examples_is_refused_by_name() -> None:
    with pytest.raises(ExecutionError, match=r"mean outputs 'x' with shape \(1, 4\)"):
        plan(Mean.Params().instantiate())
    task = Rows.Params().instantiate()
    task.child("mixing", Mixing.Params(input_dim=4, output_dim=4))
    with pytest.raises(ExecutionError, match=r"mixing \(Mixing\) couples the examples of a batch"):
        plan(task)


class Tempered(Mixing):
    """Mixes examples, and has a weight that is not learned, but no statistics to move."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("temperature", [], dims=(), init=Constant.Params(value=1.0), trainable=False)


class Centred(Rows):
    """Says nothing of it, and takes the mean of a micro-batch off in its second row."""

    def _rows(self, first: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
        x = super()._rows(first, theta, flow, ctx)["x"]
        return {**flow, "x": x - tf.reduce_mean(x, 0, keepdims=True)}


def test_a_weight_that_is_not_learned_is_no_excuse_for_mixing() -> None:
    task = Rows.Params().instantiate()
    task.child("mixing", Tempered.Params(input_dim=4, output_dim=4))
    with pytest.raises(ExecutionError, match=r"mixing \(Tempered\) couples the examples"):
        plan(task)


class Counted(Task):
    """Two pieces; the last one reads the shape of x through a copy of the flow."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child("linear", Linear.Params(input_dim=4, output_dim=2))

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.cast(tf.shape(batch["x"])[0], tf.float32)

    def pieces(self) -> list[Piece]:
        def first(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return {**flow, "y": self.linear.fprop(theta.linear, flow["x"], ctx)}

        def last(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            total = tf.reduce_sum(flow["y"])
            return {**flow, LOSS_SUM: total, METRICS: {"y": (total, self.loss_weight(flow))}}

        return [Piece("first", {"linear": self.linear}, first), Piece("last", {}, last)]


def test_a_value_of_which_a_copy_of_the_flow_has_the_shape_is_passed_on() -> None:
    task = Counted.Params().instantiate()
    reads = [trace.reads for trace in trace_all(task.pieces(), task.specs(), BATCH)]
    assert reads == [{"x"}, {"x", "y"}]


def test_a_name_that_no_piece_writes_is_an_error_of_the_piece() -> None:
    def missing(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        return {**flow, "y": flow["z"]}

    with pytest.raises(KeyError, match="z"):
        trace_all([Piece("missing", {}, missing)], {}, BATCH)


def test_coupling_that_no_layer_declares_is_found_on_numbers() -> None:
    def check(task: Task) -> None:
        pieces, specs = task.pieces(), task.specs()
        check_pieces(pieces, trace_all(pieces, specs, BATCH), specs, BATCH)

    check(Rows.Params().instantiate())
    with pytest.raises(ExecutionError, match=r"stack/0 couples the examples of a batch"):
        check(Centred.Params().instantiate())


@pytest.mark.parametrize("on_mesh", [False, True], ids=["devices", "meshes"])
def test_coupling_that_no_layer_declares_is_refused_before_stages_are_placed(on_mesh: bool) -> None:
    mesh = StagesOnMesh.Params(mesh="data:2", rules="batch:data")
    params = Pipelined.Params(num_stages=2, num_micro_batches=2)
    params.set({"stages_on": mesh, "rematerialize": "all"} if on_mesh else {})
    names = ["CPU:0", "CPU:0"]
    params.instantiate().plan(Rows.Params().instantiate(), BATCH, parts=1, devices=names)
    with pytest.raises(ExecutionError, match=r"stack/0 couples the examples of a batch"):
        params.instantiate().plan(Centred.Params().instantiate(), BATCH, parts=1, devices=names)


def test_coupling_that_no_layer_declares_is_refused_in_one_program() -> None:
    params = SpmdPipelined.Params(num_stages=3, num_micro_batches=2)
    by = Learner.Params(optimizer=SGD.Params(), schedule=Schedule.Params(value=0.1)).instantiate()
    with pytest.raises(ExecutionError, match=r"stack/0 couples the examples of a batch"):
        params.instantiate().build(Centred.Params().instantiate(), by, seed=0, batch=BATCH)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {},
            r"^3 stages need 3 devices, .* are 2 \(a, b\): .* at most 2, or set --cpu_devices=3$",
        ),
        ({"num_stages": 1, "num_replicas": 3}, r"^3 replicas of 1 stage need 3 .*--cpu_devices=3$"),
        ({"workers": ["a:1", "b:2"]}, r"^3 stages need 3 .*, or add execution\.workers$"),
    ],
    ids=["stages", "replicas", "workers"],
)
def test_too_few_devices_are_reported_with_where_to_get_more(changes: Any, said: str) -> None:
    params = Pipelined.Params(num_stages=3, num_micro_batches=2).set(changes)
    with pytest.raises(ExecutionError, match=said):
        params.instantiate().plan(Rows.Params().instantiate(), BATCH, parts=1, devices=["a", "b"])


def test_pieces_that_differ_only_in_a_number_are_traced_apart() -> None:
    class Numbered(Rows):
        def pieces(self) -> list[Piece]:
            rows = functools.partial(self._numbered, 0), functools.partial(self._numbered, 1)
            first = [Piece(f"part/{i}", {}, run) for i, run in enumerate(rows)]
            stack = Piece("stack", {"stack": self.stack}, functools.partial(self._rows, 0))
            return [*first, stack, Piece("last", {}, self._last)]

        def _numbered(self, i: int, theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "y": flow["x"] + 1.0} if i == 0 else {**flow, "x": flow["y"]}

    stage_plan = plan(Numbered.Params().instantiate(), balance=[1, 3]).stage_plan
    assert [value.name for value in stage_plan.stages[0].inputs] == ["x"]
    assert [value.name for value in stage_plan.stages[1].inputs] == ["y"]


@pytest.mark.parametrize("count", [0, None])
def test_schedule_without_a_stage_is_refused_when_the_pipeline_is_built(count: Any) -> None:
    class Stageless(OneFOneB):
        def num_stages(self, num_devices: int) -> int:
            return count

    with pytest.raises(ExecutionError, match=rf"Stageless\.num_stages\(2\) is {count}, expected"):
        plan(Rows.Params().instantiate(), schedule=Stageless.Params())
