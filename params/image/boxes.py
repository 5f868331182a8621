"""Detectors for your own images, whose boxes are in a JSON file in COCO's format.

    tekso-trainer --model=image.boxes.Ssd --set input.source.file=boxes.json

A tenth of the images is held out for evaluation, unless `input.source.dev_file` is set.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models import ssd
from tekso.params.image.imagenet import DEVIATION, MEAN
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.sources import CocoBoxes
from tekso.tasks.detection.steps import BoxFlip, Recolour, SsdCrop
from tekso.tasks.detection.task import Detection


@register
class Ssd(Experiment):
    """SSD for images of 300 × 300 pixels with a network of half the width of SSD300's."""

    def task(self) -> Params:
        """The classes are the categories of the file."""
        return Detection.Params(model=ssd.Ssd.Params(width=32, num_blocks=[2, 2, 2]))

    def input(self) -> Params:
        """Random parts of the images, flips and colours."""
        return BoxImages.Params(
            source=CocoBoxes.Params(),
            image_size=300,
            batch_size=16,
            augment=[SsdCrop.Params(), BoxFlip.Params(), Recolour.Params()],
            mean=MEAN,
            deviation=DEVIATION,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out images."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=1e-4),
            schedule=schedules.Cosine.Params(initial_value=0.001, warmup_steps=100),
        )

    def run(self) -> Params:
        """2,000 steps; the checkpoint of the best AP is kept."""
        return Run.Params(
            steps=2000,
            eval_every_steps=500,
            checkpoint_every_steps=500,
            keep_best=KeepBest.Params(metric="ap"),
        )
