"""Trains a small image model in float64 under several executions, and prints what came out.

The argument is a list of jobs {"model", "execution", "devices"}; each runs in a process of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework import execution as executions
from tekso.framework.execution import devices
from tekso.framework.execution.base import signature_of
from tekso.framework.initializers import Normal
from tekso.framework.layer import Layer
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.pieces import Flow, Piece
from tekso.framework.schedules import Constant
from tekso.framework.theta import Theta
from tekso.models.amoebanet import AmoebaNet
from tekso.models.layers.amoeba_cell import AmoebaCell
from tekso.models.layers.attention import MultiHeadAttention
from tekso.models.layers.feed_forward import FeedForward
from tekso.models.layers.normalization import BatchNorm
from tekso.models.layers.residual_blocks import BasicBlock, BottleneckBlock
from tekso.models.layers.squeeze_excite import SqueezeExcite
from tekso.models.layers.stack import Stack
from tekso.models.layers.transformer import TransformerLayer
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.models.unet import UNet, UNet3D
from tekso.models.vision_transformer import VisionTransformer
from tekso.tasks.classification.task import Classification

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "framework" / "execution" / "mesh"))

import jobs

CLASSES, SIDE, EXAMPLES = 4, 16, 8


def resnet() -> Layer.Params:
    return ResNet.Params(
        classes=CLASSES,
        width=4,
        num_blocks=[1, 1],
        stem=SMALL_STEM,
        block=BottleneckBlock.Params(squeeze_excite=SqueezeExcite.Params(reduction=4)),
        drop_path_rate=0.3,
    )


def resnet_groups(group: int) -> Layer.Params:
    """Statistics of groups of examples; a batch has 8."""
    block = BasicBlock.Params(norm=BatchNorm.Params(group=group))
    stem = SMALL_STEM.copy().set({"conv.norm.group": group})
    return ResNet.Params(classes=CLASSES, width=4, num_blocks=[1, 1], stem=stem, block=block)


def resnet_basic() -> Layer.Params:
    """The stem for large images, too."""
    block = BasicBlock.Params()
    return ResNet.Params(classes=CLASSES, width=4, num_blocks=[1, 1], block=block)


def transformer() -> Layer.Params:
    layer = TransformerLayer.Params(
        attention=MultiHeadAttention.Params(num_heads=2),
        feed_forward=FeedForward.Params(hidden_dim=8, activation="gelu"),
        dropout_rate=0.1,
    )
    return VisionTransformer.Params(
        classes=CLASSES,
        image_size=SIDE,
        patch_size=4,
        dim=4,
        stack=Stack.Params(num_layers=1, layer=layer),
        classifier_init=Normal.Params(stddev=0.5),
    )


class FourCells(AmoebaNet):
    """An AmoebaNet that ends after its fourth cell.

    The four have every kind of cell after every kind, but for two normal cells in a row.
    """

    class Params(AmoebaNet.Params):
        """Params of FourCells."""

    def _cell_params(self) -> list[AmoebaCell.Params]:
        return super()._cell_params()[:4]


def amoebanet() -> Layer.Params:
    return FourCells.Params(classes=CLASSES, num_layers=3, filters=4, drop_path_rate=0.2)


class Averaged(UNet):
    """A U-Net whose scores are the means over the image."""

    class Params(UNet.Params):
        """Params of Averaged."""

    def pieces(self) -> list[Piece]:
        def mean(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": tf.reduce_mean(tf.square(flow["x"]), [1, 2])}

        return [*super().pieces(), Piece("mean", {}, mean)]


def unet() -> Layer.Params:
    return Averaged.Params(classes=CLASSES, num_scales=2, width=4, convs_per_scale=1)


class AveragedVolume(UNet3D):
    """A U-Net of volumes whose scores are the means over the volume."""

    class Params(UNet3D.Params):
        """Params of AveragedVolume."""

    def pieces(self) -> list[Piece]:
        def mean(theta: Theta, flow: Flow, ctx: Any) -> Flow:
            return {**flow, "x": tf.reduce_mean(tf.square(flow["x"]), [1, 2, 3])}

        return [*super().pieces(), Piece("mean", {}, mean)]


def unet3d() -> Layer.Params:
    return AveragedVolume.Params(classes=CLASSES, channels=2, num_scales=1, width=2)


MODELS = {
    "unet": unet,
    "unet3d": unet3d,
    "amoebanet": amoebanet,
    "resnet": resnet,
    "resnet_basic": resnet_basic,
    "groups_of_3": functools.partial(resnet_groups, 3),
    "groups_of_4": functools.partial(resnet_groups, 4),
    "transformer": transformer,
}

OPTIMIZED = ("resnet_basic", "unet3d")
"""Models with TensorFlow's graph optimizer, which takes a fifth of the time; a mesh has it off."""


def batch(step: int, model: str = "") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    shape = (4, 8, 12, 2) if model == "unet3d" else (SIDE, SIDE, 3)
    return {
        "x": rng.normal(size=(EXAMPLES, *shape)),
        "labels": rng.integers(0, CLASSES, EXAMPLES).astype(np.int32),
        "weights": rng.integers(1, 3, EXAMPLES) + 0.1,
    }


def task_of(model: str) -> Classification.Params:
    params = Classification.Params(num_classes=CLASSES, model=MODELS[model]())
    return params.set({"model.dtype": "float64", "model.*.dtype": "float64"})


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Returns losses and weights after some steps."""
    given = dict(job["execution"])
    params = getattr(executions, given.pop("kind")).Params(**given)
    # The reference is computed op by op, which takes less time than to trace its steps.
    tf.config.run_functions_eagerly("devices" not in job)
    execution = params.instantiate()
    execution.setup_devices(cpu_devices=job.get("devices"))
    if job["model"] not in OPTIMIZED:
        devices.set_graph_optimizer(False)
    task = task_of(job["model"]).instantiate()
    learner = Learner.Params(optimizer=Momentum.Params(), schedule=Constant.Params(value=0.1))
    own = functools.partial(batch, model=job["model"])
    program = execution.build(task, learner.instantiate(), seed=3, batch=signature_of(own(0)))
    program.initialize()
    metrics = [program.train_step(own(i), i) for i in range(job.get("steps", 2))]
    evaluated = program.eval_step(own(9))
    state = program.state()
    return {
        "losses": [*(float(one["loss"]) for one in metrics), *map(float, evaluated["loss"])],
        "gradient_norms": [float(one["gradient_norm"]) for one in metrics],
        "weights": {k: v.ravel().tolist() for k, v in state.items() if k.startswith("weights/")},
    }


if __name__ == "__main__":
    jobs.run_all(run)
