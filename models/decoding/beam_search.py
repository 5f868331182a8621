"""Beam search for the targets with the highest scores.

    step   K live hypotheses ─► 2K candidates: the best continuations of all hypotheses
                                  ├─ ended, among the best K  ─► finished, if among the n best
                                  └─ the best K not ended     ─► live

Candidates are ranked by log-probability, finished hypotheses by score (hypothesis_score.py). A
source is done when none of its live hypotheses can still be among the n best.

The search is one loop in one graph for all sources. All tensor sizes are known at tracing, so that
XLA can compile it.

Legend: B sources, K beam, N = B * K, H returned hypotheses, C candidates, S source length, T most
tokens of a target, V vocabulary.
Source: Graves 2012; Sutskever et al. 2014, section 3.2; Wu et al. 2016, section 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tekso.framework import workarounds
from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.theta import Theta
from tekso.framework.while_loops import while_loop
from tekso.models.decoding.decoder import Decoder, DecoderStep
from tekso.models.decoding.hypothesis_score import HypothesisScore
from tekso.models.decoding.paths import Paths
from tekso.models.decoding.search import (
    IMPOSSIBLE,
    LEAST,
    Limits,
    Prefix,
    Search,
    forced_tokens,
    log_total,
    token_log_probs,
)
from tekso.models.decoding.top_tokens import top_tokens


class BeamSearch(Search):
    """Searches for the targets with the highest scores."""

    class Params(Search.Params):
        """Params of BeamSearch."""

        beam_size: int = param("Live hypotheses per source.", default=4)
        length_normalization: float = param(
            "alpha of GNMT: log-probabilities are divided by ((5 + length) / 6)**alpha; the length "
            "counts the end token. 0: not normalised.",
            default=0.6,
        )
        coverage_penalty: float = param(
            "beta of GNMT: weight of the log of each source token's total attention. 0: none.",
            default=0.0,
        )
        stop: Literal["exact", "enough", "never"] = param(
            "When a source is done. exact: when no live hypothesis can still be among the best. "
            "enough: when beam_size hypotheses have ended, even if a longer one could be better. "
            "never: at its last step.",
            default="exact",
        )
        return_attention: bool = param(
            "Whether to return the attention weights over the source for every token.",
            default=False,
        )

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if p.beam_size < 1:
            raise ValueError(f"BeamSearch.beam_size is {p.beam_size}, must be at least 1")
        if p.num_hypotheses > p.beam_size:
            raise ValueError(
                f"BeamSearch.num_hypotheses is {p.num_hypotheses}, must be 1 … {p.beam_size}, the "
                "beam_size"
            )
        if not abs(p.length_normalization) < float("inf"):
            raise ValueError(
                f"BeamSearch.length_normalization is {p.length_normalization}, must be finite"
            )
        if not 0.0 <= p.coverage_penalty < float("inf"):
            raise ValueError(
                f"BeamSearch.coverage_penalty is {p.coverage_penalty}, must be finite and at "
                "least 0"
            )

    def search(
        self,
        model: Decoder,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        ctx: StepContext,
        end_id: int,
        *,
        prefix: Prefix | None = None,
        forbidden_ids: Sequence[int] = (),
    ) -> dict[str, tf.Tensor]:
        """Returns the best targets of every source, best first; see `Search.search`.

        Finished hypotheses come first, by score. If there are not enough, hypotheses that reached
        the length limit without an end token follow, scored by their tokens. If there are too few
        hypotheses altogether (a tiny vocabulary, or a source that is only padding), the remaining
        ones have length 0 and log-probability and score -inf. Equal hypotheses are ordered by beam
        slot, then by token.

        With beam_size 1 and length_normalization 0, this is greedy search.

        Shapes:
          returns: as Search, and "attention" [B, H, T, S] float32 with return_attention
        Raises:
          ValueError: return_attention or coverage_penalty is set and the model provides no
            attention weights; or as Search.
        """
        is_source_BS = tf.not_equal(batch["source_segment_ids"], 0)
        limits = self.limits(is_source_BS, prefix)
        return _Run(self, model, limits, end_id, forbidden_ids, ctx).result(
            theta, batch, is_source_BS, prefix
        )


def exported_search(search: Any, path: str) -> Any:
    """Returns the Params of a search if it can be exported.

    Args:
      search: Params of a search.
      path: their path, for messages.

    Raises:
      ValueError: it is not a beam search.
    """
    if not isinstance(search, BeamSearch.Params):
        raise ValueError(
            f"{path} is {type(search).owner.__name__}, but export supports only beam search: "
            f"--set {path}=tekso.models.decoding.beam_search:BeamSearch"
        )
    return search


class _Given(NamedTuple):
    """Inputs of the loop that stay constant."""

    theta: Theta
    is_source: tf.Tensor  # [B, S]
    limits: tf.Tensor  # [B]
    prefix: Any  # (ids, lengths) or ()


class _Ended(NamedTuple):
    """The H best finished hypotheses of every source, best first; [B, H] each."""

    scores: tf.Tensor
    log_probs: tf.Tensor
    lengths: tf.Tensor
    slots: tf.Tensor  # beam slot of the hypothesis before its end token

    @classmethod
    def none(cls, num_sources: int, num_hypotheses: int) -> _Ended:
        shape = [num_sources, num_hypotheses]
        nothing = tf.fill(shape, IMPOSSIBLE)
        return cls(nothing, nothing, tf.zeros(shape, tf.int32), tf.zeros(shape, tf.int32))

    def joined(self, more: _Ended) -> _Ended:
        """Returns the best of both; among equal scores, the ones that ended first."""
        scores = tf.concat([self.scores, more.scores], 1)
        best, places = tf.math.top_k(scores, self.scores.shape[1])

        def taken(old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
            return tf.gather(tf.concat([old, new], 1), places, batch_dims=1)

        rest = (taken(old, new) for old, new in zip(self[1:], more[1:], strict=True))
        return _Ended(best, *rest)


class _State(NamedTuple):
    """State of the loop."""

    t: tf.Tensor  # []: number of tokens of every live hypothesis
    ids: tf.Tensor  # [N]: last token of every live hypothesis
    log_probs: tf.Tensor  # [B, K], best first; -inf: the slot is empty
    is_done: tf.Tensor  # [B]
    num_ended: tf.Tensor  # [B]
    ended: _Ended
    coverage: Any  # [B, K, S], total attention weight of each source token; () without a penalty
    paths: Paths
    model: Any  # state of the decoder


class _Run:
    """One search, with all values that are known at tracing."""

    def __init__(
        self,
        search: BeamSearch,
        model: Decoder,
        limits: Limits,
        end_id: int,
        forbidden_ids: Sequence[int],
        ctx: StepContext,
    ) -> None:
        params = search.params
        self._params, self._search, self._model, self._ctx = params, search, model, ctx
        self._limits, self._end_id, self._forbidden_ids = limits, end_id, forbidden_ids
        self._score = HypothesisScore(
            params.length_normalization, params.coverage_penalty, limits.longest
        )

    def result(
        self,
        theta: Theta,
        batch: Mapping[str, tf.Tensor],
        is_source_BS: tf.Tensor,
        prefix: Prefix | None,
    ) -> dict[str, tf.Tensor]:
        """Runs the loop; see `BeamSearch.search`."""
        forced = () if prefix is None else (prefix.ids, prefix.lengths)
        given = _Given(theta, is_source_BS, self._limits.of_source, forced)

        def iteration(*flat: Any) -> _State:
            inside, state = workarounds.capture(self._ctx, (given, _State(*flat)))
            return self._iteration(inside, state)

        last = while_loop(
            lambda *flat: ~tf.reduce_all(_State(*flat).is_done),
            iteration,
            self._begin(theta, batch, is_source_BS),
            maximum_iterations=self._limits.longest,
        )
        return self._outcome(_State(*last), is_source_BS)

    def _begin(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], is_source_BS: tf.Tensor
    ) -> _State:
        p, longest = self._params, self._limits.longest
        (b, s), k = is_source_BS.shape, p.beam_size
        state = self._model.start_decoding(theta, batch, longest, self._ctx)
        if k > 1:
            state = self._model.expand(state, k)
        is_first_K = tf.range(k) == 0
        is_done_B = tf.equal(self._limits.of_source, 0)
        is_live_BK = tf.expand_dims(~is_done_B, 1) & tf.expand_dims(is_first_K, 0)
        return _State(
            t=tf.constant(0),
            ids=tf.fill([b * k], tf.constant(self._end_id, tf.int32)),
            log_probs=tf.where(is_live_BK, 0.0, IMPOSSIBLE),
            is_done=is_done_B,
            num_ended=tf.zeros([b], tf.int32),
            ended=_Ended.none(b, p.num_hypotheses),
            coverage=tf.zeros([b, k, s]) if p.coverage_penalty else (),
            paths=Paths.empty((longest, b, k), s if p.return_attention else None),
            model=state,
        )

    def _iteration(self, given: _Given, state: _State) -> _State:
        p, t = self._params, state.t
        b, k = state.log_probs.shape
        step = self._model.decode_step(given.theta, state.ids, state.model, t, self._ctx)
        attention_BKS = self._attention(step.attention, [b, k, -1])
        coverage_BKS = state.coverage
        if p.coverage_penalty:
            coverage_BKS += attention_BKS
        log_probs_BC, parents_BC, ids_BC, is_end_BC = self._candidates(given, state, step)

        is_new_BK = is_end_BC[:, :k] & ~tf.expand_dims(state.is_done, 1)
        ended_BK = tf.where(is_new_BK, log_probs_BC[:, :k], IMPOSSIBLE)
        scores_BK = ended_BK / self._score.norm(t + 1)
        if p.coverage_penalty:
            penalty_BK = self._score.coverage_penalty(coverage_BKS, given.is_source)
            scores_BK += tf.gather(penalty_BK, parents_BC[:, :k], batch_dims=1)
        lengths_BK = tf.fill([b, k], t + 1)
        ended = state.ended.joined(_Ended(scores_BK, ended_BK, lengths_BK, parents_BC[:, :k]))
        is_ended_BK = tf.cast(ended_BK > LEAST, tf.int32)
        num_ended_B = state.num_ended + tf.reduce_sum(is_ended_BK, 1)

        live_BC = tf.where(is_end_BC, IMPOSSIBLE, log_probs_BC)
        live_BK, places_BK = tf.math.top_k(live_BC, k)
        live_BK = tf.where(tf.expand_dims(state.is_done, 1), state.log_probs, live_BK)
        slots_BK = tf.gather(parents_BC, places_BK, batch_dims=1)
        ids_BK = tf.gather(ids_BC, places_BK, batch_dims=1)
        if p.coverage_penalty:
            coverage_BKS = tf.where(
                tf.reshape(state.is_done, [b, 1, 1]),
                state.coverage,
                tf.gather(coverage_BKS, slots_BK, batch_dims=1),
            )
        model = step.state
        if k > 1:  # with one slot, nothing moves
            rows_BK = slots_BK + tf.expand_dims(tf.range(b) * k, 1)
            model = self._model.select(model, tf.reshape(rows_BK, [b * k]))
        return _State(
            t=t + 1,
            ids=tf.reshape(ids_BK, [b * k]),
            log_probs=live_BK,
            is_done=state.is_done
            | self._done(live_BK[:, 0], t + 1, given.limits, ended.scores[:, -1], num_ended_B),
            num_ended=num_ended_B,
            ended=ended,
            coverage=coverage_BKS,
            paths=state.paths.record(t, ids_BK, slots_BK, attention_BKS),
            model=model,
        )

    def _attention(self, attention_NS: tf.Tensor | None, shape: list[int]) -> tf.Tensor | None:
        p = self._params
        if not p.coverage_penalty and not p.return_attention:
            return None
        if attention_NS is None:
            raise ValueError(
                "BeamSearch: coverage_penalty and return_attention need attention weights over the "
                f"source, which {type(self._model).__name__} does not provide; set them to 0 and "
                "False"
            )
        return tf.reshape(tf.cast(attention_NS, tf.float32), shape)

    def _candidates(
        self, given: _Given, state: _State, step: DecoderStep
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns log-probability, parent slot, token, and whether it is the end; [B, C] each.

        The best 2K candidates of a source are among the best 2K of each of its hypotheses. Each
        hypothesis has at most one candidate that ends, so at least K of the 2K do not end.
        """
        t, (b, k), vocab_size = state.t, state.log_probs.shape, step.logits.shape[1]
        logits_NV = self._ctx.constrain(tf.cast(step.logits, tf.float32), ("batch", None))
        allowed_NV = logits_NV if step.added is None else logits_NV + step.added
        penalty = self._search.penalty(vocab_size, self._end_id, self._forbidden_ids, t)
        if penalty is not None:
            allowed_NV += penalty
        best_NC, ids_NC = top_tokens(allowed_NV, min(2 * k, vocab_size))
        log_probs_NC = tf.minimum(best_NC - log_total(logits_NV), 0.0)
        if given.prefix:
            is_forced_B, token_B = forced_tokens(Prefix(*given.prefix), t)
            is_free_N1 = tf.expand_dims(tf.repeat(~is_forced_B, k), 1)
            token_N = tf.repeat(token_B, k)
            is_first_C = tf.range(best_NC.shape[1]) == 0
            forced_N1 = tf.expand_dims(token_log_probs(logits_NV, token_N), 1)
            if step.added is not None:
                forced_N1 += tf.expand_dims(tf.gather(step.added, token_N, batch_dims=1), 1)
            forced_NC = tf.where(is_first_C, forced_N1, IMPOSSIBLE)
            log_probs_NC = tf.where(is_free_N1, log_probs_NC, forced_NC)
            ids_NC = tf.where(is_free_N1, ids_NC, tf.expand_dims(token_N, 1))

        c = best_NC.shape[1]
        sums_BKC = tf.expand_dims(state.log_probs, 2) + tf.reshape(log_probs_NC, [b, k, c])
        log_probs_BC, places_BC = tf.math.top_k(tf.reshape(sums_BKC, [b, k * c]), min(2 * k, k * c))
        ids_BC = tf.gather(tf.reshape(ids_NC, [b, k * c]), places_BC, batch_dims=1)
        is_end_BC = tf.equal(ids_BC, self._end_id)
        if given.prefix:
            is_end_BC &= tf.expand_dims(~is_forced_B, 1)
        return log_probs_BC, places_BC // c, ids_BC, is_end_BC

    def _done(
        self,
        best_live_B: tf.Tensor,
        length: tf.Tensor,
        limits_B: tf.Tensor,
        worst_ended_B: tf.Tensor,
        num_ended_B: tf.Tensor,
    ) -> tf.Tensor:
        """Returns which sources are done, [B] bool."""
        is_done_B = length >= limits_B
        if self._params.stop == "exact":
            is_done_B |= worst_ended_B >= self._score.bound(best_live_B, length, limits_B)
        elif self._params.stop == "enough":
            is_done_B |= num_ended_B >= self._params.beam_size
        return is_done_B

    def _outcome(self, last: _State, is_source_BS: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the finished hypotheses, followed by unfinished ones if there are too few."""
        p, limits_B1 = self._params, tf.expand_dims(self._limits.of_source, 1)
        num = p.num_hypotheses
        scores_BK = last.log_probs / self._score.norm(limits_B1)
        if p.coverage_penalty:
            scores_BK += self._score.coverage_penalty(last.coverage, is_source_BS)
        scores_BH, slots_BH = tf.math.top_k(scores_BK, num)
        open_BH = tf.gather(last.log_probs, slots_BH, batch_dims=1)
        lengths_BH = tf.where(open_BH > LEAST, limits_B1, 0)
        open_ = _Ended(scores_BH, open_BH, lengths_BH, slots_BH)
        is_ended_BH = last.ended.log_probs > LEAST
        num_B1 = tf.reduce_sum(tf.cast(is_ended_BH, tf.int32), 1, keepdims=True)
        places_BH = tf.range(num) + tf.where(is_ended_BH, 0, num - num_B1)
        parts = (tf.concat(pair, 1) for pair in zip(last.ended, open_, strict=True))
        found = _Ended(*(tf.gather(part, places_BH, batch_dims=1) for part in parts))
        ids_BHT, attention_BHTS = last.paths.read(
            found.slots, is_ended_BH, found.lengths, end_id=self._end_id, ctx=self._ctx
        )
        outcome = {
            "ids": ids_BHT,
            "lengths": found.lengths,
            "log_probs": found.log_probs,
            "scores": found.scores,
            "is_finished": is_ended_BH,
        }
        return outcome if attention_BHTS is None else {**outcome, "attention": attention_BHTS}
