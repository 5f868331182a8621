"""Traces the work of a training step: products, sharding constraints and sums, with shapes.

The layers run on placeholders in a temporary graph, so any machine can trace a model of any size.
Primitives record their work, see tracing_context.py. Ops that layers use directly (such as the
einsums of a mixture of experts) are read from the graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tekso.framework import task_results
from tekso.framework.execution.accumulation import part_of
from tekso.framework.planning.step_work import Alike, StepWork
from tekso.framework.planning.tracing_context import TracingContext
from tekso.framework.planning.work_recorder import Recorder
from tekso.framework.signature import Signature, num_examples
from tekso.framework.symbolic import new_graph
from tekso.framework.task import Task


def trace(
    task: Task,
    weights: Sequence[Alike],
    batch: Signature,
    *,
    activation_dtype: str = "float32",
    recomputes_loops: bool = True,
    replicas: int | None = None,
) -> StepWork:
    """Returns the work of a training step of a task.

    Args:
      task: the task.
      weights: its weights in groups; the result refers to the first weight of each group.
      batch: signature of the examples that are computed together.
      activation_dtype: type to which float32 weights are cast.
      recomputes_loops: whether the backward pass of a loop recomputes it, as on a mesh.
      replicas: number of replicas of data-parallel execution: the work is of one of them, which
        computes an equal part of the batch by itself; None: the work is of the whole batch.

    Raises:
      ExecutionError: the batch does not divide evenly over the replicas.
    """
    specs = task.specs()
    of_device = part_of(batch, replicas or 1)
    with new_graph().as_default() as graph:
        recorder = Recorder(graph)
        ctx = TracingContext(
            recorder, mode="train", num_examples=num_examples(batch),
            recomputes_loops=recomputes_loops, is_replica=replicas is not None,
        )  # fmt: skip
        theta = task.theta(recorder.weights(weights, specs, activation_dtype))
        arrays = {name: recorder.array(*array) for name, array in of_device.items()}
        task_results.loss(task, theta, arrays, ctx)
        return dataclasses.replace(recorder.step_work(specs), replicas=replicas or 1)
