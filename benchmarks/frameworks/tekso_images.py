"""The image models in Tekso, in float64; see benchmarks/image_gradients.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import image_gradients
from benchmarks.image_gradients import AMOEBANET, BATCH, MODES, WEIGHTS
from tekso.framework.context import StepContext
from tekso.framework.layer import Layer
from tekso.models.amoebanet import AmoebaNet
from tekso.models.detection.box_coding import decode_boxes
from tekso.models.detection.multibox_loss import match_boxes, multibox_loss
from tekso.models.detection.suppression import detections
from tekso.models.resnet import resnet
from tekso.models.ssd import Ssd
from tekso.models.unet import UNet, UNet3D
from tekso.models.vision_transformer import vit

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its images and its loss.

    Attributes:
      params: the model.
      size: batch and spatial dims of the images.
      has_pixel_labels: whether every pixel has a label.
    """

    params: Callable[[], Layer.Params]
    size: tuple[int, ...]
    has_pixel_labels: bool = False


CASES = {
    "amoebanet": Case(
        lambda: AmoebaNet.Params(
            num_layers=AMOEBANET.num_layers,
            filters=AMOEBANET.filters,
            image_size=AMOEBANET.image_size,
            classes=AMOEBANET.classes,
        ),
        (AMOEBANET.batch_size, AMOEBANET.image_size, AMOEBANET.image_size),
    ),
    "resnet50": Case(lambda: resnet(50, classes=1000), (2, 224, 224)),
    "vit_ti": Case(lambda: vit("Ti", classes=1000), (2, 224, 224)),
    "ssd300": Case(lambda: Ssd.Params(classes=81), (2, 300, 300)),
    "unet": Case(lambda: UNet.Params(classes=3), (2, 48, 64), has_pixel_labels=True),
    "unet3d": Case(lambda: UNet3D.Params(classes=3), (1, 16, 24, 8), has_pixel_labels=True),
}


def computed(name: str) -> Arrays:
    """Returns weights, batch, outputs, loss and gradients of a model."""
    case, random = CASES[name], np.random.default_rng(0)
    model = case.params().set(dtype="float64").instantiate()
    is_detector = isinstance(model, Ssd)
    x = random.standard_normal((*case.size, 3))
    batch = {"x": x, **(_objects(random) if is_detector else _labels(random, case, model))}
    specs = model.specs()
    weights = {path: _moved(spec.initial_value(0), random) for path, spec in specs.items()}
    trained = [path for path, spec in specs.items() if spec.trainable]
    outcome = _detected if is_detector else _classified

    def step(values: dict[str, tf.Tensor], mode: Any) -> tuple[Arrays, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            tape.watch([values[path] for path in trained])
            ctx = StepContext(mode=mode, seed=0, step=1)
            y = model.fprop(model.theta(values), tf.constant(batch["x"]), ctx)
            found = outcome(model, y, batch, mode)
        return found, tape.gradient(found["loss"], [values[path] for path in trained])

    values = {path: tf.constant(value, tf.float64) for path, value in weights.items()}
    arrays = {BATCH + key: value for key, value in batch.items()}
    arrays |= {WEIGHTS + path: value for path, value in weights.items()}
    for mode in MODES:
        found, gradients = tf.function(step, autograph=False)(values, mode)
        arrays |= {f"{mode}/{key}": value.numpy() for key, value in found.items()}
        for path, gradient in zip(trained, gradients, strict=True):
            arrays[f"{mode}/gradients/{path}"] = gradient.numpy()
    return arrays


def _moved(value: Any, random: np.random.Generator) -> Any:
    """Returns an initial value; changes a constant one, because a scale of 0 hides errors."""
    value = np.asarray(value, np.float64)
    return value if np.ptp(value) else value + random.uniform(-0.3, 0.3, value.shape)


def _labels(random: np.random.Generator, case: Case, model: Any) -> Arrays:
    size = case.size if case.has_pixel_labels else case.size[:1]
    return {"labels": random.integers(0, model.params.classes, size)}


def _objects(random: np.random.Generator) -> Arrays:
    """Returns boxes and labels of 9 objects for 2 images; 0 is padding.

    The first image has small, large, equal and outside objects; several best overlap one default
    box.
    """
    centre, size = random.uniform(0.1, 0.9, (2, 9, 2)), random.uniform(0.02, 0.7, (2, 9, 2))
    boxes = np.clip(np.concatenate([centre - size / 2, centre + size / 2], 2), 0, 1)
    boxes[0, 3], boxes[0, 4] = boxes[0, 2], boxes[0, 2] + 0.003
    boxes[0, 5] = [1.1, 1.2, 1.3, 1.4]
    labels = random.integers(1, 81, (2, 9))
    labels[:, 8], labels[1, 4:] = 0, 0
    return {"boxes": boxes, "labels": labels}


def _classified(model: Any, logits: tf.Tensor, batch: Arrays, mode: str) -> Arrays:
    del model, mode
    nats = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
    return {"logits": logits, "loss": tf.reduce_mean(nats)}


def _detected(model: Any, y: Any, batch: Arrays, mode: str) -> Arrays:
    defaults = tf.constant(model.default_boxes(), tf.float64)
    matches = match_boxes(tf.constant(batch["boxes"]), tf.constant(batch["labels"]), defaults)
    losses = multibox_loss(y["logits"], y["codes"], matches, defaults)
    found = {**y, "matches": matches.labels, "losses": losses, "loss": tf.reduce_mean(losses)}
    if mode == "eval":
        found["defaults"] = defaults
        probabilities, boxes = tf.nn.softmax(y["logits"]), decode_boxes(y["codes"], defaults)
        best = detections(
            probabilities,
            boxes,
            min_score=image_gradients.MIN_SCORE,
            candidates=image_gradients.MOST,
            max_overlap=image_gradients.MAX_OVERLAP,
            most=image_gradients.MOST,
        )
        found |= {f"detections/{key}": value for key, value in vars(best).items()}
    return found
