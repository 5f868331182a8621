"""What a task returns: the values, and a check of what each method of `Task` returned.

There is a function for each method, of the same name: it calls the method, and raises a `TaskError`
that names the method with its line and what it returned. Executions and runs call these functions
and not the task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction, ExportedTexts
from tekso.framework.input.input import Input
from tekso.framework.layer import Layer
from tekso.framework.params import Params
from tekso.framework.params.types import type_name
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.source_lines import place_of
from tekso.framework.theta import Theta

Batch = Mapping[str, tf.Tensor]
_Result = TypeVar("_Result")


class Program(Protocol):
    """The weights of a run, ready to be called: what a task decodes with.

    Attributes:
      serialize_calls: whether the calls of a function should come one at a time, with inputs of one
        shape.
    """

    serialize_calls: bool

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)`, traced once for a function and input shapes.

        `function` is pure. Pass the same function object again and the trace is used again. The
        inputs are nests of arrays, tensors and None. After a first call, several threads may call
        at a time, unless `serialize_calls`.
        """
        ...


class _Task(Protocol):
    """The methods that are called here; `Task` says what they are given and return."""

    def walk(self) -> Iterable[Layer]: ...

    def loss_weight(self, batch: Batch) -> Any: ...

    def loss(self, theta: Theta, batch: Batch, ctx: StepContext) -> Any: ...

    def pieces(self) -> Any: ...

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> Any: ...

    def count(self, batch: Mapping[str, np.ndarray]) -> Any: ...

    def summarize(self, sums: Mapping[str, tuple[float, float]]) -> Any: ...

    def check_inputs(self, inputs: Mapping[str, Any]) -> Any: ...

    def decode(self, program: Program, input: Input) -> Any: ...

    def score(
        self, program: Program, input: Input, *, is_last: bool, stopped: Callable[[], bool]
    ) -> Any: ...

    def exports(self, input: Input) -> Any: ...

    def text_exports(self, input: Input) -> Any: ...

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> Any: ...


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


def complete(params: Params, input: Input) -> Params:
    """Returns `complete(params, input)` of the task that Params are of.

    Raises:
      TaskError: they are of no task, or it returns something else than Params of itself.
    """
    owner = params.owner
    if owner is None or not hasattr(owner, "complete"):
        name = type_name(type(params)) if owner is None else owner.__name__
        raise TaskError(
            f"task is Params of {name}, and {name} is no task: a task has the model in it and a "
            "loss, as Classification.Params(model=Mlp.Params()) has"
        )
    found = owner.complete(params, input)
    if isinstance(found, type(params)):
        return found
    raise TaskError(
        f"{method_of(owner, 'complete')} returns {_shown(found)}, and has to return "
        f"{type_name(type(params))}: return params, or a copy that is filled in "
        "(params = params.copy())"
    )


def check_inputs(task: _Task, inputs: Mapping[str, Any]) -> list[str]:
    """Returns the warnings of `task.check_inputs(inputs)`.

    Raises:
      TaskError: it is neither None nor a list of texts.
    """
    found = task.check_inputs(inputs)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(line, str) for line in found):
        raise _error(task, "check_inputs", found, "warnings, a list of str, or None")
    return found


def loss_weight(task: _Task, batch: Batch) -> tf.Tensor:
    """Returns `task.loss_weight(batch)` in float32; the batch may have NumPy arrays.

    Shapes:
      returns: []

    Raises:
      TaskError: it is no scalar, or no number.
    """
    what = f"what {method_of(task, 'loss_weight')} returns"
    weight = _scalar(task.loss_weight(as_tensors(batch)), what, "sum the weights of the examples")
    return tf.cast(weight, tf.float32)


def loss(task: _Task, theta: Theta, batch: Batch, ctx: StepContext) -> LossSums:
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


def pieces(task: _Task) -> list[Piece]:
    """Returns `task.pieces()`.

    Raises:
      TaskError: it is no list of pieces; or a layer overrides fprop() and not pieces(), of which
        the loss is made.
    """
    own: object = task
    for layer in task.walk():
        if layer is own or not hasattr(layer, "pieces"):
            continue
        if (overriding := overrides(layer, "fprop")) is not None:
            name = type(layer).__name__
            raise TaskError(
                f"{method_of(overriding[0], 'fprop')} overrides what "
                f"{method_of(overriding[1], 'pieces')} computes, and the loss of "
                f"{type(task).__name__} is made of pieces(), so fprop() would not be used: "
                f"override pieces() in {name} as well, so that both compute the same"
            )
    found = task.pieces()
    if isinstance(found, (list, tuple)) and found and all(isinstance(p, Piece) for p in found):
        return list(found)
    raise _error(task, "pieces", found, "a list of at least one Piece(name, layers, run)")


def overrides(layer: Any, method: str) -> tuple[type, type] | None:
    """Returns the class that overrides a method, and that of `pieces` above it; None: neither.

    What a subclass of both computes is then not what `pieces` computes.
    """
    order = type(layer).__mro__
    one, pieces = (next(c for c in order if name in vars(c)) for name in (method, "pieces"))
    return (one, pieces) if order.index(one) < order.index(pieces) else None


def sums_of_flow(task: _Task, flow: Flow) -> LossSums:
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


def predict(task: _Task, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
    """Returns `task.predict(theta, batch, ctx)`; the batch may have NumPy arrays.

    Raises:
      TaskError: it is no dict of tensors.
    """
    return _by_name(task, "predict", task.predict(theta, as_tensors(batch), ctx), tf.Tensor)


def count(task: _Task, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Returns `task.count(batch)`.

    Raises:
      TaskError: it is no pair of a number and a unit.
    """
    found = task.count(batch)
    is_pair = isinstance(found, tuple) and len(found) == 2
    if is_pair and isinstance(found[0], (int, np.integer)) and isinstance(found[1], str):
        return int(found[0]), found[1]
    raise _error(task, "count", found, 'a pair of a whole number and its unit: (1200, "tokens")')


def summarize(task: _Task, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns `task.summarize(sums)`, every figure a float.

    Raises:
      TaskError: it is no dict of numbers.
    """
    figures = task.summarize(sums)
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (AttributeError, TypeError, ValueError):
        want = "{name: number}: super().summarize(sums), with what you change and add"
        raise _error(task, "summarize", figures, want) from None


def decode(task: _Task, program: Program, input: Input) -> Decoded | None:
    """Returns `task.decode(program, input)`.

    Raises:
      TaskError: it is something else than `Decoded` and None.
    """
    return _or_none(task, "decode", task.decode(program, input), Decoded)


def decodes_data(params: Params) -> bool:
    """Returns `decodes_data(params)` of the task that Params are of.

    Raises:
      TaskError: it is no boolean.
    """
    owner: Any = params.owner
    found = owner.decodes_data(params)
    if isinstance(found, bool):
        return found
    raise _error(owner, "decodes_data", found, "True or False")


def score(
    task: _Task, program: Program, input: Input, *, is_last: bool, stopped: Callable[[], bool]
) -> Scored | None:
    """Returns `task.score(program, input, …)`.

    Raises:
      TaskError: it is something else than `Scored` and None.
    """
    found = task.score(program, input, is_last=is_last, stopped=stopped)
    return _or_none(task, "score", found, Scored)


def exports(task: _Task, input: Input) -> dict[str, ExportedFunction]:
    """Returns `task.exports(input)`.

    Raises:
      TaskError: it is no dict of exported functions.
    """
    return _by_name(task, "exports", task.exports(input), ExportedFunction)


def text_exports(task: _Task, input: Input) -> dict[str, ExportedTexts]:
    """Returns `task.text_exports(input)`.

    Raises:
      TaskError: it is no dict of exported texts.
    """
    return _by_name(task, "text_exports", task.text_exports(input), ExportedTexts)


def setting_to_try(task: _Task, eval_inputs: Mapping[str, Any]) -> str | None:
    """Returns `task.setting_to_try(eval_inputs)`.

    Raises:
      TaskError: it is neither "path=value" nor None.
    """
    found = task.setting_to_try(eval_inputs)
    if found is None or (isinstance(found, str) and "=" in found):
        return found
    raise _error(task, "setting_to_try", found, '"path=value" or None')


def method_of(task: object, name: str) -> str:
    """Returns a method with its file and line, for messages: what it returns is wrong."""
    owner = task if isinstance(task, type) else type(task)
    return f"{owner.__name__}.{name}{place_of(getattr(task, name))}"


def as_tensors(batch: Mapping[str, Any]) -> dict[str, tf.Tensor]:
    """Returns a batch whose NumPy arrays became tensors; tensors stay as they are."""
    return {
        name: tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array
        for name, array in batch.items()
    }


def _or_none(task: _Task, name: str, found: Any, kind: type[_Result]) -> _Result | None:
    if found is None or isinstance(found, kind):
        return found
    raise _error(task, name, found, f"{kind.__name__}(...) or None")


def _by_name(task: _Task, name: str, found: Any, kind: type[_Result]) -> dict[str, _Result]:
    if isinstance(found, dict) and all(isinstance(value, kind) for value in found.values()):
        return found
    raise _error(task, name, found, f"{{name: {kind.__name__}(...)}}")


def _error(task: object, name: str, found: Any, want: str) -> TaskError:
    return TaskError(f"{method_of(task, name)} returns {_shown(found)}, and has to return {want}")


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
