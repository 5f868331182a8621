"""The plan of stages on meshes: in a ranking, and as the execution of an experiment."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from traced_pieces import traced_once

from tekso.framework import execution, registry, schedules
from tekso.framework.costs import device_types, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.this_machine import MachineSpeed, ThisMachine
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning import layout_search, mesh_time
from tekso.framework.planning.layout_ranking import layout_text
from tekso.framework.planning.mesh_time import MeshStarts
from tekso.framework.run import (
    execution_search,
    inspection,
    pipelined_step,
    plan_text,
    run_plan,
)
from tekso.framework.run.batch_kinds import ONE_KIND, BatchKind, BatchKinds
from tekso.framework.run.divided_plan import DividedStep
from tekso.framework.run.step_parts import StepParts, StepPlan

__all__ = ["traced_once"]

LENGTH, D = 32, 128


def tree(batch_size: int, layers: int = 2, **fields: Any) -> Any:
    found = registry.get("lm.python_source.Tiny")().tree()
    found.set({"task.model.stack.num_layers": layers, "input.batch_size": batch_size})
    found.set({"input.length": LENGTH})
    if fields:
        execution.import_all()
        found.execution = Pipelined.Params(**fields)
    return found


def on(mesh: str, rules: str, **axes: Any) -> Any:
    return execution.StagesOnMesh.Params(mesh=mesh, rules=rules, **axes)


def parts_of(found: Any, device: DeviceType) -> StepParts:
    learner = schedules.end_with_run(found.learner, found.run.steps).instantiate()
    return StepParts(found, inspection.task_of(found), learner, inspection.batch_of(found), device)


def planned(found: Any, device: DeviceType) -> StepPlan:
    return pipelined_step.pipelined(parts_of(found, device), found, simulates_memory=False)


def without_moves() -> DeviceType:
    """Returns a device for which links and memory take no time."""
    v100 = device_types.find("v100")
    return dataclasses.replace(
        v100, link_bytes_per_s=math.inf, link_latency_s=0.0, memory_bytes_per_s=math.inf
    )


def searched(
    monkeypatch: pytest.MonkeyPatch, found: Any, devices: int
) -> tuple[list[StepPlan], dict[str, str]]:
    """Returns the pipelines over a number of devices, and why others are impossible."""
    monkeypatch.setattr(layout_search, "MAX_TRIED", 200)
    monkeypatch.setattr(execution_search, "_PIPELINES", {"pipelined": Pipelined})
    monkeypatch.setattr(execution_search, "_accumulated", lambda *_: None)
    steps, rejected = execution_search.other_plans(
        parts_of(found, device_types.find("v100")), devices, lambda *_: DividedStep()
    )
    return [step for step in steps if step is not None], rejected


Search = tuple[list[StepPlan], dict[str, str]]


@pytest.fixture(scope="module")
def over_eight() -> Search:
    with pytest.MonkeyPatch.context() as patch:
        return searched(patch, tree(16), 8)


def test_all_products_of_stages_replicas_and_meshes_are_ranked(over_eight: Search) -> None:
    steps, rejected = over_eight
    products = [step.name.split(", ")[1] for step in steps]
    assert products == [
        "2 stages × 4 replicas",
        "2 stages × 2 replicas × 2 devices",
        "2 stages × 1 replica × 4 devices",
        "4 stages × 2 replicas",
        "4 stages × 1 replica × 2 devices",
    ]
    assert [*rejected] == ["pipelined, 8 stages"]
    assert "the task has 6" in rejected["pipelined, 8 stages"]
    assert {step.devices for step in steps} == {8}


def test_a_product_that_no_layout_divides_is_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # 3 divides no dim of the model, and a micro-batch has two rows.
    steps, rejected = searched(monkeypatch, tree(16), 6)
    assert ["3 stages" in step.name or "6 stages" in step.name for step in steps] == [True] * 3
    products = {name: why for name, why in rejected.items() if "on meshes of" in name}
    assert products == {
        "pipelined, 2 stages on meshes of 3 devices": "no layout over 3 devices divides the step",
    }


def test_text_and_json_have_the_ranked_meshes_of_stages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout_search, "MAX_TRIED", 200)
    plan = run_plan.plan(
        "m", tree(16), logdir=str(tmp_path), device="v100", num_devices=4, searches=True
    )
    text = plan_text.text(plan)
    record = json.loads(json.dumps(plan_text.record(plan)))
    assert "not_ranked" not in record
    seconds = [step["seconds"] for step in record["others"]]
    assert len(seconds) == 6 and seconds == sorted(seconds)
    (one,) = [s for s in record["others"] if "× 2 devices" in s["execution"]]
    assert one["devices"] == 4 and one["collectives"] and one["fits"]
    assert any(" × all-reduce over " in note for note in one["notes"])
    assert f"  {one['execution']}\n" in text


def test_an_experiment_with_stages_on_meshes_has_the_plan_of_its_line(over_eight: Search) -> None:
    steps, _ = over_eight
    (line,) = [step for step in steps if "2 stages × 2 replicas × 2 devices" in step.name]
    layout = line.name.rpartition(", ")[2].split("  ")
    assert layout[0] == "data:2"
    axes = dict(text.split("=") for text in layout[2:])
    own = tree(
        16, num_stages=2, num_replicas=2, num_micro_batches=8,
        stages_on=on("data:2", layout[1], **axes),
    )  # fmt: skip
    assert planned(own, device_types.find("v100")) == line


def test_a_mesh_over_the_batch_halves_the_step_of_two_stages() -> None:
    v100, fast = device_types.find("v100"), without_moves()
    of = {"num_stages": 2, "num_micro_batches": 4}
    one = planned(tree(8, **of), fast)
    two = planned(tree(8, stages_on=on("x:2", "batch:x"), **of), fast)
    assert one.devices == 2 and two.devices == 4
    assert two.name == "pipelined, 2 stages × 1 replica × 2 devices, 4 micro-batches, x:2  batch:x"
    assert two.flops == one.flops / 2
    assert two.seconds == pytest.approx(one.seconds / 2)
    assert two.memory["weights"] == one.memory["weights"]
    assert two.memory["activations"] == pytest.approx(one.memory["activations"] / 2)
    assert two.sent_bytes == one.sent_bytes / 2
    # With a real link, it waits for the gradients of each micro-batch.
    slow = planned(tree(8, stages_on=on("x:2", "batch:x"), **of), v100)
    assert slow.seconds > two.seconds
    (reduced,) = slow.collectives
    assert (reduced.kind, reduced.axis) == ("all-reduce", "x")
    assert reduced.bytes > 4 * two.memory["gradients"] * 0.9
    assert any("all-reduce over x of gradients of weights" in note for note in slow.notes)


def test_weights_and_slots_of_a_plan_are_those_of_inspect_pipeline() -> None:
    found = registry.get("lm.python_source.TinyMeshPipeline")().tree()
    step = planned(found, device_types.find("v100"))
    figures = pipelined_step.pipeline_plan.figures(found)
    assert figures.on_mesh is not None
    weights = [shards.weights for shards in figures.on_mesh.stages]
    assert step.memory["weights"] in weights
    assert step.memory["slots"] == 2 * step.memory["weights"] == 2 * step.memory["gradients"]
    assert step.devices == 4 and step.idle_share > 0.0


def test_the_layout_of_stages_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, layouts = pipelined_step.pipeline_plan, []
    before = plan.stage_layout
    monkeypatch.setattr(
        plan, "stage_layout", lambda *args: layouts.append(before(*args)) or layouts[-1]
    )
    found = tree(8, stages_on=on("x:2", "batch:x"), num_stages=2, num_micro_batches=4)
    step = planned(found, device_types.find("v100"))
    (layout,) = layouts
    assert layout is not None and str(layout.mesh) in step.name


def test_replicas_of_meshes_exchange_shards() -> None:
    v100 = device_types.find("v100")
    of = {"num_stages": 2, "num_micro_batches": 4, "num_replicas": 2}
    rules = "heads:x;mlp:x;vocab:x"
    one = planned(tree(16, **of), v100)
    two = planned(tree(16, stages_on=on("x:2", rules), **of), v100)
    sent = [next(c for c in step.collectives if c.kind == "send") for step in (one, two)]
    assert sent[0].count == sent[1].count
    figures = pipelined_step.pipeline_plan.figures(tree(16, stages_on=on("x:2", rules), **of))
    assert figures.on_mesh is not None
    assert sent[1].bytes == 2 * max(shards.gradients for shards in figures.on_mesh.stages)
    assert sent[1].bytes < sent[0].bytes


def test_a_layout_that_fits_is_chosen_before_a_faster_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = tree(16, num_stages=2, num_micro_batches=4)
    # Only products take time: a sharded batch divides all of them, but not the weights.
    device = without_moves()
    texts = ("batch:x", "mlp:x;vocab:x")
    layouts = [
        layout_search.MeshLayout(
            layout_search.MeshShape((("x", 2),)), layout_search.Rules.parse(text)
        )
        for text in texts
    ]

    def chosen(one: DeviceType) -> StepPlan:
        parts = parts_of(found, one)
        return pipelined_step.pipelined(parts, found, simulates_memory=False, layouts=layouts)

    alone = [
        planned(tree(16, num_stages=2, num_micro_batches=4, stages_on=on("x:2", text)), device)
        for text in texts
    ]
    fast, small = sorted(alone, key=lambda step: step.seconds)
    assert small.total_bytes < fast.total_bytes
    assert chosen(device) == fast
    tight = dataclasses.replace(device, memory_bytes=small.total_bytes)
    assert chosen(tight) == small


def test_buckets_have_one_layout_that_of_the_largest_batch() -> None:
    found = tree(16, num_stages=2, num_micro_batches=4)
    device = device_types.find("v100")
    layouts = [
        layout_search.MeshLayout(
            layout_search.MeshShape((("x", 2),)), layout_search.Rules.parse(text)
        )
        for text in ("batch:x", "heads:x;mlp:x;vocab:x")
    ]
    large, small = parts_of(tree(512), device).batch, parts_of(tree(8), device).batch

    def step(kinds: BatchKinds = ONE_KIND, batch: Any = large, among: Any = layouts) -> StepPlan:
        parts = dataclasses.replace(parts_of(found, device), batch=batch, kinds=kinds)
        return pipelined_step.pipelined(parts, found, simulates_memory=False, layouts=among)

    alone = [step(batch=batch) for batch in (large, small)]
    (chosen,) = [one for one in layouts if layout_text(one) in alone[0].name]
    assert layout_text(chosen) not in alone[1].name, "this test needs batches that differ"
    kinds = (BatchKind("large", 0.25, large), BatchKind("small", 0.75, small))
    both = step(BatchKinds(kinds, "batches have 2 sizes", are_buckets=True))
    times = [step(batch=batch, among=[chosen]).seconds for batch in (large, small)]
    assert times[1] > alone[1].seconds
    assert both.seconds == pytest.approx(0.25 * times[0] + 0.75 * times[1])
    assert layout_text(chosen) in both.name


def test_stages_on_meshes_of_this_machine_are_priced_by_their_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = [(1.0, 1e9), (100.0, 1e11)]
    streams = [(1.0, 1e9)]
    speed = MachineSpeed(
        points, points, points, points, points, points, streams, 1e9, {}, 1e9, streams, 1e9,
        streams, 1e9, 1e9, 1e9, streams, 1e9,
        1e9, {}, 1e9, 1e9, streams, streams, streams, 1.0, 1e-6, 1e-5, 1e-5, 1e-5, 0.0, 0.0,
    )  # fmt: skip
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    starts = MeshStarts(
        3.0, 0.0, variable_s=0.0, op_s=1e-6, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    monkeypatch.setattr(mesh_time, "measured_starts", lambda: {2: starts, 4: starts})
    here = dataclasses.replace(
        device_types.find("cpu"), name=this_machine.THIS_MACHINE, memory_bytes=1e10
    )
    of = {"num_stages": 2, "num_micro_batches": 4}
    step = planned(tree(8, layers=1, stages_on=on("x:2", "batch:x"), **of), here)
    # Both passes of four micro-batches in two stages, and in each stage one call to set the sums of
    # gradients to 0, to read the weights, for norms, and for the update.
    assert step.core_seconds is not None
    calls = 3.0 * (2 * 2 * 4 + 4 * 2)
    assert calls < step.seconds <= step.core_seconds < calls + 3.0
    assert step.notes[0].startswith("its stages compute one after the other")
    assert step.notes[-1].endswith("the time from the programs of the meshes")
    assert step.idle_share == 0.5 and step.counted_bytes is None
    assert step.sharing_devices == step.devices == 4
    assert step.total_bytes < step.bytes_together < 4 * step.total_bytes
