"""How the gradients of several losses become one gradient of every shared weight.

    loss of task 1 ─► gradient g_1 ─┐
    loss of task 2 ─► gradient g_2 ─┴─► combined ─► clipping, optimizer

A weight that only one loss reads has one gradient, which stays as it is. The gradients are combined
after they have been summed over all parts of a batch (replicas, accumulation steps), because these
methods are not linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import counter_hash
from tekso.framework.params import Configurable, param

Gradients = Mapping[str, Any]
"""{path: gradient}, or for a shared weight a tuple with one gradient for each loss."""


class GradientCombination(Configurable):
    """Base class: how gradients of several losses are combined.

    Attributes:
      is_sum: whether it adds them, so that they need not be computed separately.
    """

    is_sum = False

    class Params(Configurable.Params):
        """Params of a gradient combination."""

    def combined(
        self, gradients: Gradients, losses: Sequence[str], key: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Returns {path: combined gradient}, and metrics.

        Args:
          gradients: gradients of all trained weights.
          losses: names of the losses, in the order of the gradients of a weight.
          key: uint32 scalar, the key of the random numbers of this step.
        """
        raise NotImplementedError(f"{type(self).__name__} has no combined()")

    def check(self, losses: Sequence[str], where: str) -> None:
        """Checks the Params, given the names of the losses.

        Raises:
          ValueError: the Params do not fit; the message names the setting.
        """


def needs_each_gradient(combination: GradientCombination | None, losses: Sequence[str]) -> bool:
    """Returns whether a step needs the gradient of each loss, and not only their sum.

    Args:
      combination: how they are combined; None: they are added.
      losses: names of the losses of the task.
    """
    return combination is not None and not combination.is_sum and len(losses) > 1


class SumOfGradients(GradientCombination):
    """Adds the gradients: the gradient of the sum of the losses."""

    is_sum = True

    class Params(GradientCombination.Params):
        """Params of SumOfGradients."""


class GradDrop(GradientCombination):
    """Keeps for every element of a weight only the gradients of one sign, chosen at random.

        p = (1 + Σ g_i / Σ |g_i|) / 2,  u uniform in [0, 1)
        keep_i = [p > u and g_i > 0] or [p < u and g_i < 0]
        combined = Σ (leak_i + (1 - leak_i) keep_i) g_i

    If all gradients of an element have one sign, their sum is kept. The paper applies this to the
    gradients of one layer of activations. Here it applies to the gradients of the shared weights,
    because tasks with different inputs have no activations in common.

    Source: Chen et al. 2020, "Just pick a sign" (arXiv 2010.06808), algorithm 1, with f(p) = p.
    """

    class Params(GradientCombination.Params):
        """Params of GradDrop."""

        leak: dict[str, float] = param(
            "{task: share of its gradient that is always kept}, from 0 to 1; by default 0.",
            default={},
        )

    def check(self, losses: Sequence[str], where: str) -> None:
        """See GradientCombination."""
        for name, leak in self.params.leak.items():
            if name not in losses:
                raise ValueError(
                    f"{where}.leak names {name!r}, but the tasks are {', '.join(losses)}"
                )
            if not 0.0 <= leak <= 1.0:
                raise ValueError(f"{where}.leak[{name!r}] is {leak}, but must be from 0 to 1")

    def combined(
        self, gradients: Gradients, losses: Sequence[str], key: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """See GradientCombination."""
        leaks = [float(self.params.leak.get(name, 0.0)) for name in losses]

        def of_weight(path: str, own: Sequence[tf.Tensor]) -> tf.Tensor:
            shape = own[0].shape.as_list()
            stream = counter_hash.fold(key, counter_hash.stream(f"{path}:grad_drop"))
            u = tf.reshape(counter_hash.uniform(stream, shape or [1]), shape)
            u = tf.cast(u, own[0].dtype)
            total, size = tf.add_n(list(own)), tf.add_n([tf.abs(g) for g in own])
            p = 0.5 * (1.0 + tf.math.divide_no_nan(total, size))
            positive, negative = (tf.cast(x, p.dtype) for x in (p > u, p < u))
            kept = []
            for gradient, leak in zip(own, leaks, strict=True):
                keep = positive * tf.cast(gradient > 0, p.dtype)
                keep += negative * tf.cast(gradient < 0, p.dtype)
                kept.append((leak + (1.0 - leak) * keep) * gradient)
            return tf.add_n(kept)

        return {
            path: of_weight(path, own) if isinstance(own, tuple) else own
            for path, own in gradients.items()
        }, {}


class PCGrad(GradientCombination):
    """Removes from every gradient its component against that of another task.

        for every task i:  g = g_i
          for every other task j, in random order:
            if g · g_j < 0:  g = g - (g · g_j / |g_j|²) g_j
        combined = Σ g over the tasks

    The products are over all shared weights together. They are computed from the products of the
    original gradients, so each weight needs only one linear combination of its gradients.

    Reports "gradient_conflicts", the share of pairs of tasks whose gradients have a negative
    product.

    Source: Yu et al. 2020, "Gradient surgery for multi-task learning" (arXiv 2001.06782),
      algorithm 1.
    """

    class Params(GradientCombination.Params):
        """Params of PCGrad."""

    def combined(
        self, gradients: Gradients, losses: Sequence[str], key: tf.Tensor
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """See GradientCombination."""
        shared = [own for own in gradients.values() if isinstance(own, tuple)]
        if not shared:
            return dict(gradients), {}
        products = _products(shared, len(losses))
        factors = _factors(products, orders(key, len(losses)))
        count = len(losses)
        pairs = [(i, j) for i in range(count) for j in range(i)]
        conflicts = [tf.cast(products[i][j] < 0, tf.float32) for i, j in pairs]

        def of_weight(own: Any) -> tf.Tensor:
            if not isinstance(own, tuple):
                return own
            return tf.add_n([tf.cast(f, g.dtype) * g for f, g in zip(factors, own, strict=True)])

        return {path: of_weight(own) for path, own in gradients.items()}, {
            "gradient_conflicts": tf.add_n(conflicts) / float(max(1, len(pairs)))
        }


def orders(key: tf.Tensor, count: int) -> tf.Tensor:
    """Returns a random order of the tasks for each task.

    Shapes:
      returns: [count, count] int32; every row is a permutation
    """
    stream = counter_hash.fold(key, counter_hash.stream("pc_grad"))
    return tf.argsort(counter_hash.uniform(stream, [count, count]), axis=1)


def _products(shared: Sequence[Sequence[tf.Tensor]], count: int) -> list[list[tf.Tensor]]:
    """Returns the scalar product of every pair of gradients, over all shared weights."""
    found: list[list[Any]] = [[None] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1):
            each = [tf.reduce_sum(_wide(own[i]) * _wide(own[j])) for own in shared]
            found[i][j] = found[j][i] = tf.add_n(each)
    return found


def _wide(x: tf.Tensor) -> tf.Tensor:
    return x if x.dtype == tf.float64 else tf.cast(x, tf.float32)


def _factors(products: list[list[tf.Tensor]], order: tf.Tensor) -> list[tf.Tensor]:
    """Returns the factor of every original gradient in the sum of the projected ones.

    A projected gradient is Σ_k c_k g_k. Its product with g_j is Σ_k c_k (g_k · g_j), so that only
    the coefficients c change.
    """
    count = len(products)
    dtype = products[0][0].dtype
    gram = tf.stack([tf.stack(row) for row in products])
    total = tf.zeros([count], dtype)
    for i in range(count):
        own = tf.one_hot(i, count, dtype=dtype)
        for place in range(count):
            other = tf.one_hot(order[i, place], count, dtype=dtype)
            with_other = tf.reduce_sum(gram * tf.reshape(other, [1, count]), 1)  # g_k · g_j
            product = tf.reduce_sum(own * with_other)
            square = tf.reduce_sum(other * with_other)
            conflicts = tf.logical_and(product < 0, other[i] < 0.5)
            share = tf.math.divide_no_nan(product, square) * tf.cast(conflicts, dtype)
            own -= share * other
        total += own
    found: list[tf.Tensor] = tf.unstack(total)
    return found
