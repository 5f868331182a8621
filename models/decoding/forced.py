"""Forced decoding: scores of given targets.

Legend: B sources, H targets per source, N = B * H, S source length, T target length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop
from tekso.models.decoding.decoder import Decoder, DecoderStep
from tekso.models.decoding.hypothesis_score import HypothesisScore
from tekso.models.decoding.search import check_ids, token_log_probs


def score_targets(
    model: Decoder,
    theta: Theta,
    batch: Mapping[str, tf.Tensor],
    targets_BHT: tf.Tensor,
    lengths_BH: tf.Tensor,
    ctx: StepContext,
    end_id: int,
    *,
    length_normalization: float = 0.0,
    coverage_penalty: float = 0.0,
    return_attention: bool = False,
) -> dict[str, tf.Tensor]:
    """Returns log-probabilities and scores of targets; pure.

    Every source is encoded once. If a target does not end with the end token, none is scored.

    Args:
      model: the model that scores.
      theta: weights of the model.
      batch: "source_ids" and "source_segment_ids" [B, S] int32; segment 0 is padding.
      targets_BHT: tokens, end included.
      lengths_BH: number of tokens of each target; 0 for no target.
      ctx: step context.
      end_id: the end token, which is also the decoder's first input.
      length_normalization: see BeamSearch.
      coverage_penalty: see BeamSearch.
      return_attention: whether to return the attention weights of every token over the source.

    Shapes:
      targets_BHT: int32, lengths_BH: int32 in [0, T]
      returns: {"token_log_probs": [B, H, T] float32, 0 after the length;
                "log_probs", "scores": [B, H] float32;
                "attention": [B, H, T, S] float32, 0 after the length, with return_attention}
    Raises:
      ValueError: attention weights are needed and the model provides none; end_id is not in the
        vocabulary.
    """
    b, h, longest = targets_BHT.shape
    is_source_BS = tf.not_equal(batch["source_segment_ids"], 0)
    has_attention = return_attention or coverage_penalty > 0
    targets_NT = tf.reshape(targets_BHT, [b * h, longest])
    state = model.start_decoding(theta, batch, longest, ctx)
    if h > 1:
        state = model.expand(state, h)

    def iteration(
        t: tf.Tensor, ids_N: tf.Tensor, state: Any, log_probs: Any, attention: Any
    ) -> Any:
        weights, targets, own = workarounds.capture(ctx, (theta, targets_NT, (ids_N, state)))
        log_probs, attention = workarounds.capture(ctx, (log_probs, attention))
        step = model.decode_step(weights, own[0], own[1], t, ctx)
        check_ids(step.logits.shape[1], end_id, (), where="score_targets")
        ids_N, place = tf.identity(tf.gather(targets, t, axis=1)), tf.reshape(t, [1, 1])
        logits_NV = ctx.constrain(tf.cast(step.logits, tf.float32), ("batch", None))
        now = tf.expand_dims(token_log_probs(logits_NV, ids_N), 0)
        log_probs = tf.tensor_scatter_nd_update(log_probs, place, now)
        if has_attention:
            now = tf.expand_dims(_attention_of(step, model), 0)
            attention = tf.tensor_scatter_nd_update(attention, place, now)
        return t + 1, ids_N, step.state, log_probs, attention

    none: Any = tf.zeros([longest, b * h, is_source_BS.shape[1]]) if has_attention else ()
    begin_N = tf.fill([b * h], tf.constant(end_id, tf.int32))
    begin = (tf.constant(0), begin_N, state, tf.zeros([longest, b * h]), none)
    last = while_loop(lambda t, *_: t < longest, iteration, begin, maximum_iterations=longest)
    is_token_BHT = tf.range(longest) < tf.expand_dims(lengths_BH, 2)
    log_probs_BHT = tf.squeeze(_of_tokens(tf.expand_dims(last[3], 2), is_token_BHT), 3)
    log_probs_BH = tf.reduce_sum(log_probs_BHT, 2)
    score = HypothesisScore(length_normalization, coverage_penalty, longest)
    scores_BH = log_probs_BH / score.norm(lengths_BH)
    outcome = {"token_log_probs": log_probs_BHT, "log_probs": log_probs_BH}
    if has_attention:
        attention = _of_tokens(last[4], is_token_BHT)
        if coverage_penalty:
            coverage_BHS = tf.reduce_sum(attention, 2)
            scores_BH += score.coverage_penalty(coverage_BHS, is_source_BS)
        if return_attention:
            outcome["attention"] = attention
    return {**outcome, "scores": scores_BH}


def _of_tokens(x_TNS: tf.Tensor, is_token_BHT: tf.Tensor) -> tf.Tensor:
    """Reshapes [T, B * H, S] to [B, H, T, S], 0 where there is no token."""
    x_BHTS = tf.reshape(tf.transpose(x_TNS, [1, 0, 2]), [*is_token_BHT.shape, -1])
    return tf.where(tf.expand_dims(is_token_BHT, 3), x_BHTS, 0.0)


def _attention_of(step: DecoderStep, model: Decoder) -> tf.Tensor:
    """Returns the attention weights of a decoding step."""
    if step.attention is None:
        raise ValueError(
            "score_targets: coverage_penalty and return_attention need attention weights over the "
            f"source, which {type(model).__name__} does not provide; set them to 0 and False"
        )
    return tf.cast(step.attention, tf.float32)
