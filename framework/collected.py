"""What layers collect: sums with weights, by kind and name, and attention weights on request."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.draws import RandomDraw, Repeats, noted

Kind = Literal["loss", "metric", "statistic"]
KINDS: tuple[Kind, ...] = ("loss", "metric", "statistic")
LOSSES = frozenset({"loss", "total_loss"})
Pairs = dict[str, tuple[Any, Any]]


def added_pairs(parts: Iterable[Mapping[str, tuple[Any, Any]]]) -> Pairs:
    """Returns {name: (sum of values, sum of weights)} over all parts.

    A sum has the dtype of the first value with its name.
    """
    total: Pairs = {}
    for part in parts:
        for name, pair in part.items():
            value, weight = map(tf.convert_to_tensor, pair)
            if name in total:
                value = total[name][0] + tf.cast(value, total[name][0].dtype)
                weight = total[name][1] + tf.cast(weight, total[name][1].dtype)
            total[name] = (value, weight)
    return total


class Collected:
    """Sums of (value, weight) by kind and name. Values with the same name are summed.

    Attributes:
      sums: the sums.
      repeats: takes draws of the same random numbers on one line; None: these are not noted,
        unless in a block of `draws.warning_of_repeats`.
      draws: the random numbers that layers have drawn so far; see draws.py.
      requests_attention: whether attention layers are to add their attention weights; see
        `collecting_attention` in context.py.
    """

    def __init__(self, *, repeats: Repeats | None = None) -> None:
        self.repeats = noted() if repeats is None else repeats
        self.sums: dict[Kind, dict[str, tuple[tf.Tensor, tf.Tensor]]] = {k: {} for k in KINDS}
        self.draws: dict[Hashable, RandomDraw] = {}
        self.requests_attention = False
        self._attention: Callable[[], tf.Tensor] | None = None

    def add(self, kind: Kind, name: str, value: Any, weight: Any) -> None:
        """Adds a sum and its weight.

        A scalar weight of a statistic is broadcast: loops stack both, and then divide them.

        Raises:
          ValueError: the value or weight of a loss or metric is not a scalar.
        """
        value = tf.cast(value, tf.float32)
        weight = tf.cast(weight, tf.float32)
        for what, given in (("value", value), ("weight", weight)):
            if kind != "statistic" and given.shape.rank not in (0, None):
                raise ValueError(
                    f"collect_{kind}({name!r}): the {what} has the shape {list(given.shape)}, but "
                    "must be a scalar: sum over the examples with tf.reduce_sum"
                )
        if value.shape.rank and weight.shape.rank == 0:
            weight += tf.zeros_like(value)
        before = self.sums[kind].get(name)
        if before is not None:
            value, weight = before[0] + value, before[1] + weight
        self.sums[kind][name] = (value, weight)

    def requesting_attention(self) -> Collected:
        """Returns a collection of the same sums that also takes attention weights."""
        other = copy.copy(self)
        other.requests_attention, other._attention = True, None
        return other

    def add_attention(self, compute: Callable[[], tf.Tensor]) -> None:
        """Adds the attention weights of an attention layer, if they are requested.

        Args:
          compute: returns the attention weights. It is called for the last attention layer only.

        Shapes:
          compute(): [batch, queries, keys] float32, mean over heads
        """
        if self.requests_attention:
            self._attention = compute

    def attention_weights(self) -> tf.Tensor:
        """Returns the attention weights of the last attention layer.

        Shapes:
          returns: [batch, queries, keys] float32
        Raises:
          ValueError: no attention layer has added its attention weights.
        """
        if self._attention is None:
            raise ValueError(
                "no layer has added attention weights: an attention layer adds them with "
                "ctx.collected.add_attention(…), with the context that it is given; they cannot "
                "leave ops.scan or ops.rematerialize"
            )
        return self._attention()

    def merge(self, sums: dict[Kind, dict[str, tuple[tf.Tensor, tf.Tensor]]]) -> None:
        """Adds the sums of another collection."""
        for kind, by_name in sums.items():
            for name, (value, weight) in by_name.items():
                self.add(kind, name, value, weight)

    def reported(self, metrics: Mapping[str, tuple[Any, Any]]) -> Pairs:
        """Returns the metrics of a task and of its layers; metrics with the same name are summed.

        Raises:
          ValueError: a metric has the name of a loss that every step reports.
        """
        merged = added_pairs([metrics, self.sums["metric"]])
        for name in sorted(merged.keys() & LOSSES):
            raise ValueError(
                f"a metric is named {name!r}, which is the name of a loss that every step reports; "
                "give it another name in collect_metric or in LossSums"
            )
        return merged

    def total(self, kind: Kind) -> tf.Tensor:
        """Returns the sum over all names of a kind; for "loss": the auxiliary loss of a step."""
        return tf.add_n([tf.constant(0.0), *(value for value, _ in self.sums[kind].values())])
