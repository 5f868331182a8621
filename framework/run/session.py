"""An experiment in a Python process or notebook: its parts, training steps, losses and weights.

    session = Session("lm.python_source.Tiny", {"input.batch_size": 4})
    figures = session.train(20)
    loss = session.loss(session.theta(), session.input.batch(0))
    dev = session.evaluate("dev")

Pass a key of the registry, or a class that need not be registered.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tekso.framework import registry, task_results
from tekso.framework.context import Mode, StepContext
from tekso.framework.execution.base import LEARNER, WEIGHTS, Signature, signature_of
from tekso.framework.experiment import Experiment
from tekso.framework.learning_step import EMA
from tekso.framework.run import evaluation, loss_check
from tekso.framework.run.assembly import assemble, with_paths
from tekso.framework.run.weights import Use, check_use, read_weight
from tekso.framework.theta import SEPARATOR, Theta, flatten

Batch = Mapping[str, Any]


class SessionError(ValueError):
    """A batch, weights or a number of steps do not fit the experiment of a session."""


class Session:
    """An experiment, built and initialized, with the program that the trainer runs.

    The first weights are drawn from `run.seed`, and step s trains on `input.batch(s)`, as in
    `tekso-trainer`. A session writes no logdir.

    Args:
      experiment: key of a registered experiment, or the class of one.
      settings: {path: value} to change in its Params.
      cpu_devices: number of logical CPU devices; None: as many as the execution needs.

    Attributes:
      tree: the Params.
      task, input, eval_inputs, learner, program: what is built from them.
      step: training steps done.

    Raises:
      UnknownExperimentError: no experiment has the key.
      ExecutionError: the execution needs more logical devices than there are.
      ValueError: Params make no sense, or do not fit each other.
    """

    def __init__(
        self,
        experiment: str | type[Experiment],
        settings: Mapping[str, Any] | None = None,
        *,
        cpu_devices: int | None = None,
    ) -> None:
        kind = registry.get(experiment) if isinstance(experiment, str) else experiment
        self.tree = kind().tree().set(settings)
        self._assets = tempfile.TemporaryDirectory(prefix="tekso-")
        parts = assemble(self.tree, assets_dir=self._assets.name, cpu_devices=cpu_devices)
        self.task, self.learner, self.program = parts.task, parts.learner, parts.program
        self.input, self.eval_inputs = parts.input, parts.eval_inputs
        self.step = 0
        self._is_checked = False
        self._signature: Signature = signature_of(self.input.batch(0))
        self.program.initialize()

    def train(self, steps: int) -> list[dict[str, float]]:
        """Trains some steps; returns the figures of each, as the trainer writes them.

        Before the first step it checks the task on a few examples, as the trainer does, and logs
        what may be wrong.

        Raises:
          SessionError: the run or its input has fewer steps left.
          LossError: the loss of the task is not a sum over examples.
          InputError: the loss or a metric counts padding.
          NonFiniteStepsError: too many steps in a row were not finite.
        """
        ends = [n for n in (self.tree.run.steps, self.input.num_batches) if n is not None]
        if steps < 0 or self.step + steps > min(ends):
            raise SessionError(
                f"cannot train {steps} steps: {self.step} are done, run.steps is "
                f"{self.tree.run.steps} and the input has {self.input.num_batches or 'endless'} "
                "batches. Build the session with a larger run.steps in its settings"
            )
        self._check_task()
        found = []
        for _ in range(steps):
            metrics = self.program.train_step(self.input.batch(self.step), self.step)
            self.step += 1
            self.learner.check(metrics)
            means = {name: (float(value), 1.0) for name, value in metrics.items()}
            found.append(task_results.summarize(self.task, means))
        return found

    def _check_task(self) -> None:
        if self._is_checked:
            return
        inputs = with_paths(self.input, self.eval_inputs)
        for line in loss_check.check(self.task, self.learner, self.program, inputs):
            logging.warning("%s", line)
        self._is_checked = True

    def loss(self, theta: Theta, batch: Batch, *, mode: Mode = "train") -> tf.Tensor:
        """Returns the total loss of a batch, which `tf.GradientTape` differentiates.

        In mode "train" it is the loss of the next training step on that batch, with its dropout and
        auxiliary losses, computed on one device.

        Args:
          theta: of the task, as `theta()` returns.
          batch: NumPy arrays or tensors, as in `input.batch(step)`, of any number of examples.
          mode: "train" or "eval".

        Shapes:
          returns: []

        Raises:
          SessionError: the batch has other names, dtypes or ranks than those of the input, or its
            shapes do not fit the task.
        """
        self._check_batch(batch)
        size = len(next(iter(batch.values())))
        ctx = StepContext(
            mode=mode,
            seed=self.tree.run.seed,
            step=self.step,
            example_offset=0,
            num_examples=size,
        )
        try:
            sums = task_results.loss(self.task, theta, batch, ctx)
            return sums.total(
                task_results.loss_weight(self.task, batch), ctx.collected.total("loss")
            )
        except (ValueError, tf.errors.InvalidArgumentError) as error:
            shapes = {name: list(np.shape(value)) for name, value in batch.items()}
            wanted = {name: list(shape) for name, (shape, _) in self._signature.items()}
            if all(shapes[name][1:] == wanted[name][1:] for name in wanted):
                raise
            reason = str(error).partition("\n")[0]
            raise SessionError(
                f"the task cannot compute a batch of shapes {shapes}; those of the input have "
                f"{wanted}: {reason}"
            ) from error

    def gradients(self, theta: Theta, batch: Batch) -> Theta:
        """Returns the gradients of `loss(theta, batch)` by weight: dense, 0 where it needs none.

        Shapes:
          returns: those of theta

        Raises:
          SessionError: as in `loss`.
        """
        with tf.GradientTape() as tape:
            tape.watch(theta)
            loss = self.loss(theta, batch)
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, theta, unconnected_gradients=zero)
        return self.task.theta({p: tf.convert_to_tensor(g) for p, g in flatten(gradients).items()})

    def evaluate(self, name: str, *, max_batches: int | None = None) -> dict[str, float]:
        """Returns the figures of an evaluation input, as the trainer computes them.

        Args:
          name: of the evaluation input.
          max_batches: of the pass; None: all.

        Raises:
          SessionError: there is no such evaluation input.
        """
        if name not in self.eval_inputs:
            there = ", ".join(self.eval_inputs) or "none"
            raise SessionError(f"there is no evaluation input {name!r}; there are: {there}")
        input = self.eval_inputs[name]
        batches = map(input.batch, range(input.num_batches or 0))
        kept = itertools.islice(batches, max_batches)
        return evaluation.evaluate(self.program, self.task, kept, name=name)

    def theta(self, *, use: Use = "training") -> Theta:
        """Returns a copy of the weights as they are now.

        Args:
          use: "training", or "evaluation": moving averages where the learner keeps them.
        """
        check_use(use)
        state = self.program.state()
        flat = {
            path: tf.constant(read_weight(path, state.__getitem__, state.keys(), use))
            for path in self.task.specs()
        }
        return self.task.theta(flat)

    def assign(self, theta: Mapping[str, Any], *, path: str = "") -> None:
        """Sets weights, of all the task or of a layer; moving averages of them start anew.

        Args:
          theta: weights by name, nested, as `theta()` and `load_weights` return.
          path: of the layer: `session.task.model.stack.path`; "" for the task.

        Raises:
          SessionError: a weight is unknown or has another shape. Nothing is changed.
        """
        state, problems = self.program.state(), []
        for name, value in flatten(theta, path).items():
            array, key = np.asarray(value), WEIGHTS + name
            if key not in state:
                problems.append(f"unknown {name}")
            elif array.shape != state[key].shape:
                problems.append(f"{name} is {list(array.shape)}, want {list(state[key].shape)}")
            else:
                state[key] = array.astype(state[key].dtype)
                average = f"{LEARNER}{name}{SEPARATOR}{EMA}"
                if average in state:
                    state[average] = array.astype(state[average].dtype)
        if problems:
            raise SessionError(f"the weights do not fit the task: {'; '.join(problems[:8])}")
        self.program.restore(state.__getitem__, state.keys())

    def _check_batch(self, batch: Batch) -> None:
        wanted = self._signature
        problems = [f"{name!r} is missing" for name in wanted if name not in batch]
        problems += [f"{name!r} is unknown" for name in batch if name not in wanted]
        for name in (name for name in wanted if name in batch):
            (shape, dtype), given = wanted[name], np.asarray(batch[name])
            if given.dtype != dtype:
                problems.append(f"{name!r} is {given.dtype}, want {np.dtype(dtype)}")
            if given.ndim != len(shape):
                problems.append(f"{name!r} has shape {list(given.shape)}, want {len(shape)} dims")
        sizes = {name: len(batch[name]) for name in batch if np.ndim(batch[name])}
        if len(set(sizes.values())) > 1:
            problems.append(f"the arrays have different numbers of examples: {sizes}")
        if problems:
            raise SessionError(f"wrong batch: {'; '.join(problems)}")
