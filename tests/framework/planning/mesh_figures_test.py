"""What --mode=inspect_pipeline says that a device of a stage's mesh holds, against formulas."""

from __future__ import annotations

import functools
from typing import Any

from tekso.framework import registry
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning.stage_figures import PipelineFigures
from tekso.framework.run import pipeline_plan, pipeline_text

D, MLP, VOCAB, LAYERS = 128, 512, 256, 4
PRODUCTS = 4 * D * D + 2 * D * MLP  # of a layer; they are split
SCALES = 2 * D  # of a layer; they are not


@functools.cache
def figures(key: str) -> PipelineFigures:
    return pipeline_plan.figures(registry.get(key)().tree())


def tiny(mesh: str, rules: str, settings: dict[str, Any], **more: Any) -> PipelineFigures:
    tree = registry.get("lm.python_source.Tiny")().tree()
    on = StagesOnMesh.Params(mesh=mesh, rules=rules, **more)
    tree.execution = Pipelined.Params(num_stages=2, rematerialize="all", stages_on=on)
    tree.set({"task.model.stack.num_layers": 1, **settings})
    return pipeline_plan.figures(tree)


def test_a_device_holds_its_part_of_what_the_rules_split() -> None:
    found = figures("lm.python_source.TinyMeshPipeline")
    assert found.on_mesh is not None
    first, second = found.on_mesh.stages
    vocab = found.stages[0].weights - 2 * (PRODUCTS + SCALES)  # rows of the table, times D
    assert first.weights == 4 * (2 * (PRODUCTS // 2 + SCALES) + vocab // 2)
    assert second.weights == 4 * (2 * (PRODUCTS // 2 + SCALES) + D + vocab // 2)
    for each in (first, second):
        assert each.copies == 0
        assert each.gradients == each.weights
    assert first.slots == 2 * first.weights  # of Adam; the learner's counts are on the host
    assert second.slots == 2 * second.weights


def test_slots_and_totals_of_gradients_are_split_over_the_axis_of_slots() -> None:
    found = tiny("data:2;model:2", "2d", {}, slots_axis="data")
    assert found.on_mesh is not None
    first, second = found.on_mesh.stages
    assert first.gradients == first.weights // 2  # every weight has a dim that 2 divides
    assert second.slots == second.weights


def test_a_table_that_two_stages_read_is_kept_once_and_copied() -> None:
    found = tiny("model:2", "vocab:model", {"task.model.softmax": None})
    assert found.on_mesh is not None
    first, second = found.on_mesh.stages
    assert second.copies == found.stages[1].copy_bytes // 2
    assert second.gradients == second.weights + second.copies
    assert first.copies == 0


def test_one_program_has_a_part_of_the_stack_and_of_the_tables() -> None:
    found = figures("lm.python_source.TinySpmdPipeline")
    assert found.on_mesh is not None and found.on_mesh.is_program
    (shards,) = found.on_mesh.stages
    total = sum(each.weights for each in found.stages)
    stack = LAYERS * (PRODUCTS + SCALES)
    assert shards.weights == 4 * (stack // 2 + (total - stack - D) // 2 + D)  # D: the last norm
    assert [len(each.stage.piece_names) for each in found.stages] == [3, 5]


def test_text_and_record_show_it() -> None:
    for key in ("TinyMeshPipeline", "TinySpmdPipeline"):
        found = figures(f"lm.python_source.{key}")
        text = pipeline_text.text(key, found, width=80)
        assert all(len(line) <= 80 for line in text.splitlines())
        assert ("model:2" if key == "TinyMeshPipeline" else "layers:stage") in text
        record = pipeline_text.record(found)["on_mesh"]
        assert record["is_program"] == (key == "TinySpmdPipeline")
        held = [each["weight_bytes_per_device"] for each in record["stages"]]
        assert found.on_mesh is not None
        assert held == [each.weights for each in found.on_mesh.stages]
