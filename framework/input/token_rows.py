"""The rows of a corpus as tokens, encoded once and cached.

A row has one text (language modelling), or one text per side (a text and its translation). Each
side is one array of tokens:

    end | tokens of row 0 | end | tokens of row 1 | end | … | end

The end token marks where every text begins and ends. Each token of a text, and one end token per
text, is a label exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.skips import InputError, Origin, SkipReport
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.text import NotTextError, check_text, to_text
from tekso.framework.input.tokenizers import Tokenizer

_FORMAT = "token rows 1"
_CHUNK = 1 << 22  # characters that are encoded together
_KEPT_FROM = 1 << 20  # bytes; fewer tokens are not worth a file

Text = str | np.ndarray


class TextRow(NamedTuple):
    """A row of a corpus.

    Attributes:
      texts: the text of each side; an array has the ids of a text that is already encoded.
      numbers: what the corpus tells about the row, as numbers.
    """

    texts: tuple[Text, ...]
    numbers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenText:
    """The texts of one side as tokens.

    Attributes:
      tokens: [tokens] ids, of the smallest type that can hold them.
      ends: [texts + 1] int64, indices of the end tokens in `tokens`: from 0 to the last index.
    """

    tokens: np.ndarray
    ends: npt.NDArray[np.int64]

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return len(self.ends) - 1


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The rows of a corpus as tokens.

    Attributes:
      sides: the tokens of each side; text i of every side belongs to row i.
      numbers: the numbers of the rows: for each number, an array [rows] of the smallest type.
    """

    sides: tuple[TokenText, ...]
    numbers: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return self.sides[0].num_texts


def token_rows(
    rows: Iterable[TextRow],
    tokenizers: Sequence[Tokenizer],
    *,
    source: Source,
    assets_dir: str | None = None,
) -> TokenRows:
    """Encodes all rows of a source, or reads cached tokens.

    Rows without any token are left out.

    Args:
      rows: the rows of the source, read only if their tokens are not cached.
      tokenizers: the tokenizer of each side.
      source: the source; it counts the rows that were skipped as malformed.
      assets_dir: folder for cached tokens, used if encoding takes longer than reading them.

    Raises:
      InputError: too many rows are malformed, or no row is left.
    """
    is_fast = all(tokenizer.is_fast for tokenizer in tokenizers)
    if assets_dir is None or not files.is_local(assets_dir) or is_fast:
        return _encoded(rows, tokenizers, source)
    made_of = [_FORMAT, source.fingerprint(), *(one.fingerprint() for one in tokenizers)]
    key = digest(part.encode() for part in made_of)[:16]
    kept = TokenFiles(files.join(assets_dir, "tokens", f"{source.split}-{key}"))
    found = kept.read(source, tokenizers)
    if found is None:
        found = _encoded(rows, tokenizers, source)
        if sum(side.tokens.nbytes for side in found.sides) >= _KEPT_FROM:
            kept.write(found, source.skipped())
            found = kept.read(source, tokenizers) or found
    return found


def texts(source: Source) -> Iterator[Text]:
    """Yields all texts of a source; arrays of ids are unchanged, malformed texts are skipped.

    Raises:
      InputError: too many texts are malformed.
    """
    for origin, record in source.records():
        try:
            yield _text(record)
        except NotTextError as error:
            source.skips.add(Origin(origin.file, origin.offset + error.offset), str(error))


def _text(record: Any) -> Text:
    if isinstance(record, str):
        return check_text(record)
    if isinstance(record, bytes):
        return to_text(record)
    if isinstance(record, np.ndarray) and record.dtype.kind in "iu" and record.ndim == 1:
        return record
    raise NotTextError(f"expected a text or an array of token ids, got {type(record).__name__}")


def _encoded(rows: Iterable[TextRow], tokenizers: Sequence[Tokenizer], source: Source) -> TokenRows:
    sides = [_Side(tokenizer) for tokenizer in tokenizers]
    numbers: list[np.ndarray] = []
    for chunk in _chunks(rows):
        texts_of_sides = zip(*(row.texts for row in chunk), strict=True)
        encoded = [side.encode(texts) for side, texts in zip(sides, texts_of_sides, strict=True)]
        if not all(map(len, encoded[0])):
            taken = [i for i in range(len(chunk)) if any(len(ids[i]) for ids in encoded)]
            chunk = [chunk[i] for i in taken]
            encoded = [[ids[i] for i in taken] for ids in encoded]
        if chunk:
            for side, ids in zip(sides, encoded, strict=True):
                side.add(ids)
            numbers.append(np.array([row.numbers for row in chunk], np.int64))
    if not numbers:
        raise source.skips.nothing_left()
    columns = np.concatenate(numbers).T
    return TokenRows(
        tuple(side.whole() for side in sides),
        tuple(column.astype(np.min_scalar_type(column.max())) for column in columns),
    )


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
    """Collects the tokens of one side by chunk: many small arrays would take more memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = np.array([tokenizer.end_id], tokenizer.dtype)
        self._tokens, self._sizes = [self._end], [np.zeros(1, np.int64)]

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

    def add(self, encoded: Sequence[np.ndarray]) -> None:
        """Adds texts, with an end token after each."""
        self._tokens.append(np.concatenate([part for ids in encoded for part in (ids, self._end)]))
        self._sizes.append(np.array([len(ids) + 1 for ids in encoded], np.int64))

    def whole(self) -> TokenText:
        """Returns all texts that were added."""
        return TokenText(np.concatenate(self._tokens), np.cumsum(np.concatenate(self._sizes)))

    def _checked(self, ids: np.ndarray) -> np.ndarray:
        size = self._tokenizer.vocab_size
        if len(ids) and not 0 <= ids.min() <= ids.max() < size:
            raise InputError(
                f"token ids from {ids.min()} to {ids.max()} do not fit a vocabulary of {size}"
            )
        return ids.astype(self._tokenizer.dtype)


class TokenFiles:
    """Token files, mapped into memory.

    <path>.I.bin         the ids of side I
    <path>.I.npy         the ends of side I
    <path>.numbers.npz   the numbers of the rows
    <path>.json          sizes, and the report of skipped rows; written last
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, source: Source, tokenizers: Sequence[Tokenizer]) -> TokenRows | None:
        """Returns the rows; None if the files are missing or damaged.

        Raises:
          InputError: more rows were skipped than the source now allows.
        """
        if not files.exists(f"{self._path}.json"):
            return None
        try:
            about = json.loads(files.read(f"{self._path}.json"))
            skipped = SkipReport.from_json(about["skipped"])
            sides = tuple(
                self._side(number, tokenizer.dtype, size)
                for number, (tokenizer, size) in enumerate(
                    zip(tokenizers, about["num_tokens"], strict=True)
                )
            )
            with np.load(f"{self._path}.numbers.npz") as columns:
                numbers = tuple(columns[f"arr_{i}"] for i in range(len(columns)))
            counts = {about["num_rows"], *(side.num_texts for side in sides), *map(len, numbers)}
            if len(counts) > 1:
                raise ValueError("numbers of rows differ")
        except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            logging.warning("%s is damaged (%s) and will be created again", self._path, error)
            return None
        for skip in skipped.named:
            source.skips.add(Origin(skip.file, skip.offset), skip.reason)
        return TokenRows(sides, numbers)

    def write(self, rows: TokenRows, skipped: SkipReport) -> None:
        """Writes the files; logs a warning if that fails, for example on a full disk."""
        about = {
            "num_rows": len(rows),
            "num_tokens": [len(side.tokens) for side in rows.sides],
            "skipped": skipped.to_json(),
        }
        written: list[str] = []
        try:
            for number, side in enumerate(rows.sides):
                with self._writing(f".{number}.bin", written) as file:
                    _write_array(file, side.tokens)
                with self._writing(f".{number}.npy", written) as file:
                    np.save(file, side.ends)
            with self._writing(".numbers.npz", written) as file:
                np.savez(file, *rows.numbers)
            files.write_atomically(f"{self._path}.json", json.dumps(about) + "\n")
        except OSError as error:
            logging.warning("tokens are not cached in %s: %s", self._path, error)
            for path in written:
                with contextlib.suppress(OSError):
                    files.remove(path)

    def _side(self, number: int, dtype: Any, num_tokens: int) -> TokenText:
        ends = np.load(f"{self._path}.{number}.npy")
        tokens = np.memmap(f"{self._path}.{number}.bin", dtype, mode="r")
        if not len(tokens) == num_tokens == ends[-1] + 1:
            raise ValueError(f"side {number} has {len(tokens)} tokens instead of {num_tokens}")
        return TokenText(tokens, ends)

    def _writing(self, suffix: str, written: list[str]) -> contextlib.AbstractContextManager[Any]:
        written.append(self._path + suffix)
        return files.writing_atomically(self._path + suffix)


def _write_array(file: IO[bytes], array: np.ndarray) -> None:
    step = 1 << 24
    for begin in range(0, len(array), step):
        file.write(array[begin : begin + step].tobytes())
