"""ContrastiveLoss: each image must be closest to its own text, and each text to its own image.

Legend: b examples at hand, B examples of the global batch, E size of an embedding.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Constant
from tekso.framework.layer import Layer
from tekso.framework.params import param
from tekso.framework.theta import Theta

_HIDDEN = -1e9  # score of an example that does not count


class Embedded(NamedTuple):
    """Pairs of embeddings: images and texts [b, E], of unit length, and their weights [b]."""

    images: tf.Tensor
    texts: tf.Tensor
    weights: tf.Tensor


class Contrasts(NamedTuple):
    """The losses of pairs in nats, and whether each image is closest to its text; [b]."""

    nats: tf.Tensor
    hits: tf.Tensor


class ContrastiveLoss(Layer):
    """Symmetric cross-entropy over the pairs of the global batch (InfoNCE).

        s[i, j]  = exp(log_scale) * image[i] · text[j]
        nats[i]  = -s[i, i] + (logsumexp_j s[i, j] + logsumexp_j s[j, i]) / 2

    j runs over all examples of the global batch with a weight above 0, also on other replicas. So
    the loss cannot be computed in parts that run one after the other, such as accumulation steps or
    micro-batches of a pipeline; executions reject them.

    Shapes:
      x: Embedded
      returns: Contrasts
    Weights:
      log_scale: [1], the log of 1 / temperature; every update limits it to log(most_scale)
    Source: van den Oord et al. 2018, eq. 4; Radford et al. 2021, figure 3 and section 2.5.
    """

    class Params(Layer.Params):
        """Params of ContrastiveLoss."""

        temperature: float = param("Initial temperature.", default=0.07)
        most_scale: float = param("Largest factor 1 / temperature.", default=100.0)

    couples_examples = True
    gathers_examples = True

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not p.temperature > 0 or not p.most_scale > 0:
            raise ValueError(
                f"ContrastiveLoss: temperature {p.temperature} and most_scale {p.most_scale} must "
                "be positive"
            )
        start = Constant.Params(value=-math.log(p.temperature))
        # A limit only in `fprop` would leave a weight above it without a gradient, for ever.
        most = math.log(p.most_scale)
        self.weight("log_scale", [1], dims=(None,), init=start, most=most)

    def fprop(self, theta: Theta, x: Embedded, ctx: StepContext) -> Contrasts:
        """See the class."""
        most = math.log(self.params.most_scale)
        scale = tf.exp(tf.cast(tf.minimum(theta.log_scale, most), x.images.dtype))
        weights = tf.cast(x.weights, x.images.dtype)
        absent = self._gathered(tf.expand_dims(weights, 1), ctx) <= 0.0
        hidden = _HIDDEN * tf.cast(absent, scale.dtype)
        hidden = tf.transpose(hidden)  # [1, B]
        own = scale * tf.reduce_sum(x.images * x.texts, 1)
        to_texts = scale * tf.matmul(x.images, self._gathered(x.texts, ctx), transpose_b=True)
        to_images = scale * tf.matmul(x.texts, self._gathered(x.images, ctx), transpose_b=True)
        to_texts = ctx.constrain(to_texts + hidden, ("batch", None))
        to_images = ctx.constrain(to_images + hidden, ("batch", None))
        both = tf.reduce_logsumexp(to_texts, 1) + tf.reduce_logsumexp(to_images, 1)
        place = tf.range(x.images.shape[0]) + tf.cast(ctx.example_offset, tf.int32)
        hits = tf.equal(tf.argmax(to_texts, 1, output_type=tf.int32), place)
        return Contrasts(0.5 * both - own, tf.cast(hits, scale.dtype))

    def _gathered(self, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the rows of all replicas: [b, n] -> [B, n].

        Each replica adds its rows to zeros, at their places in the global batch.
        """
        size = x.shape[0]
        whole = size if ctx.num_examples is None else ctx.num_examples
        if size == whole:
            return ctx.constrain(x, (None, None))
        place = tf.range(size) + tf.cast(ctx.example_offset, tf.int32)
        member = tf.one_hot(place, whole, dtype=x.dtype)
        return ops.sum_over_replicas(ctx, tf.matmul(member, x, transpose_a=True), self)
