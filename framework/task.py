"""Task: what is learned. A loss as sums over the part of a batch that is seen, and what to show.

A task is a layer: its weights are those of the model below it, so specs, first values and weight
paths come from the layer contract. It knows no device: an execution calls `loss` on a part of the
batch and adds up what the parts return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.layer import Layer
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece, joined
from tekso.framework.theta import Theta

Batch = Mapping[str, tf.Tensor]
TaskParams = TypeVar("TaskParams", bound="Task.Params")
_Result = TypeVar("_Result")

LOSS = "loss"
"""Name under which an execution adds (loss_sum, loss_weight) to the sums of a task's metrics."""


class TaskError(TypeError):
    """A task returns something else than its contract says."""


@dataclasses.dataclass(frozen=True)
class LossSums:
    """What one part of a batch adds to a step, never a mean.

    Attributes:
      loss_sum: scalar; the sum over all parts divided by the global `loss_weight` is the loss.
      metrics: {name: (sum, weight)}, scalars; sum / weight over all parts is the metric. Integers
        become float32.

    Raises:
      TaskError: a value is no scalar or no number, or a metric no pair.
    """

    loss_sum: tf.Tensor
    metrics: dict[str, tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the values and makes them tensors."""
        object.__setattr__(self, "loss_sum", _scalar(self.loss_sum, "the loss sum", _SUM_OF_LOSSES))
        if not isinstance(self.metrics, Mapping):
            raise TaskError(f"metrics of LossSums are {_shown(self.metrics)}, not a dict {_PAIRS}")
        pairs = {}
        for name, pair in self.metrics.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TaskError(f"the metric {name!r} is {_shown(pair)}, not a pair: {_PAIRS}")
            one, weight = pair
            pairs[name] = (
                _scalar(one, f"the sum of the metric {name!r}", _PAIRS),
                _scalar(weight, f"the weight of the metric {name!r}", _PAIRS),
            )
        object.__setattr__(self, "metrics", pairs)

    def total(self, weight: tf.Tensor, auxiliary: tf.Tensor) -> tf.Tensor:
        """Returns what this part adds to the total loss, in the type of `loss_sum`.

        Args:
          weight: of the global batch. If it is 0, the batch is padding: nothing is to be learned.
          auxiliary: the part's auxiliary losses.
        """
        mean = tf.math.divide_no_nan(self.loss_sum, tf.cast(weight, self.loss_sum.dtype))
        return mean + tf.cast(auxiliary, mean.dtype)


_SUM_OF_LOSSES = "sum the losses of the examples with tf.reduce_sum"
_PAIRS = "{name: (sum, weight)} of scalars, whose quotient is the metric"


def _scalar(value: Any, what: str, want: str) -> tf.Tensor:
    """Returns a value as a tensor of a floating type.

    Raises:
      TaskError: it is no scalar, or no number.
    """
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError):
        raise TaskError(f"{what} is {_shown(value)}, and has to be a scalar: {want}") from None
    if not tensor.dtype.is_floating:
        if not (tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise TaskError(f"{what} is {_shown(tensor)}, and has to be a number: {want}")
        tensor = tf.cast(tensor, tf.float32)
    if tensor.shape.rank not in (0, None):
        raise TaskError(f"{what} is {_shown(tensor)}, and has to be a scalar: {want}")
    return tensor


def _shown(value: Any) -> str:
    if isinstance(value, tf.Tensor):
        return f"a {value.dtype.name} tensor of shape {list(value.shape)}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"


def as_tensors(batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a batch whose NumPy arrays became tensors; tensors stay as they are."""
    return {
        name: tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array
        for name, array in batch.items()
    }


def loss_sums(task: Task, theta: Theta, batch: Batch, ctx: Any) -> LossSums:
    """Returns `task.loss(theta, batch, ctx)`; the batch may have NumPy arrays.

    Raises:
      TaskError: it is no `LossSums`.
    """
    sums = task.loss(theta, as_tensors(batch), ctx)
    if not isinstance(sums, LossSums):
        raise TaskError(
            f"{method_of(task, 'loss')} returns {_shown(sums)}, and has to return "
            f"LossSums(loss_sum, metrics): {_SUM_OF_LOSSES}; metrics are {_PAIRS}"
        )
    return sums


def weight_of(task: Task, batch: Batch) -> tf.Tensor:
    """Returns `task.loss_weight(batch)` in float32; the batch may have NumPy arrays.

    Shapes:
      returns: []

    Raises:
      TaskError: it is no scalar, or no number.
    """
    what = f"what {method_of(task, 'loss_weight')} returns"
    weight = _scalar(task.loss_weight(as_tensors(batch)), what, "sum the weights of the examples")
    return tf.cast(weight, tf.float32)


def figures_of(task: Task, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns `task.summarize(sums)`, every figure a float.

    Raises:
      TaskError: it is no dict of numbers.
    """
    figures = task.summarize(sums)
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError):
        raise TaskError(
            f"{method_of(task, 'summarize')} returns {_shown(figures)}, and has to return "
            "{name: number}: super().summarize(sums), with what you change and add"
        ) from None


def amount_of(task: Task, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Returns `task.count(batch)`.

    Raises:
      TaskError: it is no pair of a number and a unit.
    """
    found = task.count(batch)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and isinstance(found[0], (int, np.integer)) and isinstance(found[1], str):
        return int(found[0]), found[1]
    raise TaskError(
        f"{method_of(task, 'count')} returns {_shown(found)}, and has to return a pair of a whole "
        'number and its unit: (1200, "tokens")'
    )


def result_of(task: Task, name: str, found: Any, kind: type[_Result]) -> _Result | None:
    """Returns what a method of a task returned, which may be None.

    Raises:
      TaskError: it is not of this kind.
    """
    if found is None or isinstance(found, kind):
        return found
    raise TaskError(
        f"{method_of(task, name)} returns {_shown(found)}, and has to return {kind.__name__}(...) "
        "or None"
    )


def decoded_by(task: Task, program: Program, input: Any) -> Decoded | None:
    """Returns `task.decode(program, input)`.

    Raises:
      TaskError: it is something else than `Decoded` and None.
    """
    return result_of(task, "decode", task.decode(program, input), Decoded)


def exports_of(task: Task, input: Any) -> dict[str, ExportedFunction]:
    """Returns `task.exports(input)`.

    Raises:
      TaskError: it is no dict of exported functions.
    """
    found = task.exports(input)
    if isinstance(found, dict) and all(isinstance(f, ExportedFunction) for f in found.values()):
        return found
    raise TaskError(
        f"{method_of(task, 'exports')} returns {_shown(found)}, and has to return "
        "{name: ExportedFunction(...)}"
    )


def pieces_of(task: Task) -> list[Piece]:
    """Returns `task.pieces()`.

    Raises:
      TaskError: it is no list of pieces.
    """
    pieces = task.pieces()
    if isinstance(pieces, (list, tuple)) and pieces and all(isinstance(p, Piece) for p in pieces):
        return list(pieces)
    raise TaskError(
        f"{method_of(task, 'pieces')} returns {_shown(pieces)}, and has to return a list of at "
        "least one Piece(name, layers, run)"
    )


def sums_of_flow(task: Task, flow: Flow) -> LossSums:
    """Returns the sums that the last piece of a task leaves in the flow.

    Raises:
      TaskError: they are not there.
    """
    if not isinstance(flow, dict) or LOSS_SUM not in flow or METRICS not in flow:
        given = sorted(flow) if isinstance(flow, dict) else _shown(flow)
        raise TaskError(
            f"the last piece of {method_of(task, 'pieces')} returns {given}, and has to add "
            f"{LOSS_SUM!r} and {METRICS!r} to what it is given: {{**flow, {LOSS_SUM!r}: "
            f"tf.reduce_sum(...), {METRICS!r}: {{}}}}"
        )
    return LossSums(flow[LOSS_SUM], flow[METRICS])


def method_of(task: Task, name: str) -> str:
    """Returns a method with its file and line, for messages: what it returns is wrong."""
    code = getattr(getattr(task, name), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    return f"{type(task).__name__}.{name}{place}"


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What decoding shows to people and leaves to programs.

    Attributes:
      text: to print, several lines.
      records: one JSON object a sample or scored text.
    """

    text: str
    records: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Scored:
    """What decoding an evaluation input shows, besides the sums of its pass.

    Attributes:
      figures: {name: value}, reported with those of the pass.
      text: for people, several lines; "" for nothing.
      images: {name: PNG file}.
      notes: lines that go with the figures wherever they are told.
    """

    figures: dict[str, float]
    text: str = ""
    images: dict[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Program(Protocol):
    """The weights of a run, ready to be called: what a task decodes with.

    Attributes:
      calls_alike: whether the calls of a function should come one at a time, with inputs of one
        shape.
    """

    calls_alike: bool

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)`, traced once for a function and input shapes.

        `function` is pure. Pass the same function object again and the trace is used again. The
        inputs are nests of arrays, tensors and None. After a first call, several threads may call
        at a time, unless `calls_alike`.
        """
        ...


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
    """

    class Params(Layer.Params):
        """Params of a task."""

    @classmethod
    def complete(cls, params: TaskParams, input: Any) -> TaskParams:
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

    def loss(self, theta: Theta, batch: Batch, ctx: Any) -> LossSums:
        """Returns the sums over the examples of `batch`, a whole batch or a part of one.

        Auxiliary losses are handed to `ctx.collect_loss` and are no part of these sums. By default
        the `pieces` are run one after the other.

        Raises:
          ValueError: a piece reads some rows of a repeated stack, and its neighbours not the rest.
        """
        if type(self).pieces is Task.pieces:
            raise NotImplementedError(f"{type(self).__name__} has neither loss() nor pieces()")
        flow: Flow = as_tensors(batch)
        for piece in joined(pieces_of(self)):
            self._check_whole(piece)
            flow = piece.run(theta, flow, ctx)
        return sums_of_flow(self, flow)

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

        def run(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            sums = loss_sums(self, theta, flow, ctx)
            return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

        return [Piece("loss", {"": self}, run)]

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

    def decode(self, program: Program, input: Any) -> Decoded | None:
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
        input: Any,
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

    def exports(self, input: Any) -> dict[str, ExportedFunction]:
        """Returns the functions that `--mode=export` writes, by name; empty: there are none.

        Args:
          input: the training Input; where its tokenizer is known without the data, it may be all
            besides Params and sizes.
        """
        return {}

    def text_exports(self, input: Any) -> dict[str, ExportedTexts]:
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
