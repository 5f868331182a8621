"""The simulated memory of a pipeline: what steps leave, formulas, and what TensorFlow counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import processes
import pytest
from traced_pieces import traced_once

from tekso.framework import onednn, registry, schedules
from tekso.framework.costs import this_machine
from tekso.framework.costs.best_fit import BestFit
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning import pipeline_memory
from tekso.framework.planning.pipeline_memory import PipelineMemory
from tekso.framework.planning.stage_figures import durations
from tekso.framework.run import inspection, pipeline_plan
from tekso.framework.step import Step

__all__ = ["traced_once"]

PROGRAM = Path(__file__).with_name("pipeline_memory_program.py")
MLP: dict[str, Any] = {"task.model.hidden_dims": [512]}


class Plain(BestFit):
    """Gives an array its bytes."""

    def take(self, name: Any, size: float, *, count: int = 1) -> None:
        del count
        self._used[name] = [(0, int(size))]
        self.held += int(size)
        self.peak = max(self.peak, self.held)

    def give_back(self, name: Any) -> None:
        self.held -= sum(size for _, size in self._used.pop(name, ()))


def tree_of(settings: dict[str, Any], **execution: Any) -> Any:
    tree = registry.get("image.digits.Mlp")().tree()
    tree.set(settings)
    tree.execution = Pipelined.Params(num_stages=2, **execution)
    return tree


def peak_of(tree: Any) -> tuple[float, PipelineMemory]:
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    task = inspection.task_of(tree, assets_dir=None)
    batch = inspection.batch_of(tree, assets_dir=None)
    plan = tree.execution.instantiate().plan(task, batch, parts=1)
    step = Step(task, learner, seed=0)
    memory = PipelineMemory(step, plan, batch, this_machine.only(op_s=1e-6))
    return memory.peak_bytes(durations(plan, [1.0, 1.0])), memory


@pytest.mark.parametrize(
    "settings",
    [{}, {"schedule": "zero_bubble_h1"}, {"rematerialize": "all"}, {"num_replicas": 2}],
    ids=str,
)
def test_steps_leave_weights_slots_and_sums_of_gradients_only(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(pipeline_memory, "BestFit", Plain)
    tree = tree_of(MLP, num_micro_batches=4, **settings)
    found = pipeline_plan.figures(tree)
    peak, memory = peak_of(tree)
    stored = sum(stage.weight_bytes + stage.slot_bytes for stage in found.stages)
    sums = found.plan.num_replicas * sum(stage.gradient_bytes for stage in found.stages)
    assert memory._devices.arrays.held == stored + sums
    # The update of the largest weight: its new value and two new slots, beside the old ones.
    assert peak >= stored + sums + 3 * 4 * 64 * 512


def test_every_micro_batch_of_gpipe_saves_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_memory, "BestFit", Plain)
    size = 4096  # examples of a micro-batch, whose tensors are far larger than the weights

    def peak(micro_batches: int, again: str) -> float:
        settings = {**MLP, "input.batch_size": size * micro_batches}
        options = {"schedule": "gpipe", "rematerialize": again}
        return peak_of(tree_of(settings, num_micro_batches=micro_batches, **options))[0]

    # The images have 64 pixels. The hidden layer saves the output of relu, the factors of dropout,
    # and their product, which is the input of the next layer.
    saved = 4 * size * (64 + 3 * 512)
    assert peak(5, "none") - peak(3, "none") == pytest.approx(2 * saved, rel=0.05)
    handed = 4 * size * (64 + 512)  # inputs of both stages
    assert peak(5, "all") - peak(3, "all") == pytest.approx(2 * handed, rel=0.05)


@pytest.mark.skipif(not onednn.is_enabled(), reason="without oneDNN, TensorFlow uses malloc")
def test_the_peak_is_the_one_that_tensorflow_counts() -> None:
    done = processes.run([PROGRAM])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["is_handed_over_without_a_copy"]
    assert found["planned"] == pytest.approx(found["measured"], rel=0.15)
