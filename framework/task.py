"""Task: the base class of tasks: loss, metrics, decoding and export of a model.

A task is a layer: specs, initial values and paths of the weights work as for any layer. It does not
depend on devices: an execution calls `loss` on parts of a batch and sums the results.
task_results.py checks the return values of a task's methods.
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
from tekso.framework.error_advice import naming_missing_arrays
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.gradient_combination import GradientCombination
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.method_signatures import check_methods
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, RowsError, joined
from tekso.framework.source_lines import place_of
from tekso.framework.task_values import Batch, Decoded, LossSums, Program, Scored, TaskError
from tekso.framework.theta import Theta
from tekso.framework.trained import LoadTrained

__all__ = ["LOSS", "Batch", "Decoded", "Goal", "LossSums", "Program", "Scored", "Task",
           "TaskError"]  # fmt: skip

Goal = Literal["min", "max"]
TaskParams = TypeVar("TaskParams", bound="Task.Params")

LOSS = "loss"
"""Name of (loss_sum, loss_weight) in the sums that an execution passes to `Task.summarize`."""


def _on_tensors(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Wraps a method: converts its batch argument, at `position` or by name, to tensors."""

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
    """Base class of all tasks: a model, its loss over a batch, its metrics and its decoding.

        class Regression(Task):
            def __init__(self, params):
                super().__init__(params)
                self.child("model", self.params.model)

            def loss_weight(self, batch):
                return tf.reduce_sum(batch["weights"])

            def loss(self, theta, batch, ctx):
                y = self.model.fprop(theta.model, batch["x"], ctx)
                return LossSums(tf.reduce_sum(batch["weights"] * tf.square(y - batch["y"])))

    The loss of a step is loss_sum / loss_weight, both summed over the global batch, plus the
    auxiliary losses of layers (`ctx.collect_loss`).

    Shapes:
      batch: {name: array [batch, ...]}, the arrays of an input
      loss_weight returns: [] float32
      loss returns: LossSums, whose sums are scalars
    Attributes:
      goals: {metric: "max" or "min"}: whether a large or a small value is better, for
        `run.keep_best`. Goals of base classes are inherited, and the goal of the loss is "min".
      losses: names of the losses of a task that has several: `loss` and `loss_weight` then return
        vectors in this order. Empty: one loss, a scalar.
      gradients: how the gradients of several losses are combined; None: they are added.
      shared_weights: paths of the weights that several losses read.
      unchecked_labels: names of the arrays whose labels may be too large, because the loss excludes
        such labels. A run checks all other arrays that the loss reads as classes, by `tf.one_hot`
        or a sparse softmax cross-entropy.
    """

    goals: ClassVar[Mapping[str, Goal]] = {}
    losses: tuple[str, ...] = ()
    gradients: GradientCombination | None = None
    shared_weights: frozenset[str] = frozenset()
    unchecked_labels: frozenset[str] = frozenset()

    class Params(Layer.Params):
        """Params of a task."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wraps methods of the class, and checks their arguments and its `goals`.

        `loss` and `loss_weight` accept NumPy arrays; `predict` names an array that is missing.

        Raises:
          TypeError: a method takes other arguments; `goals` is not a dict of "min" and "max".
        """
        super().__init_subclass__(**kwargs)
        check_methods(cls, Task)
        goals = vars(cls).get("goals", {})
        if not isinstance(goals, Mapping) or not all(
            goal in ("min", "max") for goal in goals.values()
        ):
            raise TypeError(
                f'{cls.__name__}.goals must be {{metric: "min" or "max"}}, given {goals!r}'
            )
        for name, position in (("loss", 1), ("loss_weight", 0)):
            if inspect.isfunction(method := vars(cls).get(name)):
                setattr(cls, name, _on_tensors(method, position))
        if inspect.isfunction(predict := vars(cls).get("predict")):
            cls.predict = naming_missing_arrays(predict)  # type: ignore[method-assign]

    @classmethod
    def goals_of(cls, params: Task.Params) -> dict[str, Goal]:
        """Returns the goals of a task with these Params: `goals` of the class and its bases."""
        del params
        found: dict[str, Goal] = {}
        for one in reversed(cls.__mro__):
            found |= vars(one).get("goals", {})
        return found

    @classmethod
    def complete(cls, params: TaskParams, input: Input) -> TaskParams:
        """Returns the Params with missing values filled in from the training input.

        Args:
          params: Params of this task; not changed.
          input: the training Input, which knows for example the vocabulary size.

        Raises:
          ValueError: the Params do not fit the input.
        """
        return params

    def use_trained(self, load: LoadTrained, input: Input) -> None:
        """Loads the other runs that the task uses, if its Params name any.

        It is called once, before the first batch is computed.

        Args:
          load: opens a run or a checkpoint by its path.
          input: the training Input. If only given data is decoded, the result of `Input.known`.

        Raises:
          ValueError: a run does not fit. The message must name the Params.
        """

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str] | None:
        """Checks that the inputs fit the task, before the first step and before an evaluation.

        Args:
          inputs: {path in the tree: Input}, the training input ("input") and evaluation inputs.

        Returns:
          a list of one-line warnings, which a run shows before its first step; None: no warnings.

        Raises:
          ValueError: an input does not fit. The message must name its path, what is wrong and what
            is allowed.
        """

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks the values of a training or evaluation batch before it is sent to a device.

        It is called on the host for every batch, so it should take microseconds. A run checks by
        itself that no label is too large; see `unchecked_labels`.

        Args:
          what: the input and the number of the batch, for messages: "input.batch(3)".
          batch: the batch of the input.

        Raises:
          ValueError: a value is not allowed. The message must contain `what`.
        """

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the weight of a batch, by which the sum of its losses is divided.

        It must be a pure function of the batch, because it is computed for the global batch before
        any loss. It must be additive: the weights of the parts of a batch sum to its weight.

        Shapes:
          returns: [], float32; [losses] of a task with several losses
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss_weight(): define loss_weight(self, batch), which "
            "returns what the sum of the losses is divided by, as tf.reduce_sum(batch['weights'])"
        )

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
        """Returns sums over the examples of `batch`, which is a whole batch or a part of one.

        Pass auxiliary losses to `ctx.collect_loss`; do not add them to these sums. By default it
        runs the `pieces` one after the other.

        Raises:
          RowsError: the pieces do not read all rows of a repeated stack in order.
        """
        if type(self).pieces is Task.pieces:
            raise NotImplementedError(f"{type(self).__name__} has neither loss() nor pieces()")
        flow: Flow = task_results.as_tensors(batch)
        for piece in joined(task_results.pieces(self)):
            self._check_whole(piece)
            flow = piece.compute(theta, flow, ctx)
        return task_results.sums_of_flow(self, flow)

    def _check_whole(self, piece: Piece) -> None:
        """Raises a RowsError if a merged piece reads only some rows of a repeated stack.

        Theta has all rows here, so the piece would run too many.
        """
        if piece.rows is None:
            return
        specs = self.specs()
        counts = {specs[path].shape[0] for path in piece.weights(sorted(specs))}
        first, end = piece.rows
        if first or counts - {end}:
            raise RowsError(
                f"{piece.name} reads rows {first} to {end - 1} of a repeated stack of "
                f"{max(counts)}, but neighbouring pieces do not read the other rows: list its "
                f"layers one after the other, or define {type(self).__name__}.loss()"
            )

    def pieces(self) -> list[Piece]:
        """Returns the parts of `loss` in order; a pipeline partitions them into stages.

        The first piece gets the batch. The last piece adds "loss_sum" and "metrics", the fields of
        `LossSums`. Layers collect their losses and metrics as usual. By default the whole loss is
        one piece.
        """

        def run(theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
            sums = task_results.loss(self, theta, flow, ctx)
            return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

        return [Piece("loss", {"": self}, run)]

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns predictions for the examples of a batch, used by `Session.predict`.

        It must be a pure function. `batch` may lack arrays that only the loss needs.

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
        """Returns the amount of data in a batch and its unit, for the speed in reports.

        By default, the number of examples, without those whose "weights" are 0, as of padding.
        """
        rows = len(next(iter(batch.values())))
        weights = np.asarray(batch.get("weights", 1.0))
        if weights.ndim and len(weights) == rows:
            rows = int(np.count_nonzero(weights.reshape(rows, -1).any(1)))
        return rows, "examples"

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """Returns the figures of a report: the mean of every sum, and figures derived from means.

        Args:
          sums: {name: (sum, weight)} over a batch or a whole pass, including `LOSS`. Names with
            weight 0 have no mean and are omitted.
        """
        return {name: value / weight for name, (value, weight) in sums.items() if weight}

    def equal_losses(self, batch: Mapping[str, np.ndarray]) -> tuple[Batch, Batch, str] | None:
        """Returns two batches with the same loss, and what is wrong if their losses differ.

        A new run compares the two losses before its first step, if the model is small.

        Args:
          batch: one example of the training input, as arrays.
        """
        return None

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns the output of `--mode=decode` and of decoding at the end of training.

        None: the task decodes nothing.

        Args:
          program: calls pure functions with the weights of the run.
          input: the training Input, with its tokenizer; `shown_rows` of it are held-out rows. If
            `decodes_data` is False, only the result of `Input.known`.
        """
        return None

    def why_nothing_decoded(self) -> str:
        """Returns why `decode` returned None, and what to write; used in error messages."""
        name = type(self).__name__
        if type(self).decode is Task.decode:
            return f"{name} has no decode(): define it, and return Decoded(text, records) from it"
        return (
            f"{name}.decode(){place_of(type(self).decode)} returned None: return Decoded(text, "
            "records), the text to print and a list of dicts; None means nothing to show"
        )

    @classmethod
    def decodes_data(cls, params: Task.Params) -> bool:
        """Returns whether `decode` reads examples of its input, and not only its tokenizers."""
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
        """Returns scores from decoding an evaluation input, after its pass; None: no scores.

        Args:
          program: calls pure functions with the weights of the run. All processes of a run must
            make the same calls.
          input: an evaluation Input.
          is_last: whether it is the last evaluation of the run, which may take longer.
          stopped: returns whether to stop early; call it regularly. The result is then not used.
        """
        return None

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns {name: function} of the functions that `--mode=export` writes.

        Args:
          input: the training Input. If its tokenizer is known without the data, only the result of
            `Input.known`, which has Params, tokenizer and sizes.
        """
        return {}

    def text_exports(self, input: Input) -> dict[str, ExportedTexts]:
        """Returns {name in `exports`: conversion from and to texts}.

        Each of these functions is also exported as a SavedModel that takes texts. Empty: there are
        none, or a package that they require is not installed.
        """
        return {}

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns a setting ("path=value") to suggest for `--mode=decode`; None: no suggestion.

        Args:
          eval_inputs: {name: evaluation Input}, data that the model was not trained on.
        """
        return None
