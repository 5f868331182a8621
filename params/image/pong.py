"""Players and ball in frames of Atari's Pong, from the package ale-py, which is not required.

The frames of dev are of other episodes than those of training. `BASELINES` has the AP of copied
boxes.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import AdamW
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models import ssd
from tekso.models.layers.conv_norm import ConvNorm
from tekso.models.layers.residual_blocks import BATCH_NORM
from tekso.models.resnet import Stem
from tekso.tasks.detection.input import BoxImages
from tekso.tasks.detection.pong import PongFrames
from tekso.tasks.detection.scoring import DetectionScoring
from tekso.tasks.detection.steps import Recolour
from tekso.tasks.detection.task import Detection

BASELINES = {"most similar training frame": 0.566, "median boxes": 0.005}
"""{method: AP at the overlap 0.5 on the 300 frames of dev}."""

STEM = Stem.Params(
    conv=ConvNorm.Params(
        kernel_shape=(3, 3), strides=(2, 2), padding="FIXED", norm=BATCH_NORM, activation="relu"
    ),
    pool=None,
)
"""A stem that halves height and width."""


@register
class Ssd(Experiment):
    """A small SSD for images of 160 × 160 pixels; three classes."""

    def task(self) -> Params:
        """Default boxes on maps of 40, 20 and 10 pixels."""
        model = ssd.Ssd.Params(
            width=16,
            num_blocks=[1, 1, 1],
            stem=STEM,
            steps=[4, 8, 16],
            scales=[3.0, 7.0, 14.0, 28.0],
            aspect_ratios=[[2], [2, 3], [2]],
        )
        return Detection.Params(
            model=model, num_classes=3, scoring=DetectionScoring.Params(baselines=BASELINES)
        )

    def input(self) -> Params:
        """16 frames in changed colours."""
        return BoxImages.Params(
            source=PongFrames.Params(),
            image_size=160,
            max_boxes=4,
            batch_size=16,
            augment=[Recolour.Params()],
            mean=[0.4],
            deviation=[0.2],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """300 frames of other episodes."""
        return {"dev": HeldOut.Params(split="dev", batch_size=50)}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=1e-4),
            schedule=schedules.Cosine.Params(initial_value=0.003, warmup_steps=50),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """200 steps: 4 passes over the training frames."""
        return Run.Params(steps=200, eval_every_steps=100, checkpoint_every_steps=100)
