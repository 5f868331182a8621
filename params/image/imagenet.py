r"""ImageNet-1k: 1,281,167 training and 50,000 validation images in TFRecords of the model garden.

    tekso-trainer --model=image.imagenet.ResNet50 --logdir=runs/resnet50 \
        --set input.source.files='imagenet/train-*' \
        --set input.source.dev_files='imagenet/validation-*'

None of these experiments has been trained on ImageNet with Tekso. Accuracies are published ones.
"""

from __future__ import annotations

from typing import Literal

from tekso.framework import schedules
from tekso.framework.execution.pipelined import Pipelined
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.optimizers.layerwise import LARS
from tekso.framework.optimizers.rmsprop import RMSProp
from tekso.framework.optimizers.sgd import Nesterov
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.amoebanet import AmoebaNet
from tekso.models.resnet import resnet
from tekso.models.vision_transformer import vit
from tekso.tasks.image.colour import RandAugment
from tekso.tasks.image.files import ImageRecords
from tekso.tasks.image.input import Images
from tekso.tasks.image.mixing import CutMix, Mixup
from tekso.tasks.image.steps import CentreCrop, Flip, InceptionCrop, RandomErasing
from tekso.tasks.image.task import ImageClassification

NUM_TRAIN = 1_281_167
MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_NOT_DECAYED = [".*/norm/.*", ".*/b"]


class ImageNet(Experiment):
    """Images of 224 × 224 pixels, with inception crops and flips."""

    BATCH_SIZE = 1024

    def input(self) -> Params:
        """A random crop of 8 to 100 % of the image; in evaluations the central 224 of 256 pixels.

        Resizing is bicubic with antialiasing.
        """
        return Images.Params(
            source=ImageRecords.Params(dev_fraction=0.01),
            image_size=224,
            batch_size=self.BATCH_SIZE,
            augment=[InceptionCrop.Params(), Flip.Params()],
            evaluate=[CentreCrop.Params(fraction=224 / 256)],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All validation images."""
        return {"dev": HeldOut.Params(split="dev", batch_size=1000)}


@register
class ResNet50(ImageNet):
    """ResNet-50 v1.5, 25,557,032 trainable weights, by the plain recipe of 90 epochs.

    The recipe of the reference models usually reaches a top-1 accuracy of about 0.763.
    """

    DEPTH = 50

    def task(self) -> Params:
        """1,000 classes."""
        return ImageClassification.Params(model=resnet(self.DEPTH), num_classes=1000)

    def learner(self) -> Params:
        """Nesterov momentum; 0.1 per 256 images, five epochs of warm-up, a tenth at 30, 60, 80.

        L2 loss on all weights but biases and those of normalisations.
        """
        epoch, rate = NUM_TRAIN // self.BATCH_SIZE, 0.1 * self.BATCH_SIZE / 256
        return Learner.Params(
            optimizer=Nesterov.Params(
                weight_decay=1e-4,
                weight_decay_scaling="gradient",
                weight_decay_exclude=_NOT_DECAYED,
            ),
            schedule=schedules.PiecewiseConstant.Params(
                values=[rate, rate / 10, rate / 100, rate / 1000],
                boundaries=[30 * epoch, 60 * epoch, 80 * epoch],
                warmup_steps=5 * epoch,
            ),
        )

    def run(self) -> Params:
        """112,590 steps of 1,024 images: 90 epochs."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(
            steps=90 * epoch, eval_every_steps=4 * epoch, checkpoint_every_steps=4 * epoch
        )


@register
class ResNet18(ResNet50):
    """ResNet-18, 11,689,512 trainable weights, by the plain recipe of 90 epochs."""

    DEPTH = 18


@register
class ResNet50Mlperf(ResNet50):
    """ResNet-50 of MLPerf-0.6: LARS with batches of 32,768 images, 76 epochs.

    The submission on 256 TPU cores reached 0.7604 after 76 epochs, in 6.5 to 7.8 minutes. Each
    normalisation uses the statistics of 128 images.

    Source:
      MLPerf training v0.6, Google's submissions; Kumar et al. 2019 (arXiv 1909.09756).
    """

    BATCH_SIZE = 32_768
    GROUP = 128
    RATE = 33.0
    WARMUP_STEPS = 976  # 25 epochs
    STEPS = 2983

    def task(self) -> Params:
        """With label smoothing, and statistics of groups of images."""
        groups = dict.fromkeys(("stem.conv.norm.group", "block.norm.group"), self.GROUP)
        sizes = {f"model.{path}": group for path, group in groups.items()}
        return super().task().set({"label_smoothing": 0.1, **sizes})

    def learner(self) -> Params:
        """LARS with momentum 0.9, without trust and decay of biases and normalisations.

        After the warm-up, the rate falls to 0.0001 with the square of the remaining steps.
        """
        return Learner.Params(
            optimizer=LARS.Params(
                momentum_form="scaled",
                weight_decay=2e-4,
                weight_decay_exclude=_NOT_DECAYED,
                trust_exclude=_NOT_DECAYED,
            ),
            schedule=schedules.Polynomial.Params(
                initial_value=self.RATE, final_value=1e-4, power=2.0, warmup_steps=self.WARMUP_STEPS
            ),
        )

    def run(self) -> Params:
        """An evaluation every four epochs."""
        every = 4 * NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(steps=self.STEPS, eval_every_steps=every, checkpoint_every_steps=every)


@register
class ResNet50Mlperf4096(ResNet50Mlperf):
    """ResNet-50 of MLPerf-0.6 with batches of 4,096 images, 72 epochs; 0.7609 is published."""

    BATCH_SIZE = 4096
    RATE = 10.0
    WARMUP_STEPS = 1564  # 5 epochs
    STEPS = 22_536


@register
class ViTTi16(ImageNet):
    """ViT-Ti with patches of 16 × 16 pixels, 5,717,416 weights, by the recipe of DeiT.

    Published: a top-1 accuracy of 0.722 for Ti, 0.798 for S and 0.818 for B.

    Source:
      Touvron et al. 2021 (arXiv 2012.12877), table 9; without repeated augmentation and without
      stochastic depth.
    """

    SIZE = "Ti"

    def task(self) -> Params:
        """With label smoothing."""
        return ImageClassification.Params(
            model=vit(self.SIZE), num_classes=1000, label_smoothing=0.1
        )

    def input(self) -> Params:
        """RandAugment and random erasing, then mixup or CutMix."""
        augment = [
            InceptionCrop.Params(),
            Flip.Params(),
            RandAugment.Params(num_operations=2, magnitude=9.0),
            RandomErasing.Params(probability=0.25),
        ]
        mix = [Mixup.Params(alpha=0.8), CutMix.Params(alpha=1.0)]
        return super().input().set(augment=augment, mix=mix)

    def learner(self) -> Params:
        """AdamW; 0.0005 per 512 images, five epochs of warm-up, then a cosine."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Learner.Params(
            optimizer=AdamW.Params(
                weight_decay=0.05,
                weight_decay_exclude=[
                    *(".*norm/.*", ".*/b", ".*_bias", ".*/positions/w", ".*/class_token/w"),
                ],
            ),
            schedule=schedules.Cosine.Params(
                initial_value=5e-4 * self.BATCH_SIZE / 512,
                final_value=1e-5,
                warmup_steps=5 * epoch,
            ),
        )

    def run(self) -> Params:
        """300 epochs."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(
            steps=300 * epoch, eval_every_steps=10 * epoch, checkpoint_every_steps=5 * epoch
        )


@register
class ViTS16(ViTTi16):
    """ViT-S with patches of 16 × 16 pixels, 22,050,664 weights, by the recipe of DeiT."""

    SIZE = "S"


@register
class ViTB16(ViTTi16):
    """ViT-B with patches of 16 × 16 pixels, 86,567,656 weights, by the recipe of DeiT."""

    SIZE = "B"


@register
class ViTL16(ViTTi16):
    """ViT-L with patches of 16 × 16 pixels, 304,326,632 weights; DeiT has no model of this size."""

    SIZE = "L"


class _AmoebaNet(ImageNet):
    """AmoebaNet as a pipeline, as in GPipe's table of the largest model per number of devices.

    Source:
      Huang et al. 2018, table 1. Settings of training: the public code of AmoebaNet for TPU, with
      these differences: there is no auxiliary head, dropped operations become more frequent from
      cell to cell (there, from step to step), and the rate decays after the warm-up (there, from
      step 0). BatchNorm uses the statistics of a micro-batch.
    """

    BATCH_SIZE = 256
    VARIANT: Literal["B", "D"] = "D"
    LAYOUT: Literal["tensorflow", "gpipe"] = "gpipe"
    NUM_LAYERS, FILTERS, NUM_STAGES = 18, 208, 1
    NUM_CLASSES = 1000

    def task(self) -> Params:
        """With label smoothing, dropout and dropped operations."""
        model = AmoebaNet.Params(
            variant=self.VARIANT,
            num_layers=self.NUM_LAYERS,
            filters=self.FILTERS,
            layout=self.LAYOUT,
            drop_path_rate=0.3,
            dropout_rate=0.5,
        )
        return ImageClassification.Params(
            model=model, num_classes=self.NUM_CLASSES, label_smoothing=0.1
        )

    def learner(self) -> Params:
        """RMSProp; a rate of 0.015 that is multiplied by 0.97 every 2.4 epochs."""
        epoch = NUM_TRAIN / self.BATCH_SIZE
        return Learner.Params(
            optimizer=RMSProp.Params(
                decay=0.9,
                momentum=0.9,
                epsilon=1.0,
                initial_mean_square=1.0,
                weight_decay=4e-5,
                weight_decay_scaling="gradient",
                weight_decay_exclude=_NOT_DECAYED,
            ),
            schedule=schedules.Exponential.Params(
                initial_value=0.015,
                rate=0.97,
                decay_steps=round(2.4 * epoch),
                form="stairs",
                warmup_steps=round(3 * epoch),
            ),
            clip_global_norm=10.0,
            ema_decay=0.9999,
        )

    def execution(self) -> Params:
        """A GPipe schedule with four micro-batches per stage and rematerialisation."""
        return Pipelined.Params(
            num_stages=self.NUM_STAGES,
            num_micro_batches=4 * self.NUM_STAGES,
            schedule="gpipe",
            rematerialize="all",
        )

    def run(self) -> Params:
        """100 epochs."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(
            steps=100 * epoch, eval_every_steps=4 * epoch, checkpoint_every_steps=epoch
        )


@register
class AmoebaNetDL18F208(_AmoebaNet):
    """AmoebaNet-D (18, 208), 81.5M weights: one accelerator."""


@register
class AmoebaNetDL18F416(_AmoebaNet):
    """AmoebaNet-D (18, 416), 319M weights: one accelerator with rematerialisation."""

    FILTERS = 416


@register
class AmoebaNetDL18F544(_AmoebaNet):
    """AmoebaNet-D (18, 544), 543M weights: 2 accelerators."""

    FILTERS, NUM_STAGES = 544, 2


@register
class AmoebaNetDL36F544(_AmoebaNet):
    """AmoebaNet-D (36, 544), 1.06B weights: 4 accelerators."""

    NUM_LAYERS, FILTERS, NUM_STAGES = 36, 544, 4


@register
class AmoebaNetDL72F512(_AmoebaNet):
    """AmoebaNet-D (72, 512), 1.84B weights: 8 accelerators."""

    NUM_LAYERS, FILTERS, NUM_STAGES = 72, 512, 8


@register
class AmoebaNetBL18F512(_AmoebaNet):
    """AmoebaNet-B (18, 512), 557M weights and images of 480 × 480 pixels: 4 accelerators.

    Published: a top-1 accuracy of 0.844 with one crop.
    """

    VARIANT, LAYOUT = "B", "tensorflow"
    FILTERS, NUM_STAGES, NUM_CLASSES = 512, 4, 1001

    def input(self) -> Params:
        """Class 0 is the background, as the labels in the files are."""
        return super().input().set({"image_size": 480, "source.label_offset": 0})
