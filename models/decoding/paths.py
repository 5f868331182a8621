"""Back pointers of a beam search: tokens and parents of every step, followed backwards at its end.

    step      0     1     2
    slot 0   the ─ cat ─ sat        parents[2] = [0, 0]: both continue "the cat"
    slot 1   a   └ dog └ is         parents[1] = [0, 0]: both continue "the"

With back pointers, no step moves the tokens or attention weights of earlier steps.

Legend: T most steps, B sources, K slots of the beam, H hypotheses that are read, S source length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext


class Paths(NamedTuple):
    """A buffer of all steps.

    Attributes:
      tokens: [T, B, K] int32, token of the hypothesis in a slot after the step.
      parents: [T, B, K] int32, slot of that hypothesis before the step.
      attention: [T, B, K, S] float32, attention weights of the hypothesis in a slot before the
        step; () if they are not needed.
    """

    tokens: tf.Tensor
    parents: tf.Tensor
    attention: Any

    @classmethod
    def empty(cls, shape: tuple[int, int, int], source_length: int | None) -> Paths:
        """Returns an empty buffer for T, B, K; with attention if there is a source length."""
        attention = () if source_length is None else tf.zeros([*shape, source_length])
        return cls(tf.zeros(shape, tf.int32), tf.zeros(shape, tf.int32), attention)

    def record(
        self, t: tf.Tensor, tokens_BK: tf.Tensor, parents_BK: tf.Tensor, attention_BKS: Any
    ) -> Paths:
        """Returns the buffer with step t written."""

        def write(buffer: tf.Tensor, row: tf.Tensor) -> tf.Tensor:
            place = tf.reshape(t, [1, 1])
            return tf.tensor_scatter_nd_update(buffer, place, tf.expand_dims(row, 0))

        attention = self.attention
        if not isinstance(attention, tuple):
            attention = write(attention, attention_BKS)
        return Paths(write(self.tokens, tokens_BK), write(self.parents, parents_BK), attention)

    def read(
        self,
        slots_BH: tf.Tensor,
        is_ended_BH: tf.Tensor,
        lengths_BH: tf.Tensor,
        *,
        end_id: int,
        ctx: StepContext,
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns tokens and attention weights of hypotheses, given their last slots.

        Args:
          slots_BH: slot of a hypothesis after its last token, not counting an end token.
          is_ended_BH: whether its last token is the end token, which is in no slot.
          lengths_BH: number of tokens, end included.
          end_id: the end token.
          ctx: step context.

        Shapes:
          returns: [B, H, T] int32, 0 after the length; [B, H, T, S] float32, 0 after the length
        """
        longest = self.tokens.shape[0]
        in_slots_BH = lengths_BH - tf.cast(is_ended_BH, tf.int32)
        has_attention = not isinstance(self.attention, tuple)

        def iteration(t: tf.Tensor, slots_BH: tf.Tensor, ids: tf.Tensor, attention: Any) -> Any:
            outside = (self, in_slots_BH, lengths_BH)
            paths, in_slots, lengths = workarounds.capture(ctx, outside)
            slots_BH, ids, attention = workarounds.capture(ctx, (slots_BH, ids, attention))
            place = tf.reshape(t, [1, 1])
            tokens_BH = tf.gather(tf.gather(paths.tokens, t), slots_BH, batch_dims=1)
            parents_BH = tf.gather(tf.gather(paths.parents, t), slots_BH, batch_dims=1)
            tokens_BH = tf.where(t < in_slots, tokens_BH, tf.where(t < lengths, end_id, 0))
            slots_BH = tf.where(t < in_slots, parents_BH, slots_BH)
            ids = tf.tensor_scatter_nd_update(ids, place, tf.expand_dims(tokens_BH, 0))
            if has_attention:
                step = tf.gather(tf.gather(paths.attention, t), slots_BH, batch_dims=1)
                step = tf.where(tf.expand_dims(t < lengths, -1), step, 0.0)
                attention = tf.tensor_scatter_nd_update(attention, place, tf.expand_dims(step, 0))
            return t - 1, slots_BH, ids, attention

        ids_TBH = tf.zeros([longest, *slots_BH.shape], tf.int32)
        attention: Any = ()
        if has_attention:
            attention = tf.zeros([longest, *slots_BH.shape, self.attention.shape[-1]])
        _, _, ids_TBH, attention = tf.while_loop(
            lambda t, *_: t >= 0,
            iteration,
            (tf.constant(longest - 1), slots_BH, ids_TBH, attention),
            maximum_iterations=longest,
        )
        ids_BHT = tf.transpose(ids_TBH, [1, 2, 0])
        return ids_BHT, tf.transpose(attention, [1, 2, 0, 3]) if has_attention else None
