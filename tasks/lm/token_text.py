"""A collection of texts as one array of tokens, encoded once and cached.

    end | tokens of text 0 | end | tokens of text 1 | end | … | end

The end token marks where every text begins and ends. Each token of a text, and one end token per
text, is a label exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.skips import InputError, Origin, SkipReport
from tekso.framework.input.sources import Source, digest
from tekso.framework.input.text import NotTextError, check_text, to_text
from tekso.framework.input.tokenizers import Tokenizer

_FORMAT = "tokens 1"
_CHUNK = 1 << 22  # characters that are encoded together
_KEPT_FROM = 1 << 20  # bytes; fewer tokens are not worth a file


@dataclasses.dataclass(frozen=True)
class TokenText:
    """Texts as tokens.

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


def token_text(source: Source, tokenizer: Tokenizer, *, assets_dir: str | None) -> TokenText:
    """Encodes all texts of a source, or reads cached tokens.

    Args:
      source: yields str, bytes of UTF-8, or arrays of ids; malformed texts are skipped.
      tokenizer: encodes the texts.
      assets_dir: folder for cached tokens, used if encoding takes longer than reading them.

    Raises:
      InputError: too many texts are malformed, or no text is left.
    """
    keeps = assets_dir is not None and files.is_local(assets_dir) and not tokenizer.is_fast
    if not keeps:
        return _encoded(source, tokenizer)
    made_of = [_FORMAT, source.fingerprint(), tokenizer.fingerprint()]
    key = digest(part.encode() for part in made_of)
    kept = TokenFiles(files.join(assets_dir or "", "tokens", f"{source.split}-{key[:16]}"))
    text = kept.read(source, tokenizer)
    if text is None:
        text = _encoded(source, tokenizer)
        if text.tokens.nbytes >= _KEPT_FROM:
            kept.write(text, source.skipped())
            text = kept.read(source, tokenizer) or text
    return text


def texts(source: Source) -> Iterator[str | np.ndarray]:
    """Yields all texts of a source; arrays of ids are unchanged, malformed texts are skipped.

    Raises:
      InputError: too many texts are malformed.
    """
    for origin, record in source.records():
        try:
            yield _text(record)
        except NotTextError as error:
            source.skips.add(Origin(origin.file, origin.offset + error.offset), str(error))


def _text(record: Any) -> str | np.ndarray:
    if isinstance(record, str):
        return check_text(record)
    if isinstance(record, bytes):
        return to_text(record)
    if isinstance(record, np.ndarray) and record.dtype.kind in "iu" and record.ndim == 1:
        return record
    raise NotTextError(f"expected a text or an array of token ids, got {type(record).__name__}")


def _encoded(source: Source, tokenizer: Tokenizer) -> TokenText:
    end = np.array([tokenizer.end_id], tokenizer.dtype)
    tokens, sizes = [end], [np.zeros(1, np.int64)]
    for chunk in _chunks(source):  # joined by chunk: many small arrays would take more memory
        encoded = [ids for ids in _encode_chunk(chunk, tokenizer) if len(ids)]
        if encoded:
            tokens.append(np.concatenate([part for ids in encoded for part in (ids, end)]))
            sizes.append(np.array([len(ids) + 1 for ids in encoded], np.int64))
    if len(tokens) == 1:
        raise source.skips.nothing_left()
    return TokenText(np.concatenate(tokens), np.cumsum(np.concatenate(sizes)))


def _chunks(source: Source) -> Iterator[list[str | np.ndarray]]:
    chunk: list[str | np.ndarray] = []
    size = 0
    for text in texts(source):
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    yield chunk


def _encode_chunk(chunk: list[str | np.ndarray], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    encoded = iter(tokenizer.encode_all([text for text in chunk if isinstance(text, str)]))
    for text in chunk:
        if isinstance(text, str):
            yield next(encoded)
            continue
        if len(text) and not 0 <= text.min() <= text.max() < tokenizer.vocab_size:
            raise InputError(
                f"token ids from {text.min()} to {text.max()} do not fit a vocabulary of "
                f"{tokenizer.vocab_size}"
            )
        yield text.astype(tokenizer.dtype)


class TokenFiles:
    """Token files, mapped into memory.

    <path>.bin    the ids
    <path>.npy    the ends
    <path>.json   sizes, and the report of skipped texts; written last
    """

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, source: Source, tokenizer: Tokenizer) -> TokenText | None:
        """Returns the tokens; None if the files are missing or damaged.

        Raises:
          InputError: more texts were skipped than the source now allows.
        """
        if not files.exists(f"{self._path}.json"):
            return None
        try:
            about = json.loads(files.read(f"{self._path}.json"))
            skipped = SkipReport.from_json(about["skipped"])
            ends = np.load(f"{self._path}.npy")
            tokens = np.memmap(f"{self._path}.bin", tokenizer.dtype, mode="r")
            if [len(tokens), len(ends)] != about["sizes"] or ends[-1] != len(tokens) - 1:
                raise ValueError("sizes differ")
        except (OSError, ValueError, KeyError, TypeError) as error:
            logging.warning("%s is damaged (%s) and will be created again", self._path, error)
            return None
        for skip in skipped.named:
            source.skips.add(Origin(skip.file, skip.offset), skip.reason)
        return TokenText(tokens, ends)

    def write(self, text: TokenText, skipped: SkipReport) -> None:
        """Writes the files; logs a warning if that fails, for example on a full disk."""
        about = {"sizes": [len(text.tokens), len(text.ends)], "skipped": skipped.to_json()}
        try:
            with files.writing_atomically(f"{self._path}.bin") as file:
                _write_array(file, text.tokens)
            with files.writing_atomically(f"{self._path}.npy") as file:
                np.save(file, text.ends)
            files.write_atomically(f"{self._path}.json", json.dumps(about) + "\n")
        except OSError as error:
            logging.warning("tokens are not cached in %s: %s", self._path, error)
            for suffix in (".bin", ".npy"):
                with contextlib.suppress(OSError):
                    files.remove(self._path + suffix)


def _write_array(file: IO[bytes], array: np.ndarray) -> None:
    step = 1 << 24
    for begin in range(0, len(array), step):
        file.write(array[begin : begin + step].tobytes())
