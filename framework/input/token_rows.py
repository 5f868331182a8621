"""The rows of a corpus as tokens, encoded once; large ones are cached on disk.

A row has one text (language modelling), or one text per side (a text and its translation). Each
side is one column of tokens:

    end | tokens of row 0 | end | tokens of row 1 | end | … | end

The end token marks where every text begins and ends. Each token of a text, and one end token per
text, is a label exactly once.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.columns import Column
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import Source, TextPiece
from tekso.framework.input.text import NotTextError, check_text, to_text
from tekso.framework.input.token_cache import (
    IN_MEMORY,
    IN_MEMORY_SLOW,
    Place,
    Table,
    TableWriter,
    obtain,
)
from tekso.framework.input.tokenizers import Tokenizer

_FORMAT = "token rows 2"
_CHUNK = 1 << 20  # characters that are encoded together

Text = str | np.ndarray


class TextRow(NamedTuple):
    """A row of a corpus, or a piece of it.

    Attributes:
      texts: the text of each side; an array has the ids of a text that is already encoded.
      numbers: numbers that the corpus has about the row.
      is_last: whether this is the last piece of the row.
    """

    texts: tuple[Text, ...]
    numbers: tuple[int, ...] = ()
    is_last: bool = True


@dataclasses.dataclass(frozen=True)
class TokenText:
    """The texts of one side as tokens.

    Attributes:
      tokens: [tokens] ids, of the smallest type that can hold them.
      ends: [texts + 1] int64, indices of the end tokens in `tokens`: from 0 to the last index.
      num_bytes: number of UTF-8 bytes of the tokens.
    """

    tokens: Column
    ends: Column
    num_bytes: int = 0

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.ends) - 1

    def lengths(self) -> npt.NDArray[np.int32]:
        """Returns the number of tokens of each text, including one end token: [texts]."""
        found = np.empty(self.num_texts, np.int32)
        place, last = -1, 0
        for ends in self.ends.blocks():
            sizes = np.diff(ends, prepend=last)
            found[max(place, 0) : place + len(ends)] = sizes[1:] if place < 0 else sizes
            place, last = place + len(ends), int(ends[-1])
        return found


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The rows of a corpus as tokens.

    Attributes:
      sides: the tokens of each side; text i of every side belongs to row i.
      numbers: the numbers of the rows: for each number, a column [rows] int64.
    """

    sides: tuple[TokenText, ...]
    numbers: tuple[Column, ...]

    def __len__(self) -> int:
        return self.sides[0].num_texts


def token_rows(
    rows: Iterable[TextRow],
    tokenizers: Sequence[Tokenizer],
    *,
    source: Source,
    cache_dir: str | None = None,
) -> TokenRows:
    """Encodes all rows of a source, or reads cached tokens.

    Rows without any token are left out.

    Args:
      rows: the rows of the source, read only if their tokens are not cached.
      tokenizers: the tokenizer of each side.
      source: the source; it counts the rows that were skipped as malformed.
      cache_dir: folder for cached tokens. None: keep them in memory.

    Raises:
      InputError: too many rows are malformed, no row is left, or the tokens cannot be written.
    """

    def write(writer: TableWriter) -> None:
        _encode(rows, tokenizers, writer)
        if writer.is_empty:
            raise source.skips.nothing_left()

    place = None
    if cache_dir is not None:
        is_fast = all(tokenizer.is_fast for tokenizer in tokenizers)
        place = Place(
            folder=cache_dir,
            name=source.split,
            made_of=[_FORMAT, source.fingerprint(), *(one.fingerprint() for one in tokenizers)],
            in_memory_bytes=IN_MEMORY if is_fast else IN_MEMORY_SLOW,
        )
    table = obtain(place, skips=source.skips, write=write)
    sides = tuple(_side(table, number) for number in range(len(tokenizers)))
    names = [name for name in table.columns if name.startswith("number.")]
    return TokenRows(sides, tuple(table.columns[name] for name in sorted(names)))


def cache_dir_of(params: Any, assets_dir: str | None, what: str = "tokens") -> str | None:
    """Returns the folder for cached tokens of an input; None: tokens stay in memory.

    Args:
      params: Params of the input, with cache_dir.
      assets_dir: folder of the assets of a run.
      what: what is cached; the name of the folder in the assets.

    Raises:
      InputError: cache_dir is not a folder of this machine.
    """
    if params.cache_dir:
        if not files.is_local(params.cache_dir):
            raise InputError(
                f"{params.path_of('cache_dir')} is {params.cache_dir!r}, but must be a folder of "
                "a local or mounted file system"
            )
        found: str | None = os.path.expanduser(params.cache_dir)
        return found
    if assets_dir is None or not files.is_local(assets_dir):
        return None
    return files.join(assets_dir, what)


def texts(source: Source) -> Iterator[Text]:
    """Yields all texts of a source; arrays of ids are unchanged, malformed texts are skipped.

    A long text may be divided into several texts, each of which ends with a line end.

    Raises:
      InputError: too many texts are malformed.
    """
    return (piece.record for piece in pieces(source))


def pieces(source: Source) -> Iterator[TextPiece]:
    """Yields all texts of a source; long texts may be divided, malformed ones are skipped.

    Raises:
      InputError: too many texts are malformed.
    """
    for piece in source.pieces():
        try:
            text = _text(piece.record)
            yield piece if text is piece.record else piece._replace(record=text)
        except NotTextError as error:
            source.skips.add(piece.origin.at(error.offset), str(error))


def _text(record: Any) -> Text:
    if isinstance(record, str):
        return check_text(record)
    if isinstance(record, bytes):
        return to_text(record)
    if isinstance(record, np.ndarray) and record.dtype.kind in "iu" and record.ndim == 1:
        return record
    raise NotTextError(f"expected a text or an array of token ids, got {type(record).__name__}")


def _side(table: Table, number: int) -> TokenText:
    columns = table.columns
    return TokenText(
        columns[f"{number}.tokens"], columns[f"{number}.ends"], table.totals[f"{number}.bytes"]
    )


def _encode(rows: Iterable[TextRow], tokenizers: Sequence[Tokenizer], writer: TableWriter) -> None:
    """Writes the tokens of all rows, chunk by chunk."""
    if not all(tokenizer.keeps_lines_apart for tokenizer in tokenizers):
        rows = _joined(rows)
    sides = [_Side(number, tokenizer) for number, tokenizer in enumerate(tokenizers)]
    has_tokens = False  # whether earlier pieces of the current row have tokens
    for chunk in _chunks(rows):
        texts_of_sides = zip(*(row.texts for row in chunk), strict=True)
        encoded = [side.encode(texts) for side, texts in zip(sides, texts_of_sides, strict=True)]
        taken, ended = [], []
        for i, row in enumerate(chunk):
            has_tokens = has_tokens or any(len(ids[i]) for ids in encoded)
            if has_tokens:
                taken.append(i)
                ended.append(row.is_last)
            has_tokens = has_tokens and not row.is_last
        if not taken:
            continue
        for side, ids in zip(sides, encoded, strict=True):
            side.write([ids[i] for i in taken], ended, writer)
        last = [chunk[i].numbers for i, ends in zip(taken, ended, strict=True) if ends]
        for number, column in enumerate(np.array(last, np.int64).T if last else ()):
            writer.append(f"number.{number}", np.ascontiguousarray(column))


def _joined(rows: Iterable[TextRow]) -> Iterator[TextRow]:
    """Joins the pieces of each row."""
    begun: list[TextRow] = []
    for row in rows:
        begun.append(row)
        if row.is_last:
            if len(begun) > 1:
                sides = zip(*(piece.texts for piece in begun), strict=True)
                row = row._replace(texts=tuple("".join(map(str, side)) for side in sides))
            yield row
            begun = []


def _chunks(rows: Iterable[TextRow]) -> Iterator[list[TextRow]]:
    chunk: list[TextRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += sum(map(len, row.texts))
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Side:
    """Encodes one side."""

    def __init__(self, number: int, tokenizer: Tokenizer) -> None:
        self._name = str(number)
        self._tokenizer = tokenizer
        self._end = np.array([tokenizer.end_id], tokenizer.dtype)
        self._num_bytes_of = tokenizer.token_num_bytes.astype(np.int64)
        self._count = 0  # tokens written

    def encode(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Returns the ids of each text.

        Raises:
          InputError: a text that is already encoded has ids outside of the vocabulary.
        """
        encoded = self._tokenizer.encode_all([one for one in texts if isinstance(one, str)])
        if len(encoded) == len(texts):
            return encoded
        rest = iter(encoded)
        return [next(rest) if isinstance(one, str) else self._checked(one) for one in texts]

    def write(
        self, encoded: Sequence[np.ndarray], ended: Sequence[bool], writer: TableWriter
    ) -> None:
        """Writes texts, with an end token after each that is not continued."""
        parts: list[np.ndarray] = []
        if not self._count:
            parts.append(self._end)
        for ids, is_end in zip(encoded, ended, strict=True):
            parts.append(ids)
            if is_end:
                parts.append(self._end)
        sizes = np.array(
            [len(ids) + is_end for ids, is_end in zip(encoded, ended, strict=True)], np.int64
        )
        begin = max(self._count, 1)
        ends = (begin + np.cumsum(sizes) - 1)[np.array(ended, bool)]
        if not self._count:
            ends = np.concatenate([np.zeros(1, np.int64), ends])
        tokens = np.concatenate(parts)
        self._count += len(tokens)
        counts = np.bincount(tokens, minlength=len(self._num_bytes_of))
        writer.append(f"{self._name}.tokens", tokens)
        writer.append(f"{self._name}.ends", ends)
        writer.add(f"{self._name}.bytes", int(counts @ self._num_bytes_of))

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        size = self._tokenizer.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise InputError(
                f"token ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {size}"
            )
        return ids.astype(self._tokenizer.dtype)
