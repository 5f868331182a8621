"""SpeechTask: what tasks of speech recognition share: checks, weights, transcripts and scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.input.skips import BadRecordError, reason_of
from tekso.framework.params import REQUIRED, literals, param
from tekso.framework.pieces import LOSS_SUM, METRICS, Flow, Piece
from tekso.framework.task import Batch, Decoded, LossSums, Program, Scored, Task
from tekso.framework.theta import Theta
from tekso.framework.trained import LoadTrained
from tekso.models.speech_model import SpeechModel
from tekso.tasks.asr.audio import AudioError, Samples, read_audio, seconds_of
from tekso.tasks.asr.input import BucketedSpeech
from tekso.tasks.asr.transcriber import Transcriber, TranscriptScoring
from tekso.tasks.asr.word_errors import CER, KINDS, WER, jiwer_module
from tekso.tasks.unset_sizes import set_vocab_size

IMPOSSIBLE = "impossible"
"""Metric: share of utterances that have too few frames for their labels."""

NUM_EXAMPLES = 3  # utterances that are transcribed if no files are given


class SpeechTask(Task):
    """Base of the tasks; a subclass defines Params `model` and `transcriber`, and `nats`.

    An utterance with too few frames for its labels has no alignment. Neither its loss nor its
    labels count, and the metric "impossible" is the share of such utterances. The blank counts as
    a label, so an utterance without labels has weight 1.

    Shapes:
      batch:
        "samples": [B, N] float32; "num_samples": [B] int32
        "labels": [B, U] int32; "num_labels": [B] int32; "weights": [B] float32, 0 for padding
      loss returns: sums over the utterances, scalars
    """

    class Params(Task.Params):
        """Params of a task of speech recognition."""

        model: SpeechModel.Params = param("The network.", default=REQUIRED)
        transcriber: Transcriber.Params = param("How texts are found.", default=REQUIRED)
        scoring: TranscriptScoring.Params | None = param(
            "Transcription and scoring in evaluations, which need jiwer; None: neither.",
            default=TranscriptScoring.Params(),
        )
        decode: list[str] = param(
            "Audio files that --mode=decode transcribes. Empty: the first training utterances.",
            default=[],
        )
        longest_file_s: float = param(
            "Longest audio file that is transcribed, in seconds; a longer one is an error, because "
            "memory grows with the length.",
            default=300.0,
        )

    goals = {name: "min" for name in (WER, CER, *KINDS)}  # noqa: RUF012
    model: Any

    def __init__(self, params: Any) -> None:
        """Builds the network."""
        super().__init__(params)
        p = self.params
        self.child("model", p.model)
        self.transcriber: Transcriber = p.transcriber.instantiate(model=self.model)
        self._scoring: TranscriptScoring | None = None
        if p.scoring is not None:
            self._scoring = p.scoring.instantiate()

    @classmethod
    def complete(cls, params: Any, input: Input) -> Any:
        """Sets the vocabulary size if it is not set.

        Raises:
          ValueError: it is set nowhere, or is smaller than the input's; or the front end has
            another sample rate than the input.
        """
        params = params.copy()
        set_vocab_size(params.model, "vocab_size", input.vocab_size, data="transcripts")
        rate = params.model.front_end.sample_rate
        if "sample_rate" in input.params and input.params.sample_rate != rate:
            raise ValueError(
                f"input.sample_rate is {input.params.sample_rate}, but "
                f"task.model.front_end.sample_rate is {rate}: they must be equal"
            )
        return params

    def use_trained(self, load: LoadTrained, input: Input) -> None:
        """Loads the language model of the transcriber, if its Params name one."""
        self.transcriber.use_trained(load, input.tokenizer)

    def check_inputs(self, inputs: Mapping[str, Any]) -> list[str]:
        """Checks that error rates can be computed; warns of utterances that are left out."""
        if self._scoring is not None and len(inputs) > 1:
            jiwer_module()
        return [
            f"{path}: {speech.num_too_long:,} utterances are too long and are left out"
            for path, input in inputs.items()
            if isinstance(speech := input.inner, BucketedSpeech) and speech.num_too_long
        ]

    def check_batch(self, what: str, batch: Mapping[str, np.ndarray]) -> None:
        """Checks that all labels are tokens.

        Raises:
          InputError: a label is out of range.
        """
        labels, size = batch["labels"], self.params.model.vocab_size
        if labels.size and (labels.min() < 0 or labels.max() >= size):
            wrong = labels[(labels < 0) | (labels >= size)][0]
            raise InputError(f"{what}: label {wrong} is not in 0 to {size - 1}")

    def has_alignment(self, batch: Batch, num_frames: tf.Tensor) -> tf.Tensor:
        """Returns whether the labels of each utterance fit into its frames.

        Shapes:
          num_frames: [B] int, of the encoder's output
          returns: bool [B]
        """
        del batch
        return num_frames > 0

    def num_targets(self, batch: Batch) -> tf.Tensor:
        """Returns the number of labels of each utterance that its loss is divided by, [B] int."""
        return tf.maximum(batch["num_labels"], 1)

    def nats(self, flow: Flow, ctx: StepContext) -> tf.Tensor:
        """Returns the loss of each utterance from the flow of the model's pieces, [B] float32.

        It may be infinite where `has_alignment` is False.
        """
        raise NotImplementedError(f"{type(self).__name__} has no nats()")

    def loss_weight(self, batch: Batch) -> tf.Tensor:
        """Returns the number of targets of the utterances that have an alignment."""
        possible = self.has_alignment(batch, self.model.num_frames(batch["num_samples"]))
        targets = tf.cast(self.num_targets(batch), tf.float32)
        return tf.reduce_sum(batch["weights"] * targets * tf.cast(possible, tf.float32))

    def pieces(self) -> list[Piece]:
        """Returns the pieces of the model, and one for loss and metrics; see `Task`."""
        pieces = [piece.below("model") for piece in self.model.pieces()]
        return [*pieces, Piece("loss", {}, self._run_sums)]

    def _run_sums(self, theta: Theta, flow: Flow, ctx: StepContext) -> Flow:
        del theta
        nats = self.nats(flow, ctx)
        weights = tf.cast(flow["weights"], nats.dtype)
        possible = self.has_alignment(flow, self.model.num_frames(flow["num_samples"]))
        nats = tf.where(possible, nats, tf.zeros_like(nats))
        missing = weights * tf.cast(tf.logical_not(possible), nats.dtype)
        metrics = {IMPOSSIBLE: (tf.reduce_sum(missing), tf.reduce_sum(weights))}
        sums = LossSums(tf.reduce_sum(weights * nats), metrics)
        return {**flow, LOSS_SUM: sums.loss_sum, METRICS: sums.metrics}

    def count(self, batch: Mapping[str, np.ndarray]) -> tuple[int, str]:
        """Returns the seconds of speech in a batch."""
        num_samples = float(np.sum(batch["num_samples"] * (batch["weights"] > 0)))
        return round(num_samples / self.params.model.front_end.sample_rate), "seconds of speech"

    def score(
        self,
        program: Program,
        input: Input,
        *,
        is_last: bool,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scored | None:
        """Returns word and character error rates of an evaluation input, and samples."""
        del is_last
        if self._scoring is None:
            return None
        speech = speech_of(input)
        steps = map(input.inner_step, range(input.num_batches or 0))
        return self._scoring.score(program, speech, steps, self.transcriber, stopped=stopped)

    @classmethod
    def decodes_data(cls, params: Any) -> bool:
        """Returns whether decoding transcribes utterances of the input; see `Task`."""
        return not params.decode

    def decode(self, program: Program, input: Input) -> Decoded | None:
        """Returns transcripts of the audio files in the Params, or of the first utterances.

        The record of a file that cannot be read has "error" instead of "text". If the transcriber
        knows when tokens are spoken, "words" has a pair [word, second of its beginning] for each.
        """
        if self.params.decode:
            records = [self.transcribe_file(program, input, path) for path in self.params.decode]
        else:
            records, speech = [], speech_of(input)
            for i in range(min(NUM_EXAMPLES, speech.num_examples)):
                known = {"file": speech.origin(i), "reference": speech.text(i)}
                records.append(self._record(program, input, known, partial(speech.samples, i)))
        return Decoded("\n".join(map(_shown, records)), records)

    def transcribe_file(self, program: Program, input: Input, path: str) -> dict[str, Any]:
        """Returns the record of an audio file; see `decode`."""
        return self._record(program, input, {"file": path}, partial(self._read, path))

    def _read(self, path: str) -> Samples:
        seconds, most = seconds_of(path), self.params.longest_file_s
        if seconds > most:
            raise AudioError(
                f"{seconds:.0f} s, longer than {self.params.path_of('longest_file_s')}={most:g}: "
                "cut it into parts, or set a higher limit"
            )
        return read_audio(path, self.params.model.front_end.sample_rate)

    def _record(
        self,
        program: Program,
        input: Input,
        known: Mapping[str, Any],
        read: Callable[[], Samples],
    ) -> dict[str, Any]:
        try:
            samples = read()
        except (AudioError, BadRecordError, OSError) as error:
            found = {"error": reason_of(error)}
        else:
            found = self.transcriber.record(program, samples, input.tokenizer)
        return {"kind": "transcript", **known, **found}

    def setting_to_try(self, eval_inputs: Mapping[str, Any]) -> str | None:
        """Returns a suggested decode setting: the first file of an evaluation input."""
        for input in eval_inputs.values():
            if (file := speech_of(input).audio_file(0)) is not None:
                return f"task.decode={literals.write([file])}"
        return None


def speech_of(input: Input) -> BucketedSpeech:
    """Returns the input that reads the utterances.

    Raises:
      InputError: it has none, or has not read its data.
    """
    found = input.inner if isinstance(input, Input) else input
    if not isinstance(found, BucketedSpeech):
        raise InputError("the task needs the utterances of its input, but they are not loaded")
    return found


def _shown(record: Mapping[str, Any]) -> str:
    if "error" in record:
        return f"{record['file']}: {record['error']}"
    lines = [f"{record['file']}", f"  model: {record['text']}"]
    if "reference" in record:
        lines.append(f"  reference: {record['reference']}")
    return "\n".join(lines)
