"""The ranking of executions: which are planned, and why others are not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planned_runs import planned, tree
from traced_pieces import traced_once

from tekso.framework import execution, registry, schedules
from tekso.framework.costs import device_types, this_machine
from tekso.framework.costs.this_machine import THIS_MACHINE
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.planning import layout_search
from tekso.framework.planning.layout_search import Ranked
from tekso.framework.run import (
    execution_search,
    inspection,
    local_steps,
    plan_text,
)
from tekso.framework.run.fitting_steps import enough, first_that_fits
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
    found.task.model.stack.layer = tree().task.model.stack.layer  # without attention
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


def test_micro_batches_divide_the_batch_also_if_they_are_no_multiple_of_the_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_search, "_PIPELINES", {"pipelined": Pipelined})
    plan = planned(tmp_path, tree(**{"input.batch_size": 6}), num_devices=4, searches=True)
    names = [step.name for step in plan.others]
    assert "data_parallel" in plan.rejected
    assert "pipelined, 2 stages × 2 replicas, 3 micro-batches" in names
    assert "pipelined, 4 stages × 1 replica, 6 micro-batches" in names
    plan = planned(tmp_path, tree(**{"input.batch_size": 3}), num_devices=4, searches=True)
    why = plan.rejected["pipelined, 2 stages"]
    assert why == "3 examples do not divide evenly over 2 replicas"


def with_memory(bytes_: float) -> Any:
    return dataclasses.replace(device_types.find("cpu"), memory_bytes=bytes_)


def ranked_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bytes_: float, **settings: Any
) -> Any:
    """Returns the ranking on devices with a memory."""
    monkeypatch.setattr(execution_search, "_PIPELINES", {"pipelined": Pipelined})
    monkeypatch.setattr(layout_search, "MAX_TRIED", 40)
    monkeypatch.setattr(this_machine, "find", lambda _: with_memory(bytes_))
    return planned(
        tmp_path, tree(**{"input.length": 256, **settings}), num_devices=2, searches=True
    )


def test_steps_that_do_not_fit_are_planned_with_settings_that_need_less_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ranked_in(monkeypatch, tmp_path, 1e12)
    whole = {step.name.partition(",")[0]: step for step in plan.others}
    assert all("accumulation" not in step.name and not step.tried for step in plan.others)
    alone = next(step for step in plan.others if step.devices == 1)
    state = sum(alone.memory[name] for name in ("weights", "slots", "gradients"))
    limit = state + 0.2 * (alone.total_bytes - state)
    plan = ranked_in(monkeypatch, tmp_path, limit)
    names = [step.name for step in plan.others if plan.fits(step)]
    assert "data_parallel, 1 device, accumulation_steps=8" in names
    assert "data_parallel, 2 devices, accumulation_steps=4" in names
    (pipe,) = [step for step in plan.others if step.name.startswith("pipelined")]
    assert plan.fits(pipe) == (not pipe.tried)
    of_all = next(step for step in plan.others if step.name == names[0])
    assert of_all.notes[0].startswith("without accumulation_steps=")
    assert whole["data_parallel"].memory["weights"] == of_all.memory["weights"]
    plan = ranked_in(monkeypatch, tmp_path, 0.5 * state)
    assert not any(plan.fits(step) for step in plan.others)
    text = " ".join(plan_text.text(plan).split())
    assert "(does not fit; weights, slots and gradients alone: " in text
    assert {one["tried"] != "" for one in plan_text.record(plan)["others"]} == {True}


def test_a_pipeline_that_does_not_fit_recomputes_or_has_more_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipeline(bytes_: float) -> StepPlan:
        plan = ranked_in(monkeypatch, tmp_path, bytes_, **{"input.batch_size": 16})
        return next(step for step in plan.others if step.name.startswith("pipelined"))

    name = "pipelined, 2 stages × 1 replica, "
    first = pipeline(1e12)
    assert first.name == f"{name}8 micro-batches"
    more = pipeline(0.9 * first.bytes_together)
    assert more.name == f"{name}16 micro-batches" and more.total_bytes < first.total_bytes
    assert more.notes[0].startswith("without 16 micro-batches: ")
    again = pipeline(0.99 * more.bytes_together)
    assert "rematerialize=all" in again.name and again.total_bytes < more.total_bytes
    assert again.flops >= first.flops


def test_what_was_tried_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    device = with_memory(10.0)
    state = {"weights": 2.0}

    def step(activations: float) -> StepPlan:
        return StepPlan("s", 1, {**state, "activations": activations}, 0.0, 1.0)

    def others() -> Iterator[tuple[str, Callable[[], StepPlan]]]:
        yield "a=2", lambda: step(20.0)
        yield "a=4", lambda: step(fitting)
        raise AssertionError("no more are planned than needed")

    fitting = 8.0
    found = first_that_fits(step(40.0), device, others(), shards=False)
    assert found.total_bytes == 10.0 and found.notes == ("without a=4: 42 B of memory",)
    tried = first_that_fits(step(40.0), device, list(others_until(step)), shards=False)
    assert tried.total_bytes == 42.0 and tried.tried == "tried: a=2, a=4"
    assert enough(step(40.0), device, 1, [1, 2, 4, 8, 16]) == [8, 16]  # 9 - 2 of 40
    assert enough(step(40.0), device, 1, [1, 2, 4]) == [4]  # though 5.4 are needed
    assert enough(step(40.0), device, 8, [1, 2, 4, 8]) == []


def test_the_largest_number_of_parts_is_tried_though_it_leaves_no_tenth_of_memory() -> None:
    device, counts = with_memory(10.0), [1, 2, 4]
    for state in (8.8, 9.2):  # a tenth is free up to 9

        def step(count: int, state: float = state) -> StepPlan:
            return StepPlan("s", 1, {"weights": state, "activations": 2.0 / count}, 0.0, 1.0)

        others = [
            (f"a={n}", functools.partial(step, n)) for n in enough(step(1), device, 1, counts)
        ]
        found = first_that_fits(step(1), device, others, shards=False)
        assert found.total_bytes == state + 0.5 and not found.tried


def others_until(step: Any) -> Iterator[tuple[str, Callable[[], StepPlan]]]:
    yield "a=2", lambda: step(20.0)
    yield "a=4", lambda: step(9.0)


def test_settings_that_are_impossible_do_not_end_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_pipeline = execution_search.pipelined

    def possible(parts: StepParts, tree: Any, **options: Any) -> StepPlan:
        p = tree.execution
        if (p.num_micro_batches, p.rematerialize) in impossible:
            raise ExecutionError("no such schedule")
        return of_pipeline(parts, tree, **options)

    def pipeline(bytes_: float) -> StepPlan:
        plan = ranked_in(monkeypatch, tmp_path, bytes_, **{"input.batch_size": 16})
        return next(step for step in plan.others if step.name.startswith("pipelined"))

    impossible: list[tuple[int, str]] = []
    first = pipeline(1e12)
    monkeypatch.setattr(execution_search, "pipelined", possible)
    impossible.append((16, "none"))
    found = pipeline(0.9 * first.bytes_together)
    assert found.name.endswith("8 micro-batches, rematerialize=all") and not found.tried
    impossible.append((8, "all"))
    found = pipeline(0.9 * first.bytes_together)
    assert found.name.endswith("16 micro-batches, rematerialize=all") and not found.tried
    impossible.append((16, "all"))
    found = pipeline(0.9 * first.bytes_together)
    why = "(impossible: no such schedule)"
    assert found.tried == (
        f"tried: 16 micro-batches {why}, rematerialize=all {why}, "
        f"rematerialize=all and 16 micro-batches {why}"
    )


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
