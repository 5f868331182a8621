"""An input of images with captions: decodes images, and encodes captions as tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from tekso.framework.input.characters import Characters
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Input, Signature
from tekso.framework.input.sources import training_text
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, param
from tekso.framework.spelling import close_matches
from tekso.tasks.captioning.sources import CaptionSource
from tekso.tasks.classification.task import WEIGHTS, X
from tekso.tasks.image.image_input import ImageInput
from tekso.tasks.image.preparation import Preparation
from tekso.tasks.image.steps import ImageStep

TARGET_IDS, TARGET_LABELS = "target_ids", "target_labels"
TARGET_SEGMENTS, TARGET_WEIGHTS = "target_segment_ids", "target_weights"
LANGUAGE_IDS = "language_ids"


@dataclasses.dataclass(frozen=True)
class KnownCaptions:
    """The parts of an input of captions that are known without its data.

    Attributes:
      params: Params of the input.
      tokenizer: encodes captions.
      languages: languages of the captions; empty: one, without a name.
    """

    params: Any
    tokenizer: Tokenizer
    languages: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.tokenizer.vocab_size


class CaptionedImages(ImageInput):
    """Images of one size with a caption each; captions are cut to `target_length` tokens.

    In training, an image goes through the steps `augment`; in an evaluation, through `evaluate`.
    The random numbers of an example are a function of (seed, epoch, index). A malformed image is
    replaced as in `ImageInput`, with weights of 0.

    Shapes:
      batch:
        "x": [batch, image_size, image_size, channels] float32, (value / 255 - mean) / deviation
        "target_ids" (end token, then the caption), "target_labels" (the caption, then the end
          token), "target_segment_ids" (0 for padding): [batch, target_length] int32
        "target_weights": [batch, target_length] float32; 0 for padding and malformed images
        "weights": [batch] float32; 0 for padding and malformed images
        "language_ids": [batch] int32, if the source has several languages
    Raises:
      InputError: as the source; the training images have changed since the run began.
      ValueError: a number is out of range.
    """

    class Params(ImageInput.Params):
        """Params of CaptionedImages."""

        source: CaptionSource.Params = param("Where the images come from.", default=REQUIRED)
        tokenizer: Tokenizer.Params = param("Encodes captions.", default=Characters.Params())
        target_length: int = param("Most tokens of a caption, end included.", default=REQUIRED)
        captions: Literal["each", "drawn"] = param(
            "each: an example per caption. drawn: an example per image, with one of its captions, "
            "drawn in every epoch; in an evaluation, the first one.",
            default="each",
        )
        augment: list[ImageStep.Params] = param("Steps of training, in their order.", default=[])
        evaluate: list[ImageStep.Params] = param("Steps of an evaluation.", default=[])

    source: CaptionSource
    tokenizer: Tokenizer
    padding_keys = (WEIGHTS, TARGET_WEIGHTS)

    def __init__(self, params: Any, *, train: Any = None, **kwargs: Any) -> None:
        super().__init__(params, train=train, **kwargs)
        p = self.params
        if p.target_length < 1:
            raise ValueError(
                f"{p.path_of('target_length')} is {p.target_length}, but must be at least 1"
            )
        self.preparation = Preparation(p, p.augment if self.is_training else p.evaluate)
        self.plain_preparation = Preparation(p, p.evaluate)
        self.languages = self.source.languages
        training = training_text(
            self.source,
            train.source if train is not None and "source" in train else p.source,
            texts=texts_of_source,
            verify=train is None,
        )
        self.tokenizer = p.tokenizer.instantiate(assets_dir=self.assets_dir, training=training)
        self._examples: list[tuple[int, int | None]] = [(i, None) for i in range(len(self.source))]
        if p.captions == "each":
            count = len(self.source)
            self._examples = [(i, n) for i in range(count) for n in range(self.num_captions(i))]
        self.num_cut = sum(
            len(self.tokenizer.encode(text)) >= p.target_length
            for text in texts_of_source(self.source)
        )

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        rows, size, length = params.batch_size, params.image_size, params.target_length
        integers, floats = np.dtype(np.int32), np.dtype(np.float32)
        found: Signature = {
            X: ((rows, size, size, params.channels), floats),
            TARGET_IDS: ((rows, length), integers),
            TARGET_LABELS: ((rows, length), integers),
            TARGET_SEGMENTS: ((rows, length), integers),
            TARGET_WEIGHTS: ((rows, length), floats),
            WEIGHTS: ((rows,), floats),
        }
        if type(params.source).owner.languages_of(params.source):
            found[LANGUAGE_IDS] = ((rows,), integers)
        return found

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> Any:
        """See `Input`."""
        tokenizer = params.tokenizer.instantiate(assets_dir=assets_dir)
        languages = type(params.source).owner.languages_of(params.source)
        return KnownCaptions(params, tokenizer, languages)

    @property
    def num_examples(self) -> int:
        """Number of captions, or of images; see `captions` in the Params."""
        return len(self._examples)

    def num_captions(self, image: int) -> int:
        """Returns the number of captions of an image."""
        return len(self.source.captions(image))

    def prepared(self, index: int, key: int) -> Batch:
        """Returns an example; see the class and `PreparedInput`."""
        image, number = self._examples[index]
        if number is None:
            number, count = 0, self.num_captions(image)
            if self.is_training and count > 1:
                random = np.random.Generator(np.random.Philox(key=np.array([key, 2], np.uint64)))
                number = int(random.integers(count))
        caption = self.source.captions(image)[number]
        example: dict[str, Any] = {X: self.pixels(image, key), WEIGHTS: 1.0}
        example |= self.target(caption.text)
        if self.languages:
            example[LANGUAGE_IDS] = self.languages.index(caption.language)
        return example

    def pixels(self, image: int, key: int = 0, *, plain: bool = False) -> np.ndarray:
        """Returns an image as the model gets it; plain: as in an evaluation.

        Raises:
          BadRecordError: the image is malformed.
        """
        preparation = self.plain_preparation if plain else self.preparation
        own, origin = self.source.image(image), self.source.origin(image)
        return preparation.normalized(preparation.image(own, key, origin))

    def target(self, text: str) -> Batch:
        """Returns the arrays of a caption, without the dim of the batch; see the class."""
        length, end_id = self.params.target_length, self.tokenizer.end_id
        ids = np.asarray(self.tokenizer.encode(text), np.int32)[: length - 1]
        size = len(ids) + 1
        inputs, labels = np.full([2, length], end_id, np.int32)
        inputs[1:size], labels[: size - 1] = ids, ids
        real = np.arange(length) < size
        return {
            TARGET_IDS: inputs,
            TARGET_LABELS: labels,
            TARGET_SEGMENTS: real.astype(np.int32),
            TARGET_WEIGHTS: real.astype(np.float32),
        }

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        return f"{super().describe()} with {len(texts_of_source(self.source)):,} captions"


def texts_of_source(source: Any) -> list[str]:
    """Returns the texts of all captions of a source."""
    return [caption.text for i in range(len(source)) for caption in source.captions(i)]


def language_id(languages: Sequence[str], language: str | None) -> int:
    """Returns the number of a language; None is the first one.

    Raises:
      InputError: there is no such language.
    """
    if language is None:
        return 0
    if language in languages:
        return list(languages).index(language)
    if not languages:
        raise InputError(
            f"the captions have one language, without a name: leave out {language!r} "
            "(task.decode_language)"
        )
    close = close_matches(language, languages)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    raise InputError(
        f"task.decode_language is {language!r}, but the captions have: {', '.join(languages)}{hint}"
    )


def captions_of(input: Input) -> CaptionedImages:
    """Returns the input of captions of an input, which may be a `HeldOut`.

    Raises:
      InputError: it has no captions.
    """
    inner = input.inner
    if not isinstance(inner, CaptionedImages):
        raise InputError(
            f"{type(inner).__name__} has no captions: use CaptionedImages as the input"
        )
    return inner


def known_captions(input: Input | KnownCaptions) -> CaptionedImages | KnownCaptions:
    """Returns what is known without the data of an input of captions, or `KnownCaptions` as it is.

    Raises:
      InputError: it has no captions.
    """
    return captions_of(input) if isinstance(input, Input) else input
