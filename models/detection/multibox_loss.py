"""The loss of SSD: matching of default boxes to objects, and hard negative mining.

Legend: B batch, N default boxes, M objects of an image at most, C classes with the background, 0.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tekso.framework.primitives.precision import widen
from tekso.models.detection.box_coding import box_overlaps, encode_boxes


@dataclasses.dataclass(frozen=True)
class Matches:
    """What every default box has to predict.

    Attributes:
      labels: [B, N] int32, the class; 0: background.
      boxes: [B, N, 4], the box of the object; any value for the background.
      overlaps: [B, N], the overlap with the object that it overlaps most; -1 if there is none.
    """

    labels: tf.Tensor
    boxes: tf.Tensor
    overlaps: tf.Tensor


def match_boxes(
    boxes: tf.Tensor, labels: tf.Tensor, defaults: tf.Tensor, *, threshold: float = 0.5
) -> Matches:
    """Matches default boxes to objects.

    A default box gets the object that it overlaps most, if the overlap is above the threshold.
    Besides, every object gets the default box that overlaps it most; if that is the best of several
    objects, the last one gets it. An object that overlaps none, such as one outside of the image,
    is not matched.

    Shapes:
      boxes: [B, M, 4], labels: [B, M] int, 0 for padding, whose boxes are ignored
      defaults: [N, 4]
    Source: Liu et al. 2016, section 2.2, "matching strategy"; ties as in MLPerf's reference.
    """
    labels = tf.cast(labels, tf.int32)
    real = tf.expand_dims(labels > 0, -1)
    overlaps = tf.where(real, box_overlaps(boxes, defaults), -1.0)
    best_overlap, best_object = tf.reduce_max(overlaps, 1), tf.argmax(overlaps, 1, tf.int32)
    count, size = boxes.shape[1], defaults.shape[0]
    owns = tf.one_hot(tf.argmax(overlaps, 2), size, on_value=True, off_value=False, dtype=tf.bool)
    owns &= overlaps > 0
    number = tf.reshape(tf.range(count), [1, count, 1])
    owner = tf.reduce_max(tf.where(owns, number, -1), 1)  # of each default box; -1: none
    chosen = tf.where(owner >= 0, owner, best_object)
    is_matched = (owner >= 0) | (best_overlap > threshold)
    found = tf.gather(labels, chosen, batch_dims=1)
    own = tf.gather(boxes, chosen, axis=1, batch_dims=1)
    return Matches(tf.where(is_matched, found, 0), own, best_overlap)


def box_loss(codes: tf.Tensor, matches: Matches, defaults: tf.Tensor) -> tf.Tensor:
    """Returns the smooth L1 loss of the matched boxes of every image, summed.

    Shapes:
      codes: [B, N, 4], defaults: [N, 4]
      returns: [B], float32 or wider
    Source: Liu et al. 2016, eq. 2.
    """
    codes = widen(tf.convert_to_tensor(codes))
    boxes, defaults = (tf.cast(x, codes.dtype) for x in (matches.boxes, defaults))
    difference = tf.abs(codes - encode_boxes(boxes, defaults))
    difference = tf.where(tf.expand_dims(matches.labels > 0, -1), difference, 0.0)
    smooth = tf.where(difference < 1, 0.5 * tf.square(difference), difference - 0.5)
    return tf.reduce_sum(smooth, [1, 2])


def multibox_loss(
    logits: tf.Tensor,
    codes: tf.Tensor,
    matches: Matches,
    defaults: tf.Tensor,
    *,
    negatives_per_positive: int = 3,
) -> tf.Tensor:
    """Returns the loss of every image: smooth L1 of matched boxes, and softmax cross-entropy.

    The cross-entropy is summed over matched boxes and the background boxes with the largest
    cross-entropy, three for each matched box. The sum is divided by the number of matched boxes; an
    image without any has the loss 0.

    Shapes:
      logits: [B, N, C], codes: [B, N, 4], defaults: [N, 4]
      returns: [B], float32 or wider
    Source: Liu et al. 2016, eq. 1 and "hard negative mining".
    """
    logits = widen(tf.convert_to_tensor(logits))
    positive = matches.labels > 0
    weight = tf.cast(positive, logits.dtype)
    positives = tf.reduce_sum(weight, 1)
    of_boxes = box_loss(codes, matches, defaults)

    nats = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=matches.labels, logits=logits)
    negative = tf.stop_gradient(tf.where(~positive, nats, 0.0))
    order = tf.argsort(negative, 1, "DESCENDING", stable=True)
    rank = tf.argsort(order, 1, stable=True)
    most = tf.expand_dims(negatives_per_positive * positives, 1)
    is_hard = (tf.cast(rank, most.dtype) < most) & ~positive
    of_classes = tf.reduce_sum(nats * (weight + tf.cast(is_hard, weight.dtype)), 1)
    return tf.math.divide_no_nan(of_boxes + of_classes, positives)
