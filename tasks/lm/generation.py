"""Generating tokens after prompts: one loop in one graph, over a key-value cache.

    prompts:  head (S tokens that all rows have, one block) + tail (the rest of the longer ones)

    buffer    h h h h h t t . | . . . . . . .        h: read at once into the cache
              └─ head ─┘ ↑ one token a turn          t: forced, .: drawn

A model that sees at most `window` tokens at once slides: when its cache is full, the later half of
the window is read again, as one block, into an empty cache. So the context of a token is never
shorter than half a window, and a text may be longer than what the model was trained on.

Legend: B prompts, S head, R tail, N new tokens, T = S + R + N, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.decoding.sampling import sample
from tekso.models.decoding.search import forbidding


@dataclasses.dataclass(frozen=True)
class PromptBlock:
    """Prompts of several lengths as arrays.

    Attributes:
      head: [B, S] int32, S the length of the shortest prompt.
      tail: [B, R] int32, what longer prompts have beyond it, padded with 0.
      lengths: [B] int32, tokens of every prompt.
    """

    head: np.ndarray
    tail: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[npt.ArrayLike]) -> PromptBlock:
        """Returns the block of token ids.

        Raises:
          ValueError: there is no prompt, or an empty one: the first token is drawn given one.
        """
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        lengths = np.array([len(row) for row in rows], np.int32)
        if not len(lengths) or lengths.min() < 1:
            raise ValueError(
                f"prompts of {lengths.tolist()} tokens: want at least one prompt, and of at least "
                "one token each"
            )
        shortest, longest = int(lengths.min()), int(lengths.max())
        ids = np.zeros([len(rows), longest], np.int32)
        for into, row in zip(ids, rows, strict=True):
            into[: len(row)] = row
        return cls(ids[:, :shortest], ids[:, shortest:], lengths)


@dataclasses.dataclass(frozen=True)
class Generator:
    """Draws `max_new_tokens` after every prompt, fewer where `stop_id` is drawn.

    Attributes:
      model: a language model with `init_cache` and `extend_step`.
      max_new_tokens: a row ends so many tokens after its prompt.
      window: most tokens in the cache; None: all of the text.
      stop_id: a row ends with this token.
      temperature: see `sample`; 0 is greedy.
      top_k: see `sample`.
      top_p: see `sample`.
      forbidden_ids: tokens that are never drawn.
    """

    model: Any
    max_new_tokens: int
    window: int | None = None
    stop_id: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    forbidden_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, want at least 1")
        if self.window is not None and self.window < 2:
            raise ValueError(f"window is {self.window}, want at least 2 tokens")

    def generate(
        self,
        theta: Theta,
        head_BS: tf.Tensor,
        tail_BR: tf.Tensor,
        lengths_B: tf.Tensor,
        ctx: StepContext,
    ) -> dict[str, tf.Tensor]:
        """Returns the prompts with what was drawn after them; pure.

        The number for a token is that of its position and row, so a sample does not depend on
        the device, nor on the length of other prompts.

        Shapes:
          theta: that of the model
          returns: {"ids": [B, T] int32, padded with 0; "lengths": [B] int32, prompt included}
        """
        batch_size, head = head_BS.shape
        total = head + tail_BR.shape[1] + self.max_new_tokens
        window = total if self.window is None else min(self.window, total)
        kept = max(1, window // 2)
        padding = [[0, 0], [0, self.max_new_tokens]]
        ids_TB = tf.transpose(tf.pad(tf.concat([head_BS, tail_BR], 1), padding))

        def turn(*state: Any) -> tuple[Any, ...]:
            weights, lengths, state = ops.capture(ctx, (theta, lengths_B, state))
            t, origin, ids_TB, logits_BV, cache, done_B, written_B = state
            is_prompt_B = t < lengths
            token_B = tf.where(done_B, 0, self._draw(logits_BV, t, ctx))
            token_B = tf.where(is_prompt_B, ids_TB[t], token_B)
            ids_TB = tf.tensor_scatter_nd_update(ids_TB, [[t]], [token_B])
            written_B = tf.where(done_B, written_B, t + 1)
            ends_B = t + 1 >= lengths + self.max_new_tokens
            if self.stop_id is not None:
                ends_B |= tf.equal(token_B, self.stop_id)
            done_B |= ends_B & ~is_prompt_B
            place = t - origin

            def extend() -> Any:
                own, token, old, at, first = ops.capture(
                    ctx, (weights, token_B, cache, place, origin)
                )
                token_B1 = tf.expand_dims(token, 1)
                logits, extended = self.model.extend_step(own, token_B1, old, at, ctx)
                return tf.squeeze(logits, 1), extended, first

            def slide() -> Any:
                own, ids, now = ops.capture(ctx, (weights, ids_TB, t))
                start = now + 1 - kept
                return *self._read(own, ids, start, kept, window, ctx), start

            if total <= window:
                logits_BV, cache, origin = extend()
            else:
                logits_BV, cache, origin = tf.cond(place < window, extend, slide)
            return t + 1, origin, ids_TB, logits_BV, cache, done_B, written_B

        start = 0 if head <= window else head - kept
        logits_BV, cache = self._read(theta, ids_TB, start, head - start, window, ctx)
        state = (
            tf.constant(head),
            tf.constant(start),
            ids_TB,
            logits_BV,
            cache,
            tf.zeros([batch_size], tf.bool),
            tf.identity(lengths_B),
        )
        _, _, ids_TB, _, _, _, written_B = tf.while_loop(
            lambda t, origin, ids, logits, cache, done_B, written: ~tf.reduce_all(done_B),
            turn,
            state,
            maximum_iterations=total - head,
        )
        return {"ids": tf.transpose(ids_TB), "lengths": written_B}

    def _read(
        self, theta: Theta, ids_TB: tf.Tensor, start: Any, size: int, window: int, ctx: StepContext
    ) -> tuple[tf.Tensor, Any]:
        """Reads a block into an empty cache; returns the logits of the token after it."""
        batch_size = ids_TB.shape[1]
        block_BS = tf.transpose(tf.slice(ids_TB, [start, 0], [size, batch_size]))
        cache = self.model.init_cache(batch_size, window)
        logits, cache = self.model.extend_step(
            theta, block_BS, cache, tf.constant(0), ctx, logits_of="last"
        )
        return tf.squeeze(logits, 1), cache

    def _draw(self, logits_BV: tf.Tensor, t: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        uniform_BV = ctx.fold(t).uniform(self.model, logits_BV.shape, "sample")
        if self.forbidden_ids:
            scores = forbidding(logits_BV.shape[-1], self.forbidden_ids)
            logits_BV += tf.constant(scores[None], logits_BV.dtype)
        return sample(
            logits_BV,
            uniform_BV,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )
