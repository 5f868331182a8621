"""LibriSpeech, 960 hours of read English, with the encoders of the Conformer.

Set `input.corpus.folder` to the folder LibriSpeech of the unpacked archives. The paper decodes with
a transducer; these experiments use CTC, so its word error rates are not theirs. Published, in
percent, on test-clean and test-other, without and with a language model:

    S   2.7 / 6.3   2.1 / 5.0        10.3 million weights with the decoder
    M   2.3 / 5.0   2.0 / 4.3        30.7
    L   2.1 / 4.3   1.9 / 3.9       118.8

They have not been trained with Tekso.

Source: Gulati et al. 2020, tables 1 and 2, and section 3.
"""

from __future__ import annotations

import math
from typing import ClassVar

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.conformer import Size, conformer
from tekso.models.ctc_model import CtcModel
from tekso.models.layers.spec_augment import SpecAugment
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.sources import LibriSpeech
from tekso.tasks.asr.task import CtcTask

NUM_PIECES = 1024


@register
class ConformerS(Experiment):
    """16 Conformer blocks of width 144, with CTC: 8.9 million weights."""

    size: ClassVar[Size] = "S"

    def task(self) -> Params:
        """80 mel channels; the paper's masks: F = 27, and ten time masks of at most 5 percent."""
        return CtcTask.Params(
            model=CtcModel.Params(
                vocab_size=NUM_PIECES,
                augment=SpecAugment.Params(
                    num_frequency_masks=2,
                    frequency_width=27,
                    num_time_masks=10,
                    time_width=3000,
                    time_share=0.05,
                ),
                encoder=conformer(self.size),
            )
        )

    def input(self) -> Params:
        """Utterances up to 17 seconds in batches of about half an hour."""
        return BucketedSpeech.Params(
            corpus=LibriSpeech.Params(folder="LibriSpeech"),
            tokenizer=SentencePiece.Params(vocab_size=NUM_PIECES),
            max_seconds=17.1,
            max_labels=200,
            bounds_s=[6.4, 10.6, 12.75, 13.8, 14.5, 15.1, 15.7],
            batch_size=128,
            keep="files",
        )

    def eval_inputs(self) -> dict[str, Params]:
        """dev-clean and test-clean, and their difficult counterparts, with all utterances."""
        longest = {"max_seconds": 36.0, "max_labels": 450}
        other = {**longest, "corpus.dev": ["dev-other"], "corpus.test": ["test-other"]}
        return {
            "dev": HeldOut.Params(changes=longest),
            "dev_other": HeldOut.Params(changes=other),
            "test": HeldOut.Params(split="test", changes=longest),
            "test_other": HeldOut.Params(split="test", changes=other),
        }

    def learner(self) -> Params:
        """Adam with a peak of 0.05 / sqrt(width) after 10,000 steps."""
        warmup_steps = 10_000
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98, epsilon=1e-9),
            schedule=schedules.InverseSquareRoot.Params(
                model_dim=conformer(self.size).dim,
                scale=0.05 * math.sqrt(warmup_steps),
                warmup_steps=warmup_steps,
            ),
        )

    def run(self) -> Params:
        """100,000 steps."""
        return Run.Params(
            steps=100_000,
            eval_every_steps=5000,
            checkpoint_every_steps=5000,
            keep_best=KeepBest.Params(metric="wer"),
        )


@register
class ConformerM(ConformerS):
    """16 Conformer blocks of width 256, with CTC: 27.6 million weights."""

    size = "M"


@register
class ConformerL(ConformerS):
    """17 Conformer blocks of width 512, with CTC: 115.6 million weights."""

    size = "L"
