"""Tests of the plan of a run: bytes by hand, executions, disk, what it resumes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import execution, registry, schedules
from tekso.framework.costs import device_types, stored_speeds, this_machine
from tekso.framework.costs.device_types import DeviceType
from tekso.framework.costs.stored_speeds import Condition
from tekso.framework.costs.this_machine import THIS_MACHINE, MachineSpeed, ThisMachine
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.execution.spmd_pipelined import SpmdPipelined
from tekso.framework.exit_codes import ExitCode
from tekso.framework.initializers import Ones
from tekso.framework.params import param
from tekso.framework.planning import layout_search, mesh_time
from tekso.framework.planning.mesh_time import MeshStarts
from tekso.framework.planning.pipeline_time import PipelineStarts
from tekso.framework.run import (
    checkpoint_files,
    execution_search,
    inspection,
    local_steps,
    pipeline_plan,
    pipelined_step,
    plan_text,
    run_plan,
    run_start,
    step_graphs,
    step_parts,
    step_plan,
)
from tekso.framework.run.checkpoint_description import Description
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.state import State
from tekso.framework.task import LossSums, Task
from tekso.framework.warm_start import WarmStart
from tekso.models.layers.stack import RepeatedStack
from tekso.tools import trainer

MODEL = "lm.python_source.Tiny"


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """Traces equal steps of modelled devices once: most tests are about the rest of the plan."""
    step_of, flops_of = run_plan.step_plan, step_parts.forward_flops
    steps: dict[Any, StepPlan] = {}
    flops: dict[Any, Any] = {}

    def step_plan_once(parts: StepParts, num_devices: int | None = None) -> StepPlan:
        if parts.device.name == THIS_MACHINE:  # whose speeds tests replace
            return step_of(parts, num_devices)
        found = parts.tree
        read = (found.task, found.input, found.learner, found.execution)
        texts = [params.to_text() for params in read]
        key = (*texts, found.run.steps, found.run.activation_dtype, str(parts.device), num_devices)
        if key not in steps:
            steps[key] = step_of(parts, num_devices)
        return steps[key]

    def forward_flops_once(task: Task, batch: Any) -> Any:
        key = task.params.to_text(), str(batch)
        if key not in flops:
            flops[key] = flops_of(task, batch)
        return flops[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_plan, "step_plan", step_plan_once)
        patch.setattr(step_parts, "forward_flops", forward_flops_once)
        yield


def tree(**settings: Any) -> Any:
    found = registry.get(MODEL)().tree()
    found.set({"task.model.stack.num_layers": 2, "input.batch_size": 8, **settings})
    return found


def planned(tmp_path: Path, found: Any = None, **options: Any) -> RunPlan:
    options = {"device": "cpu", "logdir": str(tmp_path / "none" / "run"), **options}
    return run_plan.plan(MODEL, found or tree(), **options)


def test_state_and_checkpoint_have_the_bytes_of_weights_and_two_slots(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.step is not None and plan.problem == "" and plan.problems == []
    # Adam has two slots for each weight, all float32; a checkpoint has a few counters too.
    assert plan.step.memory["weights"] == 4 * plan.weights
    assert plan.step.memory["slots"] == pytest.approx(8 * plan.weights, rel=1e-4)
    assert plan.step.memory["gradients"] == 4 * plan.weights
    assert plan.checkpoint_bytes == pytest.approx(12 * plan.weights, rel=1e-4)
    assert plan.resumes_from is None and plan.checkpoints == 3 + 1 + 1
    # 6 operations for each token and weight of a product, and the attention on top.
    params = tree().input
    tokens = 8 * params.length if "length" in params else None
    if tokens is not None:
        assert 5 * tokens * plan.weights < plan.step.flops < 9 * tokens * plan.weights


def test_a_run_in_the_logdir_is_resumed(tmp_path: Path) -> None:
    save_fitting(tmp_path, tree(**{"run.steps": 20}), 12)
    plan = planned(tmp_path, tree(**{"run.steps": 20}), logdir=str(tmp_path))
    assert plan.resumes_from == 12 and plan.problems == []
    assert plan.changes == () and plan.warnings == ()
    assert "resumes from step 12 in" in plan_text.text(plan)
    assert ": 8 steps are left, about" in plan_text.text(plan)
    assert "without start, compilation and evaluations" in plan_text.text(plan)


def test_checkpoints_that_were_best_by_an_earlier_metric_take_disk_space_of_their_own(
    tmp_path: Path,
) -> None:
    # The evaluation data changed after step 20, at which the best checkpoint was that of step 10.
    for step, loss, since in ((10, 1.0, -1), (20, 2.0, -1), (30, 5.0, 20), (40, 6.0, 20)):
        about = Description(
            step,
            MODEL,
            params="",
            metrics={"dev/loss": loss},
            input={"comparable_since": since},
        )
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        (folder / "checkpoint.json").write_text(about.to_json())
    plan = planned(tmp_path, logdir=str(tmp_path))
    # Step 10, the three newest, the best since step 20, and the one that is being written.
    assert (plan.checkpoints, plan.existing_checkpoints) == (1 + 3 + 1 + 1, 4)
    assert plan.new_disk_bytes == 2 * plan.checkpoint_bytes
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[0].endswith("10")


def test_only_meshes_recompute_layers_that_are_repeated(tmp_path: Path) -> None:
    found = tree()
    layers = RepeatedStack.Params(num_layers=2, layer=found.task.model.stack.layer)
    of_stack, of_loop = (
        planned(tmp_path, one).step for one in (found, tree(**{"task.model.stack": layers}))
    )
    assert of_stack is not None and of_loop is not None
    assert of_loop.flops == of_stack.flops
    assert of_loop.memory["activations"] == pytest.approx(of_stack.memory["activations"], rel=0.01)
    execution = {"execution": MeshSharded.Params(mesh="data:1", rules="batch:data")}
    on_mesh = planned(tmp_path, tree(**{"task.model.stack": layers, **execution})).step
    assert on_mesh is not None
    assert 1.2 * of_loop.flops < on_mesh.flops < 4 / 3 * of_loop.flops
    assert on_mesh.memory["activations"] < of_loop.memory["activations"]


def test_a_new_run_needs_the_checkpoints_of_its_warm_start(tmp_path: Path) -> None:
    found = tree(**{"run.warm_start": {"teacher": WarmStart.Params()}})
    assert planned(tmp_path, found).problems == [
        "run.warm_start.teacher.checkpoint is not set: name a run"
    ]
    found.set({"run.warm_start": {"teacher": WarmStart.Params(checkpoint="none")}})
    (problem,) = planned(tmp_path, found).problems
    assert problem.startswith("run.warm_start.teacher.checkpoint is 'none': there is no checkpoint")
    save_fitting(tmp_path, found, 12)  # a resumed run reads its own
    assert planned(tmp_path, found, logdir=str(tmp_path)).problems == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"metric": "nope", "goal": "max"},
            r"'nope', but an evaluation of eval_inputs.dev reports ",
        ),
        ({"metric": "perplexty", "goal": "min"}, r"; did you mean perplexity\?"),
        ({"metric": "nope"}, "does not declare whether larger or smaller values are better"),
        ({"metric": "loss"}, ""),
        ({"metric": "bits_per_byte"}, ""),
    ],
)
def test_the_metric_of_early_stopping_is_checked(
    settings: dict[str, str], said: str, tmp_path: Path
) -> None:
    paths = {f"run.early_stopping.{name}": value for name, value in settings.items()}
    plan = planned(tmp_path, tree(**{"run.early_stopping.patience": 2, **paths}))
    assert bool(plan.problems) == bool(said)
    assert all("run.early_stopping.metric" in problem for problem in plan.problems)
    assert re.search(said, "".join(plan.problems))


def test_the_checkpoints_of_a_resumed_run_are_on_the_disk_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = planned(tmp_path).checkpoint_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * size))
    assert "5 checkpoints need" in planned(tmp_path).problems[0]
    save_fitting(tmp_path, tree(), 4, 8, 12)
    plan = planned(tmp_path, logdir=str(tmp_path))
    assert plan.problems == [] and plan.new_disk_bytes == 2 * size
    assert ", 3 exist; " in plan_text.text(plan)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=size))
    assert "5 checkpoints need" in planned(tmp_path, logdir=str(tmp_path)).problems[0]
    # Without an evaluation there is no best checkpoint.
    assert planned(tmp_path, tree(eval_inputs={})).checkpoints == 3 + 1


def save_fitting(tmp_path: Path, found: Any, *steps: int) -> list[Path]:
    """Writes checkpoints of zeros that fit a tree; returns their folders."""
    task = inspection.task_of(found)
    learner = schedules.end_with_run(found.learner, found.run.steps).instantiate()
    specs = State(task.specs(), learner.slots(task.specs())).keyed()
    state = {key: np.zeros(spec.shape, spec.dtype) for key, spec in specs.items()}
    (tmp_path / "checkpoints").mkdir(parents=True, exist_ok=True)
    paths = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in steps]
    for step, path in zip(steps, paths, strict=True):
        checkpoint_files.write(str(path), state, Description(step, MODEL, params=found.to_text()))
    return paths


def test_a_checkpoint_that_does_not_fit_the_changed_model_is_a_problem(tmp_path: Path) -> None:
    (path,) = save_fitting(tmp_path, tree(), 12)
    changed = tree(**{"task.model.stack.num_layers": 1})
    plan = planned(tmp_path, changed, logdir=str(tmp_path))
    (problem,) = plan.problems
    assert problem.startswith(f"{path} cannot be restored: the checkpoint does not fit the model")
    (line,) = plan.changes
    assert line.startswith("task.model.stack.num_layers : 2 -> 1")
    assert f"changed since then: {line}"[:40] in plan_text.text(plan)
    assert plan_text.record(plan)["changes"] == [line]
    # Training ends before it restores a checkpoint after its last step.
    changed.set({"run.steps": 11})
    assert planned(tmp_path, changed, logdir=str(tmp_path)).problems == []


def test_a_warm_start_that_does_not_fit_the_model_is_a_problem(tmp_path: Path) -> None:
    save_fitting(tmp_path, tree(), 12)
    same = tree(**{"run.warm_start": {"main": WarmStart.Params(checkpoint=str(tmp_path))}})
    assert planned(tmp_path, same).problems == []
    other = same.copy().set({"task.model.dim": 32})
    (problem,) = planned(tmp_path, other).problems
    assert problem.startswith("the warm start does not fit the model:\n  ")
    assert not (tmp_path / "none").exists()


def test_a_damaged_checkpoint_is_skipped(tmp_path: Path) -> None:
    first, newest = save_fitting(tmp_path, tree(), 10, 12)
    (data,) = newest.glob("tensors.data*")
    os.truncate(data, 100)
    plan = planned(tmp_path, tree(**{"run.steps": 20}), logdir=str(tmp_path))
    assert (plan.resumes_from, plan.existing_checkpoints, plan.problems) == (10, 1, [])
    assert ": 10 steps are left, about" in plan_text.text(plan)
    (line,) = plan.warnings
    assert line.startswith(f"skipped the damaged checkpoint {newest}: tensors.data-00000-of-00001")
    assert "skipped the damaged checkpoint" in plan_text.text(plan)
    assert newest.exists()  # nothing is renamed
    (data,) = first.glob("tensors.data*")
    os.truncate(data, 100)
    plan = planned(tmp_path, logdir=str(tmp_path))
    assert plan.resumes_from is None and "are damaged" in plan.problems[0]


@pytest.mark.parametrize(
    ("path", "value", "at_least"),
    [
        ("input.batch_size", 0, 1),
        ("eval_inputs.dev.max_batches", 0, 1),
        ("run.log_every_steps", 0, 1),
        ("run.steps", -1, 0),
    ],
)
def test_numbers_that_training_rejects_are_problems(
    path: str, value: int, at_least: int, tmp_path: Path
) -> None:
    plan = planned(tmp_path, tree(**{path: value}), searches=True)
    assert plan.problems == [f"{path} is {value}, but must be at least {at_least}"]
    assert plan.step is None and plan_text.record(plan)["ok"] is False
    assert f"problem: {plan.problems[0]}" in plan_text.text(plan)


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("multi.cldr_and_python.Shared", "input.inputs.lm.batch_size"),
        ("multi.cldr_and_python.Shared", "eval_inputs.lm_dev.input.batch_size"),
        ("lm.python_source.Tiny", "input.length"),
    ],
)
def test_numbers_of_all_inputs_are_checked(model: str, path: str) -> None:
    found = registry.get(model)().tree().set({path: 0})
    assert run_start.params_problems(found) == [f"{path} is 0, but must be at least 1"]


def test_a_wrong_metric_of_the_best_checkpoint_is_a_problem(tmp_path: Path) -> None:
    plan = planned(tmp_path, tree(**{"run.keep_best.metric": "nope"}))
    (problem,) = plan.problems
    assert "run.keep_best.metric" in problem and "does not declare whether larger" in problem
    assert plan_text.record(plan)["problems"] == [problem]
    unused = {"run.keep_best.metric": "nope", "run.keep_best.goal": "max", "run.keep_best.count": 0}
    assert planned(tmp_path, tree(**unused)).problems == []
    (problem,) = planned(tmp_path, tree(**{"run.keep_best.eval_input": "nope"})).problems
    assert problem.startswith("run.keep_best.eval_input is 'nope', but the evaluation inputs are")


def test_devices_share_the_batch_and_replicate_the_weights(tmp_path: Path) -> None:
    one, four = planned(tmp_path).step, planned(tmp_path, num_devices=4).step
    assert one is not None and four is not None
    assert four.devices == 4 and four.name == "data_parallel, 4 devices"
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.memory["activations"] == pytest.approx(one.memory["activations"] / 4)
    assert four.memory["weights"] == one.memory["weights"]
    assert any("all-reduce" in note for note in four.notes)


def test_the_record_of_a_step_has_the_bytes_of_all_devices(tmp_path: Path) -> None:
    plan = planned(tmp_path, num_devices=2, device="v100")
    record = plan_text.record(plan)["step"]
    assert record["bytes_of_all_devices"] == 2 * record["bytes_per_device"]
    assert record["sharing_devices"] == 1
    assert plan.step is not None
    shared = dataclasses.replace(plan.step, sharing_devices=2, shared_bytes=5e6)
    record = plan_text.record(dataclasses.replace(plan, step=shared))["step"]
    assert (record["bytes_of_all_devices"], record["sharing_devices"]) == (5_000_000, 2)


def test_the_record_of_a_step_has_its_collectives(tmp_path: Path) -> None:
    """As JSON data: kind, axis, count and bytes, not only a sentence."""

    def step(plan: RunPlan) -> Any:
        return json.loads(json.dumps(plan_text.record(plan)))["step"]

    assert step(planned(tmp_path))["collectives"] == []
    plan = planned(tmp_path, num_devices=4)
    (replicas,) = step(plan)["collectives"]
    assert (replicas["kind"], replicas["axis"]) == ("all-reduce", "data")
    assert replicas["count"] > 1  # the gradients, and the sums of the loss
    assert replicas["bytes"] == pytest.approx(4 * plan.weights, rel=1e-4)
    sharded = tree()
    sharded.execution = execution.MeshSharded.Params(
        mesh="data:2;model:2", rules="batch:data;mlp:model"
    )
    found = step(planned(tmp_path, sharded))
    pairs = [(one["kind"], one["axis"]) for one in found["collectives"]]
    assert sorted(pairs) == [("all-reduce", "data"), ("all-reduce", "model")]
    assert found["sent_bytes"] == 0
    staged = tree()
    staged.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    found = step(planned(tmp_path, staged))
    size = tree().task.model.dim * 4 * 8 * tree().input.length  # of the activations
    assert found["collectives"] == [] and found["sent_bytes"] >= 2 * size


def test_a_table_in_a_problem_keeps_its_lines(tmp_path: Path) -> None:
    found = tree()
    found.execution = execution.Pipelined.Params(num_stages=50)
    lines = plan_text.text(planned(tmp_path, found)).split("\n")
    (first,) = [i for i, line in enumerate(lines) if line.startswith("problem: a pipeline of 50")]
    assert all(line.startswith("    ") for line in lines[first + 1 :])
    assert lines[-1].startswith("    set execution.num_stages to at most ")


def test_a_batch_that_does_not_divide_is_a_problem(tmp_path: Path) -> None:
    plan = planned(tmp_path, num_devices=3)
    assert plan.step is None and "input.batch_size 8 does not divide" in plan.problems[0]
    assert plan.problems[0].endswith("; the nearest that do: 6, 9")
    assert "problem: input.batch_size 8" in plan_text.text(plan)
    assert "\n\n\n" not in plan_text.text(plan)
    assert json.loads(json.dumps(plan_text.record(plan)))["ok"] is False


@pytest.mark.parametrize(
    ("model", "settings", "cure"),
    [
        ("image.fashion_mnist.ResNet", {}, ""),
        (
            "image.fashion_mnist.ResNet",
            {"learner.accumulation_steps": 2},
            "set learner.accumulation_steps=1",
        ),
        ("image.fashion_mnist.ResNet", {"execution.xla": "step"}, "set execution.xla to clusters"),
        (
            "image.emoji.DualEncoder",
            {"learner.accumulation_steps": 2},
            "set learner.accumulation_steps=1",
        ),
    ],
)
def test_parts_of_a_batch_that_training_rejects_are_a_problem(
    tmp_path: Path, model: str, settings: dict[str, Any], cure: str
) -> None:
    tree = registry.get(model)().tree().set(settings)
    problems = planned(tmp_path, tree, num_devices=2).problems
    assert len(problems) == bool(cure)
    assert cure in "".join(problems)


def test_too_little_memory_and_disk_are_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 20_000_000
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    plan = planned(tmp_path, tree(**{"input.batch_size": 8 * 1024}))
    memory, disk = plan.problems
    assert "of memory per device, but cpu has 4 GB" in memory
    assert "5 checkpoints need" in disk and "20 MB are free" in disk
    assert plan.free_bytes == free and plan.disk_bytes == 5 * plan.checkpoint_bytes
    # Checkpoints that are there already need no more space.
    save_fitting(tmp_path, tree(), *range(4))
    free = plan.checkpoint_bytes
    assert planned(tmp_path, logdir=str(tmp_path)).problems == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_has_copies_of_the_weights_in_16_bits(tmp_path: Path, dtype: str) -> None:
    step = planned(tmp_path, tree(**{"run.activation_dtype": dtype})).step
    assert step is not None and step.memory["used_weights"] == step.memory["weights"] / 2
    staged = tree(**{"run.activation_dtype": dtype})
    staged.execution = execution.Pipelined.Params(num_stages=1, num_micro_batches=4)
    step = planned(tmp_path, staged).step
    assert step is not None and step.memory["used_weights"] == step.memory["weights"] / 2


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
    assert plan.not_ranked == {}  # a stage has one device
    text = plan_text.text(plan)
    assert "mesh_sharded, data:" in text and "no problems were found" in text
    assert "\n\n\n" not in text
    assert "The memory of pipelines is without temporary memory" in text
    for step in plan.others[:3]:  # a title, and why it takes this time
        reasons = text.partition(f"\n\n{step.name}\n  - ")[2].partition("\n\n")[0]
        assert " ".join(reasons.split()).startswith(step.notes[0])
        assert " ".join(reasons.split()).endswith(step.notes[-1])


def test_pipelines_as_one_program_are_ranked_and_what_is_not_is_said(
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
    assert "execution.stages_on is not ranked" in plan_text.text(plan).replace("\n    ", " ")
    assert [*plan_text.record(plan)["not_ranked"]] == ["pipelined, stages on meshes"]
    no_stack = registry.get("image.digits.Mlp")().tree()
    monkeypatch.setattr(execution_search, "_PIPELINES", {"spmd_pipelined": SpmdPipelined})
    plan = planned(tmp_path, no_stack, num_devices=4, searches=True)
    assert "spmd_pipelined" in plan.rejected, "one reason for all numbers of stages"


def handover_of(found: Any, stages: int, device: DeviceType) -> float:
    """Returns how much longer the link makes the step of a pipeline."""
    found.execution = Pipelined.Params(num_stages=stages, num_micro_batches=4, schedule="gpipe")
    figures = pipeline_plan.figures(found)
    memory = {"weights": 0.0, "slots": 0.0}
    instant = dataclasses.replace(device, link_bytes_per_s=math.inf, link_latency_s=0.0)
    slow, fast = (
        pipelined_step._modelled_seconds(figures, one, memory, itemsize=4)
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
    assert pipelined_step._exchange_seconds(figures, device) == pytest.approx(2 * once)
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
    assert pipelined_step._exchange_seconds(pipeline_plan.figures(found), device) == 0.0


def test_one_program_of_replicas_reduces_each_weight_in_a_ring() -> None:
    device = device_types.find("v100")
    found = registry.get("lm.python_source.TinySpmdPipeline")().tree()
    found.execution = SpmdPipelined.Params(num_stages=2, num_micro_batches=2, num_replicas=2)
    figures = pipeline_plan.figures(found)
    exchange = pipelined_step._exchange(figures)
    assert exchange is not None and (exchange.kind, exchange.axis) == ("all-reduce", "data")
    assert exchange.count == len({path for stage in figures.stages for path in stage.learned})
    # A ring of two sends half of the bytes in each of two hops.
    time = exchange.bytes / device.link_bytes_per_s + 2 * exchange.count * device.link_latency_s
    assert pipelined_step._exchange_seconds(figures, device) == pytest.approx(time)


def test_data_parallel_gradients_are_one_all_reduce(tmp_path: Path) -> None:
    for parts in (1, 2):
        found = tree(**{"learner.accumulation_steps": parts})
        plan = planned(tmp_path, found, device="v100", num_devices=2)
        assert plan.step is not None
        (reduced,) = plan.step.collectives
        sums = 2 * parts  # of the loss and its weight
        assert (reduced.kind, reduced.axis, reduced.count) == ("all-reduce", "data", 1 + sums)
        assert reduced.bytes == 4 * plan.weights + 4 * sums


def test_steps_of_one_task_each_have_the_mean_time_and_the_largest_memory(tmp_path: Path) -> None:
    both = registry.get("multi.cldr_and_python.Shared")().tree()
    both.set({"input.mixing.weights": {"lm": 3.0}, "run.steps": 40})
    plan = run_plan.plan("m", both, logdir=str(tmp_path / "none"), device="v100")
    batches = inspection.task_batches(both)
    assert [one.task for one in batches] == ["lm", "mt"]
    shares = [one.share for one in batches]
    assert shares[0] == pytest.approx(0.75, abs=0.05) and sum(shares) == 1.0
    parts = StepParts(
        both,
        inspection.task_of(both),
        schedules.end_with_run(both.learner, 40).instantiate(),
        batches[0].batch,
        device_types.find("v100"),
    )
    steps = [
        step_plan._data_parallel_batch(dataclasses.replace(parts, batch=one.batch), 1)
        for one in batches
    ]
    pairs = list(zip(shares, steps, strict=True))
    assert plan.step is not None
    assert plan.step.seconds == pytest.approx(sum(share * step.seconds for share, step in pairs))
    assert plan.step.flops == pytest.approx(sum(share * step.flops for share, step in pairs))
    assert plan.step.total_bytes == max(step.total_bytes for step in steps)
    assert plan.step.notes[0].startswith(f"a step trains one task: lm {shares[0]:.0%} (")
    of_layers = [flops for name, flops in plan.forward_flops.items() if "stack" in name]
    assert len(of_layers) == 2 and min(of_layers) > 0


def test_an_unknown_device_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="'gpu'; name the model of the device; there"):
        planned(tmp_path, device="gpu")


def test_a_pipeline_that_cannot_be_divided_is_rejected_with_the_reason(tmp_path: Path) -> None:
    plan = planned(tmp_path, tree(**{"input.batch_size": 2}), num_devices=4, searches=True)
    assert "data_parallel" in plan.rejected and plan.problem
    assert "4 micro-batches of 1 replica" in plan.rejected["pipelined, 4 stages"]


def test_a_mesh_that_shards_no_product_is_not_ranked(tmp_path: Path) -> None:
    plan = planned(tmp_path, num_devices=3, searches=True)  # 8 rows, 4 heads, 512 units
    assert not [step for step in plan.others if step.name.startswith("mesh_sharded")]
    assert plan.rejected["mesh_sharded"] == "no layout over 3 devices divides the step"


def test_a_pipeline_says_that_it_has_its_own_number_of_devices(tmp_path: Path) -> None:
    found = tree()
    found.execution = execution.Pipelined.Params(num_stages=2, num_micro_batches=4)
    step = planned(tmp_path, found, num_devices=3).step
    assert step is not None and step.devices == 2
    assert step.notes[0] == "has its own number of devices, 2: --devices=3 counts only for --auto"
    alike = planned(tmp_path, found, num_devices=2).step
    assert alike is not None and step.notes[1:] == alike.notes


def speed_of(factor: float) -> MachineSpeed:
    points = [(1.0, factor * 1e9), (100.0, factor * 1e11)]
    streams, rate, fixed = [(1.0, factor * 1e9)], factor * 1e9, 1e-5 / factor
    return MachineSpeed(
        points, points, points, points, points, points, streams, rate, rate, rate, streams, rate,
        rate, rate, rate, rate, streams, 1.0,
        0.1 * fixed, fixed, fixed, fixed, 0.0, 0.0,
    )  # fmt: skip


def test_a_plan_says_that_other_programs_use_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Condition(2.5, is_slow=True, measured_busy=True)
    monkeypatch.setattr(stored_speeds, "_read", {"machine": busy})
    plan = planned(tmp_path)
    assert plan.condition == Condition()  # the plan is for another device
    assert "2.5 times" not in plan_text.text(plan)
    plan = dataclasses.replace(plan, condition=busy)
    assert "machine     other programs used this machine when its" in plan_text.text(plan)
    assert "this machine is 2.5 times as slow now" in " ".join(plan_text.text(plan).split())
    assert plan_text.record(plan)["machine"] == {
        "slowdown": 2.5, "is_slow": True, "measured_busy": True,
    }  # fmt: skip


BFLOAT16 = {"run.activation_dtype": "bfloat16"}
ONE_LAYER = {"task.model.stack.num_layers": 1}
HERE = "this_machine"


def test_a_step_on_this_machine_has_the_time_and_memory_of_its_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=1e-4, array_s=0.0, variable_s=1e-6)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    monkeypatch.setattr(step_graphs, "num_cores", lambda: 2)
    condition = Condition(2.5, is_slow=True)
    monkeypatch.setattr(stored_speeds, "_read", {"machine": condition})
    one_layer = tree(**ONE_LAYER)
    plan = planned(tmp_path, one_layer, device=HERE)
    assert plan.condition == condition
    assert plan.step is not None and "2 cores" in plan.step.name
    assert plan.device.name == "this_machine"
    alone = planned(tmp_path, tree(**{**ONE_LAYER, "execution.towers": 1}), device=HERE).step
    assert alone is not None and plan.step.core_seconds is not None
    assert alone.seconds == pytest.approx(alone.core_seconds)
    assert plan.step.core_seconds == pytest.approx(alone.core_seconds, rel=0.2)
    assert 0.5 < plan.step.seconds / plan.step.core_seconds < 0.7
    in_parts = tree(**{**ONE_LAYER, "learner.accumulation_steps": 4})
    parts = planned(tmp_path, in_parts, device=HERE).step
    assert parts is not None
    assert parts.memory["tensors of a step"] < 0.6 * plan.step.memory["tensors of a step"]
    assert parts.memory["weights"] == plan.step.memory["weights"] == 4 * plan.weights
    small = registry.get("image.digits.Mlp")().tree().set(BFLOAT16)
    in_16_bits = planned(tmp_path, small, device=HERE).step
    assert in_16_bits is not None and "in bfloat16 may take much longer" in in_16_bits.notes[-1]
    assert "float" not in plan.step.notes[-1]
    starts = MeshStarts(
        0.0, 0.0, 0.0, op_s=speed.op_s, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    monkeypatch.setattr(mesh_time, "measured_starts", lambda: {2: starts, 4: starts})
    replicas = planned(tmp_path, one_layer, device=HERE, num_devices=2)
    other = planned(tmp_path, small, device=HERE, num_devices=2).step
    assert other is not None and "in bfloat16 may take much longer" in other.notes[-1]
    # The devices compute what two towers compute, and update their own copies of the weights.
    assert replicas.step is not None and replicas.step.core_seconds is not None
    assert 1.0 < replicas.step.core_seconds / plan.step.core_seconds < 1.7
    assert f"{4 * plan.weights / 1e6:.3g}" in replicas.step.notes[1]
    (sums,) = replicas.step.collectives
    assert (sums.kind, sums.axis) == ("all-reduce", "data") and sums.bytes > 4 * plan.weights
    small = dataclasses.replace(replicas.device, memory_bytes=1.9 * replicas.step.total_bytes)
    assert replicas.problems == [] and not any(
        "the start of ops" in note for note in replicas.step.notes
    )
    (problem,) = dataclasses.replace(replicas, device=small).problems
    assert "for the 2 devices that share it" in problem


def test_a_mesh_with_several_cores_for_a_device_says_that_they_are_not_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    starts = MeshStarts(
        0.0, 0.0, 0.0, op_s=0.0, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    monkeypatch.setattr(mesh_time, "measured_starts", lambda: {2: starts, 4: starts})
    small = registry.get("image.digits.Mlp")().tree()
    small.execution = execution.MeshSharded.Params(mesh="data:2", rules="batch:data")
    compiled = local_steps.compiled_step
    made: list[Any] = []

    def compiled_once(*args: Any, **options: Any) -> Any:
        made[:] = made or [compiled(*args, **options)]
        return made[0]

    monkeypatch.setattr(local_steps, "compiled_step", compiled_once)
    for cores, threads in ((2, None), (3, None), (8, 4)):
        monkeypatch.setattr(local_steps, "num_cores", lambda cores=cores: cores)
        plan = run_plan.plan("m", small, device="this_machine", logdir=str(tmp_path / "none"))
        assert plan.step is not None
        notes = [note for note in plan.step.notes if "planned on one" in note]
        assert len(notes) == (threads is not None)
        assert threads is None or f"uses {threads} cores" in notes[0]


class Growing(Task):
    """Multiplies rows by a matrix until they are large."""

    class Params(Task.Params):
        """Params of Growing."""

        most: int | None = param("Largest number of products.", default=None)
        masks: bool = param("Whether rows are left out.", default=False)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [3, 3], dims=(None, None), init=Ones.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(8.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        (rows,) = tf.while_loop(
            lambda x: tf.reduce_sum(x) < 1e6,
            lambda x: [x @ theta.w],
            [tf.ones([2, 3])],
            maximum_iterations=self.params.most,
        )
        if self.params.masks:
            rows = tf.boolean_mask(rows, rows[:, 0] > 0) @ theta.w
        return LossSums(tf.reduce_sum(rows))


def test_a_plan_says_that_the_length_of_a_loop_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=1e-4, array_s=0.0, variable_s=1e-6)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    starts = MeshStarts(
        0.0, 0.0, 0.0, op_s=speed.op_s, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    monkeypatch.setattr(mesh_time, "measured_starts", lambda: {2: starts, 4: starts})
    for devices in (1, 2):
        for most, masks in ((None, False), (7, True)):
            found = tree(**{"learner.optimizer.weight_decay_exclude": []})
            found.task = Growing.Params(most=most, masks=masks)
            plan = planned(tmp_path, found, device="this_machine", num_devices=devices)
            assert plan.step is not None
            notes = "\n".join(plan.step.notes)
            assert ("set maximum_iterations" in notes) == (most is None)
            assert ("size depends on values" in notes) == masks
            modelled = planned(tmp_path, found, num_devices=devices).step
            assert modelled is not None
            assert ("size depends on values" in "\n".join(modelled.notes)) == masks


def test_a_pipeline_on_this_machine_has_the_time_of_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=0.0, array_s=0.0, variable_s=0.0)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    starts = PipelineStarts(step_s=7.0, stage_s=0.0, weight_s=0.0, action_s=0.0, argument_s=0.0)
    monkeypatch.setattr(pipelined_step, "measured_starts", lambda: starts)
    small = registry.get("image.digits.Mlp")().tree()
    small.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    plan = run_plan.plan("m", small, device="this_machine", logdir=str(tmp_path / "none"))
    step = plan.step
    assert step is not None and step.core_seconds is not None
    assert 7.0 < step.seconds < step.core_seconds < 8.0
    assert "7 s of it to call stages from Python" in step.notes[-2]
    assert "float" not in step.notes[-1]
    small.set(BFLOAT16)
    other = run_plan.plan("m", small, device="this_machine", logdir=str(tmp_path / "none")).step
    assert other is not None and "in bfloat16 may take much longer" in other.notes[-1]
    assert plan.problems == []
    # Each of the two stages fits into the memory of the machine, but they share it.
    limit = 1.2 * step.total_bytes
    tight = dataclasses.replace(plan, device=dataclasses.replace(plan.device, memory_bytes=limit))
    assert limit < step.bytes_together
    assert not tight.fits(step)
    assert "for the 2 devices that share it" in tight.problems[0]


def test_towers_with_batch_statistics_are_planned_as_they_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tower uses all cores for each op; two have one core each, if they can sum."""
    side_by_side, alone, alone_cpu = (speed_of(factor) for factor in (1.0, 100.0, 50.0))
    machine = ThisMachine(side_by_side, alone, alone_cpu, call_s=0.0, array_s=0.0, variable_s=0.0)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    monkeypatch.setattr(step_graphs, "num_cores", lambda: 2)

    def plan(**settings: Any) -> RunPlan:
        key = "image.digits.Cnn"
        sizes = {"input.batch_size": 8, "task.model.num_blocks": [1]}
        small = registry.get(key)().tree().set({**sizes, **settings})
        folder = str(tmp_path / "none" / "run")
        return run_plan.plan(key, small, device="this_machine", logdir=folder)

    one, two = plan().step, plan(**{"execution.towers": 2}).step
    assert one is not None and two is not None
    assert "2 cores" in one.name and "2 cores" in two.name
    assert two.seconds > 20 * one.seconds
    (problem,) = plan(**{"execution.towers": 2, "execution.xla": "step"}).problems
    assert "a step that is compiled as a whole" in problem


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "input.length=0",
            ["input.length is 0, but must be at least 1", "task.decode.window is 0"],
        ),
        ("task.model.dim=7", ["MultiHeadAttention: num_heads 4 does not divide"]),
    ],
)
def test_problems_for_which_there_are_no_costs_are_in_the_json(
    setting: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tekso-trainer", "--mode=plan", f"--model={MODEL}", f"--set={setting}"]
    assert trainer.main([*words, "--device=cpu", "--format=json"]) == ExitCode.FAILED
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    assert record["ok"] is False and record["step"] is None
    for problem, begin in zip(record["problems"], said, strict=True):
        assert problem.startswith(begin)
    assert said[-1] in printed.err


def test_the_mode_prints_text_and_json_and_its_exit_code_says_whether_the_run_would_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tekso-trainer", "--mode=plan", f"--model={MODEL}", "--set=*.num_layers=1"]
    words.append("--device=cpu")
    assert trainer.main([*words, "--steps=30"]) == ExitCode.OK
    output = capsys.readouterr().out
    assert f"a new run in runs/{MODEL}: 30 steps are left" in output
    assert not (tmp_path / "runs").exists()
    assert trainer.main([*words, "--devices=3", "--format=json"]) == ExitCode.FAILED
    record = json.loads(capsys.readouterr().out)
    assert record["step"] is None and record["resumes_from"] is None
    assert record["device"] == "cpu" and "does not divide" in record["problems"][0]
    assert trainer.main([*words, "--warm_start=missing"]) == ExitCode.FAILED
    assert "run.warm_start.main.checkpoint is 'missing'" in capsys.readouterr().out
    assert trainer.main([*words[:-1], "--device=tpu3"]) == ExitCode.WRONG_USAGE
    assert "--device=tpu3: there is no device type 'tpu3'; did you" in capsys.readouterr().err
