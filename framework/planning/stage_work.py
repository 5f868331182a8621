"""Traces the work of the stages of a pipeline on a micro-batch, for the cost model of layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from tekso.framework.costs.piece_traces import rows_of
from tekso.framework.execution.pipeline.stages import BATCH, Stage, StagePlan, Value
from tekso.framework.nests import filled, has_gradient, tensors
from tekso.framework.pieces import run_all
from tekso.framework.planning.step_work import Alike, Part, StepWork, alike
from tekso.framework.planning.tracing_context import TracingContext
from tekso.framework.planning.work_recorder import Recorder
from tekso.framework.symbolic import new_graph
from tekso.framework.weight_spec import WeightSpec


@dataclasses.dataclass(frozen=True)
class StageWork:
    """The work of a stage for a micro-batch.

    Attributes:
      work: its work, as that of a step.
      weights: the weights that it reads, in groups.
      inputs: tensors that it gets from the batch and from other stages.
      outputs: tensors that it hands to other stages.
    """

    work: StepWork
    weights: Sequence[Alike]
    inputs: Sequence[Part]
    outputs: Sequence[Part]

    def with_recomputation(self) -> StageWork:
        """Returns the work of a stage that recomputes its forward pass in its backward pass."""
        work = {(one, again + 1): count for (one, again), count in self.work.work.items()}
        return dataclasses.replace(self, work=dataclasses.replace(self.work, work=work))


def stage_works(
    plan: StagePlan,
    specs: Mapping[str, WeightSpec],
    trained: Set[str],
    size: int,
    *,
    dtype: str,
    recomputes_loops: bool,
) -> list[StageWork]:
    """Returns the work of every stage; allocates nothing.

    Args:
      plan: the stages.
      specs: specs of all weights of the task.
      trained: paths of the weights that are learned.
      size: number of examples of a micro-batch.
      dtype: type in which layers compute.
      recomputes_loops: whether the backward pass of a loop recomputes it, as on a mesh.
    """
    found: list[StageWork] = []
    made: dict[Value, list[Part]] = {}
    for stage in plan.stages:
        read = {path: rows_of(specs[path], rows) for path, rows in stage.weights.items()}
        groups = alike(read.values(), trained=trained)
        with new_graph().as_default() as graph:
            recorder = Recorder(graph)
            ctx = TracingContext(
                recorder, mode="train", num_examples=size, recomputes_loops=recomputes_loops
            )
            weights = recorder.weights(groups, read, dtype)
            given = {value: _given(recorder, plan, value, made) for value in stage.inputs}
            flow = {
                value.name: filled(plan.values[value], placeholders)
                for value, placeholders in given.items()
            }
            flow = run_all(stage.pieces, weights, flow, ctx)
            work = recorder.step_work(specs)
            outputs = _parts(recorder, stage, flow)
        made |= outputs
        inputs = [recorder.part(x) for value in given.values() for x in value]
        handed = [part for parts in outputs.values() for part in parts]
        found.append(StageWork(work, groups, inputs, handed))
    return found


def _given(
    recorder: Recorder, plan: StagePlan, value: Value, made: Mapping[Value, Sequence[Part]]
) -> list[Any]:
    """Returns placeholders for a value, with the dimension names that its producer gives it."""
    leaves = tensors(plan.values[value])
    if value.producer == BATCH:
        return [recorder.array(leaf.shape, leaf.dtype) for leaf in leaves]
    return [
        recorder.names.register(
            tf.raw_ops.Placeholder(dtype=leaf.dtype, shape=leaf.shape),
            part.dims,
            learned=has_gradient(leaf),
        )
        for leaf, part in zip(leaves, made[value], strict=True)
    ]


def _parts(recorder: Recorder, stage: Stage, flow: Mapping[str, Any]) -> dict[Value, list[Part]]:
    return {
        Value(name, stage.index): [
            dataclasses.replace(recorder.part(x), weight=None) for x in tensors(flow[name])
        ]
        for name in stage.outputs
    }
