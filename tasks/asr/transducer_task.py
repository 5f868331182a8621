"""Speech recognition by a transducer (RNN-T)."""

from __future__ import annotations

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.input import Input
from tekso.framework.params import param
from tekso.framework.pieces import Flow
from tekso.framework.task import Batch
from tekso.framework.theta import Theta
from tekso.models.speech_encoder import frames_of
from tekso.models.transducer import BLANK, LABEL, Transducer
from tekso.models.transducer_loss import lattice_loss
from tekso.tasks.asr.exports import exported_path
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.speech_task import SpeechTask
from tekso.tasks.asr.transducer_transcriber import TransducerTranscriber


class TransducerTask(SpeechTask):
    """Minimises -log P(labels | samples), summed over all alignments of a transducer, per label.

    Utterances without frames do not count; see `SpeechTask`.

    Shapes:
      batch: see `SpeechTask`
      predict returns: "ids", "frames" [B, longest] int32, "lengths" [B] int32, "log_probs" [B]
    """

    class Params(SpeechTask.Params):
        """Params of TransducerTask."""

        model: Transducer.Params = param(
            "The network. If its vocab_size is not set, the tokenizer's is used.",
            default=Transducer.Params(),
        )
        transcriber: TransducerTranscriber.Params = param(
            "How texts are found.", default=TransducerTranscriber.Params()
        )

    model: Transducer
    transcriber: TransducerTranscriber

    def nats(self, flow: Flow, ctx: StepContext) -> tf.Tensor:
        """See `SpeechTask`."""
        return lattice_loss(
            flow[BLANK],
            flow[LABEL],
            ctx,
            num_frames=frames_of(flow).lengths,
            num_labels=flow["num_labels"],
        )

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the greedy path of each utterance; see the class.

        Shapes:
          batch: "samples" [B, N], "num_samples" [B]; other arrays are ignored
        """
        return self.transcriber.best_path(theta, batch["samples"], batch["num_samples"], ctx)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns a function from samples to tokens, with the front end inside."""
        longest = BucketedSpeech.longest(input.params)
        return exported_path(self.transcriber.best_path, longest)
