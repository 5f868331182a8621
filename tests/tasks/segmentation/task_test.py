"""Segmentation: loss, IoU and Dice by NumPy over a whole pass, pictures, decoding and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from small_masks import Squares
from small_pictures import png

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run.saved_model import ExportModule
from tekso.models.unet import UNet
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.scoring import SegmentationScoring, coloured, side_by_side
from tekso.tasks.segmentation.task import Segmentation


def masks(**params: Any) -> Any:
    given = {"source": Squares.Params(), "image_size": 16, "batch_size": 5, **params}
    return MaskImages.Params(**given)


def task_of(input: Any, **params: Any) -> Any:
    model = UNet.Params(num_scales=2, width=4, convs_per_scale=1)
    return Segmentation.complete(Segmentation.Params(model=model, **params), input).instantiate()


def tensors(batch: Any) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in batch.items()}


def test_loss_and_metrics_of_a_pass_are_those_of_all_its_pixels() -> None:
    params = masks(source=Squares.Params(count=21))
    dev = HeldOut.Params(batch_size=3).instantiate(train=params)  # 7 images in 3 batches
    task = task_of(params.instantiate())
    assert (task.params.num_classes, task.params.model.classes) == (3, 3)
    theta, ctx = task.init(4), StepContext(mode="eval")
    sums: dict[str, Any] = {}
    total = weight = 0.0
    for step in range(dev.num_batches):
        batch = tensors(dev.batch(step))
        one = task.loss(theta, batch, ctx)
        total += float(one.loss_sum)
        weight += float(task.loss_weight(batch))
        for name, pair in one.metrics.items():
            sums[name] = np.add(sums.get(name, (0, 0)), pair)
    figures = task.summarize(sums)

    one = HeldOut.Params(batch_size=7).instantiate(train=params).batch(0)
    logits = task.predict(theta, tensors(one), ctx)["logits"].numpy().astype(np.float64)
    labels, counted = one["labels"], one["labels"] >= 0
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert weight == counted.sum() and not counted.all()
    np.testing.assert_allclose(total / weight, -own[counted].mean(), rtol=1e-5)
    guess = logits.argmax(-1)
    iou, dice = [], []
    for c in range(3):
        a, b = (labels == c) & counted, (guess == c) & counted
        if (a | b).any():
            iou.append((a & b).sum() / (a | b).sum())
            dice.append(2 * (a & b).sum() / (a.sum() + b.sum()))
    assert 0 < np.mean(iou) < 1
    np.testing.assert_allclose(figures["iou"], np.mean(iou), rtol=1e-6)
    np.testing.assert_allclose(figures["dice"], np.mean(dice), rtol=1e-6)
    np.testing.assert_allclose(figures["pixel_accuracy"], (guess == labels)[counted].mean())

    scoring = SegmentationScoring.Params(baselines={"threshold": 0.4}, shown=5)
    scored = task_of(params.instantiate(), scoring=scoring)
    program = EagerProgram(theta)
    assert scored.score(program, dev, is_last=False) is None
    result = scored.score(program, dev, is_last=True)
    assert result.notes == (f"mean IoU {np.mean(iou):.4f}; threshold 0.400",)
    assert result.images["masks"].startswith(b"\x89PNG") and "background" in result.text


def test_guesses_of_classes_without_labels_are_counted_as_such() -> None:
    params = masks(source=Squares.Params(count=21))
    dev = HeldOut.Params(batch_size=7).instantiate(train=params)
    scoring = SegmentationScoring.Params(baselines={"none": 0.0}, shown=0)
    task = task_of(params.instantiate(), scoring=scoring, num_classes=5)  # the masks have 3

    class Guess4(EagerProgram):
        def call(self, function: Any, *inputs: Any) -> Any:
            return {"labels": np.full(np.shape(inputs[0])[:3], 4)}

    result = task.score(Guess4(None), dev, is_last=True)
    assert result.notes == ("mean IoU 0.0000; none 0.000",)
    assert "4 " in result.text


def test_classes_of_palettes_are_those_of_voc() -> None:
    labels = np.array([[0, 1, 2, 3], [8, 20, 255, -1]])
    wanted = [(0, 0, 0), (128, 0, 0), (0, 128, 0), (128, 128, 0), (64, 0, 0), (0, 64, 128)]
    np.testing.assert_array_equal(coloured(labels).reshape(-1, 3)[:6], wanted)
    assert coloured(labels)[1, 3].tolist() == [192, 192, 192]
    shown = side_by_side(np.zeros((2, 4, 1), np.uint8), labels, labels)
    assert shown.shape == (2, 14, 3)


def test_labels_and_classes_are_checked() -> None:
    class Other(Squares):
        class_names = ("background", "dark", "bright")

    input = masks().instantiate()
    task = task_of(input)
    assert task.check_inputs({"input": input}) == []
    input.source.masks[:] = np.where(input.source.masks == 1, 255, 0)
    (warning,) = task.check_inputs({"input": input})
    assert "masks have the values 0 and 255 only" in warning
    input.source.masks[:] = 0
    assert task.check_inputs({"input": input}) == []
    input = masks().instantiate()
    with pytest.raises(
        InputError, match="dev has the classes background, dark, bright; in training"
    ):
        task.check_inputs({"input": input, "dev": masks(source=Other.Params()).instantiate()})
    with pytest.raises(InputError, match=r"a pixel has the class 2, but must be 0 to 1"):
        task_of(input, num_classes=2).check_batch("input.batch(0)", input.batch(0))


def test_files_are_segmented_and_broken_ones_named(tmp_path: Path) -> None:
    input = masks().instantiate()
    (tmp_path / "a.png").write_bytes(png(input.source.images[0]))
    (tmp_path / "b.png").write_bytes(b"")
    task = task_of(input, decode=str(tmp_path / "*"), num_decoded=2)
    program = EagerProgram(task.init(0))
    first, second = task.decode(program, input).records
    assert second["error"] == "the file is empty"
    assert sum(first["shares"].values()) == pytest.approx(1)
    assert set(first["shares"]) <= set(Squares.class_names)

    task = task_of(input, num_decoded=2)
    decoded = task.decode(EagerProgram(task.init(0)), input)
    assert [r["file"] for r in decoded.records] == [f"Squares, dev, record {i}" for i in (0, 2)]


def test_the_exported_function_reads_pixels() -> None:
    params = masks(mean=[0.4], deviation=[0.2])
    input = params.copy().set(order="sequential").instantiate()
    task = task_of(input)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    signature = module.signature(task.exports(input)["segment"], batch_size=2)
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    wanted = task.predict(theta, {"x": tf.constant(input.batch(0)["x"])}, StepContext())["labels"]
    found = signature(images=tf.constant(input.source.images[:5]))["labels"]
    assert np.mean(found == wanted) > 0.99 and len(np.unique(wanted)) > 1
