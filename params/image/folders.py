"""Classifiers of your own images: `--set input.source.folder=flowers`, a folder for each class.

A tenth of the images of every class is held out for evaluation, unless `input.source.dev_folder` is
set.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Nesterov
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models import resnet
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.image.files import ImageFolders
from tekso.tasks.image.input import Images
from tekso.tasks.image.steps import CentreCrop, Flip, InceptionCrop
from tekso.tasks.image.task import ImageClassification


@register
class ResNet(Experiment):
    """ResNet-18 of half the width for images of 64 × 64 pixels; 2.8M weights for 10 classes."""

    def task(self) -> Params:
        """The classes are the folders."""
        model = resnet.ResNet.Params(num_blocks=[2, 2, 2, 2], width=32, block=BasicBlock.Params())
        return ImageClassification.Params(model=model, label_smoothing=0.1)

    def input(self) -> Params:
        """Crops of at least a quarter of the image, and flips."""
        return Images.Params(
            source=ImageFolders.Params(),
            image_size=64,
            batch_size=64,
            augment=[InceptionCrop.Params(least_area=0.25), Flip.Params()],
            evaluate=[CentreCrop.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out images."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """Nesterov momentum; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=Nesterov.Params(
                weight_decay=5e-4,
                weight_decay_scaling="gradient",
                weight_decay_exclude=[".*/norm/.*", ".*/b"],
            ),
            schedule=schedules.Cosine.Params(initial_value=0.05, warmup_steps=200),
        )

    def run(self) -> Params:
        """2,000 steps; the checkpoint of the best accuracy is kept."""
        return Run.Params(
            steps=2000,
            eval_every_steps=500,
            checkpoint_every_steps=500,
            keep_best=KeepBest.Params(metric="accuracy"),
        )
