"""What layers hand to a step besides their output: sums with weights, by kind and name."""

from __future__ import annotations

from typing import Any, Literal

import tensorflow as tf

Kind = Literal["loss", "metric", "statistic"]
KINDS: tuple[Kind, ...] = ("loss", "metric", "statistic")


class Collected:
    """Sums of (value, weight) by kind and name; values of one name are added up."""

    def __init__(self) -> None:
        self.sums: dict[Kind, dict[str, tuple[tf.Tensor, tf.Tensor]]] = {k: {} for k in KINDS}

    def add(self, kind: Kind, name: str, value: Any, weight: Any) -> None:
        """Adds a sum and its weight."""
        value = tf.cast(value, tf.float32)
        weight = tf.cast(weight, tf.float32)
        before = self.sums[kind].get(name)
        if before is not None:
            value, weight = before[0] + value, before[1] + weight
        self.sums[kind][name] = (value, weight)

    def merge(self, sums: dict[Kind, dict[str, tuple[tf.Tensor, tf.Tensor]]]) -> None:
        """Adds what another collection holds."""
        for kind, by_name in sums.items():
            for name, (value, weight) in by_name.items():
                self.add(kind, name, value, weight)

    def total(self, kind: Kind) -> tf.Tensor:
        """Returns the sum over all names of a kind: the auxiliary losses of a step."""
        return tf.add_n([tf.constant(0.0), *(value for value, _ in self.sums[kind].values())])
