"""Runs an experiment in a Python process or notebook: training steps, losses, weights.

    session = Session("lm.python_source.Tiny", {"input.batch_size": 4})
    figures = session.train(20)
    loss = session.loss(session.theta(), session.input.batch(0))
    dev = session.evaluate("dev")

Pass a key of the registry, or a class, which does not have to be registered.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from absl import logging

from tekso.framework import draws, error_advice, files, registry, task_results
from tekso.framework.context import Mode, StepContext
from tekso.framework.execution.base import signature_of
from tekso.framework.experiment import Experiment
from tekso.framework.learning_step import APPLIED
from tekso.framework.run import (
    evaluation,
    initial_weights,
    session_arguments,
    session_arrays,
    session_batches,
)
from tekso.framework.run.assembly import assemble
from tekso.framework.run.checkpoints import Checkpoints
from tekso.framework.run.foreign_calls import answering, arrays_hint, attribute_hint, shown
from tekso.framework.run.job import checkpoints_of
from tekso.framework.run.label_limits import BatchCheck
from tekso.framework.run.logdir import Logdir
from tekso.framework.run.session_arrays import as_type, narrowed, not_named
from tekso.framework.run.session_batches import Batch, SessionError
from tekso.framework.run.session_records import SessionRecords
from tekso.framework.run.stop_signals import uninterrupted
from tekso.framework.run.time_use import EVALUATION, INPUT, START
from tekso.framework.run.weights import Use, check_use, weight_key
from tekso.framework.signature import Signature
from tekso.framework.state import LEARNER
from tekso.framework.task import Scored, Task
from tekso.framework.theta import Theta, flatten


class Session:
    """An experiment with initialized weights, and the program that the trainer would run.

    The first weights are drawn from `run.seed`, and step s trains on `input.batch(s)`, as in
    `tekso-trainer`. Only `save` writes files.

    Args:
      experiment: key of a registered experiment, or the class of an experiment.
      settings: changes to its Params, {path: value}.
      cpu_devices: number of logical CPU devices; None: as many as the execution needs.

    Attributes:
      tree: the Params.
      task, input, eval_inputs, learner, program: the parts built from the Params.
      step: training steps done.
      history: the figures of all steps, in order.

    Raises:
      SessionError: the experiment is neither a key nor a class, or the execution is a name.
      UnknownExperimentError: no experiment has the key.
      ExecutionError: the execution needs more logical devices than there are.
      ValueError: Params are invalid, or do not fit each other.
    """

    @answering
    @error_advice.advised
    def __init__(
        self,
        experiment: str | type[Experiment],
        settings: Mapping[str, Any] | None = None,
        *,
        cpu_devices: int | None = None,
    ) -> None:
        begin = time.perf_counter()
        kind = session_arguments.class_of(experiment)
        session_arguments.check_settings(settings)
        self.tree = kind().tree().set(settings)
        self._assets = tempfile.TemporaryDirectory(prefix="tekso-")
        warm_start, assets = self.tree.run.warm_start, self._assets.name
        initial_weights.take_tokenizers(warm_start, assets=assets, warn=logging.warning)
        parts = assemble(self.tree, assets_dir=self._assets.name, cpu_devices=cpu_devices)
        self._kind, self._parts = kind, parts
        self._saved: dict[str, set[int]] = {}  # steps by logdir
        self.task, self.learner, self.program = parts.task, parts.learner, parts.program
        self.input, self.eval_inputs = parts.input, parts.eval_inputs
        self.step = 0
        self.history: list[dict[str, float]] = []
        self._check: BatchCheck | None = None
        self._unchecked: list[str] = []  # warnings to log after the first step
        # One object for all calls, so that it is traced only once.
        self._predict = functools.partial(task_results.predict, self.task)
        self._signature: Signature = signature_of(self.input.batch(0))
        self.program.initialize()
        if warm_start:
            initial_weights.plan(
                self.task.specs(), warm_start, assets=assets, warn=logging.warning
            ).restore(self.program)
        self._records = SessionRecords(self.task, begin=begin)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raises an AttributeError that says what a session has for it."""
            raise AttributeError(f"a Session has no attribute {name!r}{attribute_hint(self, name)}")

    @answering
    @error_advice.advised
    def train(self, steps: int) -> list[dict[str, float]]:
        """Trains some steps; returns the figures of each step, as the trainer reports them.

        An interruption (Ctrl-C, "interrupt kernel") takes effect at the end of a step, a second one
        immediately. `history` has the steps that were done; call `train` again to continue.

        Before the first step it checks the task on a few examples, as the trainer does, and logs
        warnings.

        Raises:
          SessionError: the run or its input has fewer steps left, or `steps` is negative.
          LossError: the loss of the task is not a sum over examples.
          InputError: the loss or a metric counts padding.
          ValueError: the task rejects a batch.
          NonFiniteStepsError: too many steps in a row were not finite.
        """
        ends = [n for n in (self.tree.run.steps, self.input.num_batches) if n is not None]
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or steps < 0:
            raise SessionError(f"steps is {shown(steps)}, but must be a whole number of at least 0")
        if self.step + steps > min(ends):
            text = session_batches.too_many(steps, self.step, *ends)
            raise SessionError(text)
        first = len(self.history)
        with self._records.rest():
            self._train(steps)
        return self.history[first:]

    def _train(self, steps: int) -> None:
        check = self._check_task()
        for _ in range(steps):
            with self._records.during(INPUT):
                batch = self.input.batch(self.step)
                check(f"input.batch({self.step})", batch)
            with uninterrupted(), error_advice.naming_ids({f"input.batch({self.step})": batch}):
                with self._records.stepping(batch):
                    metrics = self.program.train_step(batch, self.step)
                    self.history.append(evaluation.step_figures(self.task, metrics))
                self.step += 1
                self._records.step(self.step, batch, self.history[-1])
            self.learner.check(metrics)
            self._warn(self._unchecked)
            self._unchecked = []

    def _check_task(self) -> BatchCheck:
        """Checks the task, the first time; returns the check of batches."""
        if self._check is None:
            self._warn(self._parts.warnings)
            with self._records.during(START):
                found = self._parts.try_task(is_new=True)
            self._warn(found.warnings)
            self._unchecked = found.unchecked
            self._check = BatchCheck(self.task, found.label_limits)
        return self._check

    def _warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            logging.warning("%s", line)

    @error_advice.advised
    def loss(self, theta: Mapping[str, Any], batch: Batch, *, mode: Mode = "train") -> tf.Tensor:
        """Returns the total loss of a batch, which `tf.GradientTape` can differentiate.

        In mode "train" it is the loss of the next training step on that batch, with its dropout and
        auxiliary losses, computed on one device.

        Args:
          theta: weights of the task, as `theta()` returns them, or as arrays in nested dicts.
          batch: NumPy arrays or tensors, as in `input.batch(step)`, of any number of examples.
          mode: "train" or "eval".

        Shapes:
          returns: []

        Raises:
          SessionError: the batch has other names, dtypes or ranks than the input, or its shapes do
            not fit the task; or theta has not all weights of the task.
        """
        theta = self._checked(theta)
        if mode not in ("train", "eval"):
            raise SessionError(f"mode is {mode!r}, but must be 'train' or 'eval'")
        _refuse(session_batches.problems_of_batch(batch, self._signature))
        size = next(iter(batch.values())).shape[0]
        ctx = StepContext(
            mode=mode,
            seed=self.tree.run.seed,
            step=self.step,
            example_offset=0,
            num_examples=size,
        )
        with session_batches.explaining(batch, self._signature):
            sums = task_results.loss(self.task, theta, batch, ctx)
            weight = task_results.loss_weight(self.task, batch)
            return sums.total(weight, ctx.collected.total("loss"))

    def gradients(self, theta: Mapping[str, Any], batch: Batch) -> Theta:
        """Returns dense gradients of `loss(theta, batch)`; 0 for weights that do not affect it.

        Shapes:
          returns: the shapes of theta

        Raises:
          SessionError: as in `loss`.
        """
        theta = self._checked(theta)
        with tf.GradientTape() as tape:
            tape.watch(theta)
            loss = self.loss(theta, batch)
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, theta, unconnected_gradients=zero)
        return self.task.theta({p: tf.convert_to_tensor(g) for p, g in flatten(gradients).items()})

    def _checked(self, theta: Mapping[str, Any]) -> Theta:
        """Returns weights that were given as arrays or tensors, in nested dicts."""
        specs = self.task.specs()
        _refuse(session_arrays.problems_of_theta(theta, specs)[:8])
        return self.task.theta(session_arrays.tensors_of(theta, specs))

    @answering
    @error_advice.advised
    def predict(self, batch: Batch) -> dict[str, np.ndarray]:
        """Returns the result of `Task.predict` for examples, as NumPy arrays.

        It uses the weights of evaluation, and computes all examples at once.

        Args:
          batch: NumPy arrays or tensors of any number of examples; arrays that only the loss reads
            may be omitted. float64 becomes float32.

        Raises:
          SessionError: the arrays have other ranks than the input, their shapes do not fit the
            task, or `predict` reads an array of the input that is not given.
          NotImplementedError: the task has no `predict`.
          ValueError: the task needs an array that is not given.
        """
        _refuse(session_batches.problems_of_values(batch))
        given = {name: narrowed(value) for name, value in batch.items()}
        _refuse(session_batches.problems_of_shapes(given, self._signature))
        if type(self.task).predict is Task.predict:
            self.task.predict(self.theta(), given, StepContext())  # raises NotImplementedError
        try:
            repeats = draws.warning_of_repeats("in predict")
            with repeats, session_batches.explaining(given, self._signature):
                found = self.program.call(self._predict, given)
        except KeyError as error:
            if not (
                text := session_batches.missing_array(error, self.task, given, self._signature)
            ):
                raise
            raise SessionError(text) from error
        return {name: np.asarray(value) for name, value in found.items()}

    @answering
    @error_advice.advised
    def evaluate(self, name: str, *, max_batches: int | None = None) -> dict[str, float]:
        """Returns the figures of an evaluation input, as the trainer computes them.

        Args:
          name: name of the evaluation input.
          max_batches: maximum number of batches; None: all, and the figures of `Task.score`.

        Raises:
          SessionError: there is no such evaluation input, or `max_batches` is less than 1.
          LossError: the loss of the task is not a sum over examples.
          InputError: the loss or a metric counts padding.
        """
        most = 1 if max_batches is None else max_batches
        if not isinstance(most, int | np.integer) or most < 1:
            raise SessionError(f"max_batches is {most!r}, but must be None or a whole number > 0")
        if not isinstance(name, str) or name not in self.eval_inputs:
            there = ", ".join(self.eval_inputs) or "none"
            hint = "" if isinstance(name, str) else f". {arrays_hint(self)}"
            raise SessionError(
                f"there is no evaluation input {shown(name)}; there are: {there}{hint}"
            )
        check = self._check_task()
        input = self.eval_inputs[name]
        kept = itertools.islice(map(input.batch, range(input.num_batches or 0)), max_batches)
        if max_batches is not None:
            return evaluation.evaluate(self.program, self.task, kept, name=name, check=check)

        def score(stopped: evaluation.Stopped) -> Scored | None:
            return task_results.score(self.task, self.program, input, is_last=True, stopped=stopped)

        with self._records.during(EVALUATION):
            found = evaluation.evaluate_and_score(
                self.program, self.task, kept, score, name=name, check=check
            )
        self._records.evaluation(self.step, name, found.figures)
        return found.figures

    def theta(self, *, use: Use = "training") -> Theta:
        """Returns a copy of the current weights.

        Args:
          use: "training", or "evaluation": moving averages if the learner keeps them.
        """
        check_use(use)
        keys, count = self.program.specs().keys(), self.program.state({LEARNER + APPLIED})
        wanted = {p: weight_key(p, count.__getitem__, keys, use) for p in self.task.specs()}
        state = self.program.state(set(wanted.values()))
        flat = {path: tf.constant(state.pop(key)) for path, key in wanted.items()}
        return self.task.theta(flat)

    def assign(self, theta: Mapping[str, Any], *, path: str = "", strict: bool = False) -> None:
        """Sets weights of the task or of a layer; also sets their moving averages to these values.

        Args:
          theta: weights by name, nested, as `theta()` and `load_weights` return them.
          path: path of the layer, such as `session.task.model.stack.path`; "" for the task.
          strict: whether theta must have all weights; otherwise those that it lacks stay as is.

        Raises:
          SessionError: a weight is unknown or missing, has another shape, or is complex or not
            finite; or with `strict`, the task has no such layer. No weight is changed.
        """
        _refuse(not_named(theta, "session.theta()"))
        specs = self.program.specs()
        missing = session_arrays.missing_weights(theta, self.task, path) if strict else []
        arrays, problems = session_arrays.assigned(flatten(theta, path), specs)
        if problems := missing + problems:
            raise SessionError(f"the weights do not fit the task: {'; '.join(problems[:8])}")
        self.program.assign(
            lambda key, where: as_type(arrays[key][where], specs[key].dtype), arrays.keys()
        )

    def save(self, logdir: str) -> str:
        """Writes the folder of a run with a checkpoint of this step; returns the checkpoint's path.

        The folder has the Params, the checkpoint with the optimizer state, learned tokenizers, and
        the figures, units and time of all steps and whole evaluations so far (metrics.jsonl).
        All commands, `load_task` and `load_weights` can read it like a run of `tekso-trainer`, in
        any process that can import the classes of the Params. To resume training with
        `tekso-trainer`, the experiment must be registered.

        Args:
          logdir: a new folder, or one that this session has saved to.

        Raises:
          SessionError: the folder contains another run, or its path is empty.
          LogdirError: a process trains in the folder, or it cannot be made.
          CheckpointError: the checkpoint cannot be written.
        """
        place = Logdir(session_arguments.folder_of(logdir))
        key = os.path.abspath(place.path) if files.is_local(place.path) else place.path
        checkpoints = checkpoints_of(Checkpoints, self.tree, place, warn=logging.warning)
        saved = self._saved.get(key, set())
        holds_run = place.model() is not None and key not in self._saved
        if holds_run or not saved.issuperset(checkpoints.steps()):
            raise SessionError(
                f"{place.path} contains a run that this session did not save: give a new folder"
            )
        model = registry.key_of(self._kind)
        place.claim(model)
        try:
            self._saved[key] = saved | {self.step}  # so that a failed save can be repeated
            files.copy_folder(self._assets.name, place.assets)
            place.write_params(model, self.tree, self._kind().tree())
            self._records.write(place, self.step)
            checkpoints.prepare()
            description = self._parts.description(model).at(self.step, {})
            checkpoints.save(self.program.shards, description)
            checkpoints.wait()
        finally:
            checkpoints.close()
            place.release()
        if unreadable := session_arguments.unreadable(description.params):
            logging.warning("%s names %s", place.path, unreadable)
        return checkpoints.path(self.step)


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise SessionError(f"wrong arrays: {'; '.join(problems)}")
