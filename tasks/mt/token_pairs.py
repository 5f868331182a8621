"""A parallel corpus as two arrays of tokens, encoded once, and which pairs are short enough."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from tekso.framework.input.tokenizers import Tokenizer
from tekso.tasks.lm.token_text import TokenText
from tekso.tasks.mt.pairs import Pair, PairSource

Ints = npt.NDArray[np.int64]

_CHUNK = 1 << 22  # characters that are encoded together


@dataclasses.dataclass(frozen=True)
class TokenPairs:
    """Pairs as tokens: text i of the source side and text i of the target side are one.

    Attributes:
      source: tokens of all sources, an end before and after each.
      target: tokens of all targets.
      records: [pairs] index of each in the corpus.
      languages: [pairs] number of the target's language among those of the corpus.
    """

    source: TokenText
    target: TokenText
    records: npt.NDArray[np.int64]
    languages: npt.NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.records)


def token_pairs(
    corpus: PairSource, source_tokenizer: Tokenizer, target_tokenizer: Tokenizer
) -> TokenPairs:
    """Encodes all pairs of a corpus.

    Raises:
      InputError: too much is malformed, or nothing is left.
    """
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
    """Collects the tokens of one side; in few arrays, as small ones take more room than tokens."""

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
class Chosen:
    """Which pairs are taken.

    Attributes:
      pairs: [taken] numbers of the pairs, in the order of the data.
      left_out: {why: how many}, of those that are not; a pair is counted under the first reason.
    """

    pairs: Ints
    left_out: dict[str, int]

    @property
    def num_left_out(self) -> int:
        """How many are not taken."""
        return sum(self.left_out.values())


def choose(
    source_lengths: Ints,
    target_lengths: Ints,
    *,
    source_length: int,
    target_length: int,
    max_ratio: float | None,
) -> Chosen:
    """Takes the pairs that are short enough, and of lengths that go together.

    Args:
      source_lengths: tokens of each source.
      target_lengths: tokens of each target.
      source_length: the longest source taken.
      target_length: the longest target taken.
      max_ratio: a side may be so many times as long as the other; None: any.

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
    return Chosen(np.flatnonzero(taken), {why: count for why, count in left_out.items() if count})
