"""Pairs of texts for sequence to sequence: from a parallel corpus and tokenizers to batches.

Every batch has, in int32 unless said otherwise (B rows, S and T tokens of the sides):

    source_ids          [B, S]  tokens of the source, then the end; filled up with ends
    source_segment_ids  [B, S]  0 fills up, 1 the first pair of a row, 2 the second, …
    target_ids          [B, T]  what a decoder reads: an end (for "begin"), then the target's tokens
    target_labels       [B, T]  what it predicts: the target's tokens, then the end
    target_weights      [B, T]  float32, 1 for every label, 0 for what fills up
    target_segment_ids  [B, T]  as of the source: pair n of a row is segment n of both sides
    source_positions, target_positions [B, S], [B, T]  only where rows are packed; from 0 in a pair
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
    """Base of inputs of pairs: reads the corpus, makes or loads tokenizers, encodes, filters.

    Pairs are numbered in the order of the data, those that are left out not counted.

    Attributes:
      tokens: the corpus as tokens.
      chosen: which pairs of it are taken.
      rows: what puts them into batches.
    """

    class Params(ExampleInput.Params):
        """Params of TranslationInput."""

        corpus: PairSource.Params = param("Where the pairs are.", default=ParallelFiles.Params())
        tokenizer: Tokenizer.Params = param(
            "What makes text of both sides tokens, learned from both.", default=Bytes.Params()
        )
        source_tokenizer: Tokenizer.Params | None = param(
            "One for the source alone; then target_tokenizer is wanted, too.", default=None
        )
        target_tokenizer: Tokenizer.Params | None = param("One for the target alone.", default=None)
        source_length: int = param(
            "Tokens of the source side of a row; longer sources, with their end (and language), "
            "are left out.",
            default=REQUIRED,
        )
        target_length: int = param(
            "Tokens of the target side; longer targets, with their end, are left out.",
            default=REQUIRED,
        )
        max_ratio: float | None = param(
            "Leave out pairs of which one side has more than so many times the tokens of the "
            "other, ends counted; not in a pass of order once. None: any.",
            default=None,
        )
        temperature: float = param(
            "With several languages of n pairs each, shuffled: they are met as often as "
            "n ** (1 / temperature). 1: as often as they are; above: rare ones more often.",
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
          InputError: there is no pair, too many are malformed or too long, or the vocabulary in
            `assets_dir` was made from other text.
          OSError: a file is missing, or assets cannot be written.
          ValueError: a number is out of range.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir, train=train)
        p, self._train = self.params, train
        for name, least in {"source_length": 2, "target_length": 2, "temperature": 1}.items():
            if p.get(name) < least:
                raise ValueError(
                    f"{p.path_of(name)} is {p.get(name)}, but has to be at least {least}"
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
        self._stream = np.arange(self.num_pairs)  # what an epoch takes, before it is shuffled
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
        """Pairs of the split that are not left out."""
        return len(self.chosen.pairs)

    @property
    def num_examples(self) -> int:
        """Examples of an epoch."""
        return len(self._stream)

    def pairs(self, numbers: Iterable[int] | slice | None = None) -> list[Pair]:
        """Pairs as texts, as they are in the corpus.

        Args:
          numbers: which, each in [0, num_pairs); None: all.
        """
        if numbers is None or isinstance(numbers, slice):
            numbers = range(self.num_pairs)[numbers or slice(None)]
        records = self.tokens.records[self.chosen.pairs[np.fromiter(numbers, np.int64)]]
        return [self.corpus[index] for index in records.tolist()]

    @property
    def num_corpus_pairs(self) -> int:
        """Pairs of the split, those among them that are left out for their length."""
        return len(self.tokens)

    def corpus_pairs(self, numbers: Iterable[int]) -> list[Pair]:
        """Pairs as texts, by number in the order of the data, each in [0, num_corpus_pairs)."""
        records = self.tokens.records[np.fromiter(numbers, np.int64)]
        return [self.corpus[index] for index in records.tolist()]

    def training_pairs(self) -> Iterator[Pair]:
        """All pairs of the training split: of the training input that this one belongs to."""
        source, _ = training_source(self.params, self.corpus, self._train)
        return (pair for _, pair in source().records())

    def skipped(self) -> SkipReport:
        """What of the data was malformed and left out."""
        return self.corpus.skipped()

    def describe(self) -> str:
        """The data in a line."""
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
    """Returns an input as one of pairs; of held-out data, the input that it is of.

    Raises:
      InputError: it has no pairs, or no data was read.
    """
    found = texts_of(input)
    if not isinstance(found, TranslationInput):
        raise InputError("the task needs the pairs of its input, and only its tokens are known")
    return found


class PaddedPairs(TranslationInput):
    """A pair a row, all batches of one shape."""

    def examples(self, index: Indices, epoch: Indices) -> Batch:
        """Some pairs.

        Shapes:
          index, epoch: [n]
          returns: as in the docstring of this file
        """
        del epoch
        p = self.params
        return self.rows.one_a_row(self._stream[index], p.source_length, p.target_length)
