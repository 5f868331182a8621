"""Stages on meshes of their own give the losses, gradients and weights of a single device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import processes
import pytest
from absl import logging
from sampling import sample

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import small_models
from equality_test import check

from tekso.framework.execution import ExecutionError, MeshSharded, Pipelined
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.mesh.sharding_mesh import ShardingMesh
from tekso.framework.execution.pipeline import stages_on_mesh
from tekso.framework.execution.pipeline.stages_on_mesh import StagesOnMesh

PROGRAM = Path(__file__).with_name("mesh_stages_program.py")
TENSOR = "heads:model;mlp:model;vocab:model"
BLOCKS = "mlp:model;vocab:model"


def run(model: str, *pipelines: dict[str, Any], **job: Any) -> list[Any]:
    done = processes.run(
        [str(PROGRAM), json.dumps({"model": model, "pipelines": pipelines, **job})],
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return results


def pipeline(mesh: str, rules: str, schedule: str, **more: Any) -> dict[str, Any]:
    sizes = {"num_stages": 2, "num_micro_batches": 4}
    return {"mesh": mesh, "rules": rules, "schedule": schedule, **sizes, **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pipelines"),
    [
        (
            "blocks",  # its table is tied: both stages read it; in two accumulation steps
            [pipeline("data:2", "fsdp", "1f1b", rematerialize="except_last")],
        ),
        (
            "repeated",
            [pipeline("model:2", TENSOR, "gpipe", num_micro_batches=2, rematerialize="all")],
        ),
        (
            "untied",
            [pipeline("data:2;model:2", f"batch:data;{TENSOR}", "interleaved_1f1b")],
        ),
        ("moe", [pipeline("model:2", "experts:model;vocab:model", "1f1b", num_micro_batches=1)]),
        (
            "lstm",
            [pipeline("model:2", "mlp:model;vocab:model", "zero_bubble_h1", rematerialize="all")],
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_language_models(model: str, pipelines: list[Any]) -> None:
    # TensorFlow's graph optimizer, a fifth of the time, is on in the slow test of float64.
    # The others have no piece of their own in it; equality_test.py evaluates rows of a stack.
    evaluate = model == "blocks"
    parts = 2 if model == "blocks" else 1
    alone, *piped = run(
        model, *pipelines, size=16, optimized=False, evaluate=evaluate, accumulation=parts
    )
    for one in piped:
        check(alone, one)


FLOAT64 = [
    pipeline(
        *("data:2", "batch:data", "1f1b"),
        **{"num_stages": 3, "rematerialize": "except_last", "slots_axis": "data"},
    ),
    pipeline("model:2", "embed:model", "gpipe", num_micro_batches=2, num_replicas=2),
]


@pytest.mark.parametrize("one", sample(FLOAT64, quick=FLOAT64[:1]), ids=["data", "model"])
def test_float64_with_values_that_jump_stages_and_a_shared_table(one: dict[str, Any]) -> None:
    alone, piped = run("skipping", one, size=16, optimized=one is FLOAT64[1])
    check(alone, piped, within=1e-12)


@pytest.mark.slow
def test_bfloat16_is_near() -> None:
    alone, half = run(
        "blocks",
        pipeline("model:2", BLOCKS, "1f1b", num_micro_batches=2, activation_dtype="bfloat16"),
        **{"size": 16, "optimized": False, "evaluate": False},
    )
    assert half["first"] == alone["first"]  # the masters are float32
    for one, other in zip(alone["steps"], half["steps"], strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=0.02)
        assert other["loss"] != one["loss"]


@pytest.mark.slow
def test_a_stage_that_fails_ends_the_step_with_its_name() -> None:
    (said,) = run("checking", pipeline("data:2", "batch:data", "1f1b"))
    assert said.startswith("StageError: ")
    assert "stage 1" in said
    assert "assertion failed" in said


# --- what is refused, before any device is used ---


def build(**changes: Any) -> None:
    params = Pipelined.Params(
        num_stages=2,
        num_micro_batches=2,
        stages_on=StagesOnMesh.Params(mesh="model:2", rules=TENSOR),
    )
    execution = params.set(changes).instantiate()
    task = small_models.MODELS["dense"]().instantiate()
    batch = signature_of(small_models.batch("dense", 0))
    execution.stages_on.layout(task, execution.micro_batch(batch, parts=1), num_devices=None)
    execution.plan(task, batch, parts=1)


def test_what_goes_together_is_accepted() -> None:
    build()
    build(**{"stages_on.rules": "tensor"})
    build(rematerialize="except_last", xla="clusters", schedule="zero_bubble_h1", num_replicas=2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": ["localhost:7001"]}, r"execution.workers is set"),
        (
            {"stages_on.mesh": "model:3"},
            r"stages_on.mesh 'model:3'.*heads of 4 does not divide evenly over the 3 devices",
        ),
        ({"stages_on.rules": "mpl:model"}, r"rule mpl:model: no tensor.*did you mean mlp"),
        (
            {"stages_on.mesh": "data:8", "stages_on.rules": "batch:data"},
            r"batch of 4 does not divide evenly over the 8 devices of axis data",
        ),
        ({"stages_on.mesh": None}, r"execution.stages_on.mesh is not set"),
        (
            {"stages_on.mesh": None, "stages_on.rules": "tensr"},
            r"execution.stages_on.rules is 'tensr': neither a preset.*did you mean tensor",
        ),
        ({"stages_on.mesh": "model:two"}, r"^execution.stages_on.mesh is 'model:two'"),
        (
            {"stages_on.rules": TENSOR.replace("mlp", "embed"), "stages_on.mesh": "model:3"},
            r"no rule for embed \(execution.stages_on.rules=",
        ),
        ({"stages_on.slots_axis": "data"}, r"execution.stages_on.slots_axis is 'data'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecutionError, match=f"(?s){said}"):
        build(**changes)


def test_what_a_stage_on_a_mesh_cannot_do_is_no_field() -> None:
    with pytest.raises(AttributeError, match=r"no field decode_on: .* decoding runs on one device"):
        StagesOnMesh.Params(decode_on="mesh")
    with pytest.raises(AttributeError, match=r"no field xla: set execution.xla instead"):
        StagesOnMesh.Params(xla="clusters")
    with pytest.raises(TypeError, match=r"stages_on: must be .*; use .*StagesOnMesh"):
        Pipelined.Params(stages_on=MeshSharded.Params())


def test_an_axis_over_which_nothing_of_a_stage_is_split_is_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(stages_on_mesh, "MeshBackend", lambda *args, **rest: None)  # no device
    monkeypatch.setattr(ShardingMesh, "num_devices", lambda self: 4)
    monkeypatch.setattr(ShardingMesh, "make", lambda self, shape, number: None)
    task = small_models.MODELS["dense"]().instantiate()
    batch = signature_of(small_models.batch("dense", 0))

    def warned(rules: str) -> list[str]:
        said.clear()
        stages = StagesOnMesh.Params(mesh="data:2;model:2", rules=rules).instantiate()
        stage_plan = SimpleNamespace(
            xla="none", num_devices=2, stage_plan=SimpleNamespace(stages=())
        )
        stages.place(task, batch).backends(stage_plan)  # type: ignore[arg-type]
        return list(said)

    (one,) = warned("batch:data")
    assert one.startswith(
        "execution.stages_on.mesh data:2;model:2: no tensor is sharded over axis model,"
    )
    assert "execution.stages_on.rules, or set execution.stages_on.slots_axis" in one
    assert not warned(f"batch:data;{TENSOR}")


def test_too_few_devices_are_counted_over_all_stages() -> None:
    execution = Pipelined.Params(
        num_stages=4,
        stages_on=StagesOnMesh.Params(mesh="model:2", rules=TENSOR),
    ).instantiate()
    task = small_models.MODELS["dense"]().instantiate()
    batch = signature_of(small_models.batch("dense", 0))
    with pytest.raises(ExecutionError, match=r"4 stages on meshes of 2 need 8 devices.* are 6"):
        execution.stages_on.layout(task, batch, num_devices=6)
