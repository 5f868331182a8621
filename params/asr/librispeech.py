"""LibriSpeech, 960 hours of read English: Conformer encoders with CTC, and LAS.

Set `input.corpus.folder` to the folder LibriSpeech of the unpacked archives. None of these
experiments has been trained with Tekso.

Conformer: the paper decodes with a transducer; these experiments use CTC, so its word error rates
are not theirs. Published, in percent, on test-clean and test-other, without and with a language
model:

    S   2.7 / 6.3   2.1 / 5.0        10.3 million weights with the decoder
    M   2.3 / 5.0   2.0 / 4.3        30.7
    L   2.1 / 4.3   1.9 / 3.9       118.8

LAS: published for Lingvo's models, on dev-clean, dev-other, test-clean and test-other, without a
language model:

    graphemes     5.2 / 15.2 / 5.4 / 15.5    853,000 steps
    word pieces   4.3 / 13.0 / 4.5 / 13.2    633,000 steps

They were trained by asynchronous gradient descent on 16 GPUs, with variational noise of 0.075 from
step 20,000, which is missing here.

Source: Gulati et al. 2020, tables 1 and 2, and section 3; Lingvo,
  tasks/asr/params/librispeech.py.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from tekso.framework import schedules
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.characters import Characters
from tekso.framework.input.held_out import HeldOut
from tekso.framework.input.sentence_piece import SentencePiece
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.conformer import Size, conformer
from tekso.models.ctc_model import CtcModel
from tekso.models.las import Las
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.source_attention import AdditiveAttention
from tekso.models.layers.spec_augment import SpecAugment
from tekso.models.speech_encoder import RecurrentEncoder
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.las_task import LasTask
from tekso.tasks.asr.sources import LibriSpeech
from tekso.tasks.asr.task import CtcTask

NUM_PIECES = 1024


class LibriSpeechExperiment(Experiment):
    """Base of the experiments: data and run."""

    num_pieces: ClassVar[int] = NUM_PIECES

    def input(self) -> Params:
        """Utterances up to 17 seconds in batches of about half an hour."""
        return BucketedSpeech.Params(
            corpus=LibriSpeech.Params(folder="LibriSpeech"),
            tokenizer=SentencePiece.Params(vocab_size=self.num_pieces),
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

    def run(self) -> Params:
        """100,000 steps."""
        return Run.Params(
            steps=100_000,
            eval_every_steps=5000,
            checkpoint_every_steps=5000,
            keep_best=KeepBest.Params(metric="wer"),
        )


@register
class ConformerS(LibriSpeechExperiment):
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


@register
class ConformerM(ConformerS):
    """16 Conformer blocks of width 256, with CTC: 27.6 million weights."""

    size = "M"


@register
class ConformerL(ConformerS):
    """17 Conformer blocks of width 512, with CTC: 115.6 million weights."""

    size = "L"


@register
class LasWordPieces(LibriSpeechExperiment):
    """Lingvo's LAS with 16,328 word pieces."""

    num_pieces = 16_328
    embedding_dim: ClassVar[int] = 96

    def task(self) -> Params:
        """Two convolutions, four bidirectional LSTMs; two LSTMs with additive attention."""
        return LasTask.Params(
            model=Las.Params(
                vocab_size=self.num_pieces,
                vocab_multiple=8,
                encoder=RecurrentEncoder.Params(num_filters=32, dim=640),
                embedding_dim=self.embedding_dim,
                decoder=RecurrentDecoder.Params(
                    num_layers=2,
                    cell=LstmCell.Params(hidden_dim=1024),
                    attention=AdditiveAttention.Params(hidden_dim=128),
                    output="state_and_context",
                ),
            )
        )

    def input(self) -> Params:
        """Batches of 48 utterances; Lingvo's have 96 of shorter ones."""
        return super().input().set(batch_size=48)

    def learner(self) -> Params:
        """Adam; from step 50,000, the learning rate is halved every 100,000 steps."""
        rate = 2.5e-4
        halving = schedules.Exponential.Params(
            initial_value=rate, rate=0.5, decay_steps=100_000, final_value=0.01 * rate
        )
        return Learner.Params(
            optimizer=Adam.Params(),
            schedule=schedules.Sequence.Params(
                schedules=[schedules.Constant.Params(value=rate), halving], boundaries=[50_000]
            ),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """633,000 steps, as published."""
        return super().run().set(steps=633_000)


@register
class LasGraphemes(LasWordPieces):
    """Lingvo's LAS with 76 characters."""

    num_pieces = 76
    embedding_dim = 76

    def input(self) -> Params:
        """Characters instead of pieces."""
        return super().input().set(tokenizer=Characters.Params(), max_labels=400)

    def eval_inputs(self) -> dict[str, Params]:
        """The same, with more labels in an utterance."""
        found: dict[str, Any] = super().eval_inputs()
        for held_out in found.values():
            held_out.changes["max_labels"] = 800
        return found

    def run(self) -> Params:
        """853,000 steps, as published."""
        return super().run().set(steps=853_000)
