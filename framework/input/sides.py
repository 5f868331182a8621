"""The sides of a row of a batch, and the arrays that they contribute.

A language model has one side; a translation model has two, source and target. A side contributes
these arrays [rows, length], int32 unless noted, with the name of the side as a prefix:

    ids          the tokens; padded with end tokens
    labels       the token after each id (only sides with labels)
    weights      float32, 1 for every label, 0 for padding (only sides with labels)
    segment_ids  0: padding, 1: the first example of a row, 2: the second, …
    positions    position in the example, from 0

Which of the last two there are depends on the input.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tekso.framework.input.input import Batch, Signature
from tekso.framework.input.packing import Ints, PlacedExamples, Spans, blocks, count_up
from tekso.framework.input.token_rows import TokenText


class ExampleSpans(Protocol):
    """The location of each example of a side in the side's tokens."""

    def __len__(self) -> int:
        """Number of examples."""

    def at(self, examples: Ints) -> Spans:
        """Returns the locations of some examples."""

    def lengths(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each example: [examples]."""


class WholeTexts:
    """Each example is one text.

    Args:
      text: the texts.
      texts: [examples] the text of each example.
      with_start: whether an example includes the end token before its text.
      with_end: whether an example includes the end token after its text.
    """

    def __init__(
        self, text: TokenText, texts: npt.ArrayLike, *, with_start: bool, with_end: bool
    ) -> None:
        self._text, self._texts = text, np.asarray(texts)
        self._first, self._beyond = int(not with_start), int(with_end)

    def __len__(self) -> int:
        return len(self._texts)

    def at(self, examples: Ints) -> Spans:
        """Returns the locations of some examples.

        Shapes:
          examples: [n]
        """
        texts = self._texts[examples].astype(np.int64)
        ends = self._text.ends.ranges(texts, np.full(len(texts), 2)).reshape(-1, 2)
        starts = ends[:, 0] + self._first
        return Spans(starts, ends[:, 1] + self._beyond - starts)

    def lengths(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each example: [examples]."""
        found: npt.NDArray[np.int32] = self._text.lengths()[self._texts]
        found += np.int32(self._beyond - self._first)
        return found


class CutTexts:
    """Each example is a text, or a piece of a longer text; empty texts have no example.

    Args:
      text: the texts; the end token before each is part of it.
      longest: number of tokens of a piece; only the last one of a text may be shorter.
    """

    def __init__(self, text: TokenText, longest: int) -> None:
        self._text, self._longest = text, longest
        sizes = text.lengths()
        smallest = np.min_scalar_type(int(sizes.max(initial=0)))
        self._sizes: npt.NDArray[Any] = sizes.astype(smallest, copy=False)
        parts = list(blocks(text.num_texts))
        total = sum(int((-(-sizes[block] // longest)).sum(dtype=np.int64)) for block in parts)
        # The first example of each text.
        dtype = np.int32 if total < 1 << 31 else np.int64
        self._first: Ints = np.zeros(text.num_texts + 1, dtype)
        for block in parts:
            counts = (-(-sizes[block] // longest)).astype(self._first.dtype)
            counts[0] += self._first[block.start]
            np.cumsum(counts, out=self._first[block.start + 1 : block.stop + 1])

    def __len__(self) -> int:
        return int(self._first[-1])

    def at(self, examples: Ints) -> Spans:
        """Returns the locations of some examples.

        Shapes:
          examples: [n]
        """
        # Of another type, NumPy would copy the whole array.
        texts = np.searchsorted(self._first, examples.astype(self._first.dtype), "right") - 1
        begins = (examples - self._first[texts]) * self._longest
        starts = self._text.ends.take(texts) + begins
        return Spans(starts, np.minimum(self._sizes[texts] - begins, self._longest))

    def lengths(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each example: [examples]."""
        found = np.full(len(self), self._longest, np.int32)
        for block in blocks(len(self._sizes)):
            first, sizes = self._first[block.start : block.stop + 1], self._sizes[block]
            counts = np.diff(first)
            some = counts > 0
            found[first[1:][some] - 1] = sizes[some] - (counts[some] - 1) * self._longest
        return found


@dataclasses.dataclass(frozen=True)
class SideForm:
    """The arrays of a side, without their values.

    Attributes:
      length: tokens in a row.
      has_labels: whether the model predicts this side: "ids" then begin with an end token.
      name: prefix of the arrays; empty: none.
    """

    length: int
    has_labels: bool
    name: str = ""

    def key(self, array: str) -> str:
        """Returns the name of an array in a batch."""
        return f"{self.name}_{array}" if self.name else array

    def signature(self, batch_size: int, marks: Iterable[str] = ()) -> Signature:
        """Returns {name: (shape, dtype)} of the arrays.

        Args:
          batch_size: number of rows.
          marks: "segment_ids" and "positions", if batches have them.
        """
        labels = ("labels", "weights") if self.has_labels else ()
        return {
            self.key(name): (
                (batch_size, self.length),
                np.dtype(np.float32 if name == "weights" else np.int32),
            )
            for name in ("ids", *labels, *marks)
        }


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of the examples of an input.

    Attributes:
      form: its arrays.
      text: its tokens.
      spans: location of each example in the tokens.
      end_id: the end token.
      first_ids: [examples] ids that replace the first token of each example; None: not replaced.
    """

    form: SideForm
    text: TokenText
    spans: ExampleSpans
    end_id: int
    first_ids: npt.NDArray[np.int32] | None = None

    def lengths(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each example: [examples]."""
        return self.spans.lengths()

    def put(
        self, batch: Batch, placed: PlacedExamples, shape: tuple[int, int], marks: Collection[str]
    ) -> None:
        """Adds the arrays of this side to a batch.

        Args:
          batch: the batch.
          placed: the examples and their rows.
          shape: number of rows, and tokens in a row.
          marks: "segment_ids" and "positions", if they are to be added.
        """
        spans = self.spans.at(placed.examples)
        sizes, columns = spans.lengths, placed.columns(spans.lengths)
        within = count_up(sizes)  # position of each token in its example
        place = np.repeat(placed.row, sizes), np.repeat(columns, sizes) + within

        def add(name: str, values: Any, padding: int, dtype: Any = np.int32) -> None:
            array = np.full(shape, padding, dtype)
            array[place] = values
            batch[self.form.key(name)] = array

        add("ids", self.text.tokens.ranges(spans.starts, sizes), self.end_id)
        if self.first_ids is not None:
            ids = self.first_ids[placed.examples]
            batch[self.form.key("ids")][placed.row, columns] = ids
        if self.form.has_labels:
            add("labels", self.text.tokens.ranges(spans.starts + 1, sizes), self.end_id)
            add("weights", 1.0, 0, np.float32)
        if "segment_ids" in marks:
            add("segment_ids", np.repeat(placed.number + 1, sizes), 0)
        if "positions" in marks:
            add("positions", within, 0)


def longest(sides: Sequence[Side]) -> npt.NDArray[np.int32]:
    """Returns the number of tokens of the longest side of each example: [examples]."""
    lengths = sides[0].lengths()
    for side in sides[1:]:
        lengths = np.maximum(lengths, side.lengths())
    return lengths
