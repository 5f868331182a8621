"""Generation with a language model that has no cache, such as one with a custom layer.

    given so far   a b c · · ·      one more token: d      logits of "a b c d · ·", at d
                   └─ init_cache ─┘                          └─ computed anew for every token

The places after the last token hold id 0. A causal model does not read them.

Legend: B rows, T new tokens, S size of the window, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.framework.theta import Theta
from tekso.models.decoder_only import DecoderOnly
from tekso.models.layers.rematerialize import Rematerialize
from tekso.models.layers.stack import StackBase


def extendable(model: Any) -> Any:
    """Returns the model, or one with the same logits and a cache if its layers have none."""
    return model if _has_cache(model) else Recomputed(model)


def _has_cache(layer: Layer) -> bool:
    """Whether a layer, and all layers to which it passes a cache, can extend a cache."""
    if not all(callable(getattr(layer, name, None)) for name in ("init_cache", "extend_step")):
        return False
    if isinstance(layer, DecoderOnly):
        return _has_cache(layer.stack)
    if isinstance(layer, StackBase):
        layers = getattr(layer, "layers", [])
        return all(map(_has_cache, [layers] if isinstance(layers, Layer) else layers))
    return _has_cache(layer.layer) if isinstance(layer, Rematerialize) else True


@dataclasses.dataclass(frozen=True)
class Recomputed:
    """A language model whose cache consists of the tokens; every step computes all logits.

    Attributes:
      model: a causal language model with `logits`.
    """

    model: Any

    def init_cache(self, batch_size: int, max_length: int) -> tf.Tensor:
        """Returns the tokens of an empty window.

        Shapes:
          returns: [B, S] int32
        """
        return tf.zeros([batch_size, max_length], tf.int32)

    def extend_step(
        self,
        theta: Theta,
        ids: tf.Tensor,
        cache: tf.Tensor,
        position: tf.Tensor,
        ctx: StepContext,
        *,
        logits_of: Literal["all", "last"] = "all",
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the logits of T new tokens, and the tokens with them; as in TransformerLm.

        Shapes:
          ids: [B, T] int, cache: [B, S] int32, position: [] int
          returns: (logits [B, T, V], or [B, 1, V] with "last"; [B, S] int32)
        """
        length = ids.shape[1]
        offset_S = tf.range(cache.shape[1]) - position
        is_new_1S = tf.expand_dims((offset_S >= 0) & (offset_S < length), 0)
        new_BS = tf.gather(ids, tf.clip_by_value(offset_S, 0, length - 1), axis=1)
        cache = tf.where(is_new_1S, tf.cast(new_BS, tf.int32), cache)
        first = length - 1 if logits_of == "last" else 0
        places = position + tf.range(first, length)
        return tf.gather(self.model.logits(theta, cache, ctx), places, axis=1), cache
