"""The values that a task's methods return, and the program that they get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import tensorflow as tf

Batch = Mapping[str, tf.Tensor]

SUM_OF_LOSSES = "sum the losses of the examples with tf.reduce_sum"
PAIRS = "{name: (sum, weight)} of scalars; the metric is sum / weight"


class Program(Protocol):
    """Calls functions with the weights of a run; tasks use it for decoding.

    Attributes:
      serialize_calls: whether callers should make one `call` at a time, with inputs of one shape.
    """

    serialize_calls: bool

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Returns `function(theta, *inputs, ctx)`, traced once per function and input shapes.

        `function` must be pure. Its trace is cached for further calls with the same function
        object. The inputs are nests of arrays, tensors and None. After the first call, several
        threads may call concurrently, unless `serialize_calls` is set.
        """
        ...


class TaskError(TypeError):
    """A method of a task returns an invalid value."""


@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums of losses and metrics over a part of a batch; never means.

    Attributes:
      loss_sum: scalar; its sum over all parts, divided by the global `loss_weight`, is the loss.
      metrics: {name: (sum, weight)}, scalars; sum / weight over all parts is the metric. Integers
        are converted to float32.
      most_dims: number of dims that `loss_sum` may have.

    Raises:
      TaskError: a value is not a scalar number, or a metric is not a pair.
    """

    most_dims: ClassVar[int] = 0
    loss_sum: tf.Tensor
    metrics: dict[str, tuple[tf.Tensor, tf.Tensor]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the values and converts them to tensors."""
        dims = self.most_dims
        loss_sum = scalar(self.loss_sum, "the loss sum", SUM_OF_LOSSES, most_dims=dims)
        object.__setattr__(self, "loss_sum", loss_sum)
        if not isinstance(self.metrics, Mapping):
            raise TaskError(f"metrics of LossSums are {shown(self.metrics)}, not a dict {PAIRS}")
        pairs = {}
        for name, pair in self.metrics.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TaskError(f"the metric {name!r} is {shown(pair)}, not a pair: {PAIRS}")
            one, weight = pair
            pairs[name] = (
                scalar(one, f"the sum of the metric {name!r}", PAIRS),
                scalar(weight, f"the weight of the metric {name!r}", PAIRS),
            )
        object.__setattr__(self, "metrics", pairs)

    def total(self, weight: tf.Tensor, auxiliary: tf.Tensor) -> tf.Tensor:
        """Returns the contribution of this part to the total loss, in the dtype of `loss_sum`.

        Args:
          weight: loss weight of the global batch. If it is 0, the batch is all padding, and the
            mean loss is 0.
          auxiliary: auxiliary losses of this part.
        """
        mean = mean_loss(self.loss_sum, weight)
        return mean + tf.cast(auxiliary, mean.dtype)


class SeveralLossSums(LossSums):
    """The sums of a task with several `losses`: `loss_sum` is a vector with one sum for each.

    The loss is the sum of their means.
    """

    most_dims = 1


@dataclasses.dataclass(frozen=True)
class Decoded:
    """The result of decoding, as text and as JSON records.

    Attributes:
      text: text to print, several lines.
      records: one JSON object per sample or scored text.
    """

    text: str
    records: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Scored:
    """The scores from decoding an evaluation input, in addition to the metrics of its pass.

    Attributes:
      figures: {name: value}, reported with the metrics of the pass.
      text: text to print, several lines; "": none.
      images: {name: PNG file}.
      notes: lines that are printed together with the figures.
    """

    figures: dict[str, float]
    text: str = ""
    images: dict[str, bytes] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def mean_loss(loss_sum: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Returns the loss of a batch: the sum of the means of all losses.

    Shapes:
      loss_sum, weight: [], or [losses] of a task with several losses
      returns: [], dtype of loss_sum; the mean of a loss with weight 0 is 0
    """
    means = tf.math.divide_no_nan(loss_sum, tf.cast(weight, loss_sum.dtype))
    return over_losses(means)


def over_losses(x: tf.Tensor) -> tf.Tensor:
    """Returns a sum or a weight over all losses of a task: [] or [losses] -> []."""
    return x if x.shape.rank == 0 else tf.reduce_sum(x)


def scalar(value: Any, what: str, want: str, *, most_dims: int = 0) -> tf.Tensor:
    """Returns a value as a floating-point tensor.

    Args:
      value: a number or a tensor.
      what: what it is, for messages.
      want: what to do instead, for messages.
      most_dims: 0 for a scalar; 1 if it may also be a vector.

    Raises:
      TaskError: the value is not a scalar number.
    """
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError, tf.errors.OpError):
        raise TaskError(f"{what} is {shown(value)}, but must be a scalar: {want}") from None
    if not tensor.dtype.is_floating:
        if not (tensor.dtype.is_integer or tensor.dtype.is_bool):
            raise TaskError(f"{what} is {shown(tensor)}, but must be a number: {want}")
        tensor = tf.cast(tensor, tf.float32)
    if tensor.shape.rank is not None and tensor.shape.rank > most_dims:
        raise TaskError(f"{what} is {shown(tensor)}, but must be a scalar: {want}")
    return tensor


def is_matrix(value: Any, size: int) -> bool:
    """Returns whether a value is a tensor [batch, size]."""
    is_known = tf.is_tensor(value) and value.shape.rank is not None
    return is_known and list(value.shape)[1:] == [size]


def shown(value: Any) -> str:
    """Returns a value as it is shown in a message."""
    if isinstance(value, tf.Tensor):
        shape = "unknown shape (tf.ensure_shape gives it one)"
        if value.shape.rank is not None:
            shape = f"shape {list(value.shape)}"
        return f"a {value.dtype.name} tensor of {shape}"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    size = f" of length {len(value)}" if hasattr(value, "__len__") else ""
    return f"a {type(value).__name__}{size}"
