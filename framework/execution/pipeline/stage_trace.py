"""Traces the training step of a stage, forward and backward, to one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework.batch_sums import Sums
from tekso.framework.context import Examples
from tekso.framework.execution.pipeline.graph_cut import GraphCut
from tekso.framework.execution.pipeline.graph_effects import effects
from tekso.framework.execution.pipeline.plan import PipelinePlan
from tekso.framework.execution.pipeline.stage_backend import Specs, StageBackend
from tekso.framework.execution.pipeline.stage_run import run_stage
from tekso.framework.execution.pipeline.stages import Stage, Value
from tekso.framework.nests import has_gradient, tensors
from tekso.framework.step import Step, unscaled, with_gradients


class Scalars(NamedTuple):
    """The scalar arguments of every function of a stage.

    Attributes:
      offset: position of the first example in the global batch.
      step: number of the training step.
      total_weight: loss weight of the global batch; a tuple, of a task with several losses.
    """

    offset: Any
    step: Any
    total_weight: Any


SCALAR_DTYPES = Scalars(tf.int32, tf.int64, tf.float32)


def scalar_dtypes(num_losses: int) -> Scalars:
    """Returns the dtypes of the scalars; of several losses, `total_weight` is a tuple of them."""
    if not num_losses:
        return SCALAR_DTYPES
    return SCALAR_DTYPES._replace(total_weight=(SCALAR_DTYPES.total_weight,) * num_losses)


class StageInputs(NamedTuple):
    """The inputs of the graph, in order: tensors, their specs, or their names.

    Attributes:
      weights: the weights that the stage reads.
      values: flat values from the batch and from earlier stages.
      scalars: the scalars.
      seeds: gradients of the floating-point outputs, and of the total loss. They arrive late.
    """

    weights: Sequence[Any]
    values: Sequence[Any]
    scalars: Scalars
    seeds: Sequence[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class StageResults:
    """Tensors and ops of the graph.

    Attributes:
      outputs: flat values that later stages read.
      sums: flat sums of the micro-batch.
      structure: the sums as a nest.
      input_gradients: gradients of the learned values.
      done: depends on the addition of all gradients of weights to the totals.
      effects: ops of the forward pass that run even if no tensor depends on them.
    """

    outputs: list[tf.Tensor]
    sums: list[tf.Tensor]
    structure: Sums
    input_gradients: list[tf.Tensor]
    done: tf.Tensor
    effects: list[tf.Operation]


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStage:
    """The graph of a stage.

    Attributes:
      cut: cuts functions from it.
      names: names of its inputs.
      results: its tensors.
    """

    cut: GraphCut
    names: StageInputs
    results: StageResults


def trace_stage(
    stage: Stage,
    specs: Specs,
    plan: PipelinePlan,
    step: Step,
    backend: StageBackend,
    totals: Mapping[str, Any],
) -> TracedStage:
    """Returns the graph of a stage for one micro-batch.

    Args:
      stage: the stage.
      specs: specs of the weights that it reads; of stacked weights, only its rows.
      plan: plan of the pipeline.
      step: steps of the task and the learner.
      backend: backend that runs the stage.
      totals: variables to which the gradients of the trained weights are added, {path: variable}.

    Raises:
      ExecutionError: the backend does not support an op.
    """
    values = plan.stage_plan.values
    outputs = tensors([values[Value(name, stage.index)] for name in stage.outputs])
    floats = [leaf for leaf in outputs if has_gradient(leaf)]
    inputs = StageInputs(
        [tf.TensorSpec(s.shape, step.used_specs[path].dtype) for path, s in specs.items()],
        [leaf for value in stage.inputs for leaf in tensors(values[value])],
        tf.nest.map_structure(backend.scalar_spec, scalar_dtypes(len(step.task.losses))),
        [*floats, backend.scalar_spec(tf.float32)],
    )
    traced: list[StageResults] = []

    def whole(*flat: tf.Tensor) -> list[tf.Tensor]:
        given = tf.nest.pack_sequence_as(inputs, flat)
        traced.append(_results(stage, specs, plan, step, backend, totals, given))
        backend.check(tf.compat.v1.get_default_graph())
        # The results are not returned: the tensors that TensorFlow makes from returned values would
        # wait for all assignments.
        return []

    function = tf.function(whole, autograph=False)
    concrete = function.get_concrete_function(*tf.nest.flatten(inputs))
    cut = GraphCut(concrete, len(inputs.seeds), num_lasting=len(inputs.weights))
    names = [tensor.name for tensor in (*cut.early, *cut.late)]
    return TracedStage(cut, tf.nest.pack_sequence_as(inputs, names), traced[0])


def _results(
    stage: Stage,
    specs: Specs,
    plan: PipelinePlan,
    step: Step,
    backend: StageBackend,
    totals: Mapping[str, Any],
    given: StageInputs,
) -> StageResults:
    weights = dict(zip(specs, given.weights, strict=True))
    scalars = tf.nest.map_structure(backend.scalar_value, given.scalars)
    total_weight = tf.stack(scalars.total_weight) if step.task.losses else scalars.total_weight
    forward_effects: list[tf.Operation] = []

    def forward() -> tuple[list[tf.Tensor], Sums]:
        sizes = plan.micro_batch_size, plan.batch_size
        examples = Examples("train", step.seed, scalars.step, scalars.offset, *sizes)
        ctx = backend.context(weights, specs, examples)
        found = run_stage(
            stage,
            step.task,
            plan.stage_plan.values,
            weights,
            given.values,
            ctx,
            total_weight=total_weight,
        )
        forward_effects.extend(effects(tf.compat.v1.get_default_graph()))  # before the backward ops
        return found

    seed = backend.scalar_value(given.seeds[-1])
    sources = (
        [weights[path] for path in totals],
        [given.values[i] for i in plan.stage_plan.learned_inputs(stage)],
    )
    outputs, sums, (of_weights, of_inputs) = with_gradients(
        forward, sources, given.seeds[:-1], seed_of_total=seed
    )
    scale = seed if step.scales_loss else None
    added = []
    for (path, total), gradient in zip(totals.items(), of_weights, strict=True):
        gradient = unscaled(gradient, scale, total.dtype)
        gradient = backend.stored(gradient, specs[path], "slot")
        added.append(total.assign_add(gradient, read_value=False))
    with tf.control_dependencies(added):
        done = tf.identity(given.seeds[-1])

    # tf.identity gives each result a separate tensor, even if two are the same.
    return StageResults(
        [tf.identity(x) for x in outputs],
        [tf.identity(backend.replicated(x)) for x in tf.nest.flatten(sums)],
        sums,
        [tf.identity(x) for x in of_inputs],
        tf.identity(done),
        forward_effects,
    )
