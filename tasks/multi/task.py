"""MultiTask: several tasks with shared and own parts, trained together.

tasks   lm: embedding ─ stack ─ softmax          each has its own input, metrics, evaluation
        mt: embedding ─ stack ─ softmax          and decoding
shared  mt/model/stack = lm/model/stack          these weights exist once
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import StepContext, isolated
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.gradient_combination import GradientCombination, SumOfGradients
from tekso.framework.input.input import Input
from tekso.framework.input.task_inputs import OneTask, TaskInputs, is_in, named, of_task
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.shared_weights import SharedPart, SharedWeights
from tekso.framework.task import (
    LOSS,
    Batch,
    Decoded,
    Goal,
    LossSums,
    Program,
    Scored,
    Task,
)
from tekso.framework.task_values import SeveralLossSums
from tekso.framework.theta import SEPARATOR, Theta
from tekso.framework.weight_spec import WeightSpec
from tekso.tasks.multi.pieces import merged
from tekso.tasks.multi.programs import TaskPrograms, exported_for_task
from tekso.tasks.multi.settings import check_names, in_task, with_task


class MultiTask(Task):
    """Several tasks, which may share weights, trained together on a `TaskInputs`.

    The loss is the sum over the tasks in a batch: loss weight × mean loss of the task. Metrics have
    the name of the task in front ("mt/bleu"), and "mt/loss" is its mean loss.

    `shared` names parts by paths of weights, which begin with the name of the task. The shared
    weights exist once, at the second path; each task computes with its own layers and Params.

    Shapes:
      batch: the arrays of one or several tasks, as "<task>/<name>"
      loss returns: sums, [tasks]; those of tasks that are not in the batch are 0
    """

    class Params(Task.Params):
        """Params of MultiTask."""

        tasks: dict[str, Task.Params] = param("{name: task}.", default=REQUIRED)
        shared: dict[str, str] = param(
            "{path of a layer or weight: path of another, whose weights it uses}, such as "
            '{"mt/model/stack": "lm/model/stack"}.',
            default={},
        )
        own: list[str] = param(
            "Patterns of the weights that are not shared although they are in a shared part: "
            'regular expressions that match whole weight paths, such as [".*_lora_[ab]"].',
            default=[],
        )
        loss_weights: dict[str, float] = param(
            "{task: factor of its loss}; by default 1.", default={}
        )
        gradients: GradientCombination.Params = param(
            "How the gradients of the tasks are combined for shared weights; other than a sum, "
            "it needs input.unit 'all_tasks'.",
            default=SumOfGradients.Params(),
        )

    def __init__(self, params: Any) -> None:
        """Builds the tasks and checks what they share.

        Raises:
          ValueError: there are no tasks, a loss weight is not positive, or weights cannot be
            shared.
        """
        super().__init__(params)
        p = self.params
        if not p.tasks:
            raise ValueError("task.tasks is empty: give at least one task")
        for name, own in p.tasks.items():
            with in_task(name):
                self.child(name, own)
        self.tasks: dict[str, Task] = {name: getattr(self, name) for name in p.tasks}
        self.losses = tuple(self.tasks)
        self.unchecked_labels = type(self).unchecked_labels | frozenset(
            array
            for name, task in self.tasks.items()
            for array in named(name, dict.fromkeys(task.unchecked_labels))
        )
        for name, weight in p.loss_weights.items():
            if name not in self.tasks or not 0 < weight < float("inf"):
                raise ValueError(
                    f"task.loss_weights[{name!r}] is {weight}, but must be a positive number for "
                    f"one of the tasks {', '.join(self.tasks)}"
                )
        self._sharing = SharedWeights(super().specs(), p.shared, p.own, where="task")
        self.shared_weights = self._sharing.several
        self.gradients: GradientCombination = p.gradients.instantiate()
        self.gradients.check(self.losses, "task.gradients")
        self._programs = TaskPrograms()

    # --- weights ---

    @property
    def shared_parts(self) -> tuple[SharedPart, ...]:
        """The parts that use the weights of other parts, for `--mode=inspect_model`."""
        return self._sharing.parts

    def specs(self) -> dict[str, WeightSpec]:
        """Returns the specs of the stored weights: a shared weight has one."""
        return self._sharing.specs(super().specs())

    def theta(self, flat: Mapping[str, Any]) -> Theta:
        """Returns stored weights as theta, in which shared weights have all their paths."""
        return super().theta(self._sharing.flat(flat))

    # --- sizes and checks ---

    @classmethod
    def goals_of(cls, params: Any) -> dict[str, Goal]:
        """See Task: the goals of every task, by names of metrics with the task in front."""
        found: dict[str, Goal] = {}
        for name, own in params.tasks.items():
            found |= named(name, {LOSS: "min", **task_results.goals_of(own)})
        return found

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Completes the Params of every task from its own input.

        Raises:
          ValueError: a task has no input, or its Params do not fit it.
        """
        params = params.copy()
        inputs = getattr(input, "inputs", None)
        if not isinstance(inputs, Mapping):
            raise ValueError(
                f"input is {type(input.params).owner.__name__}, but MultiTask needs the input of "
                "every task by name: TaskInputs.Params(inputs={…})"
            )
        check_names(params.tasks, inputs)
        for name, own in list(params.tasks.items()):
            with in_task(name):
                params.tasks[name] = task_results.complete(own, inputs[name])
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the inputs of every task; see Task.

        Raises:
          ValueError: an input has no task, or does not fit it; or `gradients` needs all tasks in a
            step.
        """
        train = inputs["input"]
        if not isinstance(train, TaskInputs):
            raise ValueError(f"input is {type(train).__name__}, but MultiTask needs TaskInputs")
        check_names(self.tasks, train.inputs)
        if not self.gradients.is_sum and train.takes_turns:
            raise ValueError(
                f"task.gradients is {type(self.gradients).__name__}, which combines the gradients "
                "of all tasks in a step, but input.unit is 'one_task': "
                "--set input.unit=all_tasks"
            )
        warnings = []
        by_task: dict[str, dict[str, Any]] = {
            name: {"input": one} for name, one in train.inputs.items()
        }
        for path, one in inputs.items():
            if path == "input":
                continue
            if not isinstance(one, OneTask):
                raise ValueError(
                    f"{path} is {type(one).__name__}, but an evaluation input of MultiTask says to "
                    "which task it belongs: OneTask.Params(task=…, input=…)"
                )
            by_task[one.task][path] = one.input
        for name, own in by_task.items():
            with in_task(name):
                warnings += task_results.check_inputs(self.tasks[name], own)
        return [f"task {name}: {line}" if len(by_task) > 1 else line for line in warnings]

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the arrays of every task in the batch."""
        for name, task in self.tasks.items():
            if is_in(name, batch):
                task.check_batch(f"{what} of the task {name}", of_task(name, batch))

    # --- loss ---

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the loss weight of every task; 0 if it is not in the batch.

        Shapes:
          returns: [tasks] float32
        """
        found = {
            name: task_results.loss_weight(task, of_task(name, batch))
            for name, task in self.tasks.items()
            if is_in(name, batch)
        }
        return tf.stack([found.get(name, tf.constant(0.0)) for name in self.tasks])

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the sums of every task; see the class."""
        found = {}
        for name, task in self.tasks.items():
            if not is_in(name, batch):
                continue
            own = of_task(name, batch)
            run = functools.partial(task_results.loss, task, theta[name], own)
            found[name] = self._in_task(name, ctx, run), task_results.loss_weight(task, own)
        return self._sums(found)

    def pieces(self) -> list[Piece]:
        """Returns the pieces of all tasks; see pieces.py."""
        pieces = {name: task_results.pieces(task) for name, task in self.tasks.items()}
        return merged(pieces, self._sharing, self._in_task, self._end)

    def _end(self, flows: Mapping[str, Flow], ctx: StepContext) -> Flow:
        del ctx
        found = {}
        for name, flow in flows.items():
            task = self.tasks[name]
            sums = task_results.sums_of_flow(task, flow)
            found[name] = sums, task_results.loss_weight(task, flow)
        sums = self._sums(found)
        return {LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def _factor(self, name: str) -> float:
        return float(self.params.loss_weights.get(name, 1.0))

    def _in_task(self, name: str, ctx: StepContext, compute: Callable[[StepContext], Any]) -> Any:
        """Returns `compute(ctx)`; what it collects gets the name of the task."""
        own = isolated(ctx)
        result = compute(own)
        for kind, sums in own.collected.sums.items():
            for key, (value, weight) in sums.items():
                if kind == "statistic":
                    ctx.collected.add(kind, self._sharing.statistic(key), value, weight)
                    continue
                factor = self._factor(name) if kind == "loss" else 1.0
                ctx.collected.add(kind, f"{name}{SEPARATOR}{key}", factor * value, weight)
        return result

    def _sums(self, found: Mapping[str, tuple[LossSums, tf.Tensor]]) -> LossSums:
        """Returns the sums of all tasks; `found` has sums and loss weight of those in the batch."""
        dtype = next(iter(found.values()))[0].loss_sum.dtype if found else tf.float32
        losses: list[tf.Tensor] = []
        metrics: dict[str, tuple[tf.Tensor, tf.Tensor]] = {}
        for name in self.tasks:
            if name not in found:
                losses.append(tf.constant(0.0, dtype))
                continue
            sums, weight = found[name]
            losses.append(self._factor(name) * tf.cast(sums.loss_sum, dtype))
            metrics |= named(name, {LOSS: (sums.loss_sum, weight), **sums.metrics})
        return SeveralLossSums(tf.stack(losses), metrics)

    # --- figures ---

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the number of examples of all tasks in the batch."""
        present = [of_task(name, batch) for name in self.tasks if is_in(name, batch)]
        return sum(len(next(iter(own.values()))) for own in present), "examples"

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns the figures of every task, with its name in front, and the common ones."""
        figures: dict[str, float] = {}
        for name, task in self.tasks.items():
            if own := of_task(name, sums):
                figures |= named(name, task_results.summarize(task, own))
        heads = tuple(name + SEPARATOR for name in self.tasks)
        common = {n: p for n, p in sums.items() if not n.startswith(heads)}
        return {**super().summarize(common), **figures}

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the predictions of every task in the batch, as "<task>/<name>"."""
        found: dict[str, tf.Tensor] = {}
        for name, task in self.tasks.items():
            if is_in(name, batch):
                own = task_results.predict(task, theta[name], of_task(name, batch), ctx)
                found |= named(name, own)
        return found

    # --- decoding and export, task by task ---

    def program_of(self, program: Program, name: str) -> Program:
        """Returns the program as a task sees it: its functions get the theta of the task."""
        return self._programs.of(program, name)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether one of the tasks decodes examples of its input."""
        return any(task_results.decodes_data(own) for own in params.tasks.values())

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns what every task decodes; records have the name of the task."""
        texts, records = [], []
        for name, task in self.tasks.items():
            own = task_results.decode(task, self.program_of(program, name), _inputs_of(input)[name])
            if own is not None:
                texts.append(f"--- {name} ---\n{own.text}")
                records += [{"task": name, **record} for record in own.records]
        return Decoded("\n".join(texts), records) if texts else None

    def why_nothing_decoded(self) -> str:
        """Returns why none of the tasks decodes anything."""
        if type(self).decode is not MultiTask.decode:
            return super().why_nothing_decoded()
        reasons = [f"{name}: {task.why_nothing_decoded()}" for name, task in self.tasks.items()]
        return f"none of the tasks decodes anything; {'; '.join(reasons)}"

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns the scores of the task of an evaluation input, with its name in front."""
        if not isinstance(input, OneTask):
            return None
        name = input.task
        found = task_results.score(
            self.tasks[name],
            self.program_of(program, name),
            input.input,
            is_last=is_last,
            stopped=stopped,
        )
        if found is None:
            return None
        return dataclasses.replace(found, figures=named(name, found.figures))

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the functions of every task, as "<task>_<name>"."""
        inputs = _inputs_of(input)
        return {
            f"{name}_{key}": exported_for_task(
                name, function, input_of=functools.partial(_input_of, name)
            )
            for name, task in self.tasks.items()
            for key, function in task_results.exports(task, inputs[name]).items()
        }

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns the conversions of texts of every task, as "<task>_<name>"."""
        inputs = _inputs_of(input)
        return {
            f"{name}_{key}": texts
            for name, task in self.tasks.items()
            for key, texts in task_results.text_exports(task, inputs[name]).items()
        }

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns the suggestion of the first task that has one."""
        for name, task in self.tasks.items():
            own = {
                path: one.input
                for path, one in eval_inputs.items()
                if isinstance(one, OneTask) and one.task == name
            }
            found = task_results.setting_to_try(task, own)
            if found is not None:
                return with_task(found, name)
        return None


def _input_of(name: str, input: Input) -> Any:
    return _inputs_of(input)[name]


def _inputs_of(input: Input) -> Mapping[str, Any]:
    """Returns the inputs of all tasks, or what is known of them."""
    inputs: Mapping[str, Any] = getattr(input, "inputs", {})
    return inputs
