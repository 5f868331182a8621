"""The plan of a step on this machine, by the ops of its graphs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from planned_runs import BFLOAT16, planned, speed_of, tree

from tekso.framework import execution, registry
from tekso.framework.costs import stored_speeds, this_machine
from tekso.framework.costs.stored_speeds import Condition
from tekso.framework.costs.this_machine import ThisMachine
from tekso.framework.initializers import Ones
from tekso.framework.params import param
from tekso.framework.planning import mesh_time
from tekso.framework.planning.mesh_time import MeshStarts
from tekso.framework.run import (
    local_steps,
    run_plan,
    step_graphs,
)
from tekso.framework.run.run_plan import RunPlan
from tekso.framework.task import LossSums, Task
from tekso.framework.units import bytes_text

HERE = "this_machine"


def mlp(**settings: Any) -> Any:
    """A step whose activations are larger than its weights."""
    found = registry.get("image.digits.Mlp")().tree()
    found.execution = execution.DataParallel.Params()
    sizes = {"input.batch_size": 2048, "task.model.hidden_dims": [512]}
    return found.set({**sizes, **settings})


def test_a_step_on_this_machine_has_the_time_and_memory_of_its_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=1e-4, array_s=0.0, variable_s=1e-6)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    monkeypatch.setattr(step_graphs, "num_cores", lambda: 2)
    condition = Condition(2.5, is_slow=True)
    monkeypatch.setattr(stored_speeds, "_read", {"machine": condition})
    plan = planned(tmp_path, mlp(), device=HERE)
    assert plan.condition == condition
    assert plan.step is not None and "2 cores" in plan.step.name
    assert plan.device.name == "this_machine"
    alone = planned(tmp_path, mlp(**{"execution.towers": 1}), device=HERE).step
    assert alone is not None and plan.step.core_seconds is not None
    assert alone.seconds == pytest.approx(alone.core_seconds)
    assert plan.step.core_seconds == pytest.approx(alone.core_seconds, rel=0.2)
    assert 0.5 < plan.step.seconds / plan.step.core_seconds < 0.7
    parts = planned(tmp_path, mlp(**{"learner.accumulation_steps": 4}), device=HERE).step
    assert parts is not None
    assert parts.memory["tensors of a step"] < 0.6 * plan.step.memory["tensors of a step"]
    assert parts.memory["weights"] == plan.step.memory["weights"] == 4 * plan.weights
    assert plan.step.memory["slots"] == pytest.approx(2 * 4 * plan.weights, rel=1e-4)  # of Adam
    small = registry.get("image.digits.Mlp")().tree().set(BFLOAT16)
    in_16_bits = planned(tmp_path, small, device=HERE).step
    assert in_16_bits is not None and "in bfloat16 may take much longer" in in_16_bits.notes[-1]
    assert "float" not in plan.step.notes[-1]
    starts = MeshStarts(
        0.0, 0.0, 0.0, op_s=speed.op_s, collective_s=0.0, collective_elapsed_s=0.0, byte_s=0.0
    )
    monkeypatch.setattr(mesh_time, "measured_starts", lambda: {2: starts, 4: starts})
    replicas = planned(tmp_path, mlp(), device=HERE, num_devices=2)
    other = planned(tmp_path, small, device=HERE, num_devices=2).step
    assert other is not None and "in bfloat16 may take much longer" in other.notes[-1]
    # The devices compute what two towers compute, and update their own copies of the weights.
    assert replicas.step is not None and replicas.step.core_seconds is not None
    assert 1.0 < replicas.step.core_seconds / plan.step.core_seconds < 1.7
    assert f" {4 * plan.weights / 1e3:.3g} kB" in replicas.step.notes[1]
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
    small = registry.get("image.digits.Mlp")().tree().set({"task.model.hidden_dims": []})
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


ROWS = 12


class Summing(Task):
    """Adds up a state for each row in a loop."""

    class Params(Task.Params):
        """Params of Summing."""

        at_once: int = param("parallel_iterations of the loop.", default=10)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.weight("w", [64, 64], dims=(None, None), init=Ones.Params())

    def loss_weight(self, batch: Any) -> tf.Tensor:
        return tf.constant(8.0)

    def loss(self, theta: Any, batch: Any, ctx: Any) -> LossSums:
        rows = tf.tanh(tf.ones([ROWS, 32, 64]) @ theta.w)
        _, state = tf.while_loop(
            lambda t, _: t < ROWS,
            lambda t, h: (t + 1, tf.tanh(h @ theta.w + rows[t])),
            (0, tf.zeros([32, 64])),
            parallel_iterations=self.params.at_once,
        )
        return LossSums(tf.reduce_sum(state))


def test_a_plan_says_how_much_memory_iterations_that_overlap_can_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = speed_of(1.0)
    machine = ThisMachine(speed, speed, speed, call_s=1e-4, array_s=0.0, variable_s=1e-6)
    monkeypatch.setattr(this_machine, "measured", lambda: machine)
    rows_and_w = 4 * (ROWS * 32 * 64 + 64 * 64)  # bytes of their gradients
    for at_once, towers in ((10, 1), (10, 2), (1, 2)):
        found = tree(**{"learner.optimizer.weight_decay_exclude": [], "execution.towers": towers})
        found.task = Summing.Params(at_once=at_once)
        plan = planned(tmp_path, found, device="this_machine")
        assert plan.step is not None
        notes = [note for note in plan.step.notes if "parallel_iterations=1" in note]
        assert len(notes) == (at_once > 1)
        more = bytes_text((at_once - 1) * towers * rows_and_w)
        assert all(f"up to about {more} more memory" in note for note in notes)


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
