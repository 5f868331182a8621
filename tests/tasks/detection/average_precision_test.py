"""COCO's average precision against a computation from its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.detection import average_precision as module
from tekso.tasks.detection.average_precision import DetectedObjects, average_precision
from tekso.tasks.detection.sources import Objects

SIZE = (400, 500)


def overlap(a: np.ndarray, b: np.ndarray, *, of_crowd: bool) -> float:
    """Intersection over union; for a crowd b, over the area of a."""
    high, wide = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
    shared = max(high, 0) * max(wide, 0)
    areas = [(x[2] - x[0]) * (x[3] - x[1]) for x in (a, b)]
    return shared / (areas[0] if of_crowd else sum(areas) - shared)


def precision(
    truths: Sequence[Objects], found: Sequence[DetectedObjects], label: int, least: float
) -> float:
    """AP of a class at one overlap, by loops: the mean of 101 interpolated precisions."""
    outcomes: list[tuple[float, bool]] = []
    count = 0
    for objects, one in zip(truths, found, strict=True):
        own = [i for i, c in enumerate(objects.labels) if c == label]
        real = [i for i in own if not objects.is_crowd[i]]
        crowds = [i for i in own if objects.is_crowd[i]]
        count += len(real)
        taken: set[int] = set()
        guesses = [i for i, c in enumerate(one.labels) if c == label]
        for guess in sorted(guesses, key=lambda i: -one.scores[i])[:100]:
            box = one.boxes[guess]
            fits = [
                (overlap(box, objects.boxes[i], of_crowd=False), i) for i in real if i not in taken
            ]
            best = max(fits, default=(0.0, -1))
            if best[0] >= least:
                taken.add(best[1])
                outcomes.append((one.scores[guess], True))
            elif all(overlap(box, objects.boxes[i], of_crowd=True) < least for i in crowds):
                outcomes.append((one.scores[guess], False))
    outcomes.sort(key=lambda pair: -pair[0])
    hits = np.cumsum([hit for _, hit in outcomes])
    recalls = hits / count
    precisions = hits / np.arange(1, len(hits) + 1)
    points = [precisions[recalls >= r - 1e-12].max(initial=0) for r in np.linspace(0, 1, 101)]
    return float(np.mean(points))


def random_case() -> tuple[list[Objects], list[DetectedObjects]]:
    """Objects, and detections near them, elsewhere, doubled, of a wrong class and in crowds."""
    rng = np.random.default_rng(0)
    truths, found = [], []
    for _ in range(12):
        count = int(rng.integers(0, 7))
        low = rng.uniform(0, 250, (count, 2))
        boxes = np.concatenate([low, low + rng.uniform(10, 140, (count, 2))], 1)
        labels, crowd = rng.integers(1, 4, count), rng.random(count) < 0.2
        truths.append(Objects.of(boxes, labels, SIZE, is_crowd=crowd))
        near = np.repeat(boxes, 2, 0) + rng.normal(0, 6, (2 * count, 4))
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 4)
        low = rng.uniform(0, 300, (5, 2))
        guesses = np.concatenate([near, np.concatenate([low, low + 60], 1)])
        classes = np.concatenate([np.repeat(labels, 2), rng.integers(1, 4, 5)])
        scores = rng.permutation(1000)[: len(guesses)] / 1000 + 0.0001 * len(truths)
        found.append(DetectedObjects(guesses, classes, scores))
    return truths, found


def test_it_is_the_mean_of_interpolated_precisions() -> None:
    truths, found = random_case()
    result = average_precision(truths, found, num_classes=4)  # no object has the class 4
    levels = np.linspace(0.5, 0.95, 10)
    table = np.array([[precision(truths, found, c, least) for least in levels] for c in (1, 2, 3)])
    assert 0.2 < table.mean() < 0.9
    np.testing.assert_allclose(result.figures["ap"], table.mean(), atol=1e-9)
    np.testing.assert_allclose(result.figures["ap_50"], table[:, 0].mean(), atol=1e-9)
    np.testing.assert_allclose(result.figures["ap_75"], table[:, 5].mean(), atol=1e-9)
    assert sorted(result.by_class) == [1, 2, 3]
    for row, c in enumerate((1, 2, 3)):
        wanted = table[row].mean(), table[row, 0]
        np.testing.assert_allclose(result.by_class[c], wanted, atol=1e-9)
    lines = result.lines(["a", "b", "c", "d"])
    assert any(line.startswith("b ") and f"{table[1].mean():.3f}" in line for line in lines)


def test_areas_divide_objects_by_size() -> None:
    box = np.array([[0.0, 0, 20, 20]])
    truth = Objects.of(box, [1], SIZE)
    right = DetectedObjects(box, np.array([1]), np.array([0.9]))
    figures = average_precision([truth], [right], num_classes=1).figures
    for name in ("ap", "ap_small", "ar_100"):
        assert figures[name] == pytest.approx(1.0)
    assert "ap_large" not in figures
    large = Objects.of(box, [1], SIZE, areas=[100.0**2])  # the area of a mask may differ
    figures = average_precision([large], [right], num_classes=1).figures
    assert figures["ap_large"] == pytest.approx(1.0) and "ap_small" not in figures


def test_images_without_detections_and_without_objects() -> None:
    nothing = DetectedObjects(np.zeros((0, 4)), np.zeros(0, int), np.zeros(0))
    truth = Objects.of([[0, 0, 9, 9]], [1], SIZE)
    assert average_precision([truth], [nothing], num_classes=1).figures["ap"] == 0.0
    empty = Objects.of(np.zeros((0, 4)), [], SIZE)
    result = average_precision([empty], [nothing], num_classes=1)
    assert result.figures == {} and "ap" not in result.lines(["a"])[0]


def test_without_pycocotools_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pycocotools.coco", None)
    with pytest.raises(InputError, match=r"pip install 'tekso\[images\]', or do not detect"):
        module.pycocotools_modules()
