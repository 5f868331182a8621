"""One Transformer for images and text: handwritten digits, and translation of CLDR phrases.

The layers that encode the patches of a digit are those that encode the source of a translation.
"""

from __future__ import annotations

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.task_inputs import OneTask, TaskInputs
from tekso.framework.input.task_mixing import ByWeight
from tekso.framework.input.tokenizers import Bytes
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.vision_transformer import VisionTransformer
from tekso.params.mt.text_files import transformer
from tekso.tasks.image.input import Images
from tekso.tasks.image.packaged import Digits
from tekso.tasks.image.steps import PadAndCrop
from tekso.tasks.image.task import ImageClassification
from tekso.tasks.mt.bucketed_pairs import BucketedPairs
from tekso.tasks.mt.cldr import Cldr
from tekso.tasks.mt.task import Translation
from tekso.tasks.multi.task import MultiTask


@register
class Shared(Experiment):
    """Digits and English to German: one encoder of 3 layers of width 128."""

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
        mt = BucketedPairs.Params(
            corpus=Cldr.Params(locales=["de"]),
            tokenizer=Bytes.Params(),
            source_length=96,
            target_length=96,
            bounds=[32],
            fill="tokens",
            batch_size=16,
        )
        return TaskInputs.Params(
            inputs={"digits": digits, "mt": mt},
            mixing=ByWeight.Params(weights={"digits": 1.0, "mt": 2.0}),
        )

    def eval_inputs(self) -> dict[str, Params]:
        """The 450 digits of other people, and held-out pairs."""
        digits, mt = HeldOut.Params(batch_size=150), HeldOut.Params(batch_size=64)
        return {
            "digits_dev": OneTask.Params(task="digits", input=digits),
            "mt_dev": OneTask.Params(task="mt", input=mt),
        }

    def learner(self) -> Params:
        """Adam; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98),
            schedule=schedules.Linear.Params(initial_value=0.001, warmup_steps=200),
            clip_global_norm=1.0,
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would only delay the start of so narrow a model."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """1,500 steps: about 500 of the digits, 1,000 of the translation."""
        return Run.Params(
            steps=1500,
            eval_every_steps=750,
            checkpoint_every_steps=750,
            keep_best=KeepBest.Params(metric="digits/accuracy", eval_input="digits_dev"),
        )
