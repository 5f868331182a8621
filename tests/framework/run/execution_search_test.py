"""The ranking of executions: which are planned, and why others are not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from planned_runs import planned, tree
from traced_pieces import traced_once

from tekso.framework import execution, registry, schedules
from tekso.framework.costs import device_types
from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.planning import layout_search
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.run import (
    execution_search,
    inspection,
    local_steps,
    plan_text,
)
from tekso.framework.run.step_parts import StepParts, StepPlan

__all__ = ["traced_once"]


def test_the_executions_of_an_experiment_and_of_a_search_are_planned(tmp_path: Path) -> None:
    found = tree()
    execution.import_all()
    found.execution = execution.Pipelined.Params(num_stages=2, num_micro_batches=4)
    plan = planned(tmp_path, found, num_devices=2, searches=True)
    assert plan.step is not None and plan.step.name.startswith("pipelined, 2 stages × 1 replica,")
    assert 0.1 < plan.step.idle_share < 0.5
    alone = planned(tmp_path).step
    assert alone is not None
    # The two stages together store all weights; the output reads the embedding of stage 0.
    assert plan.step.memory["weights"] < alone.memory["weights"]
    names = [step.name.partition(",")[0] for step in plan.others]
    assert sorted(names) == ["data_parallel", "data_parallel", "mesh_sharded", "pipelined"]
    assert "data_parallel, 1 device" in [step.name for step in plan.others]
    assert "computes products" not in plan_text.text(plan), "a mesh whose devices share nothing"
    seconds = [step.seconds for step in plan.others]
    assert seconds == sorted(seconds) and [*plan.rejected] == ["spmd_pipelined, 2 stages"]
    assert "RepeatedStack" in plan.rejected["spmd_pipelined, 2 stages"]
    text = plan_text.text(plan)
    assert "mesh_sharded, data:" in text and "no problems were found" in text
    assert "\n\n\n" not in text
    assert "The memory of pipelines is without temporary memory" in text
    for step in plan.others[:3]:  # a title, and why it takes this time
        reasons = text.partition(f"\n\n{step.name}\n  - ")[2].partition("\n\n")[0]
        assert " ".join(reasons.split()).startswith(step.notes[0])
        assert " ".join(reasons.split()).endswith(step.notes[-1])


def test_pipelines_as_one_program_and_on_meshes_are_ranked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_search, "MAX_TRIED", 40)  # meshes are not what is tested
    found = registry.get("lm.python_source.TinySpmdPipeline")().tree()
    found.set({"input.batch_size": 16, "input.length": 32})
    plan = planned(tmp_path, found, num_devices=4, searches=True)
    names = [step.name for step in plan.others]
    for stages in ("2 stages × 2 replicas", "4 stages × 1 replica"):
        (one,) = [name for name in names if name.startswith(f"spmd_pipelined, {stages}")]
        assert one.replace("spmd_", "") in names  # with as many micro-batches
    assert plan.rejected == {}
    assert any("2 stages × 1 replica × 2 devices, 8 micro-batches" in name for name in names)
    no_stack = registry.get("image.digits.Mlp")().tree()
    monkeypatch.setattr(execution_search, "_PIPELINES", {"spmd_pipelined": SpmdPipelined})
    plan = planned(tmp_path, no_stack, num_devices=4, searches=True)
    assert "spmd_pipelined" in plan.rejected, "one reason for all numbers of stages"


def test_a_pipeline_that_cannot_be_divided_is_rejected_with_the_reason(tmp_path: Path) -> None:
    plan = planned(tmp_path, tree(**{"input.batch_size": 2}), num_devices=4, searches=True)
    assert "data_parallel" in plan.rejected and plan.problem
    assert "4 micro-batches of 1 replica" in plan.rejected["pipelined, 4 stages"]


def test_a_mesh_that_shards_no_product_is_not_ranked(tmp_path: Path) -> None:
    plan = planned(tmp_path, num_devices=3, searches=True)  # 8 rows, 4 heads, 512 units
    assert not [step for step in plan.others if step.name.startswith("mesh_sharded")]
    assert plan.rejected["mesh_sharded"] == "no layout over 3 devices divides the step"


def test_a_mesh_on_this_machine_repeats_no_products_if_that_is_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slowest_first = []
    rank = layout_search.rank

    def ranked(*args: Any, **options: Any) -> list[Ranked]:
        options["device"] = "cpu"
        over_all = [one for one in rank(*args, **options) if one.layout.mesh.size == 2]
        repeats = dataclasses.replace(over_all[0].cost, redundancy=2.0)
        found = [dataclasses.replace(over_all[0], cost=repeats), *over_all[1:]]
        slowest_first.append(found[0].layout)
        return found

    def on_mesh(parts: Any, layout: Any, *rest: Any) -> StepPlan:
        return StepPlan("mesh", 2, {}, 0.0, 2.0 if layout == slowest_first[0] else 1.0)

    monkeypatch.setattr(layout_search, "rank", ranked)
    monkeypatch.setattr(local_steps, "on_mesh", on_mesh)
    found = tree()
    task, run = inspection.task_of(found), found.run
    learner = schedules.end_with_run(found.learner, run.steps).instantiate()
    machine = dataclasses.replace(device_types.find("cpu"), name=THIS_MACHINE)
    parts = StepParts(found, task, learner, inspection.batch_of(found), machine)
    step = execution_search._best_mesh(parts, 2)
    assert step.seconds == 1.0 and "computes products" not in step.name
    of_others = dataclasses.replace(parts, device=device_types.find("v100"))
    assert execution_search._best_mesh(of_others, 2).name.endswith("(computes products 2 times)")
