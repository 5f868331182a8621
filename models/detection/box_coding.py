"""Boxes as differences from default boxes, and overlaps of boxes.

All boxes are [y_min, x_min, y_max, x_max]. Functions are pure and of static shapes.
"""

from __future__ import annotations

import tensorflow as tf

CENTRE_SCALE, SIZE_SCALE = 0.1, 0.2
"""Standard deviations that differences of centres and of log sizes are divided by (SSD)."""


def encode_boxes(boxes: tf.Tensor, defaults: tf.Tensor) -> tf.Tensor:
    """Returns boxes relative to default boxes: [dy, dx, log height, log width], scaled.

    Shapes:
      boxes: [..., boxes, 4], defaults: [boxes, 4]
      returns: [..., boxes, 4]
    Source: Liu et al. 2016, eq. 2, with the variances of the authors' code.
    """
    centre, size = _centre_and_size(boxes)
    base, base_size = _centre_and_size(defaults)
    moved = (centre - base) / base_size / CENTRE_SCALE
    grown = tf.math.log(tf.maximum(size, 1e-8) / base_size) / SIZE_SCALE
    return tf.concat([moved, grown], len(moved.shape) - 1)


def decode_boxes(codes: tf.Tensor, defaults: tf.Tensor) -> tf.Tensor:
    """Returns the boxes of codes; the inverse of `encode_boxes`.

    Shapes:
      codes: [..., boxes, 4], defaults: [boxes, 4]
      returns: [..., boxes, 4]
    """
    base, base_size = _centre_and_size(defaults)
    centre = codes[..., :2] * CENTRE_SCALE * base_size + base
    half = tf.exp(codes[..., 2:] * SIZE_SCALE) * base_size / 2
    return tf.concat([centre - half, centre + half], len(half.shape) - 1)


def box_overlaps(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Returns intersection over union of every box of a with every box of b; 0 for empty boxes.

    Shapes:
      a: [..., n, 4], b: [..., m, 4]
      returns: [..., n, m]
    """
    a, b = tf.expand_dims(a, -2), tf.expand_dims(b, -3)
    low, high = tf.maximum(a[..., :2], b[..., :2]), tf.minimum(a[..., 2:], b[..., 2:])
    shared = tf.reduce_prod(tf.maximum(high - low, 0), -1)
    areas = [tf.reduce_prod(tf.maximum(x[..., 2:] - x[..., :2], 0), -1) for x in (a, b)]
    union = areas[0] + areas[1] - shared
    return tf.where(union > 0, shared / tf.where(union > 0, union, 1), 0)


def _centre_and_size(boxes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    low, high = boxes[..., :2], boxes[..., 2:]
    return (low + high) / 2, high - low
