"""SSD300 with a ResNet-34: model and loss in PyTorch, matching and suppression in NumPy.

Boxes are [y_min, x_min, y_max, x_max] in shares of the image.

Source: Liu et al. 2016, "SSD: single shot multibox detector"; sizes and backbone of MLPerf 0.6.

Legend: B images, N default boxes, M objects of an image, C classes with the background, 0.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  its usual name

from benchmarks.frameworks.pytorch_images import Network
from benchmarks.image_gradients import MAX_OVERLAP, MIN_SCORE, MOST

Array = np.ndarray[Any, Any]

CLASSES = 81
LEVELS = (
    *((38, 8, 21, 45, (2,)), (19, 16, 45, 99, (2, 3)), (10, 32, 99, 153, (2, 3))),
    *((5, 64, 153, 207, (2, 3)), (3, 100, 207, 261, (2,)), (1, 300, 261, 315, (2,))),
)
"""Of each map: size, distance of boxes, side of the small and of the large square, and ratios."""


def ssd300(net: Network, x: Any) -> dict[str, Any]:
    """Returns logits [B, N, C] and codes [B, N, 4]."""
    x, number = net.stem(x), 0
    for group, count in enumerate((3, 4, 6)):
        for i in range(count):
            stride, projects = (2 if group == 1 and i == 0 else 1), group > 0 and i == 0
            x = net.residual(f"blocks/{number}", x, (stride, 1), projects=projects)
            number += 1
    found: dict[str, list[Any]] = {"logits": [], "codes": []}
    for i in range(6):
        if i > 0:
            x = F.relu(net.conv(f"maps/{i - 1}/layers/0", x))
            x = F.relu(net.conv(f"maps/{i - 1}/layers/1", x, *((2, 1) if i < 4 else (1, 0))))
        for key, heads, size in (("logits", "class_heads", CLASSES), ("codes", "box_heads", 4)):
            y = net.conv(f"{heads}/{i}", x, padding=1)
            y = y.unflatten(1, (-1, size)).movedim(2, -1)
            found[key].append(y.reshape(len(x), -1, size))
    return {key: torch.cat(parts, 1) for key, parts in found.items()}


def default_boxes() -> Array:
    """Returns the default boxes [N, 4], cut off at the border, in float32."""
    boxes = []
    for size, step, small, large, ratios in LEVELS:
        shapes = [(small, small), (math.sqrt(small * large),) * 2]
        for ratio in ratios:
            shapes.append((small / math.sqrt(ratio), small * math.sqrt(ratio)))
            shapes.append((small * math.sqrt(ratio), small / math.sqrt(ratio)))
        for (height, width), i, j in itertools.product(shapes, range(size), range(size)):
            y, x = (i + 0.5) * step, (j + 0.5) * step
            boxes.append([y - height / 2, x - width / 2, y + height / 2, x + width / 2])
    return np.clip(np.array(boxes) / 300, 0, 1).astype(np.float32)


def overlap(a: Array, b: Array) -> Array:
    """Returns intersection over union of a box with every box of b [n, 4]; 0 for empty boxes."""
    height = np.minimum(a[2], b[:, 2]) - np.maximum(a[0], b[:, 0])
    width = np.minimum(a[3], b[:, 3]) - np.maximum(a[1], b[:, 1])
    shared = np.maximum(height, 0) * np.maximum(width, 0)
    area = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) + (a[2] - a[0]) * (a[3] - a[1])
    union = area - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def matched(boxes: Array, labels: Array, defaults: Array) -> tuple[Array, Array]:
    """Returns the object of each default box, -1 for none, and its label; of one image."""
    best, owner = np.full(len(defaults), 0.5), np.full(len(defaults), -1)
    overlaps = {m: overlap(boxes[m], defaults) for m in np.flatnonzero(labels)}
    for m, found in overlaps.items():
        better = found > best
        best[better], owner[better] = found[better], m
    for m, found in overlaps.items():
        if found.max() > 0:
            owner[found.argmax()] = m
    return owner, np.where(owner < 0, 0, labels[owner])


def multibox(y: dict[str, Any], batch: dict[str, Array], training: bool) -> dict[str, Any]:
    """Returns outputs, matches and losses; in evaluation also default boxes and detections."""
    defaults = default_boxes().astype(np.float64)
    losses, matches = [], []
    for logits, codes, boxes, labels in zip(
        y["logits"], y["codes"], batch["boxes"], batch["labels"], strict=True
    ):
        owner, label = matched(boxes, labels, defaults)
        positive = np.flatnonzero(owner >= 0)
        target = torch.from_numpy(encoded(boxes[owner[positive]], defaults[positive]))
        of_boxes = F.smooth_l1_loss(codes[positive], target, reduction="sum")
        nats = F.cross_entropy(logits, torch.from_numpy(label), reduction="none")
        background = nats[np.flatnonzero(owner < 0)]
        hard = background.sort(descending=True).values[: 3 * len(positive)]
        losses.append((of_boxes + nats[positive].sum() + hard.sum()) / len(positive))
        matches.append(torch.from_numpy(label))
    total = torch.stack(losses)
    found = {**y, "matches": torch.stack(matches), "losses": total, "loss": total.mean()}
    if training:
        return found
    found["defaults"] = torch.from_numpy(defaults)
    images = zip(y["logits"].softmax(2), y["codes"], strict=True)
    best = [detected(p.detach().numpy(), c.detach().numpy(), defaults) for p, c in images]
    for key in best[0]:
        found[f"detections/{key}"] = torch.from_numpy(np.stack([image[key] for image in best]))
    return found


def encoded(boxes: Array, defaults: Array) -> Array:
    """Returns boxes as differences from default boxes, with the variances 0.1 and 0.2."""
    size, base = boxes[:, 2:] - boxes[:, :2], defaults[:, 2:] - defaults[:, :2]
    moved = (boxes[:, :2] + boxes[:, 2:] - defaults[:, :2] - defaults[:, 2:]) / 2 / base / 0.1
    return np.concatenate([moved, np.log(size / base) / 0.2], 1)


def detected(probabilities: Array, codes: Array, defaults: Array) -> dict[str, Array]:
    """Returns the detections of an image, the best first; each box drops those it overlaps."""
    base = defaults[:, 2:] - defaults[:, :2]
    centre = codes[:, :2] * 0.1 * base + (defaults[:, :2] + defaults[:, 2:]) / 2
    size = np.exp(codes[:, 2:] * 0.2) * base
    boxes = np.concatenate([centre - size / 2, centre + size / 2], 1)
    rows = []
    for label in range(1, CLASSES):
        scores = probabilities[:, label]
        rest = np.argsort(-scores)[:MOST]
        rest = rest[scores[rest] > MIN_SCORE]
        while len(rest):
            first, rest = rest[0], rest[1:]
            rows.append((scores[first], label, *boxes[first]))
            rest = rest[overlap(boxes[first], boxes[rest]) <= MAX_OVERLAP]
    table = np.zeros((MOST, 6))
    best = np.array(sorted(rows, reverse=True)[:MOST]).reshape(-1, 6)
    table[: len(best)] = best
    return {"scores": table[:, 0], "labels": table[:, 1].astype(np.int64), "boxes": table[:, 2:]}
