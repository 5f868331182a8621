"""Volumes: crops and flips, loss and IoU by NumPy over a whole pass, files, and export."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run.saved_model import ExportModule
from tekso.models.unet import UNet3D
from tekso.tasks.segmentation.scoring import SegmentationScoring
from tekso.tasks.segmentation.shape_volumes import ShapeVolumes
from tekso.tasks.segmentation.volume_input import Volumes
from tekso.tasks.segmentation.volume_sources import VolumeArrays, VolumeFolders
from tekso.tasks.segmentation.volumes import VolumeSegmentation

SHAPE = (4, 8, 12)


class Numbered(VolumeArrays):
    """Every voxel has a number of its own; its label is the number modulo 3, or 255."""

    class_names = ("a", "b", "c")

    def load(self, split: str) -> Mapping[str, Any]:
        count = 7
        x = np.arange(count * 6 * 8 * 10).reshape(count, 6, 8, 10)
        labels = (x % 3).astype(np.uint8)
        labels[x % 11 == 0] = 255
        return {"volumes": x, "labels": labels}


def volumes(**params: Any) -> Any:
    given = {"source": Numbered.Params(), "volume_shape": SHAPE, "batch_size": 7, **params}
    return Volumes.Params(**given)


def task_of(input: Any, **params: Any) -> Any:
    model = UNet3D.Params(num_scales=2, width=2)
    given = VolumeSegmentation.Params(model=model, **params)
    return VolumeSegmentation.complete(given, input).instantiate()


def test_an_evaluation_has_the_centres_and_counts_no_padding() -> None:
    input = volumes(order="once", mean=[3.0], deviation=[2.0]).instantiate()
    batch = input.batch(0)
    assert {n: (a.shape, a.dtype) for n, a in batch.items()} == Volumes.signature(input.params)
    own = input.source.volumes[:, 1:5]  # depth 4 of 6; height 8; width 10 of 12
    np.testing.assert_allclose(batch["x"][..., :10, :], (own - 3) / 2)
    assert not batch["x"][..., 10:, :].any() and (batch["labels"][..., 10:] == -1).all()
    labels = input.source.labels[:, 1:5].astype(np.int32)
    np.testing.assert_array_equal(batch["labels"][..., :10], np.where(labels == 255, -1, labels))


def test_labels_follow_the_voxels_of_crops_and_flips() -> None:
    params = volumes(volume_shape=(3, 4, 6), flips=["depth", "width"])
    batch = params.instantiate(seed=1).batch(0)
    x, labels = batch["x"][..., 0].astype(np.int64), batch["labels"]
    np.testing.assert_array_equal(labels, np.where(x % 11 == 0, -1, x % 3))
    assert {bool(one[-1, 0, 0] > one[0, 0, 0]) for one in x} == {True, False}  # along depth
    assert (np.diff(x, axis=2) > 0).all()  # none along height
    assert len({int(one.min()) % 480 for one in x}) > 2  # other places
    again = params.instantiate(seed=1).examples(np.arange(7), np.zeros(7, np.int64))
    rows = {one.tobytes() for one in again["x"]}
    assert {one.tobytes() for one in batch["x"]} == rows  # of (seed, epoch, index) only


def test_loss_and_metrics_of_a_pass_are_those_of_all_its_voxels() -> None:
    params = volumes(mean=[1500.0], deviation=[1000.0])
    dev = HeldOut.Params(batch_size=3).instantiate(train=params)  # 7 volumes in 3 batches
    task = task_of(params.instantiate(), scoring=SegmentationScoring.Params(baselines={"b": 0.2}))
    assert (task.params.num_classes, task.params.model.classes, task.params.model.channels) == (
        3, 3, 1,
    )  # fmt: skip
    assert task.check_inputs({"input": params.instantiate(), "dev": dev}) == []
    theta, ctx, sums, total, weight = task.init(4), StepContext(mode="eval"), {}, 0.0, 0.0
    for step in range(dev.num_batches):
        batch = {name: tf.constant(array) for name, array in dev.batch(step).items()}
        one = task.loss(theta, batch, ctx)
        total += float(one.loss_sum)
        weight += float(task.loss_weight(batch))
        for name, pair in one.metrics.items():
            sums[name] = np.add(sums.get(name, (0, 0)), pair)
    figures = task.summarize(sums)

    whole = HeldOut.Params(batch_size=7).instantiate(train=params).batch(0)
    logits = task.predict(theta, {"x": tf.constant(whole["x"])}, ctx)["logits"].numpy()
    logits, labels = logits.astype(np.float64), whole["labels"]
    counted = labels >= 0
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    own = np.take_along_axis(logs, np.maximum(labels, 0)[..., None], -1)[..., 0]
    assert weight == counted.sum() and not counted.all()
    np.testing.assert_allclose(total / weight, -own[counted].mean(), rtol=1e-5)
    guess, iou = logits.argmax(-1), []
    for c in range(3):
        a, b = (labels == c) & counted, (guess == c) & counted
        iou.append((a & b).sum() / (a | b).sum())
    np.testing.assert_allclose(figures["iou"], np.mean(iou), rtol=1e-6)
    dice = np.mean([2 * one / (1 + one) for one in iou])
    np.testing.assert_allclose(figures["dice"], dice, rtol=1e-6)

    result = task.score(EagerProgram(theta), dev, is_last=True)
    assert result.notes == (f"mean IoU {np.mean(iou):.4f}; b 0.200",)
    assert result.images["masks"].startswith(b"\x89PNG")


def test_files_are_read_and_malformed_ones_named(tmp_path: Path) -> None:
    source = Numbered.Params().instantiate()
    for i in range(3):
        arrays = {"volume": source.volumes[i], "labels": source.labels[i]}
        np.savez(tmp_path / f"{i}.npz", **arrays)
    np.savez(tmp_path / "3.npz", volume=source.volumes[0])
    np.savez(tmp_path / "4.npz", volume=source.volumes[0], labels=source.labels[0, :2])
    np.savez(tmp_path / "5.npz", volume=source.volumes[0] * np.nan, labels=source.labels[0])
    np.savez(tmp_path / "6.npz", volume=source.volumes[0], labels=source.labels[0] + np.uint8(2))
    (tmp_path / "7.npz").write_bytes(b"no archive")
    folder = VolumeFolders.Params(folder=str(tmp_path), classes=["a", "b", "c"], dev_fraction=0.0)
    input = volumes(source=folder, order="once", batch_size=8).instantiate()
    batch = input.batch(0)
    assert batch["weights"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    np.testing.assert_array_equal(batch["x"][3], batch["x"][0])  # for BatchNorm
    report = str(input.skipped())
    for reason in (
        "it has no array 'labels', but volume",
        "'labels' is [2, 8, 10] uint8, but must be [6, 8, 10] integers",
        "values that are not finite",
        "its labels have the value 4, but the source has 3 classes: values must be 0 to 2, or 255",
        "not a readable .npz file",
    ):
        assert reason in report, reason

    task = task_of(input, decode=f"{tmp_path}/[07].npz")
    first, second = task.decode(EagerProgram(task.init(0)), input).records
    assert sum(first["shares"].values()) == pytest.approx(1) and set(first["shares"]) <= set("abc")
    assert second["error"].startswith("not a readable .npz file")
    assert not task.makes_pictures()
    with pytest.raises(InputError, match=r"folder: there is no folder '.*/none'"):
        folder.copy().set(folder=str(tmp_path / "none")).instantiate()
    with pytest.raises(InputError, match=r"set .*dev_folder, or a dev_fraction above 0$"):
        folder.instantiate(split="dev")


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"volume_shape is \(0, 8, 12\) and channels is 1"):
        volumes(volume_shape=(0, 8, 12)).instantiate()
    with pytest.raises(ValueError, match=r"mean has 2 numbers, but must have 1 or 1"):
        volumes(mean=[0.0, 1.0]).instantiate()
    with pytest.raises(ValueError, match="must be positive"):
        volumes(deviation=[0.0]).instantiate()


def test_the_exported_function_normalises_values() -> None:
    input = volumes(order="once", mean=[1500.0], deviation=[1000.0]).instantiate()
    task = task_of(input)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    signature = module.signature(task.exports(input)["segment"], batch_size=7)
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    x = input.batch(0)["x"]
    wanted = task.predict(theta, {"x": tf.constant(x)}, StepContext())["labels"]
    found = signature(volumes=tf.constant(x * 1000 + 1500))["labels"]
    assert np.mean(found == wanted) > 0.99 and len(np.unique(wanted)) > 1


def test_synthetic_shapes_repeat_and_are_bright() -> None:
    params = ShapeVolumes.Params(num_train=3, num_held_out=2)
    train, again, dev = (params.instantiate(split=s) for s in ("train", "train", "dev"))
    assert train.fingerprint() == again.fingerprint() and (len(train), len(dev)) == (3, 2)
    assert set(np.unique(train.labels)) == {0, 1, 2, 3}
    means = [train.volumes[..., 0][train.labels == c].mean() for c in range(4)]
    np.testing.assert_allclose(means, [0, 1, 1, 1], atol=0.05)
