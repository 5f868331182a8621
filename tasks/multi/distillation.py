"""Distillation: a student learns the probabilities of a trained teacher besides the labels.

batch ─┬─ teacher (frozen, without dropout) ─ logits ─┐
       └─ student ─────────────────────────── logits ─┴─ KL divergence
                                                 └────── loss of the student's task
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.params import REQUIRED, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.primitives.precision import widen
from tekso.framework.task import Batch, Decoded, Goal, LossSums, Program, Scored, Task
from tekso.framework.theta import Theta
from tekso.framework.weight_spec import WeightSpec
from tekso.tasks.multi.programs import TaskPrograms, exported_for_task

_TEACHER_LOGITS = "teacher_logits"


@runtime_checkable
class Predictor(Protocol):
    """A task that can be distilled: it predicts a class, or a token at every position.

    `Classification`, `LanguageModel` and `Translation` are such tasks.
    """

    def logits(self, theta: Theta, batch: Batch, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the classes, [batch, ..., classes]."""
        ...

    def logit_weights(self, batch: Batch) -> tf.Tensor:
        """Returns the weights of the positions, [batch, ...]: 0 for padding."""
        ...

    def sums_of_logits(self, logits: tf.Tensor, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the loss and metrics of the task, given the scores."""
        ...


class Distillation(Task):
    r"""Trains a student on the labels and on the predictions of a teacher.

        loss in training = (1 - weight) · loss of the student
                           + weight · T² · KL(softmax(z_teacher / T) ‖ softmax(z_student / T))

    In evaluation the loss is that of the student. Reports "teacher_kl", the divergence at T, and
    "teacher_agreement", the share of positions at which both prefer the same class.

    The weights of the teacher are never trained. Take them from the checkpoint of a run, also from
    one task of several, by `run.warm_start`:

        {"teacher": WarmStart.Params(checkpoint=…, only=["teacher/.*"], ignore=["student/.*"],
                                     rules={"teacher/(.*)": r"\1"})}      # or r"lm/\1"

    Shapes:
      batch: as of the student
      loss returns: sums, scalars
    Source: Hinton, Vinyals & Dean 2015 (arXiv 1503.02531), section 2.
    """

    class Params(Task.Params):
        """Params of Distillation."""

        student: Task.Params = param("The task to train.", default=REQUIRED)
        teacher: Task.Params = param(
            "A task of the same kind, with the model of the teacher.", default=REQUIRED
        )
        temperature: float = param("T, above 0.", default=2.0)
        weight: float = param(
            "Weight of the divergence, from 0 to 1; the loss on the labels has the rest.",
            default=0.9,
        )

    student: Any
    teacher: Any

    def __init__(self, params: Any) -> None:
        """Builds both tasks.

        Raises:
          ValueError: a number is out of range, or a task has no logits.
        """
        super().__init__(params)
        self._programs = TaskPrograms()
        p = self.params
        if not p.temperature > 0 or not 0 <= p.weight <= 1:
            raise ValueError(
                f"task.temperature is {p.temperature} and task.weight {p.weight}; temperature must "
                "be above 0, and weight from 0 to 1"
            )
        for name in ("student", "teacher"):
            self.child(name, p.get(name))
            if not isinstance(getattr(self, name), Predictor):
                raise ValueError(
                    f"task.{name} is {type(getattr(self, name)).__name__}, which has no logits to "
                    "distill: use Classification, LanguageModel or Translation, or define logits, "
                    "logit_weights and sums_of_logits"
                )
        self.unchecked_labels = type(self).unchecked_labels | self.student.unchecked_labels

    def specs(self) -> dict[str, WeightSpec]:
        """Returns the specs of all weights; those of the teacher are not trained."""
        return {
            path: dataclasses.replace(spec, trainable=spec.trainable and path.startswith("student"))
            for path, spec in super().specs().items()
        }

    # --- loss ---

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the loss weight of the student."""
        return task_results.loss_weight(self.student, batch)

    def pieces(self) -> list[Piece]:
        """Returns the teacher and the student; see `Task`."""
        return [
            Piece("teacher", {"teacher": self.teacher}, self._run_teacher),
            Piece("student", {"student": self.student}, self._run_student),
        ]

    def _run_teacher(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        # no dropout, no statistics, no auxiliary losses
        logits = self.teacher.logits(theta["teacher"], flow, ctx.evaluating())
        return {**flow, _TEACHER_LOGITS: tf.stop_gradient(widen(logits))}

    def _run_student(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        logits = widen(self.student.logits(theta["student"], flow, ctx))
        sums = self.student.sums_of_logits(logits, flow, ctx)
        teacher, weights = flow[_TEACHER_LOGITS], self.student.logit_weights(flow)
        weights, p = tf.cast(weights, logits.dtype), self.params
        if teacher.shape[-1] != logits.shape[-1]:
            raise ValueError(
                f"the teacher has {teacher.shape[-1]} classes and the student {logits.shape[-1]}: "
                "both must predict the same"
            )
        divergence = tf.reduce_sum(weights * kl_divergence(teacher, logits, p.temperature))
        same = tf.cast(tf.equal(tf.argmax(teacher, -1), tf.argmax(logits, -1)), logits.dtype)
        total = tf.reduce_sum(weights)
        metrics = {
            **sums.metrics,
            "teacher_kl": (divergence, total),
            "teacher_agreement": (tf.reduce_sum(weights * same), total),
        }
        loss = sums.loss_sum
        if ctx.is_training:
            soft = tf.cast(p.temperature**2 * divergence, loss.dtype)
            loss = (1.0 - p.weight) * loss + p.weight * soft
        return {**flow, LOSS_SUM: loss, METRICS: metrics}

    # --- everything else is the student's ---

    @classmethod
    def goals_of(cls, params: Any) -> dict[str, Goal]:
        """See Task: the goals of the student."""
        found: dict[str, Goal] = task_results.goals_of(params.student)
        return {**found, "teacher_kl": "min", "teacher_agreement": "max"}

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Completes the Params of both tasks."""
        params = params.copy()
        for name in ("student", "teacher"):
            params.set({name: task_results.complete(params.get(name), input)})
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks the inputs of the student."""
        return task_results.check_inputs(self.student, inputs)

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks a batch of the student."""
        self.student.check_batch(what, batch)

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the amount of data, as the student counts it."""
        return task_results.count(self.student, batch)

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns the figures of the student, and of the teacher's predictions."""
        return task_results.summarize(self.student, sums)

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the predictions of the student."""
        return task_results.predict(self.student, theta["student"], batch, ctx)

    def _program(self, program: Program) -> Program:
        return self._programs.of(program, "student")

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether the student decodes examples of its input."""
        return task_results.decodes_data(params.student)

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns what the student decodes."""
        return task_results.decode(self.student, self._program(program), input)

    def why_nothing_decoded(self) -> str:
        """Returns why the student decodes nothing."""
        if type(self).decode is not Distillation.decode:
            return super().why_nothing_decoded()
        return f"student: {self.student.why_nothing_decoded()}"

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns the scores of the student."""
        own = self._program(program)
        return task_results.score(self.student, own, input, is_last=is_last, stopped=stopped)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the functions of the student."""
        found = task_results.exports(self.student, input)
        return {name: exported_for_task("student", one) for name, one in found.items()}

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns the conversions of texts of the student."""
        return task_results.text_exports(self.student, input)


def kl_divergence(teacher: tf.Tensor, student: tf.Tensor, temperature: float) -> tf.Tensor:
    """Returns KL(softmax(teacher / T) ‖ softmax(student / T)) at every position, in nats.

    Shapes:
      teacher, student: [..., classes]
      returns: [...]
    """
    log_p, log_q = (tf.nn.log_softmax(x / temperature) for x in (teacher, student))
    return tf.reduce_sum(tf.exp(log_p) * (log_p - log_q), -1)
