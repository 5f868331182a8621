"""U-Nets that label every pixel: digits in scenes, and your own images with masks.

`Digits` trains on scenes of scikit-learn's digits in front of noise. The digits of dev were written
by other people. On dev, a mean IoU over 11 classes of 0.099 is reached by a threshold and the most
frequent digit, and 0.171 by logistic regression (scikit-learn 1.9.1) of 13 × 13 pixels around each
of 30,000 training pixels.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.unet import UNet
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.image.steps import Flip, InceptionCrop
from tekso.tasks.segmentation.digit_scenes import DigitScenes
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.scoring import SegmentationScoring
from tekso.tasks.segmentation.sources import MaskFolders
from tekso.tasks.segmentation.task import Segmentation

BASELINES = {"threshold": 0.099, "logistic regression": 0.171}
"""{method: mean IoU on the 300 scenes of dev}."""


@register
class Digits(Experiment):
    """A U-Net of 3 scales on scenes of 48 × 48 pixels: mean IoU 0.208 and Dice 0.287 on dev."""

    def task(self) -> Params:
        """The background and ten digits."""
        return Segmentation.Params(
            model=UNet.Params(num_scales=3, width=16),
            num_classes=11,
            scoring=SegmentationScoring.Params(baselines=BASELINES),
        )

    def input(self) -> Params:
        """16 scenes."""
        return MaskImages.Params(
            source=DigitScenes.Params(),
            image_size=48,
            channels=1,
            batch_size=16,
            mean=[0.2],
            deviation=[0.2],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """300 scenes with the digits of other people."""
        return {"dev": HeldOut.Params(split="dev", batch_size=50)}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=1e-3),
            schedule=schedules.Cosine.Params(initial_value=0.002, warmup_steps=50),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """600 steps: 4.8 passes over the training scenes."""
        return Run.Params(steps=600, eval_every_steps=300, checkpoint_every_steps=300)


@register
class Folders(Digits):
    """The U-Net of Ronneberger et al. 2015 with BatchNorm, 31M weights, on your own images.

    Needs `input.source.folder` with the folders images and masks, and `input.source.classes`.
    """

    def task(self) -> Params:
        """The classes are those of the source."""
        return Segmentation.Params(model=UNet.Params())

    def input(self) -> Params:
        """Crops of at least a quarter of the image, and flips, at 256 × 256 pixels."""
        return MaskImages.Params(
            source=MaskFolders.Params(),
            image_size=256,
            batch_size=8,
            augment=[InceptionCrop.Params(least_area=0.25), Flip.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out images."""
        return {"dev": HeldOut.Params(split="dev")}

    def execution(self) -> Params:
        """The local devices."""
        return DataParallel.Params()

    def run(self) -> Params:
        """2,000 steps; the checkpoint of the best IoU is kept."""
        return Run.Params(
            steps=2000,
            eval_every_steps=500,
            checkpoint_every_steps=500,
            keep_best=KeepBest.Params(metric="iou"),
        )
