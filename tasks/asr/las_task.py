"""Speech recognition by an attention decoder (LAS), and its beam search."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.exports import ExportedFunction
from tekso.framework.input.input import Input
from tekso.framework.params import param
from tekso.framework.pieces import Flow
from tekso.framework.task import Batch, Program
from tekso.framework.theta import Theta
from tekso.models.decoding.beam_search import BeamSearch
from tekso.models.decoding.ctc_prefix import CtcDecoder
from tekso.models.decoding.decoder import Decoder
from tekso.models.las import CROSS_ENTROPY, CTC, Las
from tekso.models.layers.frames import frame_mask
from tekso.models.speech_model import SpeechModel
from tekso.tasks.asr.exports import exported_hypotheses
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.language_fusion import FusedDecoder
from tekso.tasks.asr.speech_task import SpeechTask
from tekso.tasks.asr.transcriber import Transcriber, Transcript

_FOUND = ("ids", "lengths", "log_probs", "is_finished")


class LasTranscriber(Transcriber):
    """Finds the text of utterances by beam search. It does not know when tokens are spoken."""

    class Params(Transcriber.Params):
        """Params of LasTranscriber."""

        search: BeamSearch.Params = param(
            "The search; the source length is that of the encoder's output.",
            default=BeamSearch.Params(max_length_ratio=1.0),
        )
        ctc_weight: float = param(
            "Weight w of the CTC layer's scores in the search: w * log P_ctc + (1 - w) * "
            "log P_attention. Above 0, it needs a model trained with `model.ctc_weight`.",
            default=0.0,
        )

    sizes = ("num_hypotheses",)
    beam_size_field = "search.beam_size"

    def __init__(self, params: Any, *, model: SpeechModel) -> None:
        """Builds the search; see `Transcriber`.

        Raises:
          ValueError: a language model has a token_bonus; the model has no CTC layer that
            ctc_weight needs; or as Transcriber.
        """
        super().__init__(params, model=model)
        p = self.params
        if not 0.0 <= p.ctc_weight <= 1.0:
            raise ValueError(f"{p.path_of('ctc_weight')} is {p.ctc_weight}, must be in 0 … 1")
        if p.ctc_weight and not model.params.ctc_weight:
            raise ValueError(
                f"{p.path_of('ctc_weight')} is {p.ctc_weight}, but the model has no CTC layer: "
                f"train it with {model.params.path_of('ctc_weight')} above 0, or set "
                f"{p.path_of('ctc_weight')}=0"
            )
        fusion = self.params.language_model
        if fusion is not None and fusion.token_bonus:
            raise ValueError(
                f"{fusion.path_of('token_bonus')} is {fusion.token_bonus}, must be 0 for an "
                "attention decoder: set search.length_normalization instead"
            )
        search = self.params.search.copy().set(num_hypotheses=self.params.num_hypotheses)
        self._search: BeamSearch = search.instantiate()

    def transcripts(
        self, program: Program, samples: Any, num_samples: Any
    ) -> list[list[Transcript]]:
        """See `Transcriber`.

        Shapes:
          samples: [batch, samples], num_samples: [batch]
        """
        given = tf.constant(samples), tf.constant(num_samples)
        language = self.language()
        if language is None:
            found = program.call(self.hypotheses, *given)
        else:
            found = program.call(self._fused_hypotheses, *given, language.flat)
        ids, lengths, scores, is_finished = (np.asarray(found[name]) for name in _FOUND)
        labels = lengths - is_finished  # without the end token
        return [
            [
                Transcript(ids[i, h, : labels[i, h]].tolist(), float(scores[i, h]))
                for h in range(ids.shape[1])
                if h == 0 or lengths[i, h]
            ]
            for i in range(len(ids))
        ]

    def hypotheses(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        """Returns ids [B, H, L], lengths, log-probabilities and is_finished [B, H].

        Shapes:
          samples: [B, N], num_samples: [B]
        """
        return self._searched(self._decoder, theta, theta.model, samples, num_samples, ctx)

    @property
    def _decoder(self) -> Decoder:
        """The model, with the scores of its CTC layer if they have a weight."""
        model, weight = self._model, self.params.ctc_weight
        return CtcDecoder(model, model, weight, model.end_id) if weight else model

    def _fused_hypotheses(
        self, theta: Theta, samples: tf.Tensor, num_samples: tf.Tensor, flat: Any, ctx: StepContext
    ) -> dict[str, tf.Tensor]:
        """Returns `hypotheses` with the scores of the language model, whose weights are given."""
        language = self.language()
        if language is None:
            raise ValueError("there is no language model")
        fused = Theta(model=theta.model, language=language.theta(flat))
        model = FusedDecoder(self._decoder, language)
        return self._searched(model, theta, fused, samples, num_samples, ctx)

    def _searched(
        self,
        decoder: Decoder,
        theta: Theta,
        decoded_with: Theta,
        samples: tf.Tensor,
        num_samples: tf.Tensor,
        ctx: StepContext,
    ) -> dict[str, tf.Tensor]:
        frames = self._model.encode(theta.model, samples, ctx, lengths=num_samples)
        mask = frame_mask(frames.lengths, frames.features.shape[1])
        given = {"encoded": frames.features, "source_segment_ids": tf.cast(mask, tf.int32)}
        found = self._search.search(decoder, decoded_with, given, ctx, self._model.end_id)
        return {name: found[name] for name in _FOUND}


class LasTask(SpeechTask):
    """Minimises -log p(labels and end | samples) per token, by an attention decoder.

    With `model.ctc_weight`, the loss is the weighted mean of this and of the CTC loss. Utterances
    without frames do not count; see `SpeechTask`. Those whose labels do not fit into their frames
    have no CTC loss.

    Shapes:
      batch: see `SpeechTask`
      predict returns: "ids" [B, H, L] int32, "lengths", "log_probs" and "is_finished" [B, H]
    """

    class Params(SpeechTask.Params):
        """Params of LasTask."""

        model: Las.Params = param(
            "The network. If its vocab_size is not set, the tokenizer's is used.",
            default=Las.Params(),
        )
        transcriber: LasTranscriber.Params = param(
            "How texts are found.", default=LasTranscriber.Params()
        )

    model: Las
    transcriber: LasTranscriber

    def num_targets(self, batch: Batch) -> tf.Tensor:
        """Returns the number of labels and end tokens of each utterance, [B] int."""
        return batch["num_labels"] + 1

    def nats(self, flow: Flow, ctx: StepContext) -> tf.Tensor:
        """See `SpeechTask`."""
        del ctx
        nats = flow[CROSS_ENTROPY]
        counted = frame_mask(flow["num_labels"] + 1, nats.shape[1])
        nats = tf.reduce_sum(tf.where(counted, nats, tf.zeros_like(nats)), 1)
        weight = self.model.params.ctc_weight
        return (1.0 - weight) * nats + weight * flow[CTC] if weight else nats

    def predict(self, theta: Theta, batch: Batch, ctx: StepContext) -> dict[str, tf.Tensor]:
        """Returns the best transcripts of each utterance; see the class.

        Shapes:
          batch: "samples" [B, N], "num_samples" [B]; other arrays are ignored
        """
        return self.transcriber.hypotheses(theta, batch["samples"], batch["num_samples"], ctx)

    def exports(self, input: Input) -> dict[str, ExportedFunction]:
        """Returns functions from samples to tokens, with the front end inside."""
        greedy = self.params.transcriber.copy().set(num_hypotheses=1, language_model=None)
        greedy.search.set(beam_size=1, length_normalization=0.0, coverage_penalty=0.0)
        return exported_hypotheses(
            self.transcriber.hypotheses,
            LasTranscriber(greedy, model=self.model).hypotheses,
            BucketedSpeech.longest(input.params),
            beam_size=self.transcriber.beam_size,
            # With a coverage penalty, LiteRT returned missing hypotheses as finished ones.
            beam_for_litert=not self.params.transcriber.search.coverage_penalty,
        )
