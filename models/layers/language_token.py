"""LanguageToken: puts a vector of its language before every sequence."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.initializers import Initializer, Normal
from tekso.framework.layer import Layer
from tekso.framework.params import REQUIRED, param
from tekso.framework.theta import Theta


class LanguageToken(Layer):
    """Puts a learned vector of its language before the first element of every sequence.

    Shapes:
      x: [batch, length, dim]; language_ids: [batch] int
      returns: [batch, 1 + length, dim], dtype of x
    Weights:
      w: [num_languages, dim], dims (None, "embed")
    Source: Johnson et al. 2017, "Google's multilingual neural machine translation system".
    """

    class Params(Layer.Params):
        """Params of LanguageToken."""

        dim: int = param("Size of the last dim.", default=REQUIRED)
        num_languages: int = param("Number of languages.", default=REQUIRED)
        init: Initializer.Params = param("Initializer of w.", default=Normal.Params(stddev=1.0))

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.weight("w", [p.num_languages, p.dim], dims=(None, "embed"), init=p.init)

    def fprop(
        self,
        theta: Theta,
        x: tf.Tensor,
        ctx: StepContext,
        *,
        language_ids: tf.Tensor | None = None,
    ) -> tf.Tensor:
        """See the class; without ids, all sequences have the first language."""
        if language_ids is None:
            language_ids = tf.zeros(x.shape[:1], tf.int32)
        chosen = tf.one_hot(language_ids, self.params.num_languages, dtype=x.dtype)
        token = tf.expand_dims(tf.matmul(chosen, tf.cast(theta.w, x.dtype)), 1)
        token = ctx.constrain(token, ("batch", None, "embed"))
        x = ctx.constrain(x, ("batch", None, "embed"))
        return ctx.constrain(tf.concat([token, x], 1), ("batch", "length", "embed"))
