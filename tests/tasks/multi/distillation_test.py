"""Distillation: the formula, a frozen teacher, tasks that can be distilled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import small_tasks
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.execution import DataParallel
from tekso.framework.execution.base import signature_of
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.schedules import Constant
from tekso.framework.task import Task
from tekso.models.mlp import Mlp
from tekso.tasks.classification.task import Classification
from tekso.tasks.lm.cross_entropy import smoothed_cross_entropy
from tekso.tasks.lm.task import LanguageModel
from tekso.tasks.multi.distillation import Distillation, kl_divergence
from tekso.tasks.multi.task import MultiTask

T, WEIGHT = 3.0, 0.7


def distillation(**changes: Any) -> Distillation.Params:
    student, teacher = small_tasks.classifier(3), small_tasks.classifier(3, dropout_rate=0.5)
    return Distillation.Params(student=student, teacher=teacher, temperature=T, weight=WEIGHT).set(
        changes
    )


def batch() -> dict[str, np.ndarray]:
    found = small_tasks.Flowers.Params(batch_size=6).instantiate(seed=1).batch(0)
    return {**found, "weights": np.array([1, 1, 0, 1, 1, 0.5], np.float32)}


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def test_the_loss_is_that_of_the_paper_in_training_and_the_students_in_evaluation() -> None:
    task = distillation().instantiate()
    theta, given = task.init(3), batch()
    eager = StepContext()
    z_student, z_teacher = (
        getattr(task, name).logits(theta[name], given, eager).numpy()
        for name in ("student", "teacher")
    )
    w = given["weights"]
    hard = -(w * np.take_along_axis(log_softmax(z_student), given["labels"][:, None], 1)[:, 0])
    log_p, log_q = log_softmax(z_teacher / T), log_softmax(z_student / T)
    kl = w * (np.exp(log_p) * (log_p - log_q)).sum(-1)
    want = (1 - WEIGHT) * hard.sum() + WEIGHT * T**2 * kl.sum()
    train = task.loss(theta, given, StepContext(mode="train", num_examples=6))
    assert float(train.loss_sum) == pytest.approx(want, rel=1e-5)  # the teacher has no dropout
    held_out = task.loss(theta, given, eager)
    assert float(held_out.loss_sum) == pytest.approx(hard.sum(), rel=1e-5)
    assert float(held_out.metrics["teacher_kl"][0]) == pytest.approx(kl.sum(), rel=1e-4)
    assert float(task.loss_weight(given)) == 4.5
    same = (w * (z_student.argmax(-1) == z_teacher.argmax(-1))).sum()
    assert float(held_out.metrics["teacher_agreement"][0]) == same


def test_the_teacher_never_changes_not_even_by_weight_decay() -> None:
    task = distillation().instantiate()
    learner = Learner.Params(
        optimizer=AdamW.Params(weight_decay=0.5), schedule=Constant.Params(value=0.1)
    ).instantiate()
    given = batch()
    execution = DataParallel.Params(towers=1, xla="none").instantiate()
    program = execution.build(task, learner, seed=2, batch=signature_of(given))
    program.initialize()
    before = program.state()
    program.train_step(given, 0)
    after = program.state()
    changed = {key for key in before if not np.array_equal(before[key], after[key])}
    assert any(key.startswith("weights/student/") for key in changed)
    assert not any("teacher/" in key for key in changed)
    assert not any(key.startswith("learner/teacher/") for key in before)


def test_cross_entropy_of_tokens_with_smoothing() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(2, 3, 5)).astype(np.float32), rng.integers(0, 5, (2, 3))
    target = 0.9 * np.eye(5)[labels] + 0.1 / 5
    want = -(target * log_softmax(logits)).sum(-1)
    found = smoothed_cross_entropy(tf.constant(logits), tf.constant(labels), 0.1)
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_divergence_is_zero_for_equal_and_for_shifted_logits() -> None:
    z = tf.constant([[1.0, 2.0, 4.0]])
    np.testing.assert_allclose(kl_divergence(z, z + 7.0, 2.0), [0.0], atol=1e-6)


def test_labels_that_the_task_or_its_student_excludes_are_not_checked() -> None:
    class OfStudent(Classification):
        unchecked_labels = frozenset({"labels"})

    class Own(Distillation):
        unchecked_labels = frozenset({"kinds"})

    classifier = small_tasks.classifier(3)
    student = OfStudent.Params(model=classifier.model, num_classes=classifier.num_classes)
    task = Own.Params(student=student, teacher=classifier).instantiate()
    assert task.unchecked_labels == {"kinds", "labels"}


class NoLogits(Task):
    """A task without logits."""

    class Params(Task.Params):
        """Params of NoLogits."""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0.0}, r"task.temperature is 0.0 .* temperature must be above 0"),
        ({"weight": 1.5}, r"task.weight 1.5"),
        ({"teacher": NoLogits.Params()}, r"task.teacher is NoLogits, which has no logits"),
    ],
)
def test_wrong_settings_are_named_in_one_line(changes: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        distillation(**changes).instantiate()
    assert "\n" not in str(caught.value)


def test_classes_must_be_the_same() -> None:
    task = distillation(teacher=small_tasks.classifier(2)).instantiate()
    with pytest.raises(ValueError, match=r"the teacher has 2 classes and the student 3"):
        task.loss(task.init(0), batch(), StepContext())


def test_a_language_model_has_the_same_sums_from_logits_as_from_its_loss() -> None:
    from tekso.models.transformer_lm import TransformerLm

    model = (
        TransformerLm.Params(vocab_size=7, dim=8)
        .set({"stack.num_layers": 1})
        .set({"stack.layer.attention.num_heads": 2, "stack.layer.feed_forward.hidden_dim": 8})
    )
    task = LanguageModel.Params(model=model, decode=None, label_smoothing=0.1).instantiate()
    theta = task.init(0)
    ids = np.random.default_rng(0).integers(0, 7, (2, 5)).astype(np.int32)
    given = {"ids": ids, "labels": ids[:, ::-1].copy(), "weights": np.ones((2, 5), np.float32)}
    ctx = StepContext(mode="train", num_examples=2)
    want = task.loss(theta, given, ctx)
    found = task.sums_of_logits(task.logits(theta, given, ctx), given, ctx)
    assert float(found.loss_sum) == pytest.approx(float(want.loss_sum), rel=1e-5)


class OwnLoss(Classification):
    """Computes its loss in its own way."""

    def loss(self, theta: Any, batch: Any, ctx: StepContext) -> Any:
        """See Classification."""
        return super().loss(theta, batch, ctx)


def test_a_student_and_tasks_that_decode_nothing_say_what_to_write() -> None:
    student = OwnLoss.Params(model=Mlp.Params(input_dim=4, output_dim=3), num_classes=3)
    want = "OwnLoss has its own loss(), but no predict(): define predict(theta, batch, ctx)"
    built = distillation(student=student).instantiate()
    assert built.why_nothing_decoded().startswith(f"student: {want}")
    several = MultiTask.Params(tasks={"a": student, "b": student}).instantiate()
    text = several.why_nothing_decoded()
    assert text.startswith(f"none of the tasks decodes anything; a: {want}")
    assert f"; b: {want}" in text
