"""Handwritten digits of 8 × 8 pixels, which are in the package scikit-learn.

The last 450 images are held out; other people wrote them. `BASELINES` has the accuracy of other
methods on them.
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
from tekso.models import mlp
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.models.resnet import SMALL_STEM, ResNet
from tekso.tasks.image.input import Images
from tekso.tasks.image.packaged import Digits
from tekso.tasks.image.scoring import ImageScoring
from tekso.tasks.image.steps import PadAndCrop
from tekso.tasks.image.task import ImageClassification

BASELINES = {"logistic regression": 0.920, "RBF SVM": 0.964, "3 nearest neighbours": 0.971}
"""{method: accuracy on the held-out digits}, measured with scikit-learn 1.9.1."""


@register
class Mlp(Experiment):
    """Two hidden layers of 256 units, with dropout."""

    def task(self) -> Params:
        """Two hidden layers of 256 units, with dropout."""
        return ImageClassification.Params(
            model=mlp.Mlp.Params(hidden_dims=[256, 256], dropout_rate=0.3),
            num_classes=10,
            label_smoothing=0.1,
            scoring=ImageScoring.Params(baselines=BASELINES),
        )

    def input(self) -> Params:
        """64 digits, each moved by up to a pixel."""
        return Images.Params(
            source=Digits.Params(),
            image_size=8,
            channels=1,
            batch_size=64,
            augment=[PadAndCrop.Params(padding=1)],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The 450 digits of other people."""
        return {"dev": HeldOut.Params(split="dev", batch_size=150)}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=0.01),
            schedule=schedules.Cosine.Params(initial_value=0.002, warmup_steps=100),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """2,000 steps: 95 passes over the training digits."""
        return Run.Params(steps=2000, eval_every_steps=1000, checkpoint_every_steps=1000)


@register
class Cnn(Mlp):
    """A small residual network of 3 blocks."""

    def task(self) -> Params:
        """16 channels at 8 × 8, 32 at 4 × 4 and 64 at 2 × 2 pixels."""
        model = ResNet.Params(
            num_blocks=[1, 1, 1],
            width=16,
            stem=SMALL_STEM,
            block=BasicBlock.Params(),
            dropout_rate=0.3,
        )
        return super().task().set(model=model)

    def run(self) -> Params:
        """1,000 steps: 48 passes over the training digits."""
        return super().run().set(steps=1000, eval_every_steps=500, checkpoint_every_steps=500)
