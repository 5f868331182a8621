"""Table lookup and softmax cross-entropy over a vocabulary that may be sharded over a mesh axis.

Neither gathers the table or the logits. Every device looks up the rows of its shard, and the
results are all-reduced. Maxima, sums and the logit of the label are also reduced over the axis. An
id or a label outside the vocabulary is an error on CPUs, as on a single CPU. On other devices it
gives NaN, so the step is not applied.

Source: Shazeer et al. 2018 (Mesh-TensorFlow), section 4; Shoeybi et al. 2019 (Megatron), section 3.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.execution.mesh.context import MeshContext
from tekso.framework.execution.workarounds.tensors import loop_inputs
from tekso.framework.primitives.custom_gradient import custom_gradient
from tekso.framework.primitives.precision import widen, widen_half

_LEAD = "abcefg"  # names of the leading dims in an einsum: its "..." has no layouts


def lookup(ctx: MeshContext, table: tf.Tensor, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table.

    Shapes:
      table: [vocab, embed], ids: [...]
      returns: [..., embed]
    """
    axes = ctx.layout_of(table) or (None, None)
    dims = ("batch", "length", None, None)[: ids.shape.rank] if ids.shape.rank > 1 else (None,)
    ids_axes = _without(ctx.axes(dims, ids.shape), axes[0])

    @custom_gradient
    def run(table: tf.Tensor) -> Any:
        def grad(drows: tf.Tensor) -> tf.Tensor:
            if axes[0] is None:
                flat = tf.reshape(widen(drows), [-1, table.shape[1]])
                dtable = tf.math.unsorted_segment_sum(flat, tf.reshape(ids, [-1]), table.shape[0])
            else:
                dtable = _split_sum(ctx, widen(drows), ids, table.shape[0], axes, ids_axes)
            return ctx.reshard(tf.cast(dtable, table.dtype), axes)

        if axes[0] is None:
            return tf.gather(table, ids), grad
        return _split_lookup(ctx, table, ids, axes, ids_axes), grad

    return run(table)


def _split_lookup(
    ctx: MeshContext, table: tf.Tensor, ids: tf.Tensor, axes: Any, ids_axes: Any
) -> tf.Tensor:
    parts = ctx.axis_size(axes[0]) if axes[0] else 1
    rows = table.shape[0] // parts
    local_axes = (axes[0], *ids_axes)
    blocks = ctx.reshard(tf.reshape(table, [parts, rows, table.shape[1]]), (axes[0], None, axes[1]))
    first = tf.reshape(tf.range(parts, dtype=ids.dtype) * rows, [parts] + [1] * ids.shape.rank)
    place = tf.expand_dims(ids, 0) - first
    here = tf.logical_and(place >= 0, place < rows)
    place = ctx.reshard(tf.where(here, place, tf.zeros_like(place)), local_axes)
    # For ids outside the vocabulary: otherwise their rows would silently be 0.
    here = tf.cast(here, table.dtype) + _nan_outside(ids, table.shape[0], table.dtype)
    here = ctx.reshard(here, local_axes)
    found = tf.gather(blocks, place, axis=1, batch_dims=1)
    found = ctx.reshard(found, (*local_axes, _but(axes[1], local_axes)))
    return tf.reduce_sum(found * tf.expand_dims(here, -1), 0)


def _split_sum(
    ctx: MeshContext, drows: tf.Tensor, ids: tf.Tensor, vocab: int, axes: Any, ids_axes: Any
) -> tf.Tensor:
    """Returns the sum of rows with the same id; every device sums the ids of its shard.

    The rows get a new dim for the shards of the vocabulary, which is sharded. A row is 0 in all of
    them except the shard of its id. Rows are then summed by the position of the id in its shard.
    """
    parts = ctx.axis_size(axes[0])
    rows, part_axes = vocab // parts, (*ids_axes, axes[0])
    numbers = ctx.reshard(tf.range(parts, dtype=ids.dtype), axes[:1])
    here = ctx.reshard(tf.equal(tf.expand_dims(ids // rows, -1), numbers), part_axes)
    split = tf.expand_dims(drows, -2) * tf.cast(tf.expand_dims(here, -1), drows.dtype)
    split = ctx.reshard(split, (*part_axes, _but(axes[1], part_axes)))
    summed = tf.math.unsorted_segment_sum(split, ids % rows, rows)
    return tf.reshape(tf.transpose(summed, [1, 0, 2]), [vocab, drows.shape[-1]])


def cross_entropy(
    ctx: MeshContext,
    x: tf.Tensor,
    table: tf.Tensor,
    labels: tf.Tensor,
    *,
    bias: tf.Tensor | None = None,
    label_smoothing: float = 0.0,
    classes: int | None = None,
) -> tf.Tensor:
    """Returns the cross-entropy of every position, in nats; see `ops.cross_entropy`."""
    num_classes = classes or table.shape[0]
    axes = ctx.layout_of(table) or (None, None)
    rank = labels.shape.rank
    dims = ("batch", "length", None, None)[:rank]
    lead_axes = _without(ctx.axes(dims, labels.shape), axes[0])
    logits_axes = (*lead_axes, axes[0])
    vocab, keep = table.shape[0], 1 - label_smoothing
    lead, is_split = _LEAD[:rank], any(lead_axes)

    @custom_gradient
    def run(x: tf.Tensor, table: tf.Tensor, *bias: tf.Tensor) -> Any:
        logits = ctx.reshard(tf.einsum(f"{lead}d,vd->{lead}v", x, table), logits_axes)
        label_logit = widen(_label_logit(ctx, logits, labels, logits_axes))
        for b in bias:
            of_label = _split_lookup(ctx, tf.expand_dims(b, 1), labels, (axes[0], None), lead_axes)
            label_logit += tf.cast(tf.squeeze(of_label, -1), label_logit.dtype)
        # Constrained, so that a device compares only with its shard of the vocabulary.
        numbers = ctx.reshard(tf.range(vocab, dtype=labels.dtype), logits_axes[-1:])
        label = ctx.reshard(tf.expand_dims(labels, -1), (*lead_axes, None))
        sums = ctx.fuse(_exponentials, smoothed=num_classes if label_smoothing else 0)
        e, top, total, *mean_logit = sums(logits, numbers, *bias)
        loss = tf.squeeze(tf.math.log(total) + top, -1) - keep * label_logit
        for mean in mean_logit:
            loss -= label_smoothing * mean
        loss += _nan_outside(labels, vocab, loss.dtype)

        def grad(dloss: tf.Tensor) -> list[tf.Tensor]:
            even = label_smoothing / num_classes
            gradient = ctx.fuse(_logits_gradient, keep=keep, even=even, num_classes=num_classes)
            dlogits = gradient(widen_half(e), tf.expand_dims(dloss, -1), total, label, numbers)
            dlogits = ctx.reshard(dlogits, logits_axes)
            dx = tf.einsum(f"{lead}v,vd->{lead}d", dlogits, widen_half(table))
            # DTensor sums over devices in the dtype of a product.
            dlogits, of_table = (widen(dlogits), widen(x)) if is_split else (dlogits, widen_half(x))
            dtable = ctx.reshard(tf.einsum(f"{lead}v,{lead}d->vd", dlogits, of_table), axes)
            dbias = [tf.cast(tf.reduce_sum(dlogits, list(range(rank))), b.dtype) for b in bias]
            return [tf.cast(dx, x.dtype), tf.cast(dtable, table.dtype), *dbias]

        return loss, grad

    # The bias may be a constant (of a padded vocabulary), and this may be the body of a loop.
    return run(x, table, *([] if bias is None else loop_inputs([bias])))


def _label_logit(ctx: MeshContext, logits: tf.Tensor, labels: tf.Tensor, axes: Any) -> tf.Tensor:
    """Returns the logit of every label, from the shard that has it."""
    parts, rank = ctx.axis_size(axes[-1]) if axes[-1] else 1, logits.shape.rank
    rows = logits.shape[-1] // parts
    blocks = ctx.reshard(tf.reshape(logits, [*logits.shape[:-1], parts, rows]), (*axes, None))
    first = ctx.reshard(tf.range(parts, dtype=labels.dtype) * rows, axes[-1:])
    place = tf.expand_dims(labels, -1) - first
    here = tf.logical_and(place >= 0, place < rows)
    place = ctx.reshard(tf.where(here, place, tf.zeros_like(place)), axes)
    found = ctx.reshard(tf.gather(blocks, place, axis=rank, batch_dims=rank), axes)
    return tf.reduce_sum(tf.where(here, found, tf.zeros_like(found)), -1)


def _exponentials(
    logits: tf.Tensor, numbers: tf.Tensor, *bias: tf.Tensor, smoothed: int
) -> list[tf.Tensor]:
    """Returns exponentials, maxima, their sums, and the means of the first `smoothed` logits."""
    wide = widen(logits)
    for b in bias:
        wide += tf.cast(b, wide.dtype)
    top = tf.reduce_max(wide, -1, keepdims=True)
    e = tf.exp(wide - top)
    total = tf.reduce_sum(e, -1, keepdims=True)
    result = [tf.cast(e, logits.dtype), top, total]
    if smoothed:
        counted = wide * _first(numbers, smoothed, wide.dtype)
        result.append(tf.reduce_mean(counted, -1) * (wide.shape[-1] / smoothed))
    return result


def _first(numbers: tf.Tensor, count: int, dtype: tf.DType) -> tf.Tensor:
    """Returns 1 for the first numbers and 0 for the others, the padding of a table."""
    return tf.cast(numbers < count, dtype)


def _logits_gradient(
    e: tf.Tensor,
    d: tf.Tensor,
    total: tf.Tensor,
    label: tf.Tensor,
    numbers: tf.Tensor,
    *,
    keep: float,
    even: float,
    num_classes: int,
) -> tf.Tensor:
    target = tf.cast(tf.equal(label, numbers), d.dtype) * keep
    target += even * _first(numbers, num_classes, d.dtype)
    return tf.cast(tf.cast(e, d.dtype) * (d / total) - target * d, e.dtype)


def _nan_outside(ids: tf.Tensor, vocab: int, dtype: Any) -> tf.Tensor:
    """Returns 0 for every id of the vocabulary, and NaN for other ids, if they are no error.

    A device that looks up only the ids of its shard cannot fail for an id of none. So all ids are
    looked up in a table of a byte for each row, which fails on a CPU and names the id and the rows.
    """
    unchecked = tf.gather(tf.zeros([vocab], tf.bool), ids)
    is_inside = tf.logical_or(tf.logical_and(ids >= 0, ids < vocab), unchecked)
    return tf.math.log(2 * tf.cast(is_inside, dtype) - 1)  # log(1) or log(-1)


def _without(axes: Any, taken: str | None) -> Any:
    return tuple(None if axis == taken else axis for axis in axes)


def _but(axis: str | None, taken: Any) -> str | None:
    return None if axis in taken else axis
