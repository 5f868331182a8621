"""Pictures of clothes, 28 × 28 pixels in grey: the Debian package dataset-fashion-mnist.

Test is the official test set of 10,000 pictures; dev is the last 5,000 training pictures. The
package's README lists published accuracies: 0.916 for two convolutions with pooling, 0.949 for
ResNet-18.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.sgd import Nesterov
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models import resnet
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.tasks.image.input import Images
from tekso.tasks.image.packaged import FashionMnist
from tekso.tasks.image.scoring import ImageScoring
from tekso.tasks.image.steps import Flip
from tekso.tasks.image.task import ImageClassification

BASELINES = {"logistic regression": 0.833, "5 nearest neighbours": 0.818}
"""{method: accuracy on the test set}, fitted to the first 10,000 pictures."""


@register
class ResNet(Experiment):
    """A small residual network of 3 blocks of two 3 × 3 convolutions."""

    def task(self) -> Params:
        """16 channels at 28 × 28, 32 at 14 × 14 and 64 at 7 × 7 pixels."""
        model = resnet.ResNet.Params(
            num_blocks=[1, 1, 1], width=16, stem=resnet.SMALL_STEM, block=BasicBlock.Params()
        )
        return ImageClassification.Params(
            model=model, num_classes=10, scoring=ImageScoring.Params(baselines=BASELINES)
        )

    def input(self) -> Params:
        """128 pictures, mirrored at random."""
        return Images.Params(
            source=FashionMnist.Params(),
            image_size=28,
            channels=1,
            batch_size=128,
            augment=[Flip.Params()],
            mean=[0.286],
            deviation=[0.353],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """All held-out pictures: dev and the official test set."""
        return {
            "dev": HeldOut.Params(split="dev", batch_size=250),
            "test": HeldOut.Params(split="test", batch_size=250),
        }

    def learner(self) -> Params:
        """Nesterov momentum; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=Nesterov.Params(
                weight_decay=5e-4,
                weight_decay_scaling="gradient",
                weight_decay_exclude=[".*/norm/.*", ".*/b"],
            ),
            schedule=schedules.Cosine.Params(initial_value=0.1, warmup_steps=200),
        )

    def run(self) -> Params:
        """3,440 steps: eight passes over the training pictures."""
        return Run.Params(steps=3440, eval_every_steps=860, checkpoint_every_steps=430)
