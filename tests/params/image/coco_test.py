"""The experiments on COCO: numbers of weights, without data."""

from __future__ import annotations

from tekso.framework import registry
from tekso.framework.run import inspection


def test_the_captioner_has_the_weights_of_its_parts() -> None:
    task = inspection.task_of(registry.get("image.coco.Captions")().tree())
    count = sum(spec.size for spec in task.specs().values() if spec.trainable)
    resnet = 25_557_032 - 2049 * 1000  # ResNet-50 without its classifier
    memory = 2048 * 512 + 512 + 49 * 512 + 2 * 512
    attention, feed_forward = 4 * (512 * 512 + 512), 2 * 512 * 2048 + 2048 + 512
    decoder = 6 * (2 * attention + feed_forward + 3 * 2 * 512) + 2 * 512
    assert count == resnet + memory + decoder + 10_000 * 512  # one table for input and softmax
