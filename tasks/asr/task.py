"""Speech recognition by connectionist temporal classification (CTC)."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.input import Input
from tekso.framework.params import param
from tekso.framework.pieces import Flow
from tekso.framework.task import Batch
from tekso.framework.theta import Theta
from tekso.models.ctc_loss import ctc_frames_needed, ctc_loss
from tekso.models.ctc_model import CtcModel
from tekso.models.speech_encoder import frames_of
from tekso.tasks.asr.ctc_transcriber import CtcTranscriber
from tekso.tasks.asr.exports import exported_scores
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.speech_task import SpeechTask


class CtcTask(SpeechTask):
    """Minimises -log P(labels | samples), summed over all alignments, per label.

    Utterances with too few frames for their labels do not count; see `SpeechTask`.

    Shapes:
      batch: see `SpeechTask`
      predict returns: "log_probs" [B, T, vocab_size + 1] float32, "num_frames" [B] int32
    """

    class Params(SpeechTask.Params):
        """Params of CtcTask."""

        model: CtcModel.Params = param(
            "The network. If its vocab_size is not set, the tokenizer's is used.",
            default=CtcModel.Params(),
        )
        transcriber: CtcTranscriber.Params = param(
            "How texts are found.", default=CtcTranscriber.Params()
        )

    model: CtcModel

    def has_alignment(self, batch: Batch, num_frames: tf.Tensor) -> tf.Tensor:
        """Returns whether the labels of each utterance fit into its frames; see `SpeechTask`.

        Shapes:
          num_frames: [B] int
          returns: bool [B]
        """
        return ctc_frames_needed(batch["labels"], batch["num_labels"]) <= num_frames

    def nats(self, flow: Flow, ctx: StepContext) -> tf.Tensor:
        """See `SpeechTask`."""
        logits = frames_of(flow)
        return ctc_loss(
            logits.features,
            flow["labels"],
            ctx,
            num_frames=logits.lengths,
            num_labels=flow["num_labels"],
            blank_id=self.model.blank_id,
        )

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the log-probabilities of the tokens in every frame; see the class.

        Shapes:
          batch: "samples" [B, N], "num_samples" [B]; other arrays are ignored
        """
        frames = self.model.fprop(theta.model, batch["samples"], ctx, lengths=batch["num_samples"])
        log_probs = tf.nn.log_softmax(tf.cast(frames.features, tf.float32))
        return {"log_probs": log_probs, "num_frames": frames.lengths}

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns a function from samples to log-probabilities, with the front end inside."""

        def run(theta: Theta, *arguments: Any) -> dict[str, tf.Tensor]:
            samples, num_samples, ctx = arguments
            return self.predict(theta, {"samples": samples, "num_samples": num_samples}, ctx)

        return exported_scores(run, BucketedSpeech.longest(input.params))
