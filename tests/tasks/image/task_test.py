"""Image classification: loss and metrics by NumPy's formulas, whole passes, decoding, export."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from eager_program import EagerProgram
from PIL import Image
from small_pictures import Blobs, png, write_folders

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.held_out import HeldOut
from tekso.framework.run.saved_model import ExportModule
from tekso.framework.task import TaskError
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.residual_blocks import BATCH_NORM, BasicBlock
from tekso.models.mlp import Mlp
from tekso.models.resnet import ResNet, Stem
from tekso.tasks.image import drawing, filters
from tekso.tasks.image.crops import Crops
from tekso.tasks.image.files import ImageFolders
from tekso.tasks.image.image_input import KnownImages
from tekso.tasks.image.input import Images
from tekso.tasks.image.mixing import Mixup
from tekso.tasks.image.preparation import pixels_of
from tekso.tasks.image.scoring import ImageScoring, confusion_lines, confusions
from tekso.tasks.image.sources import ImageArrays
from tekso.tasks.image.steps import Flip
from tekso.tasks.image.task import ImageClassification

RNG = np.random.default_rng(1)
LOGITS = RNG.normal(size=(4, 7)).astype(np.float32) * 3
LABELS, OTHERS = np.array([2, 0, 6, 3], np.int32), np.array([5, 0, 1, 1], np.int32)
WEIGHTS, SHARES = np.array([1, 0, 1, 2], np.float32), np.array([0.25, 1, 0.5, 1], np.float32)


def images(**params: Any) -> Any:
    given = {"source": Blobs.Params(), "image_size": 8, "batch_size": 5, **params}
    return Images.Params(**given)


def task_of(input: Any, **params: Any) -> Any:
    given = ImageClassification.Params(model=Mlp.Params(hidden_dims=[]), **params)
    return ImageClassification.complete(given, input).instantiate()


def tensors(batch: Any) -> dict[str, tf.Tensor]:
    return {name: tf.constant(array) for name, array in batch.items()}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_loss_has_smoothed_and_mixed_targets(smoothing: float, mixed: bool) -> None:
    task = task_of(images().instantiate(), num_classes=7)
    batch = {"labels": LABELS, "weights": WEIGHTS}
    batch |= {"other_labels": OTHERS, "shares": SHARES} if mixed else {}
    sums = task.sums(tf.constant(LOGITS), tensors(batch), smoothing)

    share = (SHARES if mixed else np.ones(4))[:, None]
    target = share * np.eye(7)[LABELS] + (1 - share) * np.eye(7)[OTHERS]
    target = (1 - smoothing) * target + smoothing / 7
    x = LOGITS.astype(np.float64)
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    np.testing.assert_allclose(sums.loss_sum, -(WEIGHTS @ (target * logs).sum(1)), rtol=1e-5)
    order = np.argsort(-x, axis=1)
    for name, count in (("accuracy", 1), ("top_5_accuracy", 5)):
        hits = (order[:, :count] == LABELS[:, None]).any(1)
        np.testing.assert_allclose(sums.metrics[name], [WEIGHTS @ hits, 4.0])


class Plain(ImageClassification):
    def sums(self, logits: Any, batch: Any) -> Any:  # type: ignore[override]
        return None


def test_own_sums_without_smoothing_or_a_result_say_what_to_write() -> None:
    params = Plain.Params(model=Mlp.Params(input_dim=192, hidden_dims=[], output_dim=4))
    params.num_classes = 4
    with pytest.raises(ValueError, match=r"Plain.sums \(.*\) has no argument `smoothing`.*is 0.1"):
        params.copy().set({"label_smoothing": 0.1}).instantiate()
    task = params.instantiate()
    batch = tensors(images().instantiate().batch(0))
    with pytest.raises(TaskError, match=r"Plain.sums \(.*\) returns None"):
        task.loss(task.init(0), batch, StepContext())


def test_equal_scores_and_nan_are_not_among_the_best_five() -> None:
    task = task_of(images().instantiate(), num_classes=7)
    batch = tensors({"labels": LABELS, "weights": np.ones(4, np.float32)})
    for value in (0.0, np.nan):
        sums = task.sums(tf.fill([4, 7], value), batch)
        assert float(sums.metrics["top_5_accuracy"][0]) == 0.0


def test_smoothing_is_for_training_only() -> None:
    input = images().instantiate()
    task = task_of(input, label_smoothing=0.2)
    theta, batch = task.init(0), tensors(input.batch(0))
    train, held_out = (
        float(task.loss(theta, batch, StepContext(mode=mode)).loss_sum)
        for mode in ("train", "eval")
    )
    plain = task_of(input).loss(theta, batch, StepContext(mode="train")).loss_sum
    assert held_out == pytest.approx(float(plain)) and train != pytest.approx(held_out, rel=1e-3)


def test_a_pass_counts_every_image_once_and_broken_ones_never(tmp_path: Path) -> None:
    write_folders(tmp_path, {"a": 6, "b": 7})
    (tmp_path / "b" / "3.png").write_bytes(b"no image")
    source = ImageFolders.Params(folder=str(tmp_path), dev_fraction=0.4)
    train = Images.Params(source=source, image_size=4, batch_size=4)
    dev = HeldOut.Params(batch_size=4).instantiate(train=train)
    task = task_of(train.instantiate())
    theta = task.init(3)
    sums = [
        task.loss(theta, tensors(dev.batch(i)), StepContext(mode="eval"))
        for i in range(dev.num_batches)
    ]
    hits, weight = (sum(float(one.metrics["accuracy"][part]) for one in sums) for part in (0, 1))
    names = [dev.inner.source.origin(i).file for i in range(dev.inner.num_examples)]
    broken = sum(name.endswith("b/3.png") for name in names)
    assert len(names) == 6 and broken == 1 and weight == 5

    one = HeldOut.Params(batch_size=1).instantiate(train=train)
    singles = [one.batch(i) for i in range(len(names))]
    guesses = [
        int(task.predict(theta, tensors(b), StepContext(mode="eval"))["labels"][0]) for b in singles
    ]
    wanted = sum(
        b["weights"][0] * (guess == b["labels"][0])
        for guess, b in zip(guesses, singles, strict=True)
    )
    assert hits == wanted


def test_sizes_are_taken_from_the_input() -> None:
    task = task_of(images(channels=1).instantiate())
    assert task.params.num_classes == 4
    assert (task.params.model.input_dim, task.params.model.output_dim) == (64, 4)
    source = Blobs.Params(classes=["one"])
    with pytest.raises(InputError, match="labels are not in 0 to 1"):
        input = images(source=source).instantiate()
        task_of(input, num_classes=2).check_inputs({"input": input})


def test_classes_without_an_image_are_a_warning() -> None:
    input = images(source=Blobs.Params(count=3)).instantiate()
    warnings = task_of(input, num_classes=9).check_inputs({"input": input})
    assert warnings == ["input: 6 of the 9 classes have no training image (3, 4, 5, 6, 7, …)"]


class FromOne(Blobs):
    """Labels that count from 1."""

    class_names = ()

    def load(self, split: str) -> Any:
        """Returns them."""
        found = super().load(split)
        return {**found, "labels": found["labels"] + 1}


def test_labels_that_count_from_one_are_a_warning_with_the_cure() -> None:
    input = images(source=FromOne.Params()).instantiate()
    [warning] = task_of(input).check_inputs({"input": input})
    assert warning.startswith("input: 1 of the 5 classes have no training image (0). ")
    assert warning.endswith("if labels count from 1, subtract 1")


def test_mixed_inputs_train_and_plain_ones_are_evaluated() -> None:
    params = images(mix=[Mixup.Params()])
    train, dev = params.instantiate(), HeldOut.Params().instantiate(train=params)
    task = task_of(train)
    theta = task.init(0)
    for input, mode in ((train, "train"), (dev, "eval")):
        sums = task.loss(theta, tensors(input.batch(0)), StepContext(mode=mode))
        assert np.isfinite(float(sums.loss_sum))


def test_confusions_are_counted_and_drawn() -> None:
    counts = confusions(np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 1, 1]), 3)
    np.testing.assert_array_equal(counts, [[1, 1, 0], [0, 1, 0], [0, 2, 0]])
    assert confusion_lines(counts, ["a", "b", "c"]) == [
        "2 of 5 images are right",
        "  2 of 2 images of 'c' taken for 'b'",
        "  1 of 2 images of 'a' taken for 'b'",
    ]

    params = images()
    dev = HeldOut.Params(batch_size=3).instantiate(train=params)  # 4 images: the second batch is 1
    scoring = ImageScoring.Params(baselines={"chance": 0.25})
    task = task_of(params.instantiate(), scoring=scoring)
    program = EagerProgram(task.init(0))
    assert task.score(program, dev, is_last=False) is None
    scored = task.score(program, dev, is_last=True)
    assert program.calls == 2
    guess = np.concatenate(
        [
            task.predict(program.theta, tensors(dev.batch(i)), StepContext())["labels"]
            for i in (0, 1)
        ]
    )[:4]
    right = int((guess == dev.inner.source.labels).sum())
    assert scored.text.startswith(f"{right} of 4 images are right")
    assert scored.notes == (f"accuracy on 4 images {right / 4:.4f}; chance 0.250",)
    assert {"confusion_matrix", "examples"} <= set(scored.images)
    assert "filters" not in scored.images  # the model has no convolution
    assert all(image.startswith(b"\x89PNG") for image in scored.images.values())


def test_the_filters_of_the_first_convolution_are_drawn() -> None:
    params = images()
    dev = HeldOut.Params(batch_size=4).instantiate(train=params)
    stem = Stem.Params(conv=ConvNorm.Params(kernel_shape=(3, 5), norm=BATCH_NORM), pool=None)
    model = ResNet.Params(num_blocks=[1], width=5, stem=stem, block=BasicBlock.Params())
    given = ImageClassification.Params(model=model)
    task = ImageClassification.complete(given, params.instantiate()).instantiate()
    theta = task.init(0)
    kernels = theta.model.stem.conv.conv.w.numpy()
    assert kernels.shape == (3, 5, 3, 5)
    drawn = task.score(EagerProgram(theta), dev, is_last=True).images["filters"]
    pixels = np.asarray(Image.open(io.BytesIO(drawn)))
    side = 48 // 5
    assert pixels.shape == (2 * (3 * side + 2) + 2, 3 * (5 * side + 2) + 2, 3)
    for number, (row, column) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]):
        top, left = 2 + row * (3 * side + 2), 2 + column * (5 * side + 2)
        shown = pixels[top : top + 3 * side : side, left : left + 5 * side : side].astype(float)
        one = kernels[..., number]
        np.testing.assert_allclose((shown - 128) / 127.5, one / np.abs(one).max(), atol=0.01)
    assert (pixels[-2 - 3 * side :, -2 - 5 * side :] == 255).all()  # the sixth place is empty


def test_grey_filters_of_zeros_and_of_no_numbers_are_drawn() -> None:
    kernels = np.zeros([3, 3, 1, 2], np.float32)
    kernels[0, 0, 0, 1] = np.nan
    pixels = np.asarray(Image.open(io.BytesIO(filters.grid(kernels))))
    assert pixels.ndim == 2 and set(np.unique(pixels)) == {128, 255}


def test_pixels_come_back_from_normalised_values() -> None:
    params = images(mean=[0.4, 0.5, 0.6], deviation=[0.2, 0.3, 0.1])
    input = params.copy().set(order="sequential").instantiate()
    np.testing.assert_array_equal(pixels_of(input.batch(0)["x"], params), input.source.images[:5])


def test_files_are_classified_and_broken_ones_named(tmp_path: Path) -> None:
    params = images()
    input = params.instantiate()
    task = task_of(input, decode=str(tmp_path / "*"))
    assert not ImageClassification.decodes_data(task.params)
    program = EagerProgram(task.init(0))
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(input.source.images[number]))
    (tmp_path / "5.png").write_bytes(b"")
    known = KnownImages(params, ("north", "east", "south", "west"))
    decoded = task.decode(program, known)
    assert len(decoded.records) == 6 and program.calls == 2
    x = input.source.images[:5].astype(np.float32) / 255
    logits = task.predict(program.theta, {"x": tf.constant(x)}, StepContext())["logits"]
    best = np.argmax(logits, 1)
    for record, label in zip(decoded.records, best, strict=False):
        assert record["classes"][0]["class"] == known.class_names[label]
        assert sum(one["probability"] for one in record["classes"]) == pytest.approx(1.0)
    assert decoded.records[5]["error"] == "the file is empty"
    assert decoded.text.splitlines()[5].endswith("5.png: the file is empty")


def test_held_out_images_are_decoded_without_files() -> None:
    input = images().instantiate()
    task = task_of(input, num_decoded=3)
    decoded = task.decode(EagerProgram(task.init(0)), input)
    assert [record["number"] for record in decoded.records] == [0, 1, 2]
    assert [record["label"] for record in decoded.records] == list(Blobs.class_names[:3])
    assert "Blobs, dev" in decoded.text


def test_the_exported_function_reads_pixels() -> None:
    params = images(mean=[0.4, 0.5, 0.6], deviation=[0.2, 0.3, 0.1])
    input = params.copy().set(order="sequential").instantiate()
    task = task_of(input)
    weights = {path: spec.initial_value(2) for path, spec in task.specs().items()}
    module = ExportModule(task, weights, seed=0)
    signature = module.signature(task.exports(input)["classify"], batch_size=2)
    theta = task.theta({path: tf.constant(value) for path, value in weights.items()})
    logits = task.predict(theta, {"x": tf.constant(input.batch(0)["x"])}, StepContext())["logits"]
    for count in (1, 5):
        found = signature(images=tf.constant(input.source.images[:count]))
        wanted = tf.nn.softmax(logits[:count])
        np.testing.assert_allclose(found["probabilities"], wanted, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(found["labels"], np.argmax(wanted, 1))


def test_int8_is_calibrated_with_training_images_and_compared_on_held_out_ones() -> None:
    params = images(mean=[0.4, 0.5, 0.6], deviation=[0.2, 0.3, 0.1], augment=[Flip.Params()])
    input = params.instantiate()
    quantization = task_of(input).exports(input)["classify"].quantization
    source = Blobs.Params()
    for split, name, wanted in (("train", "train", [0, 2, 4, 7, 9]), ("held_out", "dev", range(4))):
        found = [one["images"] for one in quantization.examples(input, split, 5)]
        pixels = source.instantiate(split=name).images
        np.testing.assert_array_equal(np.concatenate(found), pixels[list(wanted)])
        assert found[0].dtype == np.uint8

    tested = images(source=OnlyTest.Params()).instantiate()
    assert len(list(quantization.examples(tested, "held_out", 5))) == 4
    only = images(source=WithoutDev.Params()).instantiate()
    assert not list(quantization.examples(only, "held_out", 5))
    assert len(list(quantization.examples(only, "train", 5))) == 5


class OnlyTest(Blobs):
    """Has a test split, but its dev split cannot be loaded."""

    def load(self, split: str) -> Any:
        """Returns the split."""
        if split == "dev":
            raise OSError("the disk is gone")
        return super().load("dev" if split == "test" else split)


class WithoutDev(Blobs):
    """Has no held-out images."""

    def load(self, split: str) -> Any:
        """Returns those of training."""
        if split != "train":
            raise InputError(f"there is no split {split}")
        return super().load(split)


def test_training_images_are_said_to_be_those_where_nothing_is_held_out() -> None:
    input = images(source=WithoutDev.Params()).instantiate()
    task = task_of(input, num_decoded=2)
    head, *lines = task.decode(EagerProgram(task.init(0)), input).text.splitlines()
    why = "the dev split cannot be loaded (InputError: there is no split dev)"
    assert head == f"training images, because {why}:"
    assert len(lines) == 2 and all("WithoutDev, train" in line for line in lines)


def test_titles_of_a_gallery_are_cut_or_wrapped() -> None:
    image = np.zeros([4, 4, 3], np.uint8)
    long = "a very long caption of an image that does not fit into one line of its title"
    short, wrapped = (
        drawing.gallery([image], [long], title="captions", lines=lines) for lines in (1, 4)
    )
    assert short.startswith(b"\x89PNG")
    assert _size(wrapped) > _size(short)


def test_characters_that_the_font_does_not_have_are_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drawing.matrix(np.eye(2), ["日本", "cat"]).startswith(b"\x89PNG")


def _size(png: bytes) -> int:
    return int.from_bytes(png[20:24], "big")  # the height


def test_ten_crops_are_the_centre_and_the_corners_and_their_mirror_images() -> None:
    image = np.arange(6 * 9, dtype=np.uint8).reshape(6, 9, 1)
    found = Crops.Params(fraction=0.5).instantiate().of(image, 3)  # 3 of 6 rows: not resized
    centre = np.full((3, 3), 1)
    corners = [image[:3, :3], image[:3, 6:], image[3:, :3], image[3:, 6:]]
    assert found.shape == (10, 3, 3, 1) and centre.shape == found[0, ..., 0].shape
    for one, wanted in zip(found[1:5], corners, strict=True):
        np.testing.assert_array_equal(one, wanted)
    assert image[1, 3] < found[0, 0, 0] < image[2, 3] + 9  # between rows 1 and 2: interpolated
    np.testing.assert_array_equal(found[5:], found[:5, :, ::-1])
    few = Crops.Params(fraction=1.0, places=["centre"], mirrors="none").instantiate()
    assert few.of(image[:, :6], 6).tolist() == [image[:, :6].tolist()]
    for wrong in ({"fraction": 0.0}, {"places": []}):
        with pytest.raises(ValueError, match=r"fraction is .* and places is"):
            Crops.Params(**wrong).instantiate()


def test_the_mean_of_the_probabilities_of_crops_is_counted_once_per_image(tmp_path: Path) -> None:
    rng, labels = np.random.default_rng(0), np.arange(11) % 7
    pixels = rng.integers(256, size=(11, 9, 12), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=pixels, labels=labels)
    source = ImageArrays.Params(file=str(tmp_path / "a.npz"), dev_file=str(tmp_path / "a.npz"))
    train = images(source=source, channels=1, image_size=5, mean=[0.5])
    dev = HeldOut.Params(batch_size=4).instantiate(train=train)
    crops = Crops.Params(places=["centre", "top_right"])
    task = task_of(train.instantiate(), crops=crops, scoring=None, num_classes=7)
    theta = task.init(3)
    program = EagerProgram(theta)
    assert task.score(program, dev, is_last=False) is None
    result = task.score(program, dev, is_last=True)
    assert program.calls == 3 * 4  # batches x crops

    w, b = (theta.model.layers[0][name].numpy() for name in ("w", "b"))
    hits, top_5 = [], []
    for image, label in zip(pixels, labels, strict=True):
        x = crops.instantiate().of(image[:, :, None], 5).reshape(4, -1) / 255 - 0.5
        scores = x @ w + b
        mean = (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).mean(0)
        hits.append(mean.argmax() == label)
        top_5.append(label in np.argsort(-mean)[:5])
    assert result.figures == pytest.approx(
        {"crops/accuracy": np.mean(hits), "crops/top_5_accuracy": np.mean(top_5)}
    )
    assert 0 < np.mean(top_5) < 1

    lost = EagerProgram(tf.nest.map_structure(lambda w: w * np.nan, theta))
    result = task.score(lost, dev, is_last=True)
    assert result.figures == {"crops/accuracy": 0.0, "crops/top_5_accuracy": 0.0}
