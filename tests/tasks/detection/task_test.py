"""Detection: what counts in the loss, scores of planted detections, decoding and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from small_boxes import Rectangles
from small_pictures import png

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run import litert
from tekso.framework.run.saved_model import ExportModule
from tekso.models.detection.box_coding import encode_boxes
from tekso.models.detection.multibox_loss import match_boxes, multibox_loss
from tekso.models.ssd import Ssd
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.losses import FocalLoss, HardNegativeMining
from tekso.tasks.detection.scoring import DetectionScoring
from tekso.tasks.detection.sources import Objects
from tekso.tasks.detection.task import Detection
from tekso.tasks.image.image_input import KnownImages


def boxes(**params: Any) -> Any:
    given = {"source": Rectangles.Params(), "image_size": 48, "batch_size": 5, "max_boxes": 3}
    return BoxImages.Params(**{**given, **params})


def task_of(input: Any, **params: Any) -> Any:
    model = Ssd.Params(width=4, num_blocks=[1, 1, 1], steps=[8, 16, 48], scales=[10, 20, 30, 40])
    model.set(aspect_ratios=[[2], [2, 3], [2]])
    return Detection.complete(Detection.Params(model=model, **params), input).instantiate()


class Planted(Detection):
    """Finds what it is told."""

    class Params(Detection.Params):
        """Params of Planted."""

    outputs: Any

    def answer(self, theta: Any, x: tf.Tensor, ctx: Any) -> dict[str, tf.Tensor]:
        del theta, ctx
        return self.outputs.pop(0)


def tensors(batch: Any) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in batch.items()}


def test_sizes_are_taken_from_the_input() -> None:
    task = task_of(boxes(channels=1).instantiate())
    p = task.params
    assert (p.num_classes, p.model.classes, p.model.image_size, p.model.channels) == (2, 3, 48, 1)


def test_loss_is_the_weighted_sum_over_images_and_boxes_of_weight_0_do_not_count() -> None:
    input = boxes().instantiate()
    task = task_of(input)
    theta, batch = task.init(0), input.batch(0)
    batch["weights"] = np.array([1, 0, 2, 1, 0.5], np.float32)
    batch["labels"][2, 1], batch["boxes"][2, 1] = 2, [0.1, 0.1, 0.9, 0.9]  # a crowd
    ctx = StepContext(mode="eval")
    sums = task.loss(theta, tensors(batch), ctx)
    assert float(task.loss_weight(tensors(batch))) == 4.5

    outputs, defaults = task.model.fprop(theta.model, batch["x"], ctx), task.model.default_boxes()
    total, matched = 0.0, 0
    for row, weight in enumerate(batch["weights"]):
        found = match_boxes(batch["boxes"][row][None, :1], batch["labels"][row][None, :1], defaults)
        own = [outputs[name][row : row + 1] for name in ("logits", "codes")]
        total += weight * float(multibox_loss(*own, found, defaults)[0])
        matched += weight * np.sum(found.labels > 0)
    np.testing.assert_allclose(sums.loss_sum, total, rtol=1e-5)
    np.testing.assert_allclose(sums.metrics["matched_boxes"], [matched, 4.5], rtol=1e-6)


def test_outputs_that_are_the_targets_are_found() -> None:
    input = boxes().instantiate()
    task, batch = task_of(input), input.batch(0)
    defaults = task.model.default_boxes()
    matches = match_boxes(batch["boxes"], batch["labels"], defaults)
    logits = 8.0 * tf.one_hot(matches.labels, 3)
    codes = encode_boxes(matches.boxes, defaults)
    task.model.fprop = lambda *_: {"logits": logits, "codes": codes}
    found = task.predict(task.init(0), {"x": batch["x"]}, StepContext())
    for row in range(5):
        assert found["labels"][row].numpy().tolist()[:2] == [batch["labels"][row, 0], 0]
        np.testing.assert_allclose(found["boxes"][row, 0], batch["boxes"][row, 0], atol=1e-5)
        assert found["scores"][row, 0] > 0.99


def test_focal_loss_trains_and_its_probabilities_are_those_of_detection() -> None:
    input = boxes().instantiate()
    task = task_of(input, loss=FocalLoss.Params(prior=0.2), min_score=0.0)
    theta, batch = task.init(0), input.batch(0)
    weights = [w for w in tf.nest.flatten(theta.model) if tf.is_tensor(w)]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        sums = task.loss(theta, tensors(batch), StepContext(mode="eval"))
    assert float(sums.loss_sum) > 0
    last = theta.model.class_heads[0].b
    gradient = tape.gradient(sums.loss_sum, last).numpy().reshape(-1, 3)
    assert not gradient[:, 0].any() and gradient[:, 1:].all()  # the background has no score

    logits = np.full((5, len(task.model.default_boxes()), 3), -30.0, np.float32)
    logits[:, 7] = [50.0, -30.0, 1.5]
    codes = np.zeros((*logits.shape[:2], 4), np.float32)
    task.model.fprop = lambda *_: {"logits": tf.constant(logits), "codes": tf.constant(codes)}
    found = task.predict(theta, {"x": batch["x"]}, StepContext())
    p = 1 / (1 + np.exp(-1.5) * 0.8 / 0.2)
    assert found["labels"][0, 0] == 2
    np.testing.assert_allclose(found["scores"][:, 0], [p] * 5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"alpha is 1\.0, .* must be between 0 and 1"):
        task_of(input, loss=FocalLoss.Params(alpha=1.0))


def planted(dev: Any, shift: float = 0.0) -> Any:
    """A task that finds the boxes of a pass, moved down by a share of the image."""
    task = Planted.Params(model=task_of(dev.inner).params.model, num_classes=2)
    task.scoring = DetectionScoring.Params(baselines={"chance": 0.1})
    found = task.instantiate()
    found.outputs = []
    for step in range(dev.num_batches):
        batch = dev.batch(step)
        moved = batch["boxes"] + np.array([shift, 0, shift, 0], np.float32)
        scores = (batch["labels"] > 0).astype(np.float32) * 0.9
        found.outputs.append({"boxes": moved, "labels": batch["labels"], "scores": scores})
    return found


def test_a_pass_is_scored_and_drawn() -> None:
    params = boxes(source=Rectangles.Params(count=21))
    dev = HeldOut.Params(batch_size=3).instantiate(train=params)  # 7 images in 3 batches
    task = planted(dev)
    scored = task.score(EagerProgram(None), dev, is_last=True)
    assert scored.figures["ap"] == pytest.approx(1.0) and scored.figures["ap_50"] == 1.0
    assert scored.notes == ("AP at the overlap 0.5 on 7 images 1.000; chance 0.100",)
    assert scored.images["detections"].startswith(b"\x89PNG")
    assert "upright" in scored.text

    # A model of more classes may find one that these images do not have.
    task = planted(dev)
    task.outputs = [{**one, "labels": one["labels"] * 3} for one in task.outputs]
    scored = task.score(EagerProgram(None), dev, is_last=True)
    assert scored.figures["ap"] == 0 and scored.images["detections"]

    # Upright rectangles have half of the height, flat ones a fifth: 0.1 lower, they overlap by
    # 0.4 / 0.6 and 0.1 / 0.3 about.
    task = planted(dev, shift=0.1)
    scored = task.score(EagerProgram(None), dev, is_last=False)
    assert scored.figures["ap_50"] == pytest.approx(0.5) and scored.figures["ap_75"] == 0.0
    assert not scored.images and not scored.text


def test_an_unknown_number_of_classes_is_an_error_that_says_how_to_set_it() -> None:
    with pytest.raises(
        ValueError, match=r"This mode does not read it, .* --set task\.num_classes="
    ):
        task_of(KnownImages(boxes(), ()))


def test_labels_and_classes_are_checked() -> None:
    class Other(Rectangles):
        class_names = ("flat", "upright")

    inputs = {"input": boxes().instantiate()}
    task = task_of(inputs["input"])
    task.check_inputs(inputs)
    with pytest.raises(InputError, match="dev has the classes flat, upright; in training, upright"):
        task.check_inputs({**inputs, "dev": boxes(source=Other.Params()).instantiate()})
    with pytest.raises(
        InputError, match=r"labels are 1 to 2, but must be 0 to 1|but must be 1 to 1"
    ):
        task_of(inputs["input"], num_classes=1).check_inputs(inputs)

    class Empty(Rectangles):
        def objects(self, index: int) -> Any:
            return Objects.of([], [], super().objects(index).size)

    with pytest.raises(InputError, match="input: no image has a box: rectangles, train: 12 images"):
        task.check_inputs({"input": boxes(source=Empty.Params()).instantiate()})


def test_files_are_searched_and_broken_ones_named(tmp_path: Path) -> None:
    params = boxes()
    input = params.instantiate()
    (tmp_path / "a.png").write_bytes(png(input.source.image(0)))
    (tmp_path / "b.png").write_bytes(b"no image")
    task = task_of(input, decode=str(tmp_path / "*"), min_score=0.0, most=2)
    assert not Detection.decodes_data(task.params)
    known = KnownImages(params, input.class_names)
    decoded = task.decode(EagerProgram(task.init(0)), known)
    first, second = decoded.records
    error = "not an image in a known format"
    assert second == {"kind": "objects", "file": str(tmp_path / "b.png"), "error": error}
    assert len(first["objects"]) == 2 and first["objects"][0]["class"] in ("upright", "flat")
    x, y, w, h = first["objects"][0]["box"]
    assert 0 <= x <= x + w <= 40 and 0 <= y <= y + h <= 32
    assert decoded.text.startswith(f"{tmp_path / 'a.png'}: ")

    shown = task_of(input, num_decoded=3).decode(EagerProgram(task.init(0)), input)
    assert [r["file"] for r in shown.records] == [f"rectangles, record {i}" for i in (0, 1, 2)]


def test_export_finds_what_predict_finds() -> None:
    params = boxes(mean=[0.4], deviation=[0.3])
    input = params.instantiate()
    task = task_of(input, most=4)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    signature = module.signature(task.exports(input)["detect"], batch_size=2)
    images = np.stack([np.pad(input.source.image(i), [(0, 16), (0, 8), (0, 0)]) for i in (0, 1)])
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    x = (images / np.float32(255) - np.float32(0.4)) / np.float32(0.3)
    wanted = task.predict(theta, {"x": tf.constant(x, tf.float32)}, StepContext(mode="decode"))
    found = signature(images=tf.constant(images))
    for name in ("boxes", "scores"):
        np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)


@pytest.mark.slow
def test_litert_finds_the_boxes_of_the_exported_function() -> None:
    input = boxes().instantiate()
    task = task_of(input, most=4)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    exported = task.exports(input)["detect"]
    assert exported.for_litert and exported.quantization is None
    data = litert.convert(module, exported, batch_size=1)
    run = litert.interpreter(data).get_signature_runner()
    signature = module.signature(exported, batch_size=1)
    for number in range(3):
        image = np.pad(input.source.image(number), [(0, 16), (0, 8), (0, 0)])[None]
        wanted, found = signature(images=tf.constant(image)), run(images=image)
        assert np.ptp(wanted["boxes"]) > 0.1
        np.testing.assert_array_equal(found["labels"], wanted["labels"])
        for name in ("boxes", "scores"):
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-4)


def test_params_stored_before_there_was_a_choice_of_losses_stay_readable() -> None:
    new = Detection.Params(num_classes=3).to_text()
    lines = [line for line in new.splitlines() if not line.startswith("loss")]
    lines[0] = lines[0].partition(", {")[0].rstrip(")") + ")"
    old = "\n".join([*lines, "negatives_per_positive : 5"])
    assert "loss" not in old
    found = Detection.Params.from_text(old)
    assert type(found.loss) is HardNegativeMining.Params
    assert found.loss.negatives_per_positive == 5
    assert Detection.Params.from_text(new).loss.negatives_per_positive == 3
