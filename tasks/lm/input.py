"""Text inputs for language models: batches of next-token prediction from a source and a tokenizer.

Every batch has "ids" and "labels" [B, L] int32, "weights" [B, L] float32 (0 is padding) and
"num_bytes" [B] float32: the number of UTF-8 bytes of the weighted labels. Packed text also has
"segment_ids" (0 is padding) and "positions" [B, L] int32, as in framework/input/sides.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.counting import counted
from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Batch, Signature
from tekso.framework.input.param_checks import check_counts
from tekso.framework.input.row_inputs import RowInput
from tekso.framework.input.sides import CutTexts, Side, SideForm
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.sources import Source, training_text
from tekso.framework.input.text_files import TextFiles
from tekso.framework.input.token_rows import (
    TextRow,
    TokenText,
    cache_dir_of,
    pieces,
    texts,
    token_rows,
)
from tekso.framework.input.tokenizers import Bytes, Tokenizer
from tekso.framework.params import REQUIRED, param
from tekso.tasks.lm.compression import compressed_bits_per_byte

Indices = npt.NDArray[np.int64]

MAX_COMPRESSED_BYTES = 20_000_000  # xz takes about a second per million bytes


class TextInput(RowInput):
    """Base of text inputs: reads the source, learns or loads the tokenizer, encodes the text.

    Attributes:
      text: the tokens of the split.
      tokenizer: encodes the text.
    """

    class Params(RowInput.Params):
        """Params of TextInput."""

        length: int = param("Tokens in an example.", default=REQUIRED)
        corpus: Source.Params = param("Source of the text.", default=TextFiles.Params())
        files: str = param(
            "Read these text files instead of the corpus: globs, separated by commas.", default=""
        )
        tokenizer: Tokenizer.Params = param("Encodes text as tokens.", default=Bytes.Params())

    padding_keys = ("weights", "num_bytes")
    tokenizer: Tokenizer

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Reads and encodes the split.

        Raises:
          InputError: there is no text, too much of it is malformed, or the vocabulary in
            `assets_dir` was learned from other text.
          OSError: a file is missing, or assets cannot be written.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir, train=train)
        if self.params.files:  # errors name this field, not the field of the corpus
            files.glob(self.params.files, what=self.params.path_of("files"))
        self._source: Source = corpus_of(self.params).instantiate(split=self.params.split)
        has_corpus = train is not None and "corpus" in train
        training = training_text(
            self._source,
            corpus_of(train if has_corpus else self.params),
            texts=lambda source: (text for text in texts(source) if isinstance(text, str)),
            verify=train is None,
        )
        self.tokenizer = self.params.tokenizer.instantiate(assets_dir=assets_dir, training=training)
        rows = (TextRow((piece.record,), (), piece.is_last) for piece in pieces(self._source))
        tokens = token_rows(
            rows,
            [self.tokenizer],
            source=self._source,
            cache_dir=cache_dir_of(self.params, assets_dir),
        )
        self.text: TokenText = tokens.sides[0]
        self._num_bytes_of = self.tokenizer.token_num_bytes

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`."""
        super().check_params(params)
        check_counts(params, "length")

    @classmethod
    def forms(cls, params: Any) -> tuple[SideForm, ...]:
        """See `RowInput`."""
        return (SideForm(params.length, has_labels=True),)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        num_bytes = (params.batch_size,), np.dtype(np.float32)
        return {**(super().signature(params) or {}), "num_bytes": num_bytes}

    @functools.cached_property
    def sides(self) -> tuple[Side, ...]:
        """The texts as examples; a text longer than a row is cut into several."""
        (form,) = self.forms(self.params)
        spans = CutTexts(self.text, form.length)
        return (Side(form, self.text, spans, self.tokenizer.end_id),)

    def texts(self) -> Iterator[str]:
        """Yields the texts of the split, without changes; a long text may be divided."""
        for text in texts(self._source):
            yield text if isinstance(text, str) else self.tokenizer.decode(text)

    @property
    def num_bytes(self) -> int:
        """Number of UTF-8 bytes in all texts of the split, as the tokenizer counts them."""
        return self.text.num_bytes

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return self._source.skipped()

    def reference_bits_per_byte(self) -> dict[str, float]:
        """Returns the bits per byte of gzip and xz on the split; empty if it is too large."""
        if self.num_bytes > MAX_COMPRESSED_BYTES:
            return {}
        return compressed_bits_per_byte(self.texts())

    def describe(self) -> str:
        """Returns a description of the data in one line."""
        skipped = f", {self.skipped().count} skipped" if self.skipped().count else ""
        return (
            f"{self._source.describe()}, {self.params.split}: "
            f"{counted(self.text.num_texts, 'text')} of {self.num_bytes:,} bytes, "
            f"{len(self.text.tokens):,} tokens{skipped}"
        )

    def window(self, first: Indices, length: int) -> Batch:
        """Returns ids and labels of full windows: label i is the token after id i.

        Shapes:
          first: [n], index of the first id of each window in the tokens
          returns: "ids", "labels" and "weights" [n, length], "num_bytes" [n]
        """
        sizes = np.full(len(first), length + 1)
        tokens = self.text.tokens.ranges(first, sizes).reshape(-1, length + 1)
        batch = {"ids": tokens[:, :-1].astype(np.int32), "labels": tokens[:, 1:].astype(np.int32)}
        batch["weights"] = np.ones(batch["labels"].shape, np.float32)
        batch["num_bytes"] = self._num_bytes_of[batch["labels"]].sum(axis=1).astype(np.float32)
        return batch

    def complete(self, batch: Batch) -> None:
        """Adds "num_bytes", the number of bytes of the labels with weight 1."""
        num_bytes = self._num_bytes_of[batch["labels"]] * (batch["weights"] > 0)
        batch["num_bytes"] = num_bytes.sum(axis=1).astype(np.float32)


def corpus_of(params: Any) -> Any:
    """Returns Params of the source that a text input reads: its corpus, or TextFiles of `files`."""
    if not params.files:
        return params.corpus
    corpus = params.corpus.copy()
    if not issubclass(corpus.owner, TextFiles):
        corpus = TextFiles.Params()
    return corpus.set(files=params.files)


class TextStream(TextInput):
    """Joins all texts and cuts them into windows of `length`.

    With order "shuffled", every epoch cuts at another offset. With order "once", every token except
    the first is a label of weight 1 exactly once, and the last window is padded.
    """

    class Params(TextInput.Params):
        """Params of TextStream."""

        overlap: int = param(
            "With order once: tokens of context that a window shares with the one before; in "
            "[0, length).",
            default=0,
        )

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Reads and encodes the split.

        Raises:
          InputError: as TextInput; or the training text is shorter than one window.
        """
        super().__init__(params, **kwargs)
        p = self.params
        if not 0 <= p.overlap < p.length:
            raise ValueError(
                f"{p.path_of('overlap')} is {p.overlap}, but must be in [0, length={p.length})"
            )
        self._stride = p.length - p.overlap
        self._offset_key = shuffle.key_of(self.seed, "offset")
        num_labels = len(self.text.tokens) - 1
        if p.order == "once":
            self._num_windows = 1 + max(0, -(-(num_labels - p.length) // self._stride))
            self._max_offset = 0
            return
        if num_labels < p.length:
            raise InputError(
                f"{self._source.describe()}, split {p.split}: {num_labels + 1} tokens are not "
                f"enough for one window of {p.length}. Add text, or set "
                f"{p.path_of('length')} below {num_labels + 1}"
            )
        self._num_windows = num_labels // p.length
        self._max_offset = 0
        if p.order == "shuffled":  # the same number of windows for every offset
            self._num_windows = max(1, (num_labels - p.length + 1) // p.length)
            self._max_offset = min(p.length - 1, num_labels - self._num_windows * p.length)

    @property
    def num_examples(self) -> int:
        """Number of windows in an epoch."""
        found: int = self._num_windows
        return found

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Returns the windows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the module docstring
        """
        length = self.params.length
        if self.params.order == "once":
            return self._once(index)
        first = index * length
        if self._max_offset:
            drawn = shuffle.fold(self._offset_key, epoch) % np.uint64(self._max_offset + 1)
            first = first + drawn.astype(np.int64)
        return self.window(first, length)

    def _once(self, index: Indices) -> Batch:
        length, last = self.params.length, len(self.text.tokens) - 1
        first = index * self._stride
        place = first[:, None] + np.arange(length + 1)
        tokens = np.full(place.shape, self.tokenizer.end_id, np.int32)
        sizes = np.minimum(last + 1 - first, length + 1)
        tokens[place <= last] = self.text.tokens.ranges(first, sizes)
        is_new = (np.arange(length) >= length - self._stride) | (index == 0)[:, None]
        is_label = place[:, 1:] <= last
        batch = {
            "ids": np.ascontiguousarray(tokens[:, :-1]),
            "labels": np.ascontiguousarray(tokens[:, 1:]),
            "weights": (is_new & is_label).astype(np.float32),
        }
        self.complete(batch)
        return batch
