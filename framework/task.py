"""Task: what is learned. A loss as sums over the part of a batch that is seen, and what to show.

A task is a layer: its weights are those of the model below it, so specs, first values and weight
paths come from the layer contract. It knows no device: an execution calls `loss` on a part of the
batch and adds up what the parts return. What its methods return is checked in task_results.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework import task_results
from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, joined
from tekso.framework.task_results import Batch, Decoded, LossSums, Program, Scored, TaskError
from tekso.framework.theta import Theta

__all__ = ["LOSS", "Batch", "Decoded", "Goal", "LossSums", "Program", "Scored", "Task", "TaskError"]

Goal = Literal["min", "max"]
TaskParams = TypeVar("TaskParams", bound="Task.Params")

LOSS = "loss"
"""Name under which an execution adds (loss_sum, loss_weight) to the sums of a task's metrics."""


def _on_tensors(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Returns a method whose argument at a position, or of the name "batch", became tensors."""

    @functools.wraps(method)
    def run(self: Task, *args: Any, **kwargs: Any) -> Any:
        arguments = list(args)
        if position < len(arguments):
            arguments[position] = task_results.as_tensors(arguments[position])
        elif "batch" in kwargs:
            kwargs["batch"] = task_results.as_tensors(kwargs["batch"])
        return method(self, *arguments, **kwargs)

    return run


class Task(Layer):
    """Base of all tasks: a model, its loss over a batch, its metrics and its decoding.

        class Regression(Task):
            def __init__(self, params):
                super().__init__(params)
                self.child("model", self.params.model)

            def loss_weight(self, batch):
                return tf.reduce_sum(batch["weights"])

            def loss(self, theta, batch, ctx):
                y = self.model.fprop(theta.model, batch["x"], ctx)
                return LossSums(tf.reduce_sum(batch["weights"] * tf.square(y - batch["y"])))

    The loss of a step is loss_sum / loss_weight, both summed over the global batch, plus what
    layers gave to `ctx.collect_loss`.

    Attributes:
      goals: {metric: "max" or "min", the end that is good}, for `run.keep_best`. Those of base
        classes and of the loss ("min") need not be repeated.
    """

    goals: ClassVar[Mapping[str, Goal]] = {}

    class Params(Layer.Params):
        """Params of a task."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Lets `loss` and `loss_weight` of the class take batches of NumPy arrays."""
        super().__init_subclass__(**kwargs)
        for name, position in (("loss", 1), ("loss_weight", 0)):
            if inspect.isfunction(method := vars(cls).get(name)):
                setattr(cls, name, _on_tensors(method, position))

    @classmethod
    def complete(cls, params: TaskParams, input: Input) -> TaskParams:
        """Returns Params in which what was left open is filled in from the training input.

        Args:
          params: Params of this task; not changed.
          input: the training Input, for example for the size of its vocabulary.

        Raises:
          ValueError: what the Params say does not fit the input.
        """
        return params

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str] | None:
        """Checks that the inputs fit the task, before the first step and before an evaluation.

        Args:
          inputs: {path in the tree: Input}, the training input ("input") and those of evaluations.

        Returns:
          warnings, a line each, which a run shows before its first step; None for none.

        Raises:
          ValueError: one does not fit; the message names its path, what is wrong and what is
            allowed.
        """

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the values of a batch of training or evaluation, before a device gets it.

        It is called on the host for every batch, so it should take microseconds. By default it
        checks nothing.

        Args:
          what: the input and the number of the batch, for messages: "input.batch(3)".
          batch: as the input made it.

        Raises:
          ValueError: a value is not allowed; the message begins with `what`.
        """

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the weight of a batch: what the sum of losses is divided by.

        A pure function of the batch, so that the weight of the global batch is known before any
        part of it is computed. It adds up: the weights of the parts sum to that of the whole.

        Shapes:
          returns: [], float32
        """
        raise NotImplementedError(f"{type(self).__name__} has no loss_weight()")

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns the sums over the examples of `batch`, a whole batch or a part of one.

        Auxiliary losses are handed to `ctx.collect_loss` and are no part of these sums. By default
        the `pieces` are run one after the other.

        Raises:
          ValueError: a piece reads some rows of a repeated stack, and its neighbours not the rest.
        """
        if type(self).pieces is Task.pieces:
            raise NotImplementedError(f"{type(self).__name__} has neither loss() nor pieces()")
        flow: Flow = task_results.as_tensors(batch)
        for piece in joined(task_results.pieces(self)):
            self._check_whole(piece)
            flow = piece.run(theta, flow, ctx)
        return task_results.sums_of_flow(self, flow)

    def _check_whole(self, piece: Piece) -> None:
        """Of a repeated stack theta has all rows, so a piece that wants some would run too many."""
        if piece.rows is None:
            return
        specs = self.specs()
        counts = {specs[path].shape[0] for path in piece.weights(sorted(specs))}
        first, end = piece.rows
        if first or counts - {end}:
            raise ValueError(
                f"{piece.name} reads rows {first} to {end - 1} of a repeated stack of "
                f"{max(counts)}, and its neighbours do not read the others: declare its layers "
                f"one after the other, or give {type(self).__name__} a loss() of its own"
            )

    def pieces(self) -> list[Piece]:
        """Returns the parts of `loss` in order, between which a pipeline can cut it.

        The first is given the batch; the last adds "loss_sum" and "metrics", the fields of
        `LossSums`. What the model's parts collect is theirs. By default all is one piece.
        """

        def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            sums = task_results.loss(self, theta, flow, ctx)
            return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

        return [Piece("loss", {"": self}, run)]

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns what the model predicts for examples: what `Session.predict` returns.

        A pure function. `batch` may lack what only the loss reads.

        Raises:
          NotImplementedError: the task defines no predictions.
        """
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has no predict(): define {name}.predict(self, theta, batch, ctx), which "
            "returns {name: tensor}; or call any function of the weights by "
            "session.program.call(function, *inputs)"
        )

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns how much a batch of arrays holds, and in what unit: the speed in reports."""
        return len(next(iter(batch.values()))), "examples"

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns the figures of a report: every mean, and what follows from them.

        Args:
          sums: {name: (sum, weight)} over a batch or a whole pass, `LOSS` among the names. A name
            whose weight is 0 has no mean and is left out.
        """
        return {name: value / weight for name, (value, weight) in sums.items() if weight}

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns what `--mode=decode` and the end of training show; None if there is nothing.

        Args:
          program: calls pure functions with the weights of the run.
          input: the training Input: its tokenizer turns text into ids and back. What is known of
            it without its data, where `decodes_data` is False.
        """
        return None

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Whether `decode` reads examples of its input; otherwise its tokenizers are enough."""
        del params
        return True

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns what decoding an evaluation input shows, after its pass; None for nothing.

        Args:
          program: calls pure functions with the weights of the run. All processes of a run call it
            alike.
          input: an evaluation Input.
          is_last: whether it is the last evaluation of the run, which may take longer.
          stopped: asked now and then whether to leave off; what is returned is then not used.
        """
        return None

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns the functions that `--mode=export` writes, by name; empty: there are none.

        Args:
          input: the training Input; where its tokenizer is known without the data, it may be all
            besides Params and sizes.
        """
        return {}

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns how some of the functions of `exports` take and give texts, by their names.

        They are written beside the others, as a SavedModel that takes texts; empty: there are none,
        or a package is missing that such a thing needs.
        """
        return {}

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns a setting ("path=value") worth trying with `--mode=decode`; None: there is none.

        Args:
          eval_inputs: the evaluation Inputs by name: what the model has not seen.
        """
        return None
