"""The focal loss of detectors: every default box counts, confident ones little.

Legend: B batch, N default boxes, C classes with the background, 0.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tekso.framework.primitives.precision import widen
from tekso.models.detection.multibox_loss import Matches, box_loss


def focal_scores(logits: tf.Tensor, *, prior: float) -> tf.Tensor:
    """Returns the scores of the classes without the background, whose sigmoids are probabilities.

    A constant makes every probability of a model that returns 0 the prior. (RetinaNet has it as the
    initial bias.)

    Shapes:
      logits: [B, N, C]
      returns: [B, N, C - 1], float32 or wider
    """
    return widen(tf.convert_to_tensor(logits)[:, :, 1:]) + math.log(prior / (1.0 - prior))


def focal_loss(
    logits: tf.Tensor,
    codes: tf.Tensor,
    matches: Matches,
    defaults: tf.Tensor,
    *,
    alpha: float = 0.25,
    gamma: float = 2.0,
    prior: float = 0.01,
    ignored_above: float = 0.4,
) -> tf.Tensor:
    """Returns the loss of every image: smooth L1 of matched boxes, and focal loss of classes.

    With the probability p of a class, its focal loss is -alpha (1 - p)^gamma log p for the class of
    a matched box, and -(1 - alpha) p^gamma log(1 - p) for every other class and box. The sum over
    all boxes and classes is divided by the number of matched boxes, at least 1. A default box that
    is not matched but overlaps an object by `ignored_above` or more does not count.

    Shapes:
      logits: [B, N, C], codes: [B, N, 4], defaults: [N, 4]
      returns: [B], float32 or wider
    Source: Lin et al. 2017, "Focal loss for dense object detection", eq. 5 and section 4.1.
    """
    scores = focal_scores(logits, prior=prior)
    is_class = tf.one_hot(matches.labels - 1, scores.shape[2], dtype=scores.dtype)  # 0: none
    nats = tf.nn.sigmoid_cross_entropy_with_logits(labels=is_class, logits=scores)
    # The log of 1 - the probability of the truth; its power has finite gradients for any gamma.
    log_missing = tf.math.log_sigmoid(scores * (1.0 - 2.0 * is_class))
    share = is_class * alpha + (1.0 - is_class) * (1.0 - alpha)
    positive = matches.labels > 0
    counted = tf.cast(positive | (matches.overlaps < ignored_above), scores.dtype)
    of_boxes = tf.reduce_sum(share * tf.exp(gamma * log_missing) * nats, 2) * counted
    count = tf.reduce_sum(tf.cast(positive, scores.dtype), 1)
    total = tf.reduce_sum(of_boxes, 1) + box_loss(codes, matches, defaults)
    return total / tf.maximum(count, 1.0)
