"""U-Nets that label every pixel or voxel: synthetic data, and your own images and volumes.

`Digits` trains on scenes of scikit-learn's digits in front of noise. The digits of dev were written
by other people. `Shapes` trains on volumes of balls, boxes and rods in noise.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.optimizers.sgd import Momentum
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.unet import UNet, UNet3D
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.image.steps import Flip, InceptionCrop
from tekso.tasks.segmentation.digit_scenes import DigitScenes
from tekso.tasks.segmentation.input import MaskImages
from tekso.tasks.segmentation.scoring import SegmentationScoring
from tekso.tasks.segmentation.shape_volumes import ShapeVolumes
from tekso.tasks.segmentation.sources import MaskFolders
from tekso.tasks.segmentation.task import Segmentation
from tekso.tasks.segmentation.volume_input import Volumes as VolumeInput
from tekso.tasks.segmentation.volume_sources import VolumeFolders
from tekso.tasks.segmentation.volumes import VolumeSegmentation

BASELINES = {"threshold": 0.099, "logistic regression": 0.171}
"""{method: mean IoU on the 300 scenes of dev}."""

SHAPE_BASELINES = {"threshold": 0.315}
"""{method: mean IoU on the 60 volumes of dev}."""


@register
class Digits(Experiment):
    """A U-Net of 3 scales on scenes of 48 × 48 pixels: ten digits in front of noise."""

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
            schedule=schedules.Cosine.Params(initial_value=0.01, warmup_steps=50),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """1,500 steps: 12 passes over the training scenes."""
        return Run.Params(steps=1500, eval_every_steps=500, checkpoint_every_steps=500)


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

    def learner(self) -> Params:
        """AdamW with a lower learning rate, as the model is larger."""
        return super().learner().set(**{"schedule.initial_value": 0.002})

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


@register
class Shapes(Experiment):
    """A U-Net of 2 scales on synthetic volumes of 16 × 24 × 24 voxels: balls, boxes and rods."""

    def task(self) -> Params:
        """The background, balls, boxes and rods."""
        return VolumeSegmentation.Params(
            model=UNet3D.Params(num_scales=2, width=6),
            num_classes=4,
            scoring=SegmentationScoring.Params(baselines=SHAPE_BASELINES),
        )

    def input(self) -> Params:
        """8 volumes, mirrored at random along all dims."""
        return VolumeInput.Params(
            source=ShapeVolumes.Params(),
            volume_shape=(16, 24, 24),
            batch_size=8,
            mean=[0.2],
            deviation=[0.5],
            flips=["depth", "height", "width"],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """60 volumes."""
        return {"dev": HeldOut.Params(split="dev", batch_size=12)}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=1e-3),
            schedule=schedules.Cosine.Params(initial_value=0.005, warmup_steps=20),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """200 steps: 4 passes over the training volumes."""
        return Run.Params(steps=200, eval_every_steps=100, checkpoint_every_steps=100)


@register
class Volumes(Shapes):
    """The 3D U-Net of Çiçek et al. 2016, on your own volumes: 3 channels and 3 classes.

    Needs `input.source.folder` with .npz files, and `input.source.classes`. The paper's count of
    19,069,955 weights has one number for every channel of a convolution with BatchNorm. Here there
    are two, scale and bias: 2,336 more.

    Source: Çiçek et al. 2016, figure 2. The padding is SAME, so the output is as large as the input
    (there, 132 × 132 × 116 voxels have labels for 44 × 44 × 28).
    """

    def task(self) -> Params:
        """3 classes."""
        return VolumeSegmentation.Params(model=UNet3D.Params(), num_classes=3)

    def input(self) -> Params:
        """One crop of 112 × 128 × 128 voxels, mirrored at random."""
        return VolumeInput.Params(
            source=VolumeFolders.Params(),
            volume_shape=(112, 128, 128),
            channels=3,
            batch_size=1,
            flips=["depth", "height", "width"],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The centres of all held-out volumes."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """SGD with momentum; the rate is not the paper's, which does not give one."""
        return Learner.Params(
            optimizer=Momentum.Params(),
            schedule=schedules.Cosine.Params(initial_value=0.01, warmup_steps=500),
        )

    def execution(self) -> Params:
        """The local devices."""
        return DataParallel.Params()

    def run(self) -> Params:
        """70,000 steps, as in the paper; the checkpoint of the best IoU is kept."""
        return Run.Params(
            steps=70_000,
            eval_every_steps=2000,
            checkpoint_every_steps=2000,
            keep_best=KeepBest.Params(metric="iou"),
        )
