"""Connectionist temporal classification (CTC): the loss of a labelling without an alignment.

A path has one token per frame: a label, or the blank. Repeated tokens are merged, then blanks are
removed; what is left is the labelling of the path. The loss is -log of the summed probability of
all paths of a labelling.

The sum runs over states: the labels with a blank before, between and after them.

    state   0      1      2      3      4          labels a b
    token   blank  a      blank  b      blank
    arrows  s → s, s → s + 1, and s → s + 2 from a label to a different label

Legend: B batch, T frames, V tokens, U labels, S = 2 U + 1 states.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta
from tekso.models.layers.frames import frame_mask

IMPOSSIBLE = -1e30
"""The log-probability of what cannot happen; finite, so that no difference is NaN."""


def ctc_loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    ctx: StepContext,
    *,
    num_frames: tf.Tensor,
    num_labels: tf.Tensor,
    blank_id: int,
) -> tf.Tensor:
    """Returns -log P(labels | logits) of each utterance, in nats.

    It is infinite, with gradient 0, if there is no path: an utterance needs a frame for each label,
    and one for each label that equals the one before it (`ctc_frames_needed`). Without frames, the
    empty labelling has probability 1. Sums are computed in float32 or wider. The gradient is
    computed from the forward and backward sums; there is no second derivative.

    Shapes:
      logits: [B, T, V], float16, bfloat16, float32 or float64
      labels: [B, U] int, U >= 0; those after num_labels are ignored, but must be in [0, V)
      num_frames, num_labels: [B] int
      returns: [B], float32 or wider
    Source: Graves et al. 2006, sections 4.1 and 4.2.
    """
    logits = ctx.constrain(logits, ("batch", None, None))
    lattice = _Lattice(labels, num_frames, num_labels, blank_id, logits.shape[1])

    @custom_gradient
    def loss(logits: tf.Tensor) -> Any:
        log_probs = tf.maximum(tf.nn.log_softmax(widen(logits)), IMPOSSIBLE)
        emit_TBS = lattice.emissions(log_probs)
        alpha_TBS, last_BS, subtracted_B = lattice.forward(emit_TBS, ctx)
        total_B = tf.reduce_logsumexp(last_BS + lattice.ends(emit_TBS.dtype), 1) + subtracted_B
        possible_B = total_B > 0.1 * IMPOSSIBLE
        nats = tf.where(possible_B, -total_B, tf.fill(total_B.shape, _infinity(total_B)))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            beta_TBS = lattice.backward(emit_TBS, ctx)
            # In every frame, the paths through all states are all paths.
            occupied_TBS = tf.nn.softmax(alpha_TBS + beta_TBS)
            expected = lattice.to_tokens(occupied_TBS, log_probs.shape[2])
            factor = tf.where(possible_B, upstream, tf.zeros_like(upstream))
            counted = tf.expand_dims(tf.cast(lattice.real_BT, factor.dtype), 2)
            factor = tf.reshape(factor, [-1, 1, 1]) * counted
            return tf.cast((tf.exp(log_probs) - expected) * factor, logits.dtype)

        return nats, gradient

    result: tf.Tensor = loss(logits)
    return result


def ctc_frames_needed(labels: tf.Tensor, num_labels: tf.Tensor) -> tf.Tensor:
    """Returns the fewest frames that a labelling needs.

    Shapes:
      labels: [B, U] int, num_labels: [B] int
      returns: [B] int32
    """
    repeated = tf.equal(labels[:, 1:], labels[:, :-1])
    inside = frame_mask(num_labels, labels.shape[1])[:, 1:]
    repeats = tf.reduce_sum(tf.cast(repeated & inside, tf.int32), 1)
    return tf.cast(num_labels, tf.int32) + repeats


class _Lattice:
    """The states of a batch of labellings, and the sums over their paths."""

    def __init__(
        self,
        labels: tf.Tensor,
        num_frames: tf.Tensor,
        num_labels: tf.Tensor,
        blank_id: int,
        length: int,
    ) -> None:
        batch, most = labels.shape
        blanks = tf.fill([batch, most], tf.constant(blank_id, labels.dtype))
        pairs = tf.reshape(tf.stack([blanks, labels], 2), [batch, 2 * most])
        last = tf.fill([batch, 1], tf.constant(blank_id, labels.dtype))
        self.token_BS = tf.concat([pairs, last], 1)
        self.num_labels = tf.cast(num_labels, tf.int32)
        self.num_frames = tf.cast(num_frames, tf.int32)
        self.real_BT = frame_mask(self.num_frames, length)
        # From s to s + 2: not from or to a blank, and not to an equal label.
        differs = tf.not_equal(self.token_BS[:, 2:], self.token_BS[:, :-2])
        self.skips_BS = tf.concat([differs, tf.zeros([batch, min(2, 2 * most + 1)], tf.bool)], 1)

    def emissions(self, log_probs: tf.Tensor) -> tf.Tensor:
        """Returns the log-probability of the token of each state: [B, T, V] -> [T, B, S]."""
        by_token = tf.transpose(log_probs, [0, 2, 1])
        return tf.transpose(tf.gather(by_token, self.token_BS, batch_dims=1), [2, 0, 1])

    def to_tokens(self, x_TBS: tf.Tensor, num_tokens: int) -> tf.Tensor:
        """Sums over the states of each token: [T, B, S] -> [B, T, V]."""
        one_hot = tf.one_hot(self.token_BS, num_tokens, dtype=x_TBS.dtype)
        return tf.einsum("tbs,bsv->btv", x_TBS, one_hot)

    def ends(self, dtype: tf.DType) -> tf.Tensor:
        """Returns 0 for the states in which a path may end, and IMPOSSIBLE for others: [B, S]."""
        place = tf.expand_dims(tf.range(self.token_BS.shape[1]), 0)
        after = 2 * tf.expand_dims(self.num_labels, 1) - place
        return _log_of(tf.equal(after, 0) | tf.equal(after, 1), dtype)

    def forward(
        self, emit_TBS: tf.Tensor, ctx: StepContext
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the log-sums of all paths that end in a state at a frame, and the last ones.

        The path before the first frame is in state 0. In every frame, the largest log-sum is
        subtracted: after a thousand frames, float32 would not have the digits of thousands of nats
        and of their differences.

        Shapes:
          returns: [T, B, S], [B, S] at the last frame of each utterance, and [B], the sum of what
            was subtracted
        """
        num_states = emit_TBS.shape[2]
        skips = self._log_skips(emit_TBS.dtype)
        first = tf.zeros_like(emit_TBS[0]) + _log_of(
            tf.expand_dims(tf.equal(tf.range(num_states), 0), 0), emit_TBS.dtype
        )

        def step(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
            del ctx
            before = state["alpha"]
            skipping = before + theta["skips"]
            arrived = _log_sum(before, _later(before, 1), _later(skipping, 2))
            alpha = arrived + x["emit"]
            largest = tf.where(x["real"], _largest(alpha), tf.zeros_like(alpha[:, :1]))
            alpha = tf.where(x["real"], alpha - largest, before)
            return {"alpha": alpha}, {"alpha": alpha, "largest": largest}

        xs = {"emit": emit_TBS, "real": self._real()}
        state, found = ops.scan(ctx, step, Theta(skips=skips), {"alpha": first}, xs)
        return found["alpha"], state["alpha"], tf.reduce_sum(found["largest"], [0, 2])

    def backward(self, emit_TBS: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the log-sums of all paths from a state at a frame to the end, after this frame.

        A number that is the same for all states of a frame is subtracted; see `forward`.

        Shapes:
          returns: [T, B, S]
        """
        ends = self.ends(emit_TBS.dtype)
        skips = self._log_skips(emit_TBS.dtype)
        length = emit_TBS.shape[0]
        # Whether another frame follows.
        continues = tf.expand_dims(tf.transpose(frame_mask(self.num_frames - 1, length)), 2)

        def step(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
            del ctx
            after = state["after"]
            skipping = _earlier(after, 2) + theta["skips"]
            left = _log_sum(after, _earlier(after, 1), skipping)
            beta = tf.where(x["continues"], left, theta["ends"])
            after = beta + x["emit"]
            return {"after": after - _largest(after)}, beta

        xs = {"emit": _reversed(emit_TBS), "continues": _reversed(continues)}
        constants = Theta(skips=skips, ends=ends)
        _, beta_TBS = ops.scan(ctx, step, constants, {"after": tf.zeros_like(ends)}, xs)
        return _reversed(beta_TBS)

    def _real(self) -> tf.Tensor:
        return tf.expand_dims(tf.transpose(self.real_BT), 2)

    def _log_skips(self, dtype: tf.DType) -> tf.Tensor:
        return _log_of(self.skips_BS, dtype)


def _largest(x: tf.Tensor) -> tf.Tensor:
    """Returns the largest of the states of a batch [B, S], or 0 if all are impossible: [B, 1]."""
    found = tf.reduce_max(x, 1, keepdims=True)
    return tf.where(found > 0.1 * IMPOSSIBLE, found, tf.zeros_like(found))


def _log_of(possible: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.where(possible, tf.zeros(possible.shape, dtype), tf.fill(possible.shape, _low(dtype)))


def _low(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(IMPOSSIBLE, dtype)


def _infinity(x: tf.Tensor) -> tf.Tensor:
    return tf.constant(float("inf"), x.dtype)


def _later(x: tf.Tensor, by: int) -> tf.Tensor:
    """Moves [B, S] to later states; nothing arrives in the first ones."""
    by = min(by, x.shape[1])
    gap = tf.fill([x.shape[0], by], _low(x.dtype))
    return tf.concat([gap, x[:, : x.shape[1] - by]], 1)


def _earlier(x: tf.Tensor, by: int) -> tf.Tensor:
    """Moves [B, S] to earlier states; nothing arrives in the last ones."""
    by = min(by, x.shape[1])
    gap = tf.fill([x.shape[0], by], _low(x.dtype))
    return tf.concat([x[:, by:], gap], 1)


def _log_sum(*terms: tf.Tensor) -> tf.Tensor:
    """Returns log(exp(a) + exp(b) + …) of each element; the terms are finite."""
    largest = terms[0]
    for term in terms[1:]:
        largest = tf.maximum(largest, term)
    total = tf.zeros_like(largest)
    for term in terms:
        total += tf.exp(term - largest)
    return largest + tf.math.log(total)


def _reversed(x: tf.Tensor) -> tf.Tensor:
    """Reverses the frames of [T, …] by a gather, which every execution supports.

    `workarounds.reverse` keeps the first dim sharded, as a batch; here, the frames come first.
    """
    return tf.gather(x, tf.range(x.shape[0] - 1, -1, -1))
