"""Recognition of Asterisk's English voice prompts: 24 minutes of one speaker at 8 kHz.

No sentence of the held-out splits is in the training data.
"""

from __future__ import annotations

from typing import Any

from tekso.framework import schedules
from tekso.framework.execution.data_parallel import DataParallel
from tekso.framework.experiment import Experiment, KeepBest, Run
from tekso.framework.input.characters import Characters
from tekso.framework.input.held_out import HeldOut
from tekso.framework.learner import Learner
from tekso.framework.optimizers.adam import Adam
from tekso.framework.params import Params
from tekso.framework.registry import register
from tekso.models.conformer import Conformer as ConformerEncoder
from tekso.models.ctc_model import CtcModel
from tekso.models.las import Las as LasModel
from tekso.models.layers.conformer_block import ConformerBlock, ConvolutionModule
from tekso.models.layers.location_attention import LocationAwareAttention
from tekso.models.layers.log_mel import LogMel
from tekso.models.layers.normalization import LayerNorm
from tekso.models.layers.recurrent import RecurrentStack
from tekso.models.layers.recurrent_cells import LstmCell
from tekso.models.layers.recurrent_decoder import RecurrentDecoder
from tekso.models.layers.spec_augment import SpecAugment
from tekso.models.layers.transducer_layers import Joint, PredictionNetwork
from tekso.models.lstm_lm import LstmLm
from tekso.models.speech_encoder import RecurrentEncoder
from tekso.models.transducer import Transducer
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.las_task import LasTask, LasTranscriber
from tekso.tasks.asr.perturbation import Perturbation
from tekso.tasks.asr.sources import AsteriskPrompts
from tekso.tasks.asr.task import CtcTask
from tekso.tasks.asr.transcript_texts import TranscriptTexts
from tekso.tasks.asr.transducer_task import TransducerTask
from tekso.tasks.lm.bucketed_text import BucketedText
from tekso.tasks.lm.task import LanguageModel

SAMPLE_RATE = 8000


def listening() -> dict[str, Any]:
    """Returns the Params of a model up to its encoder.

    Convolutions and two bidirectional LSTM layers of 128 units, on 40 mel channels up to 3,800 Hz;
    narrow masks, since the data is small.
    """
    return {
        "front_end": LogMel.Params(
            sample_rate=SAMPLE_RATE, num_channels=40, fft_length=512, high_hz=3800.0
        ),
        "augment": SpecAugment.Params(
            num_frequency_masks=1, frequency_width=8, num_time_masks=1, time_width=20,
            time_share=0.2,
        ),
        "encoder": RecurrentEncoder.Params(
            num_filters=16,
            dim=128,
            stack=RecurrentStack.Params(
                num_layers=2,
                direction="bidirectional",
                cell=LstmCell.Params(hidden_dim=128),
                dropout_rate=0.2,
            ),
            dropout_rate=0.2,
        ),
    }  # fmt: skip


@register
class Ctc(Experiment):
    """Characters by CTC: convolutions and two bidirectional LSTM layers of 128 units."""

    def task(self) -> Params:
        """Encoder and projection."""
        return CtcTask.Params(model=CtcModel.Params(**listening()))

    def input(self) -> Params:
        """Utterances up to 8 seconds; batches of about 32 seconds."""
        return BucketedSpeech.Params(
            corpus=AsteriskPrompts.Params(),
            sample_rate=SAMPLE_RATE,
            max_seconds=8.0,
            max_labels=160,
            bounds_s=[1.0, 2.0, 4.0],
            batch_size=4,
            fill="seconds",
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Prompts whose texts are not in the training data."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """Adam; the learning rate rises, then falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=Adam.Params(beta2=0.98),
            schedule=schedules.Linear.Params(initial_value=0.003, warmup_steps=100),
            clip_global_norm=1.0,
        )

    def execution(self) -> Params:
        """The local devices without XLA, which would compile every bucket."""
        return DataParallel.Params(xla="none")

    def run(self) -> Params:
        """1,500 steps."""
        return Run.Params(
            steps=1500,
            eval_every_steps=500,
            checkpoint_every_steps=500,
            keep_best=KeepBest.Params(metric="cer"),
        )


@register
class Rnnt(Ctc):
    """Characters by a transducer: the encoder of Ctc, and an LSTM of 128 units over the labels."""

    def task(self) -> Params:
        """A prediction network with strong dropout, since the texts are few."""
        return TransducerTask.Params(
            model=Transducer.Params(
                prediction=PredictionNetwork.Params(
                    dim=64,
                    stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=128)),
                    dropout_rate=0.3,
                ),
                joint=Joint.Params(dim=128, block_frames=25),
                **listening(),
            )
        )


@register
class Las(Ctc):
    """Characters by an attention decoder with location-aware attention; the encoder of Ctc.

    The encoder is also trained by CTC, without which so little speech aligns no attention. The
    search adds the scores of both.
    """

    def task(self) -> Params:
        """One LSTM layer of 128 units; a tenth of its inputs are drawn by the model."""
        return LasTask.Params(
            model=LasModel.Params(
                embedding_dim=64,
                decoder=RecurrentDecoder.Params(
                    num_layers=1,
                    cell=LstmCell.Params(hidden_dim=128),
                    attention=LocationAwareAttention.Params(hidden_dim=64, kernel_size=15),
                    output="state_and_context",
                ),
                sampled_inputs=0.1,
                ctc_weight=0.3,
                label_smoothing=0.1,
                dropout_rate=0.2,
                **listening(),
            ),
            transcriber=LasTranscriber.Params(ctc_weight=0.4),
        )


@register
class Conformer(Las):
    """Characters by attention and CTC, as Las, with a small Conformer: 4 blocks of width 128.

    So little speech is learned by heart, hence the regularisation: more masks, twice the dropout of
    the published models, narrow convolutions before the blocks, and three speeds of the recordings.
    """

    def task(self) -> Params:
        """Kernels of 15 frames; layer normalisation, so that utterances do not depend on others."""
        convolution = ConvolutionModule.Params(kernel_size=15, norm=LayerNorm.Params())
        encoder = ConformerEncoder.Params(
            dim=128,
            num_layers=4,
            num_filters=32,
            dropout_rate=0.2,
            block=ConformerBlock.Params(num_heads=4, dropout_rate=0.2, convolution=convolution),
        )
        masks = {"num_frequency_masks": 2, "num_time_masks": 2, "time_share": 0.15}
        return (
            super()
            .task()
            .set({"model.encoder": encoder})
            .set({f"model.augment.{name}": value for name, value in masks.items()})
        )

    def input(self) -> Params:
        """The utterances of Ctc at three speeds."""
        return super().input().set(perturb=Perturbation.Params(speeds=[0.9, 1.0, 1.1]))

    def learner(self) -> Params:
        """Adam with a smaller learning rate and a longer warm-up than for LSTMs.

        The gradient of every weight is clipped by itself first. The run whose result is stored
        needed it: its bias before the first layer norm began at 0, see `Conformer.bias_init`.
        """
        changes = {"schedule.initial_value": 0.002, "schedule.warmup_steps": 300}
        return super().learner().set({**changes, "clip_tensor_norm": 0.5})

    def run(self) -> Params:
        """2,500 steps."""
        return super().run().set(steps=2500)


@register
class Texts(Experiment):
    """A language model of the training transcripts, for `task.transcriber.language_model`."""

    def task(self) -> Params:
        """An LSTM layer of 128 units over characters, with strong dropout."""
        return LanguageModel.Params(
            model=LstmLm.Params(
                embedding_dim=64,
                stack=RecurrentStack.Params(num_layers=1, cell=LstmCell.Params(hidden_dim=128)),
                dropout_rate=0.4,
            ),
            decode=None,
        )

    def input(self) -> Params:
        """One transcript per row; the longest have about 190 characters."""
        return BucketedText.Params(
            corpus=TranscriptTexts.Params(corpus=AsteriskPrompts.Params()),
            tokenizer=Characters.Params(),
            length=192,
            batch_size=16,
        )

    def eval_inputs(self) -> dict[str, Params]:
        """Transcripts that are not in the training data."""
        return {"dev": HeldOut.Params(split="dev")}

    def learner(self) -> Params:
        """Adam; the learning rate falls to zero at the end of the run."""
        return Learner.Params(
            optimizer=Adam.Params(),
            schedule=schedules.Linear.Params(initial_value=0.005, warmup_steps=50),
            clip_global_norm=1.0,
        )

    def run(self) -> Params:
        """600 steps."""
        return Run.Params(
            steps=600,
            eval_every_steps=100,
            checkpoint_every_steps=100,
            keep_best=KeepBest.Params(metric="loss"),
        )
