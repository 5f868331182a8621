r"""COCO 2017: boxes of 80 classes in 118,287 training and 5,000 validation images.

    tekso-trainer --model=image.coco.Ssd300 --logdir=runs/ssd300 \
        --set input.source.file=coco/annotations/instances_train2017.json \
        --set input.source.folder=coco/train2017 \
        --set input.source.dev_file=coco/annotations/instances_val2017.json \
        --set input.source.dev_folder=coco/val2017

This experiment has not been trained on COCO with Tekso. Published figures are those of MLPerf-0.6.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.ssd import Ssd
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.sources import CocoBoxes
from tekso.tasks.detection.steps import BoxFlip, Recolour, SsdCrop
from tekso.tasks.detection.task import Detection

NUM_TRAIN = 117_266
"""Training images with a box."""


@register
class Ssd300(Experiment):
    """SSD300 with a ResNet-34 (19,972,534 weights) on COCO, by MLPerf-0.6's recipe for 32 images.

    The target of MLPerf-0.6 is an AP of 0.23. It starts from weights of a ResNet-34 that was
    trained on ImageNet; without them, as here by default, expect less. See docs/vision.md.

    Source:
      Liu et al. 2016; MLPerf training v0.6, the reference of "single stage detector".
    """

    BATCH_SIZE = 32

    def task(self) -> Params:
        """80 classes and the background; 8,732 default boxes."""
        return Detection.Params(model=Ssd.Params(), num_classes=80)

    def input(self) -> Params:
        """Random parts, flips and colours, at 300 × 300 pixels; images without a box are left out.

        The most boxes of an image are 93.
        """
        return BoxImages.Params(
            source=CocoBoxes.Params(train_on="with_objects"),
            image_size=300,
            batch_size=self.BATCH_SIZE,
            augment=[SsdCrop.Params(), BoxFlip.Params(), Recolour.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All validation images."""
        return {"dev": HeldOut.Params(split="dev", batch_size=100)}

    def learner(self) -> Params:
        """Momentum; 0.0025 per 32 images after 300 steps, a tenth at 40 and 50 epochs.

        L2 loss of 0.0005 on all weights.
        """
        epoch, rate = NUM_TRAIN // self.BATCH_SIZE, 2.5e-3 * self.BATCH_SIZE / 32
        return Learner.Params(
            optimizer=Momentum.Params(weight_decay=5e-4, weight_decay_scaling="gradient"),
            schedule=schedules.PiecewiseConstant.Params(
                values=[rate, rate / 10, rate / 100],
                boundaries=[40 * epoch, 50 * epoch],
                warmup_steps=300,
            ),
        )

    def run(self) -> Params:
        """70 epochs; the checkpoint of the best AP is kept."""
        epoch = NUM_TRAIN // self.BATCH_SIZE
        return Run.Params(
            steps=70 * epoch,
            eval_every_steps=5 * epoch,
            checkpoint_every_steps=epoch,
            keep_best=KeepBest.Params(metric="ap"),
        )
