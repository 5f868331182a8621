"""One Transformer for images and text: handwritten digits, and translation of CLDR phrases.

The layers that encode the patches of a digit are those that encode the source of a translation.
"""

from __future__ import annotations

from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import TaskInputs
from tekso.framework.input.task_mixing import ByWeight
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.vision_transformer import VisionTransformer
from tekso.params.mt.text_files import transformer
from tekso.params.multi.settings import NarrowExperiment, held_out, pairs_of_bytes, run_of
from tekso.tasks.image.input import Images
from tekso.tasks.image.packaged import Digits
from tekso.tasks.image.steps import PadAndCrop
from tekso.tasks.image.task import ImageClassification
from tekso.tasks.mt.cldr import Cldr
from tekso.tasks.mt.task import Translation
from tekso.tasks.multi.task import MultiTask


@register
class Shared(NarrowExperiment):
    """Digits and English to German: one encoder of 3 layers of width 128."""

    learning_rate = 0.001

    def task(self) -> Params:
        """A vision Transformer on patches of 2 × 2 pixels, and an encoder-decoder on bytes."""
        mt = transformer(num_layers=3, dim=128, hidden_dim=512, num_heads=4, dropout_rate=0.1)
        digits = VisionTransformer.Params(
            image_size=8, channels=1, dim=128, patch_size=2, stack=mt.encoder, dropout_rate=0.1
        )
        tasks = {
            "digits": ImageClassification.Params(model=digits, num_classes=10, label_smoothing=0.1),
            "mt": Translation.Params(model=mt, decode=["October 3, 2021 to May 4, 2022"]).set(
                {"scoring.pairs": 200}
            ),
        }
        shared = {
            "digits/model/stack": "mt/model/encoder",
            "digits/model/final_norm": "mt/model/encoder_norm",
        }
        return MultiTask.Params(tasks=tasks, shared=shared)

    def input(self) -> Params:
        """Every third step trains digits."""
        digits = Images.Params(
            source=Digits.Params(),
            image_size=8,
            channels=1,
            batch_size=64,
            augment=[PadAndCrop.Params(padding=1)],
        )
        mt = pairs_of_bytes(Cldr.Params(locales=["de"]), length=96, bound=32)
        return TaskInputs.Params(
            inputs={"digits": digits, "mt": mt},
            mixing=ByWeight.Params(weights={"digits": 1.0, "mt": 2.0}),
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The 450 digits of other people, and held-out pairs."""
        digits, mt = HeldOut.Params(batch_size=150), HeldOut.Params(batch_size=64)
        return held_out(digits=digits, mt=mt)

    def run(self) -> Params:
        """1,500 steps: about 500 of the digits, 1,000 of the translation."""
        return run_of(1500, "digits/accuracy")
