"""The time of a step of a pipeline on this machine, from times of ops and of calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry
from tekso.framework.context import StepContext
from tekso.framework.costs import this_machine
from tekso.framework.costs.piece_traces import trace_all
from tekso.framework.costs.this_machine import MachineSpeed
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, of_layers
from tekso.framework.planning import pipeline_probes
from tekso.framework.planning.pass_times import PassSeconds
from tekso.framework.planning.pipeline_time import PipelineStarts, pipeline_time
from tekso.framework.planning.saved_bytes import saved_bytes
from tekso.framework.planning.stage_figures import PipelineFigures
from tekso.framework.planning.step_time import StepTime
from tekso.framework.run import pipeline_plan
from tekso.framework.theta import Theta
from tekso.models.layers.linear import Linear

SPEED = this_machine.only(op_s=1.0)
"""Only the start of an op takes time: one second."""
NONE = PipelineStarts(0.0, 0.0, 0.0, 0.0, 0.0)
M = 4


def mlp(machine: MachineSpeed | None = None, **execution: Any) -> PipelineFigures:
    tree = registry.get("image.digits.Mlp")().tree()
    tree.execution = Pipelined.Params(num_stages=2, num_micro_batches=M, **execution)
    return pipeline_plan.figures(tree, machine=machine)


def with_passes(figures: PipelineFigures, *seconds: PassSeconds) -> PipelineFigures:
    stages = tuple(
        dataclasses.replace(stage, seconds=own)
        for stage, own in zip(figures.stages, seconds, strict=True)
    )
    return dataclasses.replace(figures, stages=stages)


def time(
    figures: PipelineFigures, starts: PipelineStarts = NONE, *, cores: int = 2, update: float = 0.0
) -> StepTime:
    return pipeline_time(figures, starts, SPEED, update_s=update, cores=cores)


def test_stages_run_side_by_side_if_there_are_cores() -> None:
    equal = PassSeconds(1.0, 1.0, 2.0)
    found = with_passes(mlp(schedule="gpipe"), equal, equal)
    assert time(found).seconds == pytest.approx((M + 1) * 4.0)  # GPipe's bubble
    assert time(found).core_seconds == pytest.approx(2 * M * 4.0)
    assert time(found, cores=1).seconds == pytest.approx(2 * M * 4.0)
    updated = time(found, update=6.0)
    assert updated.core_seconds == pytest.approx(2 * M * 4.0 + 6.0)
    sizes = [stage.weight_bytes for stage in found.stages]
    share = max(sizes) / sum(sizes)
    assert 0.5 < share < 1 and updated.seconds == pytest.approx((M + 1) * 4.0 + 6.0 * share)
    again = with_passes(mlp(schedule="gpipe", rematerialize="all"), equal, equal)
    # The last stage has no outputs, so it computes its forward pass once.
    assert time(again).core_seconds == pytest.approx(M * (5.0 + 4.0))


def test_gradients_of_weights_fill_the_bubble_of_zero_bubble_schedules() -> None:
    found = with_passes(mlp(schedule="zero_bubble_h1"), *[PassSeconds(1.0, 1.0, 2.0)] * 2)
    other = with_passes(mlp(schedule="zero_bubble_h1"), *[PassSeconds(1.0, 2.0, 1.0)] * 2)
    assert time(found).core_seconds == time(other).core_seconds == pytest.approx(2 * M * 4.0)
    # The last stage waits for one forward pass, and then the first for one gradient of inputs.
    assert time(found).seconds == pytest.approx(M * 4.0 + 1.0)
    assert time(other).seconds == pytest.approx(M * 4.0 + 2.0)


def test_calls_run_one_after_the_other() -> None:
    nothing = with_passes(mlp(), PassSeconds(0.0, 0.0, 0.0), PassSeconds(0.0, 0.0, 0.0))
    starts = PipelineStarts(step_s=0.5, stage_s=8.0, weight_s=100.0, action_s=1.0, argument_s=10.0)
    weights = [len(stage.stage.weights) for stage in nothing.stages]
    fixed = 0.5 + 2 * 8.0 + 100.0 * sum(weights)
    calls = 2 * M * (2 * 1.0 + 10.0 * sum(weights))  # forward and backward
    found = time(nothing, starts)
    assert found.seconds == pytest.approx(fixed + calls)
    assert found.core_seconds == pytest.approx(fixed + calls)
    assert found.start_seconds == pytest.approx(fixed + calls)


def test_passes_have_the_ops_of_the_whole_piece() -> None:
    found = [stage.seconds for stage in mlp(SPEED).stages]
    assert all(own is not None and own.forward > 2 and own.weights > 2 for own in found)
    first, last = found
    assert first is not None and first.inputs == 0.0, "the batch gets no gradient"
    assert last is not None and last.inputs > 0.0


class Equal(Layer):
    """Two equal layers, of which the first reads the batch, and a sum."""

    class Params(Layer.Params):
        """Params of Equal."""

        layer: Linear.Params = param("A layer.", default=Linear.Params(output_dim=4, input_dim=4))

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.child_list("layers", [self.params.layer] * 2)

    def pieces(self) -> list[Piece]:
        def run(i: int, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return {**flow, "x": self.layers[i].fprop(theta.layers[i], flow["x"], ctx)}

        def last(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            return {**flow, LOSS_SUM: tf.reduce_sum(flow["x"]), METRICS: {}}

        return [*of_layers("layers", self.layers, run), Piece("sum", {}, last)]


def test_equal_pieces_have_gradients_of_inputs_except_of_the_batch() -> None:
    model = Equal.Params().instantiate()
    pieces, specs, batch = model.pieces(), model.specs(), {"x": ((3, 4), np.dtype(np.float32))}
    traces = trace_all(pieces, specs, batch)
    assert traces[0] is traces[1]
    first, second, _ = saved_bytes(pieces, traces, specs, set(specs), batch, machine=SPEED)
    assert first.seconds is not None and first.seconds.inputs == 0.0
    assert second.seconds is not None and second.seconds.inputs > 0.0


def test_figures_without_a_machine_have_no_time() -> None:
    with pytest.raises(ValueError, match="without a machine"):
        time(mlp())


def test_the_probes_separate_steps_stages_weights_and_actions() -> None:
    starts = {"step_s": 5.0, "stage_s": 3.0, "weight_s": 2.0, "action_s": 0.5, "argument_s": 0.25}

    def step(stages: int, micro_batches: int, weights: int) -> float:
        action = 0.5 + 0.25 * weights
        return 5.0 + stages * (3.0 + weights * 2.0 + 2 * micro_batches * action)

    times = {shape: step(*shape) for shape in pipeline_probes._SHAPES}
    assert pipeline_probes.starts_of(times) == pytest.approx(starts)
