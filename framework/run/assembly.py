"""Builds the parts of an experiment from its tree of Params, in the right order.

    devices ─► inputs ─► task (completed from the input) ─► learner ─► program

A command assembles one experiment in its process; a notebook may assemble several, one after the
other. The first one determines TensorFlow's threads and logical devices (`execution/devices.py`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import foreign_variables, schedules, task_results
from tekso.framework.coupling import gathering
from tekso.framework.execution import ExecutionProgram, devices
from tekso.framework.execution.base import signature_of
from tekso.framework.execution.data_parallel_program import DataParallelProgram
from tekso.framework.execution.errors import ExecutionError
from tekso.framework.experiment import Run, Tree
from tekso.framework.input.input import ExampleInput, Input
from tekso.framework.input.prefetch import Prefetch
from tekso.framework.learning_step import LearnerBase
from tekso.framework.run import (
    batch_kinds,
    comparable,
    input_checks,
    inspection,
    loss_check,
    metric_choice,
    metric_names,
    reproducibility,
    schedule_check,
    training_data,
    update_check,
)
from tekso.framework.run.checkpoints import Description
from tekso.framework.run.consistency import check_data
from tekso.framework.run.divided_losses import Division, division_of, statistics_of_parts
from tekso.framework.run.evaluation import Stopped
from tekso.framework.run.process_group import ProcessGroup
from tekso.framework.run.tpu_connection import connecting
from tekso.framework.run.trained_models import load_trained
from tekso.framework.signature import Signature, num_examples
from tekso.framework.task import Scored, Task


@dataclasses.dataclass(frozen=True)
class Assembly:
    """The parts of an experiment; the program has no state yet."""

    tree: Tree.Params
    run: Run
    input: Input
    eval_inputs: dict[str, Input]
    task: Task
    learner: LearnerBase
    program: ExecutionProgram
    division: Division
    """How the program divides a batch."""
    warnings: tuple[str, ...] = ()
    """Possible problems with the inputs, to be shown before the first step."""
    conditions: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What the order of sums depends on besides the Params; see `reproducibility.py`."""
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Digests for descriptions of checkpoints; see `comparable` and `training_data`."""

    def try_task(self, *, is_new: bool, trains: bool = True) -> loss_check.Findings:
        """Checks the task on a few examples, or only padding and devices; finds its labels.

        Args:
          is_new: whether the program starts training from its initial weights; otherwise only
            padding, and the loss on several devices, are checked.
          trains: whether the program trains; otherwise it only evaluates.

        Returns:
          warnings, and the labels to check in each batch (`BatchCheck`).

        Raises:
          LossError: the loss of the task is not a sum over examples, or several devices would
            compute another one.
          InputError: the loss or a metric counts padding.
        """
        task_results.setting_to_try(self.task, self.eval_inputs)  # raises now, not after all steps
        inputs = with_paths(self.input, self.eval_inputs)
        if is_new:
            return loss_check.check(
                self.task, self.learner, self.program, inputs, division=self.division
            )
        return loss_check.check_restored(
            self.task, self.program, inputs, division=self.division, trains=trains
        )

    def batches(self, start: int) -> Iterator[Mapping[str, Any]]:
        """Returns this process's part of the training batches, from a batch to the last one."""
        return self._prefetched(self.input, start, stop=self.input.num_batches, training=True)

    def eval_batches(self) -> dict[str, Callable[[int], Iterator[Mapping[str, Any]]]]:
        """Returns {evaluation: function that returns the batches of one pass from a number on}."""
        return {
            name: functools.partial(self._prefetched, input, stop=input.num_batches)
            for name, input in self.eval_inputs.items()
        }

    def _prefetched(
        self, input: Input, start: int, *, stop: int | None, training: bool = False
    ) -> Iterator[Mapping[str, Any]]:
        rows = self.program.own_rows(training=training)
        fetch = input.batch if rows is None else functools.partial(input.own_part, rows=rows)
        with Prefetch(fetch, start=start, stop=stop) as batches:
            yield from batches

    def score(self, name: str, is_last: bool, stopped: Stopped) -> Scored | None:
        """Decodes an evaluation input; see `Task.score`."""
        input = self.eval_inputs[name]
        return task_results.score(self.task, self.program, input, is_last=is_last, stopped=stopped)

    def description(self, model: str) -> Description:
        """Returns the description that every checkpoint of this experiment has."""
        return Description(
            step=0,
            model=model,
            params=self.tree.to_text(),
            task=self.task.params.to_text(),
            goal=metric_choice.goal_of_best(self.tree),
            input={"seed": self.run.params.seed, **self.data},
            conditions=self.conditions,
            tensors={key: spec.described() for key, spec in self.program.specs().items()},
        )


def assemble(
    tree: Tree.Params,
    *,
    assets_dir: str,
    tpu: str | None = None,
    cpu_devices: int | None = None,
    group: ProcessGroup | None = None,
    reads_data: bool = True,
    trains: bool = True,
    one_task: str | None = None,
    checks_metrics: bool = False,
) -> Assembly:
    """Builds the parts of an experiment; call it before other code of this process runs TensorFlow.

    Args:
      tree: the Params.
      assets_dir: folder in which inputs store assets such as tokenizers.
      tpu: name or address of a TPU.
      cpu_devices: number of logical CPU devices.
      group: the processes that run the program; all of them must call this at the same time.
      reads_data: False: texts to decode are given, so no data is read unless the input needs it.
      trains: False: the training data may have changed since the run began.
      one_task: without data: the task to decode with, of several; data of others is not read.
      checks_metrics: whether evaluations must report the metrics of the rules of the run.

    Raises:
      ValueError: Params of a part are invalid, or do not fit the Params of another part.
    """
    run = tree.run.instantiate()
    devices.set_determinism(run.params.deterministic)
    devices.set_graph_optimizer(True)
    group = group or ProcessGroup()
    execution = batch_kinds.execution_of(tree)
    if group.cluster is not None:
        execution.join(group.cluster)
    execution.expect(tree.task)
    with connecting(tpu):
        execution.setup_devices(tpu=tpu, cpu_devices=cpu_devices)
    seed = run.params.seed
    eval_inputs = {}
    if reads_data:
        with group.first_before_others():  # the first process creates the assets
            input = tree.input.instantiate(seed=seed, assets_dir=assets_dir)
            eval_inputs = {
                name: params.instantiate(seed=seed, assets_dir=assets_dir, train=tree.input)
                for name, params in tree.eval_inputs.items()
            }
            for one in [*([input] if trains else []), *eval_inputs.values()]:
                one.check_unchanged()
        signature = _checked_signature(input, eval_inputs, group)
        execution.batches_differ = batch_kinds.differ_in_size(tree, input)
    else:
        with group.first_before_others():  # this may read the data and create assets
            input, signature = inspection.known_parts(tree, assets_dir, one_task=one_task)
    task = _task(tree, input)
    warnings = batch_kinds.division_warnings(tree, execution, signature) if trains else []
    if reads_data:
        inputs = with_paths(input, eval_inputs)
        warnings += [*input_checks.warnings(inputs), *task_results.check_inputs(task, inputs)]
    learner = schedules.end_with_run(tree.learner, run.params.steps).instantiate()
    if reads_data:
        _check_functions(task, learner, signature, run.params.steps)
    if checks_metrics:
        metric_names.check(tree, task, eval_inputs)
    program = execution.build(
        task, learner, seed=seed, batch=signature, dtype=run.params.activation_dtype
    )
    division = _division(tree, learner, program)
    if trains:
        warnings += statistics_of_parts(task, division)
        warnings += _check_steps(run.params, learner, task, program.concurrent_steps)
    if isinstance(program, DataParallelProgram) and (names := gathering(task)):
        _check_eval_batches(eval_inputs, program.num_replicas, names[0])
    if reads_data:
        input_checks.check_weights(with_paths(input, eval_inputs), task)
    return Assembly(
        tree, run, input, eval_inputs, task, learner, program, division, tuple(warnings),
        conditions=reproducibility.conditions(group),
        data=_described(input, eval_inputs) if trains and reads_data else {},
    )  # fmt: skip


def _described(input: Input, eval_inputs: Mapping[str, Input]) -> dict[str, Any]:
    return {**comparable.described(eval_inputs), **training_data.described(input)}


def _division(tree: Tree.Params, learner: LearnerBase, program: ExecutionProgram) -> Division:
    replicas = program.num_replicas if isinstance(program, DataParallelProgram) else 1
    accumulation = learner.params.accumulation_steps
    return division_of(tree.execution, replicas, accumulation=accumulation)


def _checked_signature(
    input: Input, eval_inputs: Mapping[str, Input], group: ProcessGroup
) -> Signature:
    """Returns the signature of the first batch, after checks of all inputs."""
    input_checks.check_ends(eval_inputs)
    batch = input.batch(0)
    for path, one in with_paths(input, eval_inputs).items():
        if isinstance(one.inner, ExampleInput):
            one.inner.check_has_examples()
        if one.num_batches != 0:
            input_checks.check_batch(path, one, batch if one is input else one.batch(0))
    input_checks.check_alike(with_paths(input, eval_inputs))
    check_data(group, batch)
    return signature_of(batch)


def _task(tree: Tree.Params, input: Input) -> Task:
    task: Task = task_results.complete(tree.task, input).instantiate()
    foreign_variables.check(task)
    task.use_trained(load_trained, input)
    return task


def with_paths(input: Input, eval_inputs: Mapping[str, Input]) -> dict[str, Input]:
    """Returns all inputs of an experiment by their paths in its tree."""
    return {"input": input, **{f"eval_inputs.{name}": one for name, one in eval_inputs.items()}}


def _check_functions(task: Task, learner: LearnerBase, batch: Signature, steps: int) -> None:
    """Checks that constants, loss_weight and schedules use no variables and random numbers."""
    foreign_variables.check_constants(task, task.params.instantiate())
    foreign_variables.check_function(task, lambda: task_results.loss_weight(task, _zeros(batch)))
    for one, own in learner.groups(task.specs()).values():
        try:
            foreign_variables.check_function(None, functools.partial(one.schedule, 0))
        except foreign_variables.ForeignVariableError as error:
            raise ValueError(
                f"{type(one.schedule).__name__} creates or reads a variable, or draws random "
                "numbers: a schedule must be a function of only the step and its Params"
            ) from error
        schedule_check.check_values(one.schedule, steps)
        update_check.check(one, own)


def _zeros(batch: Signature) -> dict[str, tf.Tensor]:
    return {name: tf.zeros(shape, dtype) for name, (shape, dtype) in batch.items()}


def _check_eval_batches(eval_inputs: Mapping[str, Input], num_devices: int, layer: str) -> None:
    """Raises an ExecutionError if some devices have no examples to compare in an evaluation."""
    for name, input in eval_inputs.items():
        size = num_examples(signature_of(input.batch(0))) if input.num_batches != 0 else num_devices
        if size < num_devices:
            raise ExecutionError(
                f"eval_inputs.{name} has batches of {size} examples, fewer than the {num_devices} "
                f"devices of all processes, whose examples {layer} compares: set "
                f"eval_inputs.{name}.batch_size to at least {num_devices}, or use fewer devices"
            )


def _check_steps(run: Any, learner: LearnerBase, task: Task, concurrent: int) -> list[str]:
    """Checks the steps of a call; returns the warnings about the schedules."""
    schedule_check.check_steps_per_call(run.steps_per_call, concurrent)
    return schedule_check.warnings(learner, task.specs(), run.steps)
