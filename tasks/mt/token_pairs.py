"""A parallel corpus as two arrays of tokens, encoded once, and the choice of pairs by length."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.sources import digest
from tekso.framework.input.tokenizers import Tokenizer
from tekso.tasks.lm.token_text import TokenFiles, TokenText
from tekso.tasks.mt.pairs import Pair, PairSource

Ints = npt.NDArray[np.int64]

_FORMAT = "token pairs 1"
_CHUNK = 1 << 22  # characters that are encoded together
_KEPT_FROM = 1 << 20  # bytes; fewer tokens are not worth a file


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Pairs as tokens: text i of the target side is the translation of text i of the source side.

    Attributes:
      source: tokens of all sources, with an end token before and after each.
      target: tokens of all targets, in the same format.
      records: [pairs] index of each pair in the corpus.
      languages: [pairs] number of the target language in the languages of the corpus.
    """

    source: TokenText
    target: TokenText
    records: npt.NDArray[np.int64]
    languages: npt.NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.records)


def token_pairs(
    corpus: PairSource,
    source_tokenizer: Tokenizer,
    target_tokenizer: Tokenizer,
    *,
    assets_dir: str | None = None,
) -> TokenPairs:
    """Encodes all pairs of a corpus, or reads cached tokens.

    Args:
      corpus: the pairs; malformed ones are skipped.
      source_tokenizer: encodes the sources.
      target_tokenizer: encodes the targets.
      assets_dir: folder for cached tokens, used if encoding takes longer than reading them.

    Raises:
      InputError: too many pairs are malformed, or no pair is left.
    """
    tokenizers = source_tokenizer, target_tokenizer
    is_fast = all(tokenizer.is_fast for tokenizer in tokenizers)
    if assets_dir is None or not files.is_local(assets_dir) or is_fast:
        return _encoded(corpus, *tokenizers)
    made_of = [_FORMAT, corpus.fingerprint(), *(one.fingerprint() for one in tokenizers)]
    key = digest(part.encode() for part in made_of)[:16]
    kept = KeptPairs(files.join(assets_dir, "tokens", f"{corpus.split}-{key}"))
    pairs = kept.read(corpus, *tokenizers)
    if pairs is None:
        pairs = _encoded(corpus, *tokenizers)
        if pairs.source.tokens.nbytes + pairs.target.tokens.nbytes >= _KEPT_FROM:
            kept.write(pairs, corpus)
            pairs = kept.read(corpus, *tokenizers) or pairs
    return pairs


class KeptPairs:
    """Cached token pairs: <path>.pairs.npy, and the `TokenFiles` of both sides."""

    def __init__(self, path: str) -> None:
        self._path = f"{path}.pairs.npy"
        self._sides = TokenFiles(f"{path}.source"), TokenFiles(f"{path}.target")

    def read(
        self, corpus: PairSource, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
    ) -> TokenPairs | None:
        """Returns the pairs; None if the files are missing or damaged.

        Raises:
          InputError: more pairs were skipped than the corpus now allows.
        """
        if not files.exists(self._path):
            return None
        source = self._sides[0].read(corpus, source_tokenizer)
        target = self._sides[1].read(corpus, target_tokenizer)
        if source is None or target is None:
            return None
        try:
            records, languages = np.load(self._path)
            if not len(records) == source.num_texts == target.num_texts:
                raise ValueError("sizes differ")
        except (OSError, ValueError, EOFError) as error:
            logging.warning("%s is damaged (%s) and will be created again", self._path, error)
            return None
        return TokenPairs(source, target, records, languages.astype(np.int16))

    def write(self, pairs: TokenPairs, corpus: PairSource) -> None:
        """Writes the files; logs a warning if that fails, for example on a full disk."""
        for side, text in zip(self._sides, (pairs.source, pairs.target), strict=True):
            side.write(text, corpus.skipped())
        try:
            with files.writing_atomically(self._path) as file:
                np.save(file, np.stack([pairs.records, pairs.languages.astype(np.int64)]))
        except OSError as error:
            logging.warning("pairs are not cached in %s: %s", self._path, error)


def _encoded(
    corpus: PairSource, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> TokenPairs:
    sides = _Side(source_tokenizer), _Side(target_tokenizer)
    number_of = {language: number for number, language in enumerate(corpus.languages or ("",))}
    records, languages = [], []
    for chunk in _chunks(corpus):
        records.append(np.array([index for index, _ in chunk], np.int64))
        languages.append(np.array([number_of[pair.language] for _, pair in chunk], np.int16))
        sides[0].add([pair.source for _, pair in chunk])
        sides[1].add([pair.target for _, pair in chunk])
    return TokenPairs(
        sides[0].whole(), sides[1].whole(), np.concatenate(records), np.concatenate(languages)
    )


class _Side:
    """Collects the tokens of one side in few large arrays, which take less memory."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._end = np.array([tokenizer.end_id], tokenizer.dtype)
        self._tokens, self._sizes = [self._end], [np.zeros(1, np.int64)]

    def add(self, texts: list[str]) -> None:
        encoded = self._tokenizer.encode_all(texts)
        self._tokens.append(np.concatenate([part for ids in encoded for part in (ids, self._end)]))
        self._sizes.append(np.array([len(ids) + 1 for ids in encoded], np.int64))

    def whole(self) -> TokenText:
        return TokenText(np.concatenate(self._tokens), np.cumsum(np.concatenate(self._sizes)))


def _chunks(corpus: PairSource) -> Iterator[list[tuple[int, Pair]]]:
    chunk: list[tuple[int, Pair]] = []
    size = 0
    for index, _, pair in corpus.numbered_records():
        chunk.append((index, pair))
        size += len(pair.source) + len(pair.target)
        if size >= _CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


@dataclasses.dataclass(frozen=True)
class Selection:
    """The pairs of a corpus that are used.

    Attributes:
      pairs: [pairs used] numbers of the pairs, in the order of the data.
      left_out: {reason: number of pairs left out}; a pair is counted under the first reason.
    """

    pairs: Ints
    left_out: dict[str, int]

    @property
    def num_left_out(self) -> int:
        """Number of pairs that are left out."""
        return sum(self.left_out.values())


def choose(
    source_lengths: Ints,
    target_lengths: Ints,
    *,
    source_length: int,
    target_length: int,
    max_ratio: float | None,
) -> Selection:
    """Selects the pairs that are short enough and whose lengths are similar enough.

    Args:
      source_lengths: number of tokens of each source.
      target_lengths: number of tokens of each target.
      source_length: most tokens of a source.
      target_length: most tokens of a target.
      max_ratio: largest ratio between the lengths of the two sides; None: no limit.

    Shapes:
      source_lengths, target_lengths: [pairs], at least 1
    """
    reasons = {
        f"source longer than {source_length} tokens": source_lengths > source_length,
        f"target longer than {target_length} tokens": target_lengths > target_length,
    }
    if max_ratio is not None:
        longer = np.maximum(source_lengths, target_lengths)
        shorter = np.minimum(source_lengths, target_lengths)
        reasons[f"one side over {max_ratio:g} times as long"] = longer > max_ratio * shorter
    taken = np.ones(len(source_lengths), bool)
    left_out = {}
    for reason, holds in reasons.items():
        left_out[reason] = int((holds & taken).sum())
        taken &= ~holds
    return Selection(
        np.flatnonzero(taken), {why: count for why, count in left_out.items() if count}
    )
