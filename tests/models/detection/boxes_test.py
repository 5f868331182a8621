"""Default boxes, coding, matching, loss and suppression against loops in NumPy."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import tensorflow as tf

from tekso.models.detection.box_coding import box_overlaps, decode_boxes, encode_boxes
from tekso.models.detection.default_boxes import SSD300, BoxLevels, default_boxes
from tekso.models.detection.focal_loss import focal_loss
from tekso.models.detection.multibox_loss import Matches, match_boxes, multibox_loss
from tekso.models.detection.suppression import detections

SMALL = BoxLevels(32, (4, 2), (8, 16), (6, 14, 30), ((2,), (2, 3)))
DEFAULTS = default_boxes(SMALL)


def random_boxes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    low = rng.uniform(0, 0.7, (*shape, 2))
    return np.concatenate([low, low + rng.uniform(0.1, 0.3, (*shape, 2))], -1).astype(np.float32)


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    sides = [min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1)]
    shared = max(sides[0], 0) * max(sides[1], 0)
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    return shared / (sum(areas) - shared)


def test_ssd300_has_8732_boxes() -> None:
    boxes = default_boxes(SSD300)
    assert boxes.shape == (8732, 4) and boxes.dtype == np.float32
    assert SSD300.boxes_per_place() == (4, 6, 6, 6, 4, 4)
    assert boxes.min() == 0 and boxes.max() == 1
    # A place inside the first map: row 10, column 20; all shapes have its centre.
    centre = np.array([(10.5 * 8) / 300, (20.5 * 8) / 300])
    place = boxes[10 * 38 + 20 : 4 * 38 * 38 : 38 * 38]
    np.testing.assert_allclose((place[:, :2] + place[:, 2:]) / 2, [centre] * 4, rtol=1e-5)
    mean, root = math.sqrt(21 * 45), math.sqrt(2)
    sizes = [(21, 21), (mean, mean), (21 / root, 21 * root), (21 * root, 21 / root)]
    np.testing.assert_allclose((place[:, 2:] - place[:, :2]) * 300, sizes, rtol=1e-4)
    np.testing.assert_allclose(boxes[-4], [0.065, 0.065, 0.935, 0.935], atol=1e-6)  # 261 of 300


def test_coding_and_overlaps() -> None:
    rng = np.random.default_rng(0)
    boxes = random_boxes(rng, 2, len(DEFAULTS))
    codes = encode_boxes(boxes, DEFAULTS).numpy()
    d, b = DEFAULTS[5], boxes[1, 5]
    height, width = d[2] - d[0], d[3] - d[1]
    wanted = [
        ((b[0] + b[2] - d[0] - d[2]) / 2) / height / 0.1,
        ((b[1] + b[3] - d[1] - d[3]) / 2) / width / 0.1,
        math.log((b[2] - b[0]) / height) / 0.2,
        math.log((b[3] - b[1]) / width) / 0.2,
    ]
    np.testing.assert_allclose(codes[1, 5], wanted, rtol=1e-4)
    np.testing.assert_allclose(decode_boxes(codes, DEFAULTS), boxes, rtol=1e-4, atol=1e-5)
    found = box_overlaps(boxes[:, :7], boxes[:, 7:12])
    for i, j, k in itertools.product(range(2), range(7), range(5)):
        wanted_one = overlap(boxes[i, j], boxes[i, 7 + k])
        np.testing.assert_allclose(found[i, j, k], wanted_one, rtol=1e-4, atol=1e-6)
    empty = tf.zeros([1, 4])
    assert float(box_overlaps(empty, empty)[0, 0]) == 0


def matched(boxes: np.ndarray, labels: np.ndarray) -> tuple[list[int], list[int]]:
    """Labels and objects of the default boxes of one image, by loops."""
    real = [m for m in range(len(boxes)) if labels[m] > 0]
    found, objects = [0] * len(DEFAULTS), [-1] * len(DEFAULTS)
    for n, default in enumerate(DEFAULTS):
        best = max(real, key=lambda m: (overlap(boxes[m], default), -m), default=None)
        if best is not None and overlap(boxes[best], default) > 0.5:
            found[n], objects[n] = int(labels[best]), best
    for m in real:
        n = max(range(len(DEFAULTS)), key=lambda n: (overlap(boxes[m], DEFAULTS[n]), -n))
        found[n], objects[n] = int(labels[m]), m
    return found, objects


def test_matching() -> None:
    rng = np.random.default_rng(1)
    boxes = random_boxes(rng, 5, 4)
    boxes[2, 1] = boxes[2, 0]  # two objects with the same best default box: the last one gets it
    labels = rng.integers(1, 5, (5, 4))
    labels[:, 3] = 0
    labels[4] = 0  # no object at all
    matches = match_boxes(tf.constant(boxes), tf.constant(labels), tf.constant(DEFAULTS))
    for i in range(5):
        wanted, objects = matched(boxes[i], labels[i])
        np.testing.assert_array_equal(matches.labels[i], wanted)
        own = [n for n, m in enumerate(objects) if m >= 0]
        np.testing.assert_array_equal(
            matches.boxes.numpy()[i, own], boxes[i, [objects[n] for n in own]]
        )
    assert not np.any(matches.labels[4])
    assert all(np.sum(matches.labels[i] > 0) >= 2 for i in range(4))


def test_objects_outside_of_the_image_are_not_matched() -> None:
    inside, outside = [0.1, 0.1, 0.4, 0.4], [0.2, 1.0, 0.7, 1.0]  # cut off at the right border
    boxes, labels = tf.constant([[inside, outside]]), tf.constant([[1, 2]])
    found = match_boxes(boxes, labels, tf.constant(DEFAULTS)).labels.numpy()
    assert (found == 1).any() and not (found == 2).any()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-12)])
def test_loss_takes_three_hard_negatives_for_each_match(dtype: str, tolerance: float) -> None:
    rng = np.random.default_rng(2)
    size, classes = len(DEFAULTS), 4
    logits = rng.normal(size=(3, size, classes)).astype(dtype)
    codes = (rng.normal(size=(3, size, 4)) * 2).astype(dtype)
    labels = np.zeros((3, size), np.int32)
    labels[0, [3, 40]], labels[1, 7] = [2, 1], 3
    boxes = random_boxes(rng, 3, size)
    overlaps = tf.zeros(labels.shape)
    matches = Matches(tf.constant(labels), tf.constant(boxes), overlaps)
    inputs = (tf.constant(logits), tf.constant(codes), matches, tf.constant(DEFAULTS))
    found = tf.function(lambda: multibox_loss(*inputs))()  # a graph does not cast constants
    targets = encode_boxes(boxes.astype(dtype), DEFAULTS.astype(dtype)).numpy()
    log_sum = np.log(np.exp(logits).sum(-1))
    nats = log_sum - np.take_along_axis(logits, labels[..., None], 2)[..., 0]
    for i in (0, 1):
        own = np.flatnonzero(labels[i])
        apart = np.abs(codes[i, own] - targets[i, own])
        of_boxes = np.where(apart < 1, apart**2 / 2, apart - 0.5).sum()
        hard = np.sort(np.delete(nats[i], own))[::-1][: 3 * len(own)]
        wanted = (of_boxes + nats[i, own].sum() + hard.sum()) / len(own)
        np.testing.assert_allclose(found[i], wanted, rtol=tolerance)
    assert float(found[2]) == 0
    x = tf.constant(codes)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(multibox_loss(tf.constant(logits), x, matches, DEFAULTS))
    gradient = tape.gradient(loss, x).numpy()
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(np.any(gradient != 0, -1), labels > 0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float64", 1e-12)])
def test_focal_loss_is_that_of_the_paper_for_every_box_and_class(
    dtype: str, tolerance: float
) -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 2, (3, len(DEFAULTS), 4)).astype(dtype)
    codes = rng.normal(size=(3, len(DEFAULTS), 4)).astype(dtype)
    boxes = random_boxes(rng, 3, 2)
    labels = np.array([[1, 3], [2, 0], [0, 0]])
    matches = match_boxes(boxes, labels, DEFAULTS)
    options = {"alpha": 0.3, "gamma": 1.5, "prior": 0.05, "ignored_above": 0.2}
    inputs = (logits, codes, matches, tf.constant(DEFAULTS))
    found = tf.function(lambda: focal_loss(*inputs, **options))()
    targets = encode_boxes(tf.cast(matches.boxes, dtype), DEFAULTS.astype(dtype)).numpy()
    ignored = 0
    for i in range(3):
        total, count = 0.0, 0
        real = boxes[i][labels[i] > 0]
        for n, default in enumerate(DEFAULTS):
            label = int(matches.labels[i, n])
            if label:
                count += 1
                apart = np.abs(codes[i, n] - targets[i, n]).astype(np.float64)
                total += np.where(apart < 1, apart**2 / 2, apart - 0.5).sum()
            elif max((overlap(one, default) for one in real), default=0) >= 0.2:
                ignored += 1
                continue
            for c in (1, 2, 3):
                p = 1 / (1 + np.exp(-(logits[i, n, c] + np.log(0.05 / 0.95))))
                if c == label:
                    total -= 0.3 * (1 - p) ** 1.5 * np.log(p)
                else:
                    total -= 0.7 * p**1.5 * np.log(1 - p)
        assert (count == 0) == (i == 2)
        np.testing.assert_allclose(found[i], total / max(count, 1), rtol=tolerance)
    assert ignored > 2

    # Published: with gamma 2, a confident background box counts a hundredth of its cross-entropy.
    one = Matches(tf.zeros((1, 1), tf.int32), tf.zeros((1, 1, 4)), tf.zeros((1, 1)))
    score = tf.constant([[[0.0, math.log(0.1 / 0.9)]]])
    loss = focal_loss(score, tf.zeros((1, 1, 4)), one, DEFAULTS[:1], prior=0.5)
    np.testing.assert_allclose(loss, [-0.75 * 0.01 * math.log(0.9)], rtol=1e-5)


def test_suppression_of_each_class() -> None:
    rng = np.random.default_rng(3)
    boxes = random_boxes(rng, 2, 30)
    scores = rng.dirichlet([0.5] * 4, (2, 30)).astype(np.float32)
    found = detections(
        tf.constant(scores), tf.constant(boxes), candidates=20, max_overlap=0.3, most=25
    )
    for i in range(2):
        wanted: list[tuple[float, int, int]] = []
        for c in range(1, 4):
            order = [n for n in np.argsort(-scores[i, :, c])[:20] if scores[i, n, c] > 0.05]
            kept: list[int] = []
            for n in order:
                if all(overlap(boxes[i, n], boxes[i, k]) <= 0.3 for k in kept):
                    kept.append(int(n))
            wanted += [(float(scores[i, n, c]), c, n) for n in kept]
        wanted = sorted(wanted, reverse=True)[:25]
        count = len(wanted)
        np.testing.assert_allclose(found.scores[i, :count], [w[0] for w in wanted])
        np.testing.assert_array_equal(found.labels[i, :count], [w[1] for w in wanted])
        np.testing.assert_array_equal(found.boxes[i, :count], boxes[i, [w[2] for w in wanted]])
        assert not np.any(found.scores[i, count:]) and not np.any(found.labels[i, count:])
