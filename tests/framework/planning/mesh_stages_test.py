"""The figures of a device of a stage's mesh, against formulas by hand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from traced_pieces import traced_once

from tekso.framework import registry, schedules
from tekso.framework.costs import device_types
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning.layout_search import ONE_DEVICE
from tekso.framework.planning.mesh_figures import MeshFigures
from tekso.framework.planning.mesh_stages import MeshStages
from tekso.framework.planning.rings import WEIGHTS, CollectiveCost
from tekso.framework.planning.stage_figures import PipelineFigures, pass_costs
from tekso.framework.run import inspection, pipeline_plan
from tekso.models.layers.stack import RepeatedStack

__all__ = ["traced_once"]

MICRO, ROWS, LENGTH, D = 4, 2, 128, 128
TENSOR = "heads:x;mlp:x;vocab:x"


@functools.cache
def stages(
    rematerialize: Any = "none", *, repeated: bool = False, parts: int = 1, layers: int = 2
) -> tuple[MeshStages, PipelineFigures]:
    """Returns the stages of Tiny with a layer in each of two, and their figures on devices."""
    tree = registry.get("lm.python_source.Tiny")().tree()
    tree.set({"input.batch_size": MICRO * ROWS * parts, "input.length": LENGTH})
    tree.set({"task.model.stack.num_layers": layers, "learner.accumulation_steps": parts})
    if repeated:
        before = tree.task.model.stack
        tree.task.model.stack = RepeatedStack.Params(num_layers=layers, layer=before.layer)
    tree.execution = Pipelined.Params(
        num_stages=2, num_micro_batches=MICRO, rematerialize=rematerialize, balance=None
    )
    task = inspection.task_of(tree)
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    batch = inspection.batch_of(tree)
    before = pipeline_plan.figures_of_parts(tree, task, learner, batch, machine=None)
    device = device_types.find("v100")
    return MeshStages(before, learner, task.specs(), device, cost_s=1.0, dtype="float32"), before


def on(rules: str, *, size: int = 2, axes: Any = None, **how: Any) -> PipelineFigures:
    layout = MeshLayout(MeshShape((("x", size),)), Rules.parse(rules), **(axes or {}))
    return stages(**how)[0].on(layout)


def collectives(found: PipelineFigures, stage: int) -> dict[tuple[str, str], CollectiveCost]:
    assert isinstance(found.on_mesh, MeshFigures)
    return {(one.kind, one.of): one for one in found.on_mesh.collectives[stage]}


@pytest.mark.parametrize("repeated", [False, True])
def test_a_mesh_of_one_device_has_the_figures_of_the_device(repeated: bool) -> None:
    model, before = stages(repeated=repeated)
    found = model.on(ONE_DEVICE)
    for own, whole in zip(found.stages, before.stages, strict=True):
        same = ("weight_bytes", "copy_bytes", "slot_bytes", "gradient_bytes", "handed_bytes")
        assert [getattr(own, name) for name in same] == [getattr(whole, name) for name in same]
        assert own.memory.inputs == whole.memory.inputs
        if repeated:  # on a mesh, the backward pass of a loop recomputes it: four passes, not three
            assert whole.flops < own.flops <= 4 / 3 * whole.flops
        else:
            assert own.flops == whole.flops
            assert own.memory == whole.memory
            assert own.forward_cost == pytest.approx(whole.forward_cost)
    if not repeated:
        assert found.held_bytes == before.held_bytes and found.shared_bytes == before.shared_bytes
    assert found.on_mesh is not None and found.on_mesh.collectives == ((), ())


def test_a_mesh_that_shards_the_batch_halves_operations_and_activations() -> None:
    _, before = stages()
    found = on("batch:x")
    for i, (own, whole) in enumerate(zip(found.stages, before.stages, strict=True)):
        assert own.flops == whole.flops / 2
        assert own.weight_bytes == whole.weight_bytes and own.slot_bytes == whole.slot_bytes
        assert own.memory.saved == pytest.approx(whole.memory.saved / 2)
        assert own.handed_bytes == whole.handed_bytes / 2
        # Each micro-batch all-reduces the gradient of each weight.
        reduced = collectives(found, i)["all-reduce", "gradients"]
        assert reduced.count == MICRO * len(own.learned)
        assert reduced.bytes == MICRO * whole.gradient_bytes
    assert found.held_bytes[0] == pytest.approx(before.held_bytes[0] / 2)
    assert found.mesh_size == 2 and found.num_devices == 4


@pytest.mark.parametrize(("rematerialize", "first"), [("none", 4), ("all", 6)])
def test_a_layer_with_sharded_products_all_reduces_its_output_in_both_passes(
    rematerialize: str, first: int
) -> None:
    _, before = stages(rematerialize)
    found = on(TENSOR, rematerialize=rematerialize)
    # The table, which one product shards by rows, has one more; a recomputed pass has its own.
    output = ROWS * LENGTH * D * 4
    reduced = collectives(found, 0)["all-reduce", "activations"]
    lookups = 2 if rematerialize == "all" else 1
    assert reduced.count == MICRO * (first + lookups)
    assert reduced.bytes == reduced.count * output
    for own, whole in zip(found.stages, before.stages, strict=True):
        assert own.flops == pytest.approx(whole.flops / 2)
        assert own.handed_bytes == whole.handed_bytes  # embed has no rule
        assert whole.memory.saved / 2 < own.memory.saved < whole.memory.saved
        assert own.memory.inputs == whole.memory.inputs
    if rematerialize == "all":  # the input of a stage is all that a micro-batch saves
        assert found.held_bytes[1] >= output


def test_accumulation_repeats_the_collectives_of_a_micro_batch() -> None:
    one, two = (collectives(on("batch:x", parts=n), 0) for n in (1, 2))
    key = ("all-reduce", "gradients")
    assert two[key].count == 2 * one[key].count and two[key].bytes == 2 * one[key].bytes


def test_stored_shards_of_weights_are_gathered_once_in_a_step() -> None:
    _, before = stages()
    found = on("batch:x", axes={"weights_axis": "x"})
    for i, (own, whole) in enumerate(zip(found.stages, before.stages, strict=True)):
        gathered = collectives(found, i)["all-gather", WEIGHTS]
        assert gathered.count == len(own.learned)  # and not for each micro-batch
        assert gathered.bytes == whole.weight_bytes == own.copy_bytes
        assert own.weight_bytes == whole.weight_bytes / 2
        assert own.slot_bytes == whole.slot_bytes / 2


def test_the_cost_of_a_stage_has_the_time_of_its_collectives() -> None:
    """With costs in seconds, a stage takes its share of the computation and its collectives."""
    model, before = stages()
    found = on("batch:x")
    passes = pass_costs(found.plan, [each.forward_cost for each in found.stages])
    alone = pass_costs(before.plan, [each.forward_cost for each in before.stages])
    for i, (cost, whole) in enumerate(zip(passes, alone, strict=True)):
        exchange = sum(one.seconds for one in collectives(found, i).values()) / MICRO
        share = model._stages[i][1].cost(MeshLayout(MeshShape((("x", 2),)), Rules.parse("batch:x")))
        of_one = model._stages[i][2].cost(ONE_DEVICE)
        computed = whole * share.compute_s / of_one.compute_s
        assert cost == pytest.approx(computed + exchange)
        assert whole / 2 <= computed < whole


def test_a_loop_that_dtensor_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    of_tiny = stages()[0]
    (work, *models), *others = of_tiny._stages
    loops = dataclasses.replace(work.work, list_loops=("my_layer.py:7",))
    with_loop = (dataclasses.replace(work, work=loops), *models)
    monkeypatch.setattr(of_tiny, "_stages", [with_loop, *others])
    with pytest.raises(ExecutionError, match=r"a stage on a mesh.*my_layer\.py:7.*ops\.scan"):
        on("batch:x")
