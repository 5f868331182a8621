r"""Letters and digits of fonts, 62 classes of 28 × 28 pixels; held-out fonts are other families.

    apt-get download fonts-lato fonts-dejavu-extra fonts-urw-base35
    for file in fonts-*.deb; do dpkg-deb -x "$file" fonts; done
    tekso-trainer --model=image.glyphs.ResNet --logdir=runs/glyphs --set input.source.folder=fonts

The stored result and `BASELINES` are of 178 fonts of the Debian 12 packages fonts-cantarell,
comic-neue, dancingscript, dejavu-extra, lato, league-spartan, liberation2, linuxlibertine, lobster,
open-sans, roboto-unhinted, texgyre and urw-base35: 9,362 glyphs for training, and 1,674 of C059
(with its clone TeX Gyre Schola), DejaVu and Linux Biolinum for dev.
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
from tekso.models import resnet
from tekso.models.layers.residual_blocks import BasicBlock
from tekso.tasks.image.glyphs import Glyphs
from tekso.tasks.image.input import Images
from tekso.tasks.image.scoring import ImageScoring
from tekso.tasks.image.task import ImageClassification

BASELINES = {"logistic regression": 0.922, "nearest neighbour": 0.900}
"""{method: accuracy on the glyphs of dev}, for the fonts of the module."""


@register
class ResNet(Experiment):
    """A small residual network of 3 blocks of two 3 × 3 convolutions."""

    def task(self) -> Params:
        """32 channels at 28 × 28, 64 at 14 × 14 and 128 at 7 × 7 pixels."""
        model = resnet.ResNet.Params(
            num_blocks=[1, 1, 1],
            width=32,
            stem=resnet.SMALL_STEM,
            block=BasicBlock.Params(),
            dropout_rate=0.3,
        )
        return ImageClassification.Params(
            model=model,
            num_classes=62,
            label_smoothing=0.1,
            scoring=ImageScoring.Params(baselines=BASELINES),
        )

    def input(self) -> Params:
        """64 glyphs. They fill their images, so they are not moved."""
        return Images.Params(
            source=Glyphs.Params(),
            image_size=28,
            channels=1,
            batch_size=64,
            mean=[0.75],
            deviation=[0.4],
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The glyphs of other families."""
        return {"dev": HeldOut.Params(split="dev", batch_size=186)}

    def learner(self) -> Params:
        """AdamW; the learning rate falls to zero along a cosine."""
        return Learner.Params(
            optimizer=AdamW.Params(weight_decay=0.01),
            schedule=schedules.Cosine.Params(initial_value=0.003, warmup_steps=50),
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so small a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """1,000 steps: 7 passes over the training glyphs."""
        return Run.Params(steps=1000, eval_every_steps=500, checkpoint_every_steps=500)
