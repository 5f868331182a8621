"""The plan of a step of a pipeline: handovers and exchanges by hand, and this machine."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from planned_runs import BFLOAT16, planned, speed_of, tree
from traced_pieces import traced_once

from tekso.framework import execution, registry
from tekso.framework.costs import device_types, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.this_machine import ThisMachine
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.planning.pipeline_time import PipelineStarts
from tekso.framework.run import (
    pipeline_exchange,
    pipeline_plan,
    pipelined_step,
    plan_text,
    run_plan,
)

__all__ = ["traced_once"]


def test_a_table_in_a_problem_keeps_its_lines(tmp_path: Path) -> None:
    found = tree()
    found.execution = execution.Pipelined.Params(num_stages=50)
    lines = plan_text.text(planned(tmp_path, found)).split("\n")
    (first,) = [i for i, line in enumerate(lines) if line.startswith("problem: a pipeline of 50")]
    assert all(line.startswith("    ") for line in lines[first + 1 :])
    assert lines[-1].startswith("    set execution.num_stages to at most ")


def handover_of(found: Any, stages: int, device: DeviceType) -> float:
    """Returns how much longer the link makes the step of a pipeline."""
    found.execution = Pipelined.Params(num_stages=stages, num_micro_batches=4, schedule="gpipe")
    figures = pipeline_plan.figures(found)
    memory = {"weights": 0.0, "slots": 0.0}
    instant = dataclasses.replace(device, link_bytes_per_s=math.inf, link_latency_s=0.0)
    cost_s = figures.cost_seconds(pipelined_step._flops_per_s(device, "float32"))
    slow, fast = (
        pipelined_step._modelled_seconds(figures, one, memory, cost_s=cost_s)
        for one in (device, instant)
    )
    return slow - fast


@pytest.mark.parametrize("stages", [2, 3])
def test_a_pipeline_waits_for_the_handovers_that_fill_and_drain_it(stages: int) -> None:
    found = tree(**{"task.model.stack.num_layers": 4})
    device = device_types.find("v100")
    # Of GPipe, the first micro-batch passes all stages forward and the last one backward: all other
    # handovers are while the devices compute. A stage sends [rows, length, width] floats.
    micro_batch = 2 * found.input.length * found.task.model.dim * 4
    one = micro_batch / device.link_bytes_per_s + device.link_latency_s
    assert handover_of(found, stages, device) == pytest.approx(2 * (stages - 1) * one, rel=1e-6)


def test_replicas_of_a_pipeline_exchange_gradients_and_weights(tmp_path: Path) -> None:
    device = device_types.find("v100")
    found = tree()
    found.execution = Pipelined.Params(num_stages=2, num_micro_batches=2, num_replicas=2)
    figures = pipeline_plan.figures(found)
    largest = max(figures.stages, key=lambda stage: stage.gradient_bytes)
    number = len(largest.stage.weights)  # all are learned, and each is sent by itself
    once = largest.gradient_bytes / device.link_bytes_per_s + number * device.link_latency_s
    assert number > 5
    assert pipeline_exchange.exchange_seconds(figures, device) == pytest.approx(2 * once)
    plan = planned(tmp_path, found, device="v100")
    assert plan.step is not None
    (sent,) = plan_text.record(plan)["step"]["collectives"]
    assert sent == {
        "kind": "send",
        "axis": "replica",
        "count": 2 * number,
        "bytes": 2 * largest.gradient_bytes,
    }
    assert any(note.startswith(f"sends and gets {2 * number} tensors") for note in plan.step.notes)
    found.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    assert pipeline_exchange.exchange_seconds(pipeline_plan.figures(found), device) == 0.0


@pytest.mark.parametrize(("stages", "handovers"), [(2, 1), (3, 2)])
def test_a_stage_sends_its_outputs_and_the_gradients_of_its_inputs(
    stages: int, handovers: int, tmp_path: Path
) -> None:
    found = tree(**{"task.model.stack.num_layers": 4})
    found.execution = Pipelined.Params(num_stages=stages, num_micro_batches=4)
    step = planned(tmp_path, found, device="v100").step
    # Of two stages, one sends activations and the other gradients; the middle of three sends both.
    batch = found.input.batch_size * found.input.length * found.task.model.dim * 4
    assert step is not None and step.sent_bytes == handovers * batch


def test_one_program_of_replicas_reduces_each_weight_in_a_ring() -> None:
    device = device_types.find("v100")
    found = registry.get("lm.python_source.TinySpmdPipeline")().tree()
    found.execution = SpmdPipelined.Params(num_stages=2, num_micro_batches=2, num_replicas=2)
    figures = pipeline_plan.figures(found)
    exchange = pipeline_exchange.exchange(figures)
    assert exchange is not None and (exchange.kind, exchange.axis) == ("all-reduce", "data")
    assert exchange.count == len({path for stage in figures.stages for path in stage.learned})
    # A ring of two sends half of the bytes in each of two hops.
    time = exchange.bytes / device.link_bytes_per_s + 2 * exchange.count * device.link_latency_s
    assert pipeline_exchange.exchange_seconds(figures, device) == pytest.approx(time)


def test_a_pipeline_says_that_it_has_its_own_number_of_devices(tmp_path: Path) -> None:
    found = tree()
    found.execution = execution.Pipelined.Params(num_stages=2, num_micro_batches=4)
    step = planned(tmp_path, found, num_devices=3).step
    assert step is not None and step.devices == 2
    assert step.notes[0] == "has its own number of devices, 2: --devices=3 counts only for --auto"
    alike = planned(tmp_path, found, num_devices=2).step
    assert alike is not None and step.notes[1:] == alike.notes


def test_a_pipeline_on_this_machine_has_the_time_of_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    starts = PipelineStarts(step_s=7.0, stage_s=0.0, weight_s=0.0, action_s=0.0, argument_s=0.0)
    monkeypatch.setattr(pipelined_step, "measured_starts", lambda: starts)
    small = registry.get("image.digits.Mlp")().tree().set({"task.model.hidden_dims": [32]})
    small.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    plan = run_plan.plan("m", small, device="this_machine", logdir=str(tmp_path / "none"))
    step = plan.step
    assert step is not None and step.core_seconds is not None
    assert 7.0 < step.seconds < step.core_seconds < 8.0
    assert "7 s of it to call stages from Python" in step.notes[-2]
    assert "float" not in step.notes[-1]
    small.set(BFLOAT16)
    memory = pipelined_step.pipeline_memory
    monkeypatch.setattr(memory, "with_simulated_memory", lambda base, *_: base)
    other = run_plan.plan("m", small, device="this_machine", logdir=str(tmp_path / "none")).step
    assert other is not None and "in bfloat16 may take much longer" in other.notes[-1]
    assert plan.problems == []
    # Each of the two stages fits into the memory of the machine, but they share it.
    limit = 1.2 * step.total_bytes
    tight = dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory_bytes=limit))
    assert limit < step.bytes_together
    assert not tight.fits(step)
    assert "for the 2 devices that share it" in tight.problems[0]
