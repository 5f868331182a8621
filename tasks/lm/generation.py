"""Generates tokens after prompts, in one loop of one graph, with a key-value cache.

    prompts:  head (the first S tokens of every row) + tail (further tokens of longer prompts)

    buffer    h h h h h t t . | . . . . . . .        h: one block, written to the cache at once
              └─ head ─┘ ↑ one token per iteration   t: forced, .: sampled

With a sliding window, the model sees at most `window` tokens: when its cache is full, the later
half of the window is computed again, as one block, into an empty cache. The context of a token is
then never shorter than half a window, and a text may be longer than the training examples.

Legend: B prompts, S head, R tail, N new tokens, T = S + R + N, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop
from tekso.models.decoding.recomputation import extendable
from tekso.models.decoding.sampling import sample
from tekso.models.decoding.search import forbidding


@dataclasses.dataclass(frozen=True)
class PromptBlock:
    """Prompts of several lengths as arrays.

    Attributes:
      head: [B, S] int32, S the length of the shortest prompt.
      tail: [B, R] int32, the further tokens of longer prompts, padded with 0.
      lengths: [B] int32, number of tokens of every prompt.
    """

    head: np.ndarray
    tail: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, prompts: Sequence[npt.ArrayLike]) -> PromptBlock:
        """Returns the block of token ids.

        Raises:
          ValueError: there is no prompt, or a prompt has no token.
        """
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        lengths = np.array([len(row) for row in rows], np.int32)
        if not len(lengths) or lengths.min() < 1:
            raise ValueError(
                f"prompts of {lengths.tolist()} tokens: generation needs at least one prompt, and "
                "at least one token in each"
            )
        shortest, longest = int(lengths.min()), int(lengths.max())
        ids = np.zeros([len(rows), longest], np.int32)
        for into, row in zip(ids, rows, strict=True):
            into[: len(row)] = row
        return cls(ids[:, :shortest], ids[:, shortest:], lengths)


@dataclasses.dataclass(frozen=True)
class Generator:
    """Samples `max_new_tokens` tokens after every prompt, or fewer if it samples `stop_id`.

    Attributes:
      model: a language model with `init_cache` and `extend_step`, or only `logits`; then all of
        its window is computed again for every token.
      max_new_tokens: most tokens of a row after its prompt.
      window: most tokens in the cache; None: the whole text.
      stop_id: a row ends with this token.
      temperature: see `sample`; 0 is greedy.
      top_k: see `sample`.
      top_p: see `sample`.
      forbidden_ids: tokens that are never sampled.
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
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, must be at least 1")
        if self.window is not None and self.window < 2:
            raise ValueError(f"window is {self.window}, must be at least 2 tokens")

    def generate(
        self,
        theta: Theta,
        head_BS: tf.Tensor,
        tail_BR: tf.Tensor,
        lengths_B: tf.Tensor,
        ctx: StepContext,
    ) -> dict[str, tf.Tensor]:
        """Returns the prompts followed by the sampled tokens; pure.

        The random number of a token depends on its row and position, so a sample does not depend
        on the device, or on the length of other prompts.

        Shapes:
          theta: weights of the model
          returns: {"ids": [B, T] int32, padded with 0; "lengths": [B] int32, prompt included}
        """
        batch_size, head = head_BS.shape
        total = head + tail_BR.shape[1] + self.max_new_tokens
        window = total if self.window is None else min(self.window, total)
        kept = max(1, window // 2)
        padding = [[0, 0], [0, self.max_new_tokens]]
        model = extendable(self.model)
        ids_TB = tf.transpose(tf.pad(tf.concat([head_BS, tail_BR], 1), padding))

        def iteration(*state: Any) -> tuple[Any, ...]:
            weights, lengths, state = workarounds.capture(ctx, (theta, lengths_B, state))
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
                own, token, old, at, first = workarounds.capture(
                    ctx, (weights, token_B, cache, place, origin)
                )
                token_B1 = tf.expand_dims(token, 1)
                logits, extended = model.extend_step(own, token_B1, old, at, ctx)
                return tf.squeeze(logits, 1), extended, first

            def slide() -> Any:
                own, ids, now = workarounds.capture(ctx, (weights, ids_TB, t))
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
        _, _, ids_TB, _, _, _, written_B = while_loop(
            lambda t, origin, ids, logits, cache, done_B, written: ~tf.reduce_all(done_B),
            iteration,
            state,
            maximum_iterations=total - head,
        )
        return {"ids": tf.transpose(ids_TB), "lengths": written_B}

    def _read(
        self, theta: Theta, ids_TB: tf.Tensor, start: Any, size: int, window: int, ctx: StepContext
    ) -> tuple[tf.Tensor, Any]:
        """Writes a block into an empty cache; returns the logits after it, and the cache."""
        batch_size = ids_TB.shape[1]
        block_BS = tf.transpose(tf.slice(ids_TB, [start, 0], [size, batch_size]))
        model = extendable(self.model)
        cache = model.init_cache(batch_size, window)
        logits, cache = model.extend_step(
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
