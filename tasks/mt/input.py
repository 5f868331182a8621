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
from typing import Any, ClassVar

import numpy as np

from tekso.framework.input import shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.input.row_inputs import RowInput
from tekso.framework.input.sides import Side, SideForm, WholeTexts
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.sources import TrainingText, training_source, training_text
from tekso.framework.input.token_rows import TextRow, TokenRows, cache_dir_of, token_rows
from tekso.framework.input.tokenizers import Bytes, Tokenizer
from tekso.framework.params import REQUIRED, param
from tekso.tasks.mt.languages import sampled
from tekso.tasks.mt.pair_texts import KnownPairs, PairTexts, texts_of
from tekso.tasks.mt.pairs import Pair, PairSource
from tekso.tasks.mt.parallel_files import ParallelFiles
from tekso.tasks.mt.selection import Selection, choose
from tekso.tasks.mt.vocabulary import side_texts


class TranslationInput(PairTexts, RowInput):
    """Base of inputs of pairs: reads the corpus, learns or loads tokenizers, encodes, filters.

    Pairs are numbered in the order of the data, without the pairs that are left out.

    Attributes:
      tokens: the corpus as tokens.
      chosen: the pairs of the corpus that are used.
      sides: source and target of the pairs of an epoch, before shuffling.
    """

    class Params(RowInput.Params):
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
    marks: ClassVar[tuple[str, ...]] = ("segment_ids",)
    sides: tuple[Side, ...] = ()

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
        p = self.params
        for name, least in {"source_length": 2, "target_length": 2, "temperature": 1}.items():
            if p.get(name) < least:
                raise ValueError(
                    f"{p.path_of(name)} is {p.get(name)}, but must be at least {least}"
                )
        self.corpus: PairSource = p.corpus.instantiate(split=p.split)
        self.languages = self.corpus.languages
        self._train_corpus = train.corpus if train is not None and "corpus" in train else p.corpus

        def training(side: Any) -> TrainingText:
            return training_text(
                self.corpus,
                self._train_corpus,
                texts=lambda source: side_texts(source, side),
                verify=train is None,
            )

        self._make_tokenizers(assets_dir, training)
        self.tokens: TokenRows = token_rows(
            self._text_rows(),
            [self.source_tokenizer, self.target_tokenizer],
            source=self.corpus,
            cache_dir=cache_dir_of(p, assets_dir),
        )
        source, target = (side.lengths() for side in self.tokens.sides)
        self.chosen: Selection = choose(
            source + (1 if self.languages else 0),
            target,
            source_length=p.source_length,
            target_length=p.target_length,
            max_ratio=None if p.order == "once" else p.max_ratio,
        )
        if not self.num_pairs:
            raise InputError(
                f"{self.corpus.describe()}, {p.split}: all {len(self.tokens):,} pairs are left out "
                f"({self._left_out()}): set {p.path_of('source_length')} and target_length higher"
            )
        self.sides = self._make_sides()

    def _text_rows(self) -> Iterator[TextRow]:
        """Yields all pairs, with their index in the corpus and the number of their language."""
        number_of = {name: number for number, name in enumerate(self.languages or ("",))}
        for index, _, pair in self.corpus.numbered_records():
            yield TextRow((pair.source, pair.target), (index, number_of[pair.language]))

    def _make_sides(self) -> tuple[Side, ...]:
        p, pairs = self.params, self.chosen.pairs
        languages = self.tokens.numbers[1].read() if self.languages else np.zeros(0)
        if p.order == "shuffled" and p.temperature > 1 and self.languages:
            key = shuffle.key_of(self.seed, "languages")
            pairs = pairs[sampled(languages[pairs], temperature=p.temperature, key=key)]
        first_ids = None
        if self.languages:
            first_ids = self.source_tokenizer.vocab_size + languages[pairs].astype(np.int32)
        source, target = self.tokens.sides
        source_form, target_form = self.forms(p)
        return (
            Side(
                source_form,
                source,
                WholeTexts(source, pairs, with_start=bool(self.languages), with_end=True),
                self.source_tokenizer.end_id,
                first_ids,
            ),
            Side(
                target_form,
                target,
                WholeTexts(target, pairs, with_start=True, with_end=False),
                self.target_tokenizer.end_id,
            ),
        )

    @classmethod
    def forms(cls, params: Any) -> tuple[SideForm, ...]:
        """See `RowInput`."""
        return (
            SideForm(params.source_length, has_labels=False, name="source"),
            SideForm(params.target_length, has_labels=True, name="target"),
        )

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownPairs:
        """See `Input`."""
        return KnownPairs(params, assets_dir=assets_dir)

    @property
    def num_pairs(self) -> int:
        """Number of pairs of the split, without those that are left out."""
        return len(self.chosen.pairs)

    def pairs(self, numbers: Iterable[int] | slice | None = None) -> list[Pair]:
        """Returns pairs as texts, unchanged from the corpus.

        Args:
          numbers: numbers of the pairs, each in [0, num_pairs); None: all.
        """
        if numbers is None or isinstance(numbers, slice):
            numbers = range(self.num_pairs)[numbers or slice(None)]
        return self.corpus_pairs(self.chosen.pairs[np.fromiter(numbers, np.int64)].tolist())

    @property
    def num_corpus_pairs(self) -> int:
        """Number of pairs of the split, including those left out for their length."""
        return len(self.tokens)

    def corpus_pairs(self, numbers: Iterable[int]) -> list[Pair]:
        """Returns pairs as texts, by number in the data, each in [0, num_corpus_pairs)."""
        records, _ = self.tokens.numbers
        chosen = records.take(np.fromiter(numbers, np.int64))
        return [self.corpus[index] for index in chosen.tolist()]

    def training_pairs(self) -> Iterator[Pair]:
        """Yields all pairs of the training split of the experiment."""
        source, _ = training_source(self.corpus, self._train_corpus)
        return (pair for _, pair in source().records())

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return self.corpus.skipped()

    def describe(self) -> str:
        """Returns a description of the data in one line."""
        pairs = self.chosen.pairs
        sizes = [int(side.lengths()[pairs].sum(dtype=np.int64)) for side in self.tokens.sides]
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
