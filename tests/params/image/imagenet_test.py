"""The published recipes of ImageNet: counts, schedules, and what is decayed."""

from __future__ import annotations

import numpy as np
import pytest

from tekso.framework import registry, schedules
from tekso.framework.run import inspection


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("ResNet18", 11_689_512),
        ("ResNet50", 25_557_032),
        ("ResNet50Mlperf", 25_557_032),
        ("AmoebaNetDL18F208", 81_505_540),
        ("AmoebaNetBL18F512", 557_286_057),
        ("ViTTi16", 5_717_416),
        ("ViTS16", 22_050_664),
        ("ViTB16", 86_567_656),
        ("ViTL16", 304_326_632),
    ],
)
def test_trainable_weights_are_the_published_number(name: str, count: int) -> None:
    task = inspection.task_of(registry.get(f"image.imagenet.{name}")().tree())
    assert sum(spec.size for spec in task.specs().values() if spec.trainable) == count


def test_mlperf_normalises_over_128_images_and_the_plain_recipe_over_all() -> None:
    for name, group in (("ResNet50", None), ("ResNet50Mlperf", 128), ("ResNet50Mlperf4096", 128)):
        task = inspection.task_of(registry.get(f"image.imagenet.{name}")().tree())
        layers = [task.model.stem.conv, *(c for block in task.model.blocks for c in block.convs)]
        layers += [block.shortcut for block in task.model.blocks if hasattr(block, "shortcut")]
        assert len(layers) == 53 and {one.norm.params.group for one in layers} == {group}


def test_decay_leaves_out_normalisations_and_the_bias() -> None:
    for name in ("ResNet50", "ResNet50Mlperf"):
        tree = registry.get(f"image.imagenet.{name}")().tree()
        learner = schedules.end_with_run(tree.learner, tree.run.steps).instantiate()
        specs = [spec for spec in inspection.task_of(tree).specs().values() if spec.trainable]
        decayed = {spec.path for spec in specs if learner.optimizer.decays(spec)}
        assert decayed == {spec.path for spec in specs if spec.path.endswith("/w")}
        assert len(decayed) == 54


def rate(name: str, step: int) -> float:
    tree = registry.get(f"image.imagenet.{name}")().tree()
    learner = schedules.end_with_run(tree.learner, tree.run.steps)
    return float(learner.schedule.instantiate()(step))


def test_the_plain_schedule_falls_by_ten_at_30_60_and_80_epochs() -> None:
    tree = registry.get("image.imagenet.ResNet50")().tree()
    assert (tree.run.steps, tree.input.batch_size) == (112_590, 1024)
    expected = {0: 0.0, 1251: 0.08, 5 * 1251: 0.4, 30 * 1251: 0.04, 60 * 1251: 4e-3, 112_589: 4e-4}
    for step, value in expected.items():
        assert rate("ResNet50", step) == pytest.approx(value, rel=1e-5)


def test_the_schedule_of_mlperf_is_a_polynomial_over_2007_steps() -> None:
    for step in (976, 1500, 2900):
        left = (2983 - step) / 2007
        assert rate("ResNet50Mlperf", step) == pytest.approx(1e-4 + (33 - 1e-4) * left**2, rel=1e-4)
    assert rate("ResNet50Mlperf", 488) == pytest.approx(33 / 2)
    epochs = 32_768 * np.array([976, 2983]) / 1_281_167
    np.testing.assert_allclose(epochs, [25, 76], atol=0.4)
