"""Detections from scores and boxes: non-maximum suppression for each class.

Legend: B batch, N boxes, C classes with the background, 0; K detections of an image.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tekso.models.detection.box_coding import box_overlaps


@dataclasses.dataclass(frozen=True)
class Detections:
    """The detections of images, in descending order of their scores.

    Attributes:
      boxes: [B, K, 4]; 0 for padding.
      labels: [B, K] int32; 0 for padding.
      scores: [B, K] float32; 0 for padding.
    """

    boxes: tf.Tensor
    labels: tf.Tensor
    scores: tf.Tensor


def detections(
    probabilities: tf.Tensor,
    boxes: tf.Tensor,
    *,
    min_score: float = 0.05,
    candidates: int = 200,
    max_overlap: float = 0.5,
    most: int = 200,
) -> Detections:
    """Returns the best boxes of all classes after suppression within each class.

    Args:
      probabilities: of the classes of every box.
      boxes: the boxes, decoded.
      min_score: smaller probabilities are ignored.
      candidates: number of boxes of a class that are considered, those with the largest scores.
      max_overlap: a box that overlaps a better box of its class more than this is dropped.
      most: K, the number of detections of an image.

    Shapes:
      probabilities: [B, N, C], boxes: [B, N, 4]
    Source: Liu et al. 2016, section 3; values of MLPerf 0.6.
    """
    classes = probabilities.shape[2] - 1
    of_class = tf.transpose(probabilities[:, :, 1:], [0, 2, 1])
    scores, index = tf.math.top_k(of_class, min(candidates, boxes.shape[1]))  # [B, C - 1, n]
    chosen = tf.gather(boxes, index, axis=1, batch_dims=1)  # [B, C - 1, n, 4]
    kept = suppressed(chosen, scores > min_score, max_overlap=max_overlap)
    scores = tf.where(kept, scores, 0.0)
    flat = tf.reshape(scores, [-1, classes * scores.shape[2]])
    best, place = tf.math.top_k(flat, min(most, flat.shape[1]))
    label = place // scores.shape[2] + 1
    found = tf.gather(tf.reshape(chosen, [-1, flat.shape[1], 4]), place, axis=1, batch_dims=1)
    real = best > 0
    return Detections(
        tf.where(tf.expand_dims(real, -1), found, 0.0), tf.where(real, label, 0), best
    )


def suppressed(boxes: tf.Tensor, valid: tf.Tensor, *, max_overlap: float) -> tf.Tensor:
    """Returns which boxes remain if each one drops later boxes that overlap it too much.

    Shapes:
      boxes: [..., n, 4], the best first; valid: [..., n] bool
      returns: [..., n] bool, False where not valid
    """
    size = boxes.shape[-2]
    number = tf.range(size)
    drops = (box_overlaps(boxes, boxes) > max_overlap) & (
        tf.expand_dims(number, 1) < tf.expand_dims(number, 0)
    )

    def body(i: tf.Tensor, kept: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        is_kept = tf.gather(kept, i, axis=-1)
        dropped = tf.gather(drops, i, axis=-2) & tf.expand_dims(is_kept, -1)
        return i + 1, kept & ~dropped

    _, kept = tf.while_loop(
        lambda i, kept: i < size, body, (tf.constant(0), valid), maximum_iterations=size
    )
    return kept
