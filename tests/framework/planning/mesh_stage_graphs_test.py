"""What a step of a pipeline on meshes runs, read from programs that never start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tekso.framework import registry, schedules
from tekso.framework.execution import StagesOnMesh
from tekso.framework.execution.mesh.layouts import MeshLayout, MeshShape, Rules
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.planning.mesh_graphs import DeviceGraphs
from tekso.framework.planning.mesh_stage_graphs import mesh_stage_graphs
from tekso.framework.run import inspection
from tekso.framework.step import Step
from tekso.framework.weight_spec import WeightSpec

LENGTH, ROWS, MICRO, DIM, LAYERS = 16, 2, 2, 128, 1
SHARDED = ("heads", "mlp", "vocab")
TENSOR = ";".join(f"{dim}:x" for dim in SHARDED)


def tiny() -> Any:
    """Returns Params of Tiny with one layer, which is in one of two stages."""
    tree = registry.get("lm.python_source.Tiny")().tree()
    tree.set({"task.model.stack.num_layers": LAYERS, "input.length": LENGTH})
    return tree


def graphs(rules: str, *, replicas: int = 1) -> DeviceGraphs:
    """Returns the graphs of Tiny in two stages, each on a mesh of two devices."""
    tree = tiny()
    tree.set({"input.batch_size": ROWS * MICRO * replicas})
    tree.execution = Pipelined.Params(
        num_stages=2, num_micro_batches=MICRO, num_replicas=replicas,
        stages_on=StagesOnMesh.Params(mesh="x:2", rules=rules),
    )  # fmt: skip
    task, batch = inspection.task_of(tree), inspection.batch_of(tree)
    learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
    plan = tree.execution.instantiate().plan(task, batch, parts=1)
    layout = MeshLayout(MeshShape((("x", 2),)), Rules.parse(rules))
    return mesh_stage_graphs(Step(task, learner, seed=0), plan, layout, batch)


def weights_with(dims: Sequence[str]) -> list[WeightSpec]:
    """Returns the weights that have one of these dims; no dims: all weights."""
    task = inspection.task_of(tiny())
    return [s for s in task.specs().values() if not dims or set(dims) & set(s.dims)]


@pytest.fixture(scope="module")
def sharded() -> DeviceGraphs:
    return graphs(TENSOR)


def test_a_stage_is_called_for_both_passes_of_each_micro_batch_and_four_times_more(
    sharded: DeviceGraphs,
) -> None:
    # Further calls set the sums of gradients to 0, read the weights, compute norms, and update.
    assert sharded.calls == 2 * (2 * 2 + 4)
    assert sorted(times for times, _ in sharded.graphs) == [1] * 8 + [2] * 4


def test_collectives_are_those_of_sharded_products_and_norms(sharded: DeviceGraphs) -> None:
    sizes = list(sharded.collectives)
    # For each micro-batch, each layer sums the outputs of attention and of the feed-forward layer,
    # and the gradients of their inputs. So do the table of embeddings and the softmax.
    assert sizes.count(4.0 * ROWS * LENGTH * DIM) == MICRO * (4 * LAYERS + 2)
    # The squares of the gradients of weights whose elements are on both devices.
    assert sizes.count(4.0) == len(weights_with(SHARDED))


def test_a_sharded_batch_sums_the_gradients_of_weights_for_each_micro_batch() -> None:
    found = graphs("batch:x")
    gradients = [4.0 * np.prod(spec.shape) for spec in weights_with(())]
    assert sum(found.collectives) == pytest.approx(MICRO * sum(gradients), rel=0.01)
    assert 4.0 * ROWS * LENGTH * DIM not in found.collectives


def test_replicas_repeat_the_passes_but_not_the_update(sharded: DeviceGraphs) -> None:
    two = graphs(TENSOR, replicas=2)
    # The second replica gets copies of weights, and sends its gradients to the first.
    assert two.calls == 2 * sharded.calls - 2 * 3
    assert two.flops() == pytest.approx(2 * sharded.flops(), rel=0.05)
    assert two.arrays > 2 * sharded.arrays


def test_no_device_is_needed(sharded: DeviceGraphs) -> None:
    assert sharded.graphs and len(tf.config.list_logical_devices("CPU")) < 4
