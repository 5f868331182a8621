"""Sampler: samples targets from a model, several per source in one batch; greedy at temperature 0.

Legend: B sources, H samples per source, N = B * H, S source length, T most tokens of a target,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop
from tekso.models.decoding.sampling import check_sampling, sample
from tekso.models.decoding.search import Prefix, Search, forced_tokens, token_log_probs


class Sampler(Search):
    """Samples targets token by token."""

    class Params(Search.Params):
        """Params of Sampler."""

        temperature: float = param("Divisor of the logits; 0 is greedy.", default=1.0)
        top_k: int | None = param("Sample only from the k likeliest tokens.", default=None)
        top_p: float = param(
            "Sample only from the likeliest tokens with this total probability.", default=1.0
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_sampling(temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, where="Sampler")

    def search(
        self,
        model: Any,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        end_id: int,
        *,
        prefix: Prefix | None = None,
        forbidden_ids: Sequence[int] = (),
    ) -> dict[str, tf.Tensor]:
        """Returns samples, unsorted; see `Search.search`.

        The random number of a token depends on source, sample and position, so a sample does not
        depend on devices, on other sources, or on the number of samples. The model must be a Layer.
        Log-probabilities and scores are the model's, independent of temperature, top_k and top_p.
        """
        p = self.params
        is_source_BS = tf.not_equal(batch["source_segment_ids"], 0)
        limits = self.limits(is_source_BS, prefix)
        b, h, longest = is_source_BS.shape[0], p.num_hypotheses, limits.longest
        state = model.start_decoding(theta, batch, longest, ctx)
        if h > 1:
            state = model.expand(state, h)
        forced = () if prefix is None else (prefix.ids, prefix.lengths)
        outside = theta, tf.repeat(limits.of_source, h), forced

        def iteration(*flat: Any) -> tuple[Any, ...]:
            (weights, limits_N, forced), inside = workarounds.capture(ctx, (outside, flat))
            t, ids_N, state, ids_TN, log_probs_N, lengths_N, is_open_N = inside
            step = model.decode_step(weights, ids_N, state, t, ctx)
            logits_NV = ctx.constrain(tf.cast(step.logits, tf.float32), ("batch", None))
            penalty = self.penalty(logits_NV.shape[1], end_id, forbidden_ids, t)
            ids_N = self._draw(
                logits_NV if penalty is None else logits_NV + penalty, model, ctx.fold(t), b
            )
            is_end_N = tf.equal(ids_N, end_id)
            if forced:
                is_forced_B, token_B = forced_tokens(Prefix(*forced), t)
                is_forced_N = tf.repeat(is_forced_B, h)
                ids_N = tf.where(is_forced_N, tf.repeat(token_B, h), ids_N)
                is_end_N &= ~is_forced_N
            more_N = token_log_probs(logits_NV, ids_N)
            log_probs_N += tf.where(is_open_N, more_N, 0.0)
            lengths_N += tf.cast(is_open_N, tf.int32)
            kept_1N = tf.expand_dims(tf.where(is_open_N, ids_N, 0), 0)
            ids_TN = tf.tensor_scatter_nd_update(ids_TN, tf.reshape(t, [1, 1]), kept_1N)
            is_open_N &= ~is_end_N & (t + 1 < limits_N)
            return t + 1, ids_N, step.state, ids_TN, log_probs_N, lengths_N, is_open_N

        last = while_loop(
            lambda *flat: tf.reduce_any(flat[-1]),
            iteration,
            (
                tf.constant(0),
                tf.fill([b * h], tf.constant(end_id, tf.int32)),
                state,
                tf.zeros([longest, b * h], tf.int32),
                tf.zeros([b * h]),
                tf.zeros([b * h], tf.int32),
                outside[1] > 0,
            ),
            maximum_iterations=longest,
        )
        _, _, _, ids_TN, log_probs_N, lengths_N, _ = last
        lengths_BH = tf.reshape(lengths_N, [b, h])
        log_probs_BH = tf.reshape(log_probs_N, [b, h])
        ids_BHT = tf.reshape(tf.transpose(ids_TN), [b, h, longest])
        last_BH = tf.gather(ids_BHT, tf.maximum(lengths_BH - 1, 0), batch_dims=2)
        is_finished_BH = tf.equal(last_BH, end_id) & (lengths_BH > 0)
        return {
            "ids": ids_BHT,
            "lengths": lengths_BH,
            "log_probs": log_probs_BH,
            "scores": log_probs_BH,
            "is_finished": is_finished_BH,
        }

    def _draw(
        self, logits_NV: tf.Tensor, model: Any, ctx: StepContext, num_sources: int
    ) -> tf.Tensor:
        p = self.params
        if p.temperature == 0.0:
            return tf.argmax(logits_NV, 1, output_type=tf.int32)
        n, vocab_size = logits_NV.shape
        uniform = ctx.uniform(model, [num_sources, n // num_sources * vocab_size], "sample")
        return sample(
            logits_NV,
            tf.reshape(uniform, [n, vocab_size]),
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
        )
