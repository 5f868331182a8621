"""The plan of a step: bytes, operations and collectives by hand, and what training rejects."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recurrent_tasks
import tensorflow as tf
from planned_runs import planned, tree
from traced_pieces import traced_once

from tekso.framework import execution, registry, schedules
from tekso.framework.costs import device_types
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.mesh_sharded import MeshSharded
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.input.bucketing import BucketedInput
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.run import (
    batch_kinds,
    execution_search,
    inspection,
    plan_text,
    run_plan,
    step_plan,
)
from tekso.framework.run.divided_plan import DividedStep
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.run.step_parts import StepParts, StepPlan
from tekso.framework.task import LossSums
from tekso.models.layers.stack import RepeatedStack

__all__ = ["traced_once"]


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
    first_products = 2 * 2 * (8 * 128) * 128 * 512  # of two layers, which the gradients need
    assert on_mesh.flops == of_loop.flops + first_products
    assert on_mesh.memory["activations"] < of_loop.memory["activations"]


def test_devices_share_the_batch_and_replicate_the_weights(tmp_path: Path) -> None:
    one, four = planned(tmp_path).step, planned(tmp_path, num_devices=4).step
    assert one is not None and four is not None
    assert four.devices == 4 and four.name == "data_parallel, 4 devices"
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.memory["activations"] == pytest.approx(one.memory["activations"] / 4)
    assert four.memory["weights"] == one.memory["weights"]
    assert any("all-reduce" in note for note in four.notes)


def recurrent_parts(kind: str) -> StepParts:
    """A recurrence, to be planned for a V100."""
    constant = schedules.Constant.Params(value=0.1)
    learner = Learner.Params(optimizer=Adam.Params(), schedule=constant).instantiate()
    task = recurrent_tasks.Recurrence.Params(kind=kind).instantiate()
    device = device_types.find("v100")
    return StepParts(tree(), task, learner, recurrent_tasks.SIGNATURE, device)


@pytest.mark.parametrize("kind", ["scan", "loop", "unrolled"])
def test_devices_share_the_batch_of_a_recurrence(kind: str) -> None:
    """Its state starts with zeros, which have no dims with names."""
    alone = step_plan.data_parallel(recurrent_parts(kind), 1)
    of_zeros = 2 * recurrent_tasks.BATCH * recurrent_tasks.UNITS**2  # they have no gradient
    assert alone.flops == recurrent_tasks.FLOPS - of_zeros * (kind == "unrolled")
    assert alone.collectives == ()
    for devices in (2, 4):
        step = step_plan.data_parallel(recurrent_parts(kind), devices)
        assert step.flops * devices == alone.flops
        assert step.memory["activations"] * devices == alone.memory["activations"]
        (reduced,) = step.collectives
        # The weight of the loss; the gradients, with the loss.
        assert (reduced.kind, reduced.count) == ("all-reduce", 2)
        assert reduced.bytes == 4 * (recurrent_tasks.WEIGHTS + 1)


@pytest.mark.parametrize("is_constrained", [False, True])
def test_a_mesh_shards_the_batch_of_a_recurrence(is_constrained: bool) -> None:
    """DTensor stores zeros, and so the state of a scan that starts with them, on every device."""
    kind = "constrained_scan" if is_constrained else "scan"
    alone, four = (
        step_plan.priced(
            recurrent_parts(kind),
            MeshLayout(MeshShape.parse(mesh), Rules.parse("batch:data")),
            "float32",
        )
        for mesh in ("data:1", "data:4")
    )
    r = recurrent_tasks
    recomputed = 2 * r.BATCH * r.TIME * r.UNITS * r.UNITS
    assert 4 * four.flops == alone.flops == r.FLOPS + recomputed
    state = 4 * r.BATCH * r.UNITS
    gathers = [(one.count, one.bytes) for one in four.collectives if one.kind == "all-gather"]
    assert gathers == ([] if is_constrained else [(r.TIME, r.TIME * state)])
    (reduced,) = [one for one in four.collectives if one.kind == "all-reduce"]
    assert (reduced.count, reduced.bytes) == (3 + 1, 4 * (r.WEIGHTS + 1))  # weights, and the loss


def test_a_mesh_refuses_loops_of_tensorflow_as_training_does() -> None:
    """Also in a search: a mesh is not ranked."""
    parts = recurrent_parts("loop")
    layout = MeshLayout(MeshShape.parse("data:2"), Rules.parse("batch:data"))
    reason = r"recurrent_tasks.py:\d+: return tf.while_loop.*: EmptyTensorList: .*Write ops.scan"
    with pytest.raises(ExecutionError, match=f"for execution.mesh 'data:2', .*{reason}"):
        step_plan.priced(parts, layout, "float32")
    steps, rejected = execution_search.other_plans(parts, 2, lambda *_: DividedStep())
    assert [step.devices for step in steps] == [2, 1]
    assert re.search(reason, rejected["mesh_sharded"])


class Joined(recurrent_tasks.Recurrence):
    """Joins tensors along an axis that is counted from the end, which a mesh refuses."""

    class Params(recurrent_tasks.Recurrence.Params):
        """Params of Joined."""

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        y = tf.matmul(batch["x"], theta.w)
        return LossSums(tf.reduce_sum(tf.concat([y, y], -1)))


def test_data_parallel_devices_compute_what_a_mesh_refuses() -> None:
    task = Joined.Params(kind="unrolled").instantiate()
    parts = dataclasses.replace(recurrent_parts("unrolled"), task=task)
    for devices in (1, 2):
        assert step_plan.data_parallel(parts, devices).devices == devices
    layout = MeshLayout(MeshShape.parse("data:2"), Rules.parse("batch:data"))
    with pytest.raises(ExecutionError, match=r"on a mesh, tf\.concat with a negative axis"):
        step_plan.priced(parts, layout, "float32")


def test_batch_statistics_are_summed_over_the_replicas(tmp_path: Path) -> None:
    """Of each layer: count, sum and squares, and in the backward pass two sums."""
    found = registry.get("image.fashion_mnist.ResNet")().tree()
    task = inspection.task_of(found)
    layers = sum(layer.has_statistics for layer in task.walk())
    plan = planned(tmp_path, found, num_devices=2, device="v100")
    assert plan.step is not None and layers > 1
    (reduced,) = plan.step.collectives
    assert reduced.count == 2 + 5 * layers


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
    assert found["collectives"] == [] and found["sent_bytes"] == size


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_has_copies_of_the_weights_in_16_bits(tmp_path: Path, dtype: str) -> None:
    step = planned(tmp_path, tree(**{"run.activation_dtype": dtype})).step
    assert step is not None and step.memory["used_weights"] == step.memory["weights"] / 2
    staged = tree(**{"run.activation_dtype": dtype})
    staged.execution = execution.Pipelined.Params(num_stages=1, num_micro_batches=4)
    step = planned(tmp_path, staged).step
    assert step is not None and step.memory["used_weights"] == step.memory["weights"] / 2


def test_data_parallel_gradients_are_one_all_reduce(tmp_path: Path) -> None:
    for parts in (1, 2):
        found = tree(**{"learner.accumulation_steps": parts})
        plan = planned(tmp_path, found, device="v100", num_devices=2)
        assert plan.step is not None
        (reduced,) = plan.step.collectives
        # The weight of the loss of all parts; then the gradients, with the loss.
        assert (reduced.kind, reduced.axis, reduced.count) == ("all-reduce", "data", 2)
        assert reduced.bytes == 4 * plan.weights + 4


def test_steps_of_one_task_each_have_the_mean_time_and_the_largest_memory(tmp_path: Path) -> None:
    both = registry.get("multi.cldr_and_python.Shared")().tree()
    root = str(Path(run_plan.__file__).parent)  # instead of the whole standard library
    both.set({"input.inputs.lm.corpus.root": root, "input.inputs.mt.corpus.num_pairs": 3000})
    both.set({"*.num_layers": 1})
    both.set({"input.mixing.weights": {"lm": 3.0}, "run.steps": 40})
    plan = run_plan.plan("m", both, logdir=str(tmp_path / "none"), device="v100")
    batches = batch_kinds.of_experiment(both).kinds
    assert [one.name for one in batches] == ["lm", "mt"]
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
    begin = f"a step trains one task, each with its largest batch: lm {shares[0]:.0%} ("
    assert plan.step.notes[0].startswith(begin)
    of_layers = [flops for name, flops in plan.forward_flops.items() if "stack" in name]
    assert len(of_layers) == 2 and min(of_layers) > 0


class RowsOfTwoLengths(BucketedInput):
    """Three batches of 8 rows of 3 vectors, and one of 4 rows of 9."""

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self.assign([3] * 24 + [9] * 4, [3, 5, 9], [8, 6, 4])

    def bucket_rows(self, examples: Any, bound: int) -> Any:
        return {"x": np.zeros([len(examples), bound, recurrent_tasks.INPUTS], np.float32)}


def test_a_step_of_several_buckets_has_the_mean_time_and_the_largest_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tree()
    found.task = recurrent_tasks.Recurrence.Params(kind="unrolled")
    found.input = RowsOfTwoLengths.Params(batch_size=4)
    found.eval_inputs = {}
    found.learner.optimizer = Adam.Params()

    def plan() -> Any:
        step = run_plan.plan("m", found, logdir=str(tmp_path / "none"), device="v100").step
        assert step is not None
        return step

    kinds = batch_kinds.of_experiment(found).kinds
    assert [(one.name, one.share) for one in kinds] == [("8 × 3", 0.75), ("4 × 9", 0.25)]
    step, alone = plan(), []
    for one in kinds:
        with monkeypatch.context() as patch:
            patch.setattr(batch_kinds, "_of_buckets", lambda *_: batch_kinds.ONE_KIND)
            patch.setattr(inspection, "batch_of", lambda *_, one=one, **__: one.batch)
            alone.append(plan())
    assert alone[0].flops != alone[1].flops
    for name in ("flops", "seconds"):
        first, second = (getattr(one, name) for one in alone)
        assert getattr(step, name) == pytest.approx(0.75 * first + 0.25 * second)
    assert step.total_bytes == max(one.total_bytes for one in alone)
    assert step.notes[0].startswith("batches have 2 sizes: 8 × 3 75% (")


@pytest.mark.slow
def test_a_pipeline_with_buckets_has_the_mean_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = registry.get("mt.cldr.EnDe")().tree()
    found.set({"input.corpus.num_pairs": 3000, "*.num_layers": 1, "run.steps": 40})
    found.execution = Pipelined.Params(num_stages=2, num_micro_batches=4)
    kinds = batch_kinds.of_experiment(found).kinds
    assert [one.name for one in kinds] == ["128 × 16", "64 × 32", "32 × 64"]

    def plan() -> Any:
        step = run_plan.plan("m", found, logdir=str(tmp_path / "none"), device="v100").step
        assert step is not None
        return step

    step = plan()
    assert step.notes[0].startswith(f"batches have 3 sizes: 128 × 16 {kinds[0].share:.0%} (")
    monkeypatch.setattr(batch_kinds, "_of_buckets", lambda *_: batch_kinds.ONE_KIND)
    mean = 0.0
    for one in kinds:
        monkeypatch.setattr(inspection, "batch_of", lambda *_, one=one, **__: one.batch)
        mean += one.share * plan().seconds
    assert step.seconds == pytest.approx(mean)


def test_recordings_are_not_read_for_the_shares_of_buckets() -> None:
    kinds = batch_kinds.of_experiment(registry.get("asr.prompts.Ctc")().tree())
    assert (
        kinds.note == "the plan is for the largest batch: recordings are not read for other lengths"
    )


def test_buckets_whose_data_is_not_read_are_planned_for_the_largest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a.en", tmp_path / "a.de"
    for path in (source, target):
        path.write_text("one two\n" * 50)
    files = {"source_files": str(source), "target_files": str(target)}
    found = registry.get("mt.text_files.Lstm")().tree()
    found.set({f"input.corpus.{name}": path for name, path in files.items()})
    assert not batch_kinds.of_experiment(found).note
    largest = "the plan is for the largest batch: "
    with monkeypatch.context() as patch:
        patch.setattr(batch_kinds, "_MOST_BYTES", 100)
        kinds = batch_kinds.of_experiment(found)
    note = f"{largest}files of 800 bytes are not read for other lengths"
    assert kinds == batch_kinds.BatchKinds(note=note)
    parts: Any = StepParts(tree(), None, None, {}, device_types.find("v100"), kinds)  # type: ignore[arg-type]
    planned_step = StepPlan("x", 1, {}, 1.0, 2.0, notes=("other",))
    assert parts.of_each_kind(lambda _: planned_step).notes == (note, "other")
    for unread in (str(tmp_path / "none*"), str(tmp_path)):
        other = found.copy().set({"input.corpus.test_source_files": unread})
        assert not batch_kinds.of_experiment(other).note  # this split is not evaluated
        other = found.copy().set({"input.corpus.source_files": unread})
        assert batch_kinds.of_experiment(other).note.startswith(largest)
    source.write_text("one\n")  # of 50 lines
    kinds = batch_kinds.of_experiment(found)
    assert not kinds.kinds
    assert kinds.note.startswith(f"{largest}the data cannot be read for other lengths (")
