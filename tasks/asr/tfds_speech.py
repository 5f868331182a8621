"""Speech of a prepared data set of tensorflow-datasets; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input.errors import InputError
from tekso.framework.input.skips import BadRecordError, Origin
from tekso.framework.input.sources import digest
from tekso.framework.input.splits import Split
from tekso.framework.input.text import NotTextError, to_text
from tekso.framework.input.tfds import Tfds
from tekso.framework.params import param
from tekso.tasks.asr.utterances import AnySpeech, Utterance


class TfdsSpeech(Tfds, AnySpeech):
    """One split of a TFDS data set with recordings and transcripts, such as librispeech.

    The transcript is a text, or the name of a class, as in speech_commands. Data sets in the file
    formats tfrecord and array_record are read by index. Of any other, `input.keep=files` decodes
    the whole split into memory: use cache or memory.

    Raises:
      InputError: the data set is not available, has no such split or features, or its rate is not
        known.
    """

    class Params(Tfds.Params, AnySpeech.Params):
        """Params of TfdsSpeech."""

        feature: str = param("Must be empty: whole examples are read.", default="")
        audio_feature: str = param("The feature with the samples.", default="speech")
        text_feature: str = param("The feature with the transcript.", default="text")
        sample_rate: int | None = param(
            "Samples per second of the recordings. None: what the data set says.", default=None
        )

    def __init__(self, params: Any, *, split: Split = "train") -> None:
        super().__init__(params, split=split)
        p = self.params
        self.check_whole(p.audio_feature, p.text_feature)
        features = self._builder.info.features
        rate = p.sample_rate or getattr(features[p.audio_feature], "sample_rate", None)
        if not rate:
            raise InputError(
                f"{self.describe()} does not say how many samples per second "
                f"{p.audio_feature!r} has: set {p.path_of('sample_rate')}"
            )
        self._rate = int(rate)
        self._class_names = getattr(features[p.text_feature], "names", None)

    def fingerprint(self) -> str:
        """Returns a digest of the data set's name, version and split sizes, and of the features."""
        p = self.params
        names = f"{p.audio_feature} {p.text_feature} {self._rate}"
        return digest([super().fingerprint().encode(), names.encode()])

    def _feature(self, example: dict[str, Any]) -> Utterance:
        p, origin = self.params, Origin(self.describe())
        samples = np.asarray(example[p.audio_feature])
        if samples.dtype.kind in "iu":
            samples = _narrowed(samples, origin)
        elif samples.dtype.kind != "f":
            raise BadRecordError(
                origin, f"{p.audio_feature!r} is {samples.dtype}, but must be samples"
            )
        text = example[p.text_feature]
        if self._class_names is not None:
            text = self._class_names[int(text)]
        elif isinstance(text, bytes):
            try:
                text = to_text(text)
            except NotTextError as error:
                raise BadRecordError(origin, str(error)) from error
        return self._formed(Utterance((samples, self._rate), str(text)), origin)


def _narrowed(samples: np.ndarray, origin: Origin) -> np.ndarray:
    """Returns integer samples as int16, which is what TFDS stores in wider types."""
    found = samples.astype(np.int16)
    if not np.array_equal(found, samples):
        raise BadRecordError(origin, "samples that are not 16-bit integers")
    return found
