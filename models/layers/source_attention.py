"""Attention of a recurrent decoder to its source: additive or dot-product, one query per step.

The keys depend on the source alone and are computed once. Then every decoder step has one query
per source, or in a search one per hypothesis.

Legend: B sources, K queries per source, S source length, Q query_dim, M memory_dim, A size of a
key.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import GlorotUniform, Initializer
from tekso.framework.params import REQUIRED, param
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.layers.projections import ProjectionLayer

Memory = dict[str, tf.Tensor]
"""{"keys": [B, S, A], "values": [B, S, M]} of a source."""

_NEVER = -1e9


class SourceAttention(ProjectionLayer):
    """Base of the attentions: softmax of query-key scores over the source, and the mean of values.

    If the whole source is masked, the result is 0. The softmax is computed in float32.

    Shapes:
      memory: encoded [B, S, M]; returns {"keys": [B, S, A], "values": [B, S, M]}
      attend: x [B, K, Q], mask bool [B, S]
        returns contexts [B, K, M] and probabilities [B, K, S]
    """

    class Params(ProjectionLayer.Params):
        """Params of an attention to a source."""

        query_dim: int = param("Size of a query.", default=REQUIRED)
        memory_dim: int = param("Size of the last dim of the source.", default=REQUIRED)
        init: Initializer.Params = param(
            "Initializer of the matrices.", default=GlorotUniform.Params()
        )

    uses_previous: ClassVar[bool] = False
    """Whether `attend` needs the attention weights of the previous step."""

    def memory(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> Memory:
        """Returns keys and values of an encoded source, computed once for all queries.

        Shapes:
          encoded: [B, S, M]
        """
        # Sharded over the batch alone: every query needs all keys and values.
        dims = ("batch", None, None)
        keys = self._keys(theta, encoded, ctx)
        return {"keys": ctx.constrain(keys, dims), "values": ctx.constrain(encoded, dims)}

    def attend(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        memory: Memory,
        mask: tf.Tensor | None = None,
        previous: tf.Tensor | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Attends with the queries x.

        Args:
          theta: weights.
          x: the queries.
          ctx: step context.
          memory: result of `memory`.
          mask: False hides a source element.
          previous: attention weights of the previous step, if `uses_previous`.

        Shapes:
          x: [B, K, Q], mask: bool [B, S], previous: [B, K, S]
          returns: contexts [B, K, M], dtype of x; probabilities [B, K, S], float32
        """
        more = {"previous": previous} if self.uses_previous else {}
        scores = widen(self._scores(theta, x, memory["keys"], ctx, **more))
        if mask is None:
            probabilities = tf.nn.softmax(scores)
        else:
            seen = tf.expand_dims(mask, 1)
            probabilities = tf.nn.softmax(tf.where(seen, scores, tf.constant(_NEVER, scores.dtype)))
            # Changes only a completely masked source, whose softmax would be uniform.
            probabilities = tf.where(seen, probabilities, tf.zeros_like(probabilities))
        values = memory["values"]
        return tf.einsum(
            "bks,bsm->bkm", tf.cast(probabilities, values.dtype), values
        ), probabilities

    def _keys(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the keys of a source: [B, S, M] -> [B, S, A]."""
        raise NotImplementedError(f"{type(self).__name__} has no keys")

    def _scores(
        self, theta: Theta, queries: tf.Tensor, keys: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the scores of queries and keys: [B, K, Q] and [B, S, A] -> [B, K, S]."""
        raise NotImplementedError(f"{type(self).__name__} has no scores")


class AdditiveAttention(SourceAttention):
    """score(q, m) = w_score · tanh(q @ w_query + m @ w_key).

    Shapes:
      x: [B, K, Q], encoded: [B, S, M]; A is hidden_dim, or Q if that is None
      attend returns: contexts [B, K, M], probabilities [B, K, S]
    Weights:
      w_query: [Q, A], w_key: [M, A], dims ("embed", None)
      w_score: [A], dims (None,); fans (A, 1)
    Source: Bahdanau et al. 2015, appendix A.1.2.
    """

    class Params(SourceAttention.Params):
        """Params of AdditiveAttention."""

        hidden_dim: int | None = param("Number of hidden units; None: query_dim.", default=None)

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        size = p.query_dim if p.hidden_dim is None else p.hidden_dim
        self.matrix("w_query", [p.query_dim, size], dims=("embed", None), init=p.init)
        self.matrix("w_key", [p.memory_dim, size], dims=("embed", None), init=p.init)
        self.weight("w_score", [size], dims=(None,), init=p.init, fan_in=size, fan_out=1)

    def _keys(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        return self.project(theta, "w_key", encoded, ctx)

    def _scores(
        self, theta: Theta, queries: tf.Tensor, keys: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        projected = tf.expand_dims(self.project(theta, "w_query", queries, ctx), 2)
        hidden = tf.tanh(projected + tf.expand_dims(keys, 1))
        return tf.einsum("bksa,a->bks", hidden, theta.w_score)


class DotAttention(SourceAttention):
    """score(q, m) = scale * q · m ("dot"), or scale * q · (m @ w_key) ("general").

    Shapes:
      x: [B, K, Q], encoded: [B, S, M]; A is Q
      attend returns: contexts [B, K, M], probabilities [B, K, S]
    Weights:
      w_key: [M, Q], dims ("embed", None); with form "general" only
    Raises:
      ValueError: form is "dot", and query and memory have different sizes.
    Source:
      Luong et al. 2015, section 3.1; the factor: Vaswani et al. 2017, section 3.2.1.
    """

    class Params(SourceAttention.Params):
        """Params of DotAttention."""

        form: Literal["dot", "general"] = param(
            "Whether the key is the memory itself, or a projection of it.", default="general"
        )
        scale: Literal["none", "rsqrt_dim"] = param(
            "Factor on the scores: 1, or 1 / sqrt(query_dim).", default="none"
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.form == "general":
            self.matrix("w_key", [p.memory_dim, p.query_dim], dims=("embed", None), init=p.init)
        elif p.memory_dim != p.query_dim:
            raise ValueError(
                f"DotAttention: form is 'dot', but query_dim is {p.query_dim} and memory_dim "
                f"{p.memory_dim}; make them equal, or set form='general'"
            )

    def _keys(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        keys = encoded if self.params.form == "dot" else self.project(theta, "w_key", encoded, ctx)
        return keys / math.sqrt(keys.shape[-1]) if self.params.scale == "rsqrt_dim" else keys

    def _scores(
        self, theta: Theta, queries: tf.Tensor, keys: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        return tf.einsum("bkq,bsq->bks", queries, keys)
