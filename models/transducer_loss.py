"""The loss of a transducer (RNN-T): -log P(labels), summed over all alignments.

An alignment is a path through a lattice of frames t and labels u. At every node, the model emits
the blank and goes to the next frame, or the next label and stays in the frame. The path ends with a
blank in the last frame, after the last label.

    u = 2   ·────►·────►·────► end        ────►  blank (t, u)
            ▲     ▲     ▲                  ▲     label (t, u), which is labels[u]
    u = 1   ·────►·────►·
            ▲     ▲     ▲
    u = 0   ·────►·────►·
          t = 0     1     2

The sums run over the diagonals t + u = n, whose nodes depend only on the diagonal before. In the
loops, row u of the lattice is shifted by u ("skewed"), so that a diagonal is a column.

Legend: B batch, T frames, U labels, R = U + 1 rows, V tokens and the blank, N = T + U diagonals.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework import ops
from tekso.framework.context import StepContext
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen
from tekso.framework.theta import Theta

IMPOSSIBLE = -1e30
"""The log-probability of what cannot happen; finite, so that no difference is NaN."""


def transducer_loss(
    logits: tf.Tensor,
    labels: tf.Tensor,
    ctx: StepContext,
    *,
    num_frames: tf.Tensor,
    num_labels: tf.Tensor,
    blank_id: int,
) -> tf.Tensor:
    """Returns -log P(labels | logits) of each utterance, in nats.

    The logits of all frames and labels are in memory; `Joint` computes them in blocks instead, for
    `lattice_loss`. The loss is infinite, with gradient 0, for an utterance without frames.

    Shapes:
      logits: [B, T, U + 1, V], float16, bfloat16, float32 or float64
      labels: [B, U] int, U >= 0; those after num_labels are ignored, but must be in [0, V)
      num_frames, num_labels: [B] int
      returns: [B], float32 or wider
    Source: Graves 2012, sections 2.3 and 2.4.
    """
    next_label = tf.one_hot(tf.pad(labels, [[0, 0], [0, 1]]), logits.shape[3])
    blank, label = transition_log_probs(logits, next_label, blank_id=blank_id)
    return lattice_loss(blank, label, ctx, num_frames=num_frames, num_labels=num_labels)


def transition_log_probs(
    logits: tf.Tensor, next_label: tf.Tensor, *, blank_id: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the log-probabilities of the blank and of the next label at every node.

    Shapes:
      logits: [B, T, R, V]
      next_label: [B, R, V] float, one-hot; after the last label, that of any token
      returns: [B, T, R] twice, float32 or wider
    """
    wide = tf.maximum(widen(logits), IMPOSSIBLE)  # finite, because the einsum adds 0 * logit
    total = tf.reduce_logsumexp(wide, 3)
    chosen = tf.stop_gradient(tf.cast(next_label, wide.dtype))
    return wide[..., blank_id] - total, tf.einsum("btuv,buv->btu", wide, chosen) - total


def lattice_loss(
    blank: tf.Tensor,
    label: tf.Tensor,
    ctx: StepContext,
    *,
    num_frames: tf.Tensor,
    num_labels: tf.Tensor,
) -> tf.Tensor:
    """Returns -log of the summed probability of all alignments, in nats.

    It is infinite, with gradient 0, without frames. Sums are computed in float32 or wider. The
    gradient is computed from the forward and backward sums; there is no second derivative.

    Shapes:
      blank, label: [B, T, U + 1] log-probabilities of the transitions
      num_frames, num_labels: [B] int
      returns: [B], float32 or wider
    """
    dims = ("batch", None, None)
    lattice = _Lattice(blank.shape[1], blank.shape[2], num_frames, num_labels)

    @custom_gradient
    def loss(blank: tf.Tensor, label: tf.Tensor) -> Any:
        blank_NBR = lattice.skewed(tf.maximum(widen(blank), IMPOSSIBLE))
        label_NBR = lattice.skewed(tf.maximum(widen(label), IMPOSSIBLE))
        alpha_NBR = lattice.forward(blank_NBR, label_NBR, ctx)
        ends_NBR = lattice.ends(blank_NBR.dtype)
        total_B = tf.reduce_sum((alpha_NBR + blank_NBR) * ends_NBR, [0, 2])
        possible_B = tf.greater(lattice.num_frames, 0)
        nats = tf.where(possible_B, -total_B, tf.fill(total_B.shape, _infinity(total_B)))

        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            # After a transition: the log-sum of the paths from its end.
            beta_NBR = lattice.backward(blank_NBR, label_NBR, ends_NBR, ctx)
            factor_B = tf.where(possible_B, -upstream, tf.zeros_like(upstream))

            def occupied(log_prob_NBR: tf.Tensor, after_NBR: tf.Tensor) -> tf.Tensor:
                total_1B1 = tf.reshape(total_B, [1, -1, 1])
                path_NBR = tf.minimum(alpha_NBR + log_prob_NBR + after_NBR - total_1B1, 0.0)
                return lattice.straight(tf.exp(path_NBR) * tf.reshape(factor_B, [1, -1, 1]))

            none_1BR = tf.fill(beta_NBR[:1].shape, _low(beta_NBR))
            next_NBR = tf.concat([beta_NBR[1:], none_1BR], 0)
            # From the end, no probability is left.
            after_blank = tf.where(ends_NBR > 0, tf.zeros_like(next_NBR), next_NBR)
            blank_BTR = occupied(blank_NBR, after_blank)
            label_BTR = occupied(label_NBR, _row_above(next_NBR))
            return (
                ctx.constrain(tf.cast(blank_BTR, blank.dtype), dims),
                ctx.constrain(tf.cast(label_BTR, label.dtype), dims),
            )

        return nats, gradient

    result: tf.Tensor = loss(ctx.constrain(blank, dims), ctx.constrain(label, dims))
    return result


class _Lattice:
    """The nodes of a batch of lattices, and the sums over their paths."""

    def __init__(
        self, frames: int, rows: int, num_frames: tf.Tensor, num_labels: tf.Tensor
    ) -> None:
        self._frames, self._rows = frames, rows
        self._diagonals = frames + rows - 1
        self.num_frames = tf.cast(num_frames, tf.int32)
        self._num_labels = tf.cast(num_labels, tf.int32)

    def skewed(self, x_BTR: tf.Tensor) -> tf.Tensor:
        """Shifts row u by u places: [B, T, R] -> [N, B, R]; what is outside is impossible."""
        batch, frames, rows = x_BTR.shape
        size = self._diagonals
        x_BRT = tf.transpose(x_BTR, [0, 2, 1])
        outside = tf.fill([batch, rows, size + 1 - frames], _low(x_BTR))
        flat = tf.reshape(tf.concat([x_BRT, outside], 2), [batch, rows * (size + 1)])
        x_BRN = tf.reshape(flat[:, : rows * size], [batch, rows, size])
        x_NBR = tf.transpose(x_BRN, [2, 0, 1])
        return tf.where(self._inside(), x_NBR, tf.fill(x_NBR.shape, _low(x_NBR)))

    def straight(self, x_NBR: tf.Tensor) -> tf.Tensor:
        """Undoes `skewed`: [N, B, R] -> [B, T, R]."""
        size, batch, rows = x_NBR.shape
        flat = tf.reshape(tf.transpose(x_NBR, [1, 2, 0]), [batch, rows * size])
        flat = tf.concat([flat, tf.zeros([batch, rows], flat.dtype)], 1)
        x_BRT = tf.reshape(flat, [batch, rows, size + 1])[:, :, : self._frames]
        return tf.transpose(x_BRT, [0, 2, 1])

    def _places(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns frame and row of every node: [N, 1, R] and [1, 1, R]."""
        row = tf.reshape(tf.range(self._rows), [1, 1, -1])
        return tf.reshape(tf.range(self._diagonals), [-1, 1, 1]) - row, row

    def _inside(self) -> tf.Tensor:
        """Returns whether a node belongs to its utterance, bool [N, B, R]."""
        frame, row = self._places()
        last_1B1 = tf.reshape(self.num_frames, [1, -1, 1])
        return (frame >= 0) & (frame < last_1B1) & (row <= tf.reshape(self._num_labels, [1, -1, 1]))

    def ends(self, dtype: tf.DType) -> tf.Tensor:
        """Returns 1 for the last node of every utterance, and 0 for others: [N, B, R]."""
        frame, row = self._places()
        is_last_frame = tf.equal(frame, tf.reshape(self.num_frames - 1, [1, -1, 1]))
        is_last_row = tf.equal(row, tf.reshape(self._num_labels, [1, -1, 1]))
        return tf.cast(is_last_frame & is_last_row, dtype)

    def forward(self, blank_NBR: tf.Tensor, label_NBR: tf.Tensor, ctx: StepContext) -> tf.Tensor:
        """Returns the log-sums of all paths from the first node to every node, [N, B, R]."""
        rows = blank_NBR.shape[2]
        is_first = tf.reshape(tf.equal(tf.range(rows), 0), [1, rows])
        nothing = tf.fill(blank_NBR.shape[1:], _low(blank_NBR))
        first = tf.where(is_first, tf.zeros_like(nothing), nothing)

        def step(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
            del theta, ctx
            alpha = state["alpha"]
            after = _log_sum(alpha + x["blank"], _row_below(alpha + x["label"]))
            return {"alpha": tf.maximum(after, IMPOSSIBLE)}, alpha

        xs = {"blank": blank_NBR, "label": label_NBR}
        return ops.scan(ctx, step, Theta(), {"alpha": first}, xs)[1]

    def backward(
        self, blank_NBR: tf.Tensor, label_NBR: tf.Tensor, ends_NBR: tf.Tensor, ctx: StepContext
    ) -> tf.Tensor:
        """Returns the log-sums of all paths from every node to the end, [N, B, R]."""

        def step(theta: Theta, state: Any, x: Any, ctx: StepContext) -> tuple[Any, Any]:
            del theta, ctx
            after = state["beta"]
            beta = _log_sum(after + x["blank"], _row_above(after) + x["label"])
            beta = tf.where(x["ends"] > 0, x["blank"], tf.maximum(beta, IMPOSSIBLE))
            return {"beta": beta}, beta

        xs = {"blank": blank_NBR, "label": label_NBR, "ends": ends_NBR}
        nothing = {"beta": tf.fill(blank_NBR.shape[1:], _low(blank_NBR))}
        xs = {name: _reversed(x) for name, x in xs.items()}
        return _reversed(ops.scan(ctx, step, Theta(), nothing, xs)[1])


def _row_below(x: tf.Tensor) -> tf.Tensor:
    """Returns at row u the value of row u - 1 of [..., R]; nothing is below the first row."""
    gap = tf.fill([*x.shape[:-1], 1], _low(x))
    return tf.concat([gap, x[..., :-1]], x.shape.rank - 1)


def _row_above(x: tf.Tensor) -> tf.Tensor:
    """Returns at row u the value of row u + 1 of [..., R]; nothing is above the last row."""
    gap = tf.fill([*x.shape[:-1], 1], _low(x))
    return tf.concat([x[..., 1:], gap], x.shape.rank - 1)


def _log_sum(one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Returns log(exp(one) + exp(other)); both are finite."""
    return tf.maximum(one, other) + tf.math.log1p(tf.exp(-tf.abs(one - other)))


def _low(x: tf.Tensor) -> tf.Tensor:
    return tf.constant(IMPOSSIBLE, x.dtype)


def _infinity(x: tf.Tensor) -> tf.Tensor:
    return tf.constant(float("inf"), x.dtype)


def _reversed(x: tf.Tensor) -> tf.Tensor:
    """Reverses the first dim by a gather, which every execution supports."""
    return tf.gather(x, tf.range(x.shape[0] - 1, -1, -1))
