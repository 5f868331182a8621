"""Inputs for sequence-to-sequence models: batches of pairs from a parallel corpus and tokenizers.

Every batch has these arrays, int32 unless noted (B rows, S source tokens, T target tokens):

    source_ids          [B, S]  tokens of the source, then the end token; padded with end tokens
    source_segment_ids  [B, S]  0: padding, 1: the first pair of a row, 2: the second, …
    target_ids          [B, T]  decoder input: the end token (as start), then the target's tokens
    target_labels       [B, T]  decoder output: the target's tokens, then the end token
    target_weights      [B, T]  float32, 1 for every label, 0 for padding
    target_segment_ids  [B, T]  like the source's: pair n of a row is segment n of both sides
    source_positions, target_positions [B, S], [B, T]  packed rows only; from 0 in each pair
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, ExampleInput, Input, Signature
from tekso.framework.input.skips import InputError, SkipReport
from tekso.framework.input.tokenizers import Bytes, Tokenizer
from tekso.framework.params import REQUIRED, param
from tekso.tasks.mt.languages import sampled
from tekso.tasks.mt.pair_texts import KnownPairs, PairTexts, texts_of
from tekso.tasks.mt.pairs import Pair, PairSource
from tekso.tasks.mt.parallel_files import ParallelFiles
from tekso.tasks.mt.rows import PairRows
from tekso.tasks.mt.token_pairs import Selection, TokenPairs, choose, token_pairs
from tekso.tasks.mt.vocabulary import training_source, training_text

Indices = npt.NDArray[np.int64]


class TranslationInput(PairTexts, ExampleInput):
    """Base of inputs of pairs: reads the corpus, learns or loads tokenizers, encodes, filters.

    Pairs are numbered in the order of the data, without the pairs that are left out.

    Attributes:
      tokens: the corpus as tokens.
      chosen: the pairs of the corpus that are used.
      rows: puts them into batches.
    """

    class Params(ExampleInput.Params):
        """Params of TranslationInput."""

        corpus: PairSource.Params = param("Source of the pairs.", default=ParallelFiles.Params())
        tokenizer: Tokenizer.Params = param(
            "Tokenizer of both sides, learned from both.", default=Bytes.Params()
        )
        source_tokenizer: Tokenizer.Params | None = param(
            "Tokenizer of the source alone; requires target_tokenizer.", default=None
        )
        target_tokenizer: Tokenizer.Params | None = param(
            "Tokenizer of the target alone; requires source_tokenizer.", default=None
        )
        source_length: int = param(
            "Source tokens in a row. Pairs with a longer source, counting its end token and "
            "language token, are left out.",
            default=REQUIRED,
        )
        target_length: int = param(
            "Target tokens in a row. Pairs with a longer target, counting its end token, are left "
            "out.",
            default=REQUIRED,
        )
        max_ratio: float | None = param(
            "Leave out pairs if one side has more than this many times the tokens of the other, "
            "counting end tokens; ignored with order once. None: no limit.",
            default=None,
        )
        temperature: float = param(
            "With several languages and order shuffled: a language of n pairs is sampled in "
            "proportion to n ** (1 / temperature). 1: in proportion to its pairs; above 1: rare "
            "languages more often.",
            default=1.0,
        )

    padding_keys = ("target_weights",)

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Reads, encodes and filters the split.

        Raises:
          InputError: no pair is left, too many are malformed, or the vocabulary in `assets_dir`
            was learned from other text.
          OSError: a file is missing, or assets cannot be written.
          ValueError: a number is out of range.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir, train=train)
        p, self._train = self.params, train
        for name, least in {"source_length": 2, "target_length": 2, "temperature": 1}.items():
            if p.get(name) < least:
                raise ValueError(
                    f"{p.path_of(name)} is {p.get(name)}, but must be at least {least}"
                )
        self.corpus: PairSource = p.corpus.instantiate(split=p.split)
        self.languages = self.corpus.languages
        self._make_tokenizers(assets_dir, lambda side: training_text(p, self.corpus, train, side))
        self.tokens: TokenPairs = token_pairs(
            self.corpus, self.source_tokenizer, self.target_tokenizer, assets_dir=assets_dir
        )
        self.chosen: Selection = choose(
            np.diff(self.tokens.source.ends) + (1 if self.languages else 0),
            np.diff(self.tokens.target.ends),
            source_length=p.source_length,
            target_length=p.target_length,
            max_ratio=None if p.order == "once" else p.max_ratio,
        )
        if not self.num_pairs:
            raise InputError(
                f"{self.corpus.describe()}, {p.split}: all {len(self.tokens):,} pairs are left out "
                f"({self._left_out()}): set {p.path_of('source_length')} and target_length higher"
            )
        self.rows = PairRows(
            self.tokens,
            self.chosen.pairs,
            source_end=self.source_tokenizer.end_id,
            target_end=self.target_tokenizer.end_id,
            first_language=self.source_tokenizer.vocab_size if self.languages else None,
        )
        self._stream = np.arange(self.num_pairs)  # pairs of an epoch, before shuffling
        if p.order == "shuffled" and p.temperature > 1 and self.languages:
            self._stream = sampled(
                self.tokens.languages[self.chosen.pairs],
                temperature=p.temperature,
                key=shuffle.key_of(seed, "languages"),
            )

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        source = (params.batch_size, params.source_length), np.dtype(np.int32)
        target = (params.batch_size, params.target_length), np.dtype(np.int32)
        return {
            "source_ids": source,
            "source_segment_ids": source,
            "target_ids": target,
            "target_labels": target,
            "target_weights": (target[0], np.dtype(np.float32)),
            "target_segment_ids": target,
        }

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownPairs:
        """See `Input`."""
        return KnownPairs(params, assets_dir=assets_dir)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of the split, without those that are left out."""
        return len(self.chosen.pairs)

    @property
    def num_examples(self) -> int:
        """Number of examples in an epoch."""
        return len(self._stream)

    def pairs(self, numbers: Iterable[int] | slice | None = None) -> list[Pair]:
        """Returns pairs as texts, unchanged from the corpus.

        Args:
          numbers: numbers of the pairs, each in [0, num_pairs); None: all.
        """
        if numbers is None or isinstance(numbers, slice):
            numbers = range(self.num_pairs)[numbers or slice(None)]
        records = self.tokens.records[self.chosen.pairs[np.fromiter(numbers, np.int64)]]
        return [self.corpus[index] for index in records.tolist()]

    @property
    def num_corpus_pairs(self) -> int:
        """Number of pairs of the split, including those left out for their length."""
        return len(self.tokens)

    def corpus_pairs(self, numbers: Iterable[int]) -> list[Pair]:
        """Returns pairs as texts, by number in the data, each in [0, num_corpus_pairs)."""
        records = self.tokens.records[np.fromiter(numbers, np.int64)]
        return [self.corpus[index] for index in records.tolist()]

    def training_pairs(self) -> Iterator[Pair]:
        """Yields all pairs of the training split of the experiment."""
        source, _ = training_source(self.params, self.corpus, self._train)
        return (pair for _, pair in source().records())

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return self.corpus.skipped()

    def describe(self) -> str:
        """Returns a description of the data in one line."""
        pairs = self.chosen.pairs
        sizes = [
            int((np.diff(side.ends)[pairs]).sum())
            for side in (self.tokens.source, self.tokens.target)
        ]
        more = f" in {len(self.languages)} languages" if self.languages else ""
        skipped = f", {self.skipped().count:,} skipped" if self.skipped().count else ""
        left_out = f", {self._left_out()}" if self.chosen.num_left_out else ""
        return (
            f"{self.corpus.describe()}, {self.params.split}: {self.num_pairs:,} pairs{more} of "
            f"{sizes[0]:,} source and {sizes[1]:,} target tokens{skipped}{left_out}"
        )

    def _left_out(self) -> str:
        reasons = ", ".join(f"{count:,} {why}" for why, count in self.chosen.left_out.items())
        return f"{self.chosen.num_left_out:,} left out: {reasons}"


def pairs_of(input: Input | PairTexts) -> TranslationInput:
    """Returns the input as a TranslationInput, unwrapped if it is wrapped for evaluation.

    Raises:
      InputError: the input has no pairs, or has not read its data.
    """
    found = texts_of(input)
    if not isinstance(found, TranslationInput):
        raise InputError("the task needs the pairs of its input, but its data is not loaded")
    return found


class PaddedPairs(TranslationInput):
    """One pair per row; all batches have the same shape."""

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Returns the pairs with the given indices.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of this file
        """
        del epoch
        p = self.params
        return self.rows.one_a_row(self._stream[index], p.source_length, p.target_length)
