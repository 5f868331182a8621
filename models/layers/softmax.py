"""Softmax output layers over a vocabulary: full and sampled."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, LecunNormal, Zeros
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.layers import vocabulary
from tekso.models.layers.adapted_table import TableLayer


class Softmax(TableLayer):
    """Softmax of x @ w^T + b over a vocabulary.

    `Embedding` has the same methods, which use its table (tied softmax).

    Shapes:
      x: [..., input_dim]; labels: [...] int in [0, vocab_size)
      logits returns: [..., rows], dtype of x
      cross_entropy returns: [...] float32
    Weights:
      w: [rows, input_dim], dims ("vocab", "embed"); rows is vocab_size, padded
      b: [rows], dims ("vocab",); starts at 0
      w_lora_a, w_lora_b: with an adapter (see Lora)
    """

    class Params(TableLayer.Params):
        """Params of Softmax."""

        input_dim: int = param("Size of the last dim of the input.", default=REQUIRED)
        vocab_size: int = param("Number of classes.", default=REQUIRED)
        vocab_multiple: int = param(vocabulary.ROWS_DOC, default=1)
        use_bias: bool = param("Whether to add a bias.", default=False)
        init: Initializer.Params = param("Initializer of w.", default=LecunNormal.Params())

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self._rows = vocabulary.padded_rows(p.vocab_size, p.vocab_multiple, type(self).__name__)
        self.weight(
            "w",
            [self._rows, p.input_dim],
            dims=("vocab", "embed"),
            init=p.init,
            fan_in=p.input_dim,
            fan_out=p.vocab_size,
        )
        self.adapt_table("w", self._rows, p.input_dim)
        if p.use_bias:
            self.weight("b", [self._rows], dims=("vocab",), init=Zeros.Params())

    def logits(self, theta: Theta, x: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns x @ w^T + b.

        Shapes:
          x: [..., input_dim]
          returns: [..., rows], dtype of x; -1e9 for padding rows
        """
        y = self.scores(theta, "w", x, ctx)
        bias = self._bias(theta, y.dtype)
        return y if bias is None else y + tf.cast(bias, y.dtype)

    def _bias(self, theta: Theta, dtype: tf.DType = tf.float32) -> tf.Tensor | None:
        """Returns the bias of the scores, with -1e9 for padding rows; None if there is none.

        Args:
          theta: the weights, whose dtype the bias has.
          dtype: dtype of the bias if no weight is part of it.
        """
        dtype = theta.b.dtype if self.params.use_bias else dtype
        padding = vocabulary.padding_bias(self.params.vocab_size, self._rows, dtype)
        if not self.params.use_bias:
            return padding
        return theta.b if padding is None else theta.b + padding

    def cross_entropy(
        self,
        theta: Theta,
        x: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        *,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns -log softmax(logits)[label] of every position, in nats.

        Shapes:
          x: [..., input_dim], labels: [...] int in [0, vocab_size)
          returns: [...] float32
        """
        x, w = self.joined(theta, "w", x, ctx)
        return ops.cross_entropy(
            ctx,
            x,
            w,
            labels,
            bias=self._bias(theta),
            label_smoothing=label_smoothing,
            classes=self.params.vocab_size,
        )


class SampledSoftmax(Softmax):
    """Softmax that estimates the normaliser from a sample of the vocabulary in training.

    A step draws `num_samples` classes s with replacement, the same for the whole global batch, from
    the log-uniform distribution P(k) = log((k + 2) / (k + 1)) / log(vocab_size + 1), which fits a
    vocabulary sorted by descending frequency. The loss at a position with label t is

        log(exp(y[t]) + sum over s != t of exp(y[s] - log(num_samples * P(s)))) - y[t]

    The argument of the logarithm is an unbiased estimate of the full normaliser. It always contains
    the label, whose logit is therefore not corrected. As num_samples grows, the loss approaches the
    full loss from below. Outside training, the full softmax is used.

    Shapes:
      inputs, results and weights as in Softmax: x [..., input_dim]; labels and cross-entropy [...]
      sample returns: [num_samples] int32
    Source: Jean et al. 2015, section 3; Jozefowicz et al. 2016, section 3.1.
    """

    class Params(Softmax.Params):
        """Params of SampledSoftmax."""

        num_samples: int = param("Classes sampled per training step.", default=REQUIRED)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if self.params.num_samples < 1:
            raise ValueError(
                f"SampledSoftmax: num_samples is {self.params.num_samples}, must be at least 1"
            )

    def cross_entropy(
        self,
        theta: Theta,
        x: tf.Tensor,
        labels: tf.Tensor,
        ctx: StepContext,
        *,
        label_smoothing: float = 0.0,
    ) -> tf.Tensor:
        """Returns the cross-entropy of every position: estimated in training, else exact.

        Shapes:
          x: [..., input_dim], labels: [...] int in [0, vocab_size)
          returns: [...] float32
        Raises:
          ValueError: label smoothing in training, which is not supported.
        """
        if not ctx.is_training:
            return super().cross_entropy(theta, x, labels, ctx, label_smoothing=label_smoothing)
        if label_smoothing:
            raise ValueError(
                f"SampledSoftmax: label_smoothing is {label_smoothing}, but only 0 is supported; "
                "use Softmax"
            )
        p = self.params
        samples = self.sample(ctx)
        x, w = self.joined(theta, "w", x, ctx)
        # Constrained: on a mesh, the products would shard the gathered rows along "embed", and a
        # transposition cannot reshard.
        w_ES = tf.transpose(ops.lookup(ctx, w, samples))
        embed = "embed" if self.lora("w") is None else None
        sampled = ops.project(ctx, x, ctx.constrain(w_ES, (embed, None)))
        rows = ops.lookup(ctx, w, labels)
        true = tf.reduce_sum(widen(x) * widen(rows), -1)
        sampled = widen(sampled)
        if p.use_bias:
            sampled += tf.gather(widen(theta.b), samples)
            true += tf.gather(widen(theta.b), labels)
        sampled -= tf.cast(
            math.log(p.num_samples) + log_uniform_log_probability(samples, p.vocab_size),
            sampled.dtype,
        )
        hit = tf.equal(tf.expand_dims(labels, -1), tf.cast(samples, labels.dtype))
        sampled = tf.where(hit, sampled.dtype.min, sampled)
        log_rest = tf.reduce_logsumexp(sampled, -1)
        return tf.math.softplus(log_rest - true)

    def sample(self, ctx: StepContext) -> tf.Tensor:
        """Samples the classes of this step: int32 [num_samples]."""
        p = self.params
        high, low = (
            tf.cast(ctx.uniform(self, [1, p.num_samples], name, shared=True), tf.float64)
            for name in ("candidates", "candidates, low bits")
        )
        u = tf.squeeze(high + low * 2.0**-24, 0)
        # float64, so that compilers' rounding of exp() does not change the classes.
        classes = tf.cast(tf.exp(u * math.log(p.vocab_size + 1)), tf.int32) - 1
        return tf.clip_by_value(classes, 0, p.vocab_size - 1)


def log_uniform_log_probability(classes: tf.Tensor, vocab_size: int) -> tf.Tensor:
    """Returns log P(k) = log(log((k + 2) / (k + 1)) / log(vocab_size + 1)), in float64."""
    k = tf.cast(classes, tf.float64)
    return tf.math.log(tf.math.log1p(1 / (k + 1)) / math.log(vocab_size + 1))
