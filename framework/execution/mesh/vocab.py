"""Table lookup and softmax cross-entropy over a vocabulary that may be split over a mesh axis.

Neither gathers the table or the logits: every device looks up the rows that it holds and the parts
are added up; maxima, sums and the logit of the label are reduced over the axis. An id or a label
outside of the vocabulary, for which one device raises an error, gives NaN: no step is taken.

Source: Shazeer et al. 2018 (Mesh-TensorFlow), section 4; Shoeybi et al. 2019 (Megatron), section 3.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.primitives.precision import widen

_LEAD = "abcefg"  # names of the leading dims in an einsum: its "..." has no layouts


def lookup(ctx: Any, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table.

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed]
    """
    axes = ctx.weight_axes(table) or (None, None)
    dims = ("batch", "length", None, None)[: ids.shape.rank] if ids.shape.rank > 1 else (None,)
    ids_axes = _without(ctx.axes(dims, ids.shape), axes[0])

    @tf.custom_gradient
    def run(table: tf.Tensor) -> Any:
        def grad(drows: tf.Tensor) -> tf.Tensor:
            if axes[0] is None:
                flat = tf.reshape(drows, [-1, table.shape[1]])
                dtable = tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), table.shape[0])
            else:
                places = ctx.pin(
                    tf.one_hot(ids, table.shape[0], dtype=drows.dtype), (*ids_axes, axes[0])
                )
                lead = _LEAD[: ids.shape.rank]
                dtable = tf.einsum(f"{lead}v,{lead}d->vd", places, drows)
            return ctx.pin(tf.cast(dtable, table.dtype), axes)

        if axes[0] is None:
            return tf.gather(table, ids), grad
        return _split_lookup(ctx, table, ids, axes, ids_axes), grad

    return run(table)


def _split_lookup(
    ctx: Any, table: tf.Tensor, ids: tf.Tensor, axes: Any, ids_axes: Any
) -> tf.Tensor:
    parts = ctx.axis_size(axes[0])
    rows = table.shape[0] // parts
    local_axes = (axes[0], *ids_axes)
    blocks = ctx.pin(tf.reshape(table, [parts, rows, table.shape[1]]), (axes[0], None, axes[1]))
    first = tf.reshape(tf.range(parts, dtype=ids.dtype) * rows, [parts] + [1] * ids.shape.rank)
    place = tf.expand_dims(ids, 0) - first
    here = tf.logical_and(place >= 0, place < rows)
    place = ctx.pin(tf.where(here, place, tf.zeros_like(place)), local_axes)
    # Ids of no part: otherwise their rows would be 0 without a word.
    here = tf.cast(here, table.dtype) + _nan_outside(ids, table.shape[0], table.dtype)
    here = ctx.pin(here, local_axes)
    found = tf.gather(blocks, place, axis=1, batch_dims=1)
    found = ctx.pin(found, (*local_axes, _but(axes[1], local_axes)))
    return tf.reduce_sum(found * tf.expand_dims(here, -1), 0)


def cross_entropy(
    ctx: Any,
    x: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    bias: tf.Tensor | None,
    label_smoothing: float,
) -> tf.Tensor:
    """Returns the cross-entropy of every position, in nats; see `StepContext.cross_entropy`."""
    axes = ctx.weight_axes(table) or (None, None)
    rank = labels.shape.rank
    dims = ("batch", "length", None, None)[:rank]
    lead_axes = _without(ctx.axes(dims, labels.shape), axes[0])
    logits_axes = (*lead_axes, axes[0])
    vocab, keep = table.shape[0], 1 - label_smoothing
    lead = _LEAD[:rank]

    @tf.custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, *bias: tf.Tensor) -> Any:
        logits = ctx.pin(tf.einsum(f"{lead}d,vd->{lead}v", x, table), logits_axes)
        wide = widen(logits)
        for b in bias:
            wide += tf.cast(b, wide.dtype)
        top = tf.reduce_max(wide, -1, keepdims=True)
        e = tf.exp(wide - top)
        total = tf.reduce_sum(e, -1, keepdims=True)
        is_label = _is_label(ctx, labels, vocab, logits_axes)
        label_logit = tf.reduce_sum(wide * tf.cast(is_label, wide.dtype), -1)
        loss = tf.squeeze(tf.math.log(total) + top, -1) - keep * label_logit
        if label_smoothing:
            loss -= label_smoothing * tf.reduce_mean(wide, -1)
        loss += _nan_outside(labels, vocab, loss.dtype)
        e = tf.cast(e, logits.dtype)

        def grad(dloss: tf.Tensor) -> list[tf.Tensor]:
            d = tf.expand_dims(dloss, -1)
            target = tf.cast(is_label, d.dtype) * keep + label_smoothing / vocab
            dlogits = tf.cast(tf.cast(e, d.dtype) * (d / total) - target * d, x.dtype)
            dlogits = ctx.pin(dlogits, logits_axes)
            dx = tf.einsum(f"{lead}v,vd->{lead}d", dlogits, table)
            dtable = ctx.pin(tf.einsum(f"{lead}v,{lead}d->vd", dlogits, x), axes)
            return [dx, dtable, *(tf.reduce_sum(dlogits, list(range(rank))) for _ in bias)]

        return loss, grad

    return run(x, table, *([] if bias is None else [bias]))


def _nan_outside(ids: tf.Tensor, vocab: int, dtype: Any) -> tf.Tensor:
    """0 for every id of the vocabulary, NaN for others."""
    is_inside = tf.logical_and(ids >= 0, ids < vocab)
    return tf.math.log(2 * tf.cast(is_inside, dtype) - 1)  # log(1) or log(-1)


def _is_label(ctx: Any, labels: tf.Tensor, vocab: int, axes: Any) -> tf.Tensor:
    """[..., vocab] bool, split like the logits: no device makes more than its part."""
    numbers = ctx.pin(tf.range(vocab, dtype=labels.dtype), axes[-1:])
    return tf.equal(ctx.pin(tf.expand_dims(labels, -1), (*axes[:-1], None)), numbers)


def _without(axes: Any, taken: str | None) -> Any:
    return tuple(None if axis == taken else axis for axis in axes)


def _but(axis: str | None, taken: Any) -> str | None:
    return None if axis in taken else axis
