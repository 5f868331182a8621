"""CTC scores of the prefixes that an attention decoder's search extends (hybrid decoding).

    log p = (1 - weight) * log p_attention + weight * log p_ctc

CTC gives a prefix h the probability of all labellings that begin with h, and a whole text that of
this labelling alone. A token c after h adds the difference

    log p_ctc(c | h)   = log P(h c …) - log P(h …)
    log p_ctc(end | h) = log P(h)     - log P(h …)

so that the sum over a text is its CTC log-probability. Of a prefix h, two vectors are stored: the
probability that the first t frames have the labelling h, by paths that end with a label or with a
blank. Both follow from those of the prefix before by a linear recurrence over the frames, which is
computed in log2(T) steps, without a loop.

Legend: B utterances, K hypotheses of each, N = B * K, T frames, V labels.
Source: Graves 2008, section 7.5.3; Watanabe et al. 2017, "Hybrid CTC/attention architecture for
  end-to-end speech recognition", section IV and algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.theta import Theta
from tekso.models.decoding.decoder import Decoder, DecoderStep, repeat_rows, take_rows
from tekso.models.decoding.search import log_total

IMPOSSIBLE = -1e30
"""The log-probability of what cannot happen; finite, so that no difference is NaN."""

_SMALLEST = 1e-37
"""The smallest float32 sum that is distinguished from 0."""


class Prefixes(NamedTuple):
    """What is stored of the prefixes.

    Attributes:
      label, blank: [N, T + 1] log-probability that the first t frames have this labelling, by paths
        that end with a label or a blank; t = 0 is before the first frame.
      total: [N] log-probability of all labellings that begin with the prefix.
      last: [N] int32, the last label; -1: the prefix is empty.
    """

    label: tf.Tensor
    blank: tf.Tensor
    total: tf.Tensor
    last: tf.Tensor


class CtcFrames(NamedTuple):
    """The CTC log-probabilities of the utterances.

    Attributes:
      label: [B, V, T] of each label; IMPOSSIBLE after the end of an utterance.
      probability: [B, V, T], its exponential.
      blank: [B, T] of the blank; 0 after the end.
    """

    label: tf.Tensor
    probability: tf.Tensor
    blank: tf.Tensor

    @classmethod
    def of_logits(cls, logits: tf.Tensor, mask: tf.Tensor, blank_id: int) -> CtcFrames:
        """Returns the log-probabilities for the scores of the labels and, last, the blank.

        Shapes:
          logits: [B, T, V + 1]; mask: bool [B, T], False for padding
        Raises:
          ValueError: the blank is not the last token.
        """
        if blank_id != logits.shape[2] - 1:
            raise ValueError(f"the blank is token {blank_id}, must be {logits.shape[2] - 1}")
        by_token = tf.transpose(tf.nn.log_softmax(tf.cast(logits, tf.float32)), [0, 2, 1])
        real = tf.expand_dims(mask, 1)
        label = tf.where(real, tf.maximum(by_token[:, :-1], IMPOSSIBLE), IMPOSSIBLE)
        blank = tf.where(mask, tf.maximum(by_token[:, -1], IMPOSSIBLE), 0.0)
        return cls(label, tf.exp(label), blank)

    def begin(self) -> Prefixes:
        """Returns the empty prefix of each utterance."""
        blank = tf.pad(tf.cumsum(self.blank, axis=1), [[0, 0], [1, 0]])
        nothing = tf.fill(blank.shape, IMPOSSIBLE)
        size = blank.shape[0]
        return Prefixes(nothing, blank, tf.zeros([size]), tf.fill([size], -1))

    def extended(self, prefixes: Prefixes, ids: tf.Tensor) -> Prefixes:
        """Returns the prefixes with a label appended to each.

        Shapes:
          ids: [N] int32
        """
        sources = self.blank.shape[0]
        count = ids.shape[0] // sources
        of_source = tf.reshape(ids, [sources, count])
        emitted = tf.reshape(
            tf.gather(self.label, of_source, batch_dims=1), [ids.shape[0], self.blank.shape[1]]
        )
        before = _log_sum(prefixes.label[:, :-1], prefixes.blank[:, :-1])
        repeats = tf.expand_dims(tf.equal(ids, prefixes.last), 1)
        before = tf.where(repeats, prefixes.blank[:, :-1], before)
        label = _recurrence(emitted, before + emitted)
        own_blank = tf.repeat(self.blank, count, axis=0)
        from_label = tf.pad(label[:, :-1], [[0, 0], [1, 0]], constant_values=IMPOSSIBLE)
        blank = _recurrence(own_blank, from_label + own_blank)
        total = _log_total(before + emitted)
        first = [[0, 0], [1, 0]]
        return Prefixes(
            tf.pad(label, first, constant_values=IMPOSSIBLE),
            tf.pad(blank, first, constant_values=IMPOSSIBLE),
            tf.maximum(total, IMPOSSIBLE),
            ids,
        )

    def next_scores(self, prefixes: Prefixes) -> tf.Tensor:
        """Returns log p_ctc of every label and of the end, after each prefix.

        A label that is less probable than about 1e-37 of the frames before it counts as 1e-37.

        Shapes:
          returns: [N, V + 1], the end last; at most 0
        """
        sources, num_labels, length = self.label.shape
        count = prefixes.total.shape[0] // sources
        before = _log_sum(prefixes.label[:, :-1], prefixes.blank[:, :-1])
        largest = tf.reduce_max(before, 1, keepdims=True)
        shares = tf.reshape(tf.exp(before - largest), [sources, count, length])
        sums = tf.einsum("bkt,bvt->bkv", shares, self.probability)
        sums = tf.reshape(sums, [-1, num_labels])
        totals = largest + tf.math.log(tf.maximum(sums, _SMALLEST))
        # The last label needs a blank before it is repeated.
        last = tf.maximum(prefixes.last, 0)
        emitted = tf.gather(self.label, tf.reshape(last, [sources, count]), batch_dims=1)
        emitted = tf.reshape(emitted, [-1, length])
        again = _log_total(prefixes.blank[:, :-1] + emitted)
        is_last = tf.equal(
            tf.expand_dims(tf.range(num_labels), 0), tf.expand_dims(prefixes.last, 1)
        )
        totals = tf.where(is_last, tf.expand_dims(again, 1), totals)
        whole = _log_sum(prefixes.label[:, -1:], prefixes.blank[:, -1:])
        scores = tf.concat([totals, whole], 1) - tf.expand_dims(prefixes.total, 1)
        return tf.clip_by_value(scores, IMPOSSIBLE, 0.0)


class HasCtc(Protocol):
    """A model with a CTC layer; the blank is its last token, which is also the decoder's end."""

    def ctc_logits(self, theta: Theta, encoded: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the scores of the labels and the blank, [B, T, V + 1]."""
        ...


class CtcDecoder:
    """A decoder whose scores are mixed with those of its model's CTC layer; see `Decoder`.

    Its weights are those of the model.
    """

    def __init__(self, model: Decoder, ctc: HasCtc, weight: float, end_id: int) -> None:
        """Keeps the model.

        Args:
          model: the attention decoder.
          ctc: the same model, whose CTC layer scores prefixes.
          weight: weight of CTC, in (0, 1].
          end_id: the end token, and the blank.
        """
        self._model, self._ctc, self._weight, self._end_id = model, ctc, weight, end_id

    def start_decoding(
        self, theta: Theta, batch: Mapping[str, tf.Tensor], max_length: int, ctx: StepContext
    ) -> Any:
        """See `Decoder`; the batch has "encoded" and "source_segment_ids"."""
        mask = tf.not_equal(batch["source_segment_ids"], 0)
        logits = self._ctc.ctc_logits(theta, batch["encoded"], ctx)
        frames = CtcFrames.of_logits(logits, mask, self._end_id)
        state = self._model.start_decoding(theta, batch, max_length, ctx)
        return {"model": state, "frames": frames, "prefixes": frames.begin()}

    def decode_step(
        self, theta: Theta, ids: tf.Tensor, state: Any, position: Any, ctx: StepContext
    ) -> DecoderStep:
        """See `Decoder`."""
        step = self._model.decode_step(theta, ids, state["model"], position, ctx)
        frames = CtcFrames(*state["frames"])
        begun = Prefixes(*state["prefixes"])
        # At position 0, the id is the start token. Later, only ended hypotheses have the end token.
        labels = tf.minimum(ids, frames.label.shape[1] - 1)
        longer = frames.extended(begun, labels)
        is_first = tf.equal(position, 0)
        # DTensor has no `where` for a condition without dims.
        prefixes = Prefixes(
            *(
                tf.where(tf.reshape(is_first, [1] * old.shape.rank), old, new)
                for old, new in zip(begun, longer, strict=True)
            )
        )
        scores = frames.next_scores(prefixes)
        num_tokens = scores.shape[1]
        logits = tf.cast(step.logits, tf.float32)
        own = logits[:, :num_tokens] - log_total(logits)
        added = self._weight * (scores - own)
        padding = [[0, 0], [0, logits.shape[1] - num_tokens]]
        added = tf.pad(added, padding, constant_values=float("-inf"))
        if step.added is not None:
            added += step.added
        after = {"model": step.state, "frames": frames, "prefixes": prefixes}
        return DecoderStep(step.logits, step.attention, after, added)

    def expand(self, state: Any, k: int) -> Any:
        """See `Decoder`."""
        prefixes = Prefixes(*repeat_rows(tuple(state["prefixes"]), k))
        return {**state, "model": self._model.expand(state["model"], k), "prefixes": prefixes}

    def select(self, state: Any, rows: tf.Tensor) -> Any:
        """See `Decoder`."""
        prefixes = Prefixes(*take_rows(tuple(state["prefixes"]), rows))
        return {**state, "model": self._model.select(state["model"], rows), "prefixes": prefixes}


def _recurrence(factor: tf.Tensor, added: tf.Tensor) -> tf.Tensor:
    """Returns y[t] = log(exp(factor[t] + y[t - 1]) + exp(added[t])), where exp(y[-1]) = 0.

    The step from t - d to t is again of this form; d is doubled until it is T.

    Shapes:
      factor, added, returns: [N, T]
    """
    length, d = factor.shape[1], 1
    while d < length:
        gap = [[0, 0], [d, 0]]
        earlier = tf.pad(added[:, :-d], gap, constant_values=IMPOSSIBLE)
        added = _log_sum(added, factor + earlier)
        factor = factor + tf.pad(factor[:, :-d], gap)
        factor, added = tf.maximum(factor, IMPOSSIBLE), tf.maximum(added, IMPOSSIBLE)
        d *= 2
    return added


def _log_sum(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns log(exp(a) + exp(b)) of finite numbers, by ops that LiteRT has."""
    return tf.maximum(a, b) + tf.math.log(1.0 + tf.exp(-tf.abs(a - b)))


def _log_total(x: tf.Tensor) -> tf.Tensor:
    """Returns log(sum(exp(x))) of finite numbers: [N, T] -> [N]."""
    largest = tf.reduce_max(x, 1, keepdims=True)
    return tf.squeeze(largest, 1) + tf.math.log(tf.reduce_sum(tf.exp(x - largest), 1))
