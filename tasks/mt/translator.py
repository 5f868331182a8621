"""Translates texts by a search with the weights of a run.

    texts ─ encode ─ sort by length ─ batches of few shapes ─ search ─ decode ─ original order

Every batch shape is traced and compiled once, so there are few shapes: sources are padded to one of
a few lengths, and all batches of a length have the same number of rows. If the texts do not fill a
batch, the number of rows is the next power of two. A single text is a batch of one row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.params import param
from tekso.framework.task import Program
from tekso.framework.theta import Theta
from tekso.tasks.mt.pair_texts import PairTexts
from tekso.tasks.mt.target_search import Hypothesis, TargetSearch, hypotheses_of, side_by_side

_SHORTEST = 16  # tokens: sources are padded to this length, twice this length, and so on
_FEWEST_ROWS = 8

Batch = dict[str, np.ndarray]


class PairModel(Protocol):
    """A task whose model translates: a `Translation`."""

    params: Any
    model: Any

    def log_probs(self, theta: Theta, batch: Mapping[str, tf.Tensor], ctx: StepContext) -> Any:
        """Returns the log-probability of every label of the target in nats, [B, T]; pure."""
        ...


@dataclasses.dataclass(frozen=True)
class Translations:
    """Translations of texts.

    Attributes:
      hypotheses: the hypotheses of each text, the best first; empty if the translation was stopped
        before the text, or the text is blank.
      num_cut: number of texts longer than `max_source_length`, whose beginning was translated.
    """

    hypotheses: list[list[Hypothesis]]
    num_cut: int

    @property
    def best(self) -> list[str]:
        """The best translation of each text, "" if there is none."""
        return [own[0].text if own else "" for own in self.hypotheses]


class _Plan(NamedTuple):
    """A batch: indices of its texts, number of rows, and tokens per row."""

    texts: Sequence[int]
    rows: int
    length: int


class Translator(TargetSearch):
    """Translates texts."""

    class Params(TargetSearch.Params):
        """Params of Translator."""

        batch_tokens: int = param(
            "Most source tokens in a batch, but a batch has at least 8 texts.", default=2048
        )
        max_source_length: int | None = param(
            "Most tokens of a source; only the beginning of a longer source is translated. None: "
            "source_length of the input.",
            default=None,
        )

    sizes = ("batch_tokens", "num_searches", "max_source_length")
    unit = "translations"

    def translate(
        self,
        program: Program,
        input: PairTexts,
        texts: Sequence[str],
        *,
        languages: Sequence[str | None] = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> Translations:
        """Returns the translations of texts.

        Args:
          program: runs a function with the weights of the run.
          input: a translation input, which encodes and decodes texts.
          texts: texts to translate; a blank text has no translation.
          languages: target language of each text, if the model has several.
          stopped: called before every batch; if it returns True, the translation stops.
        """
        targets = list(languages) or [None] * len(texts)
        longest = self.longest_source(input)
        whole = [
            input.encode_source(text, language=language)
            for text, language in zip(texts, targets, strict=True)
        ]
        num_cut = sum(len(ids) > longest for ids in whole)
        encoded = [_cut(ids, longest) for ids in whole]
        found: list[list[Hypothesis]] = [[] for _ in texts]

        def search(plan: _Plan) -> Any:
            sources = [encoded[i] for i in plan.texts]
            batch = source_batch(sources, rows=plan.rows, length=plan.length)
            return self.results(program, input.target_tokenizer, batch)

        shortest = longest if program.serialize_calls else _SHORTEST
        plans = self._plans(
            _by_length(encoded, texts, shortest, longest),
            is_one=len(texts) == 1 and not program.serialize_calls,
            is_filled=program.serialize_calls,
        )
        for plan, result in side_by_side(search, plans, self.most_searches(program), stopped):
            for row, i in enumerate(plan.texts):
                found[i] = hypotheses_of(
                    result, row, input.target_tokenizer.end_id, input.decode_target
                )
        return Translations(found, num_cut)

    def _plans(
        self, by_length: Mapping[int, Sequence[int]], *, is_one: bool, is_filled: bool
    ) -> list[_Plan]:
        """Returns all batches: one of the shortest texts, then from the longest to the shortest."""
        found = []
        for length, own in by_length.items():
            rows = 1 if is_one else self._rows(len(own), length, is_filled=is_filled)
            for first in range(0, len(own), rows):
                found.append(_Plan(own[first : first + rows], rows, length))
        return found[-1:] + found[:-1]

    def _rows(self, num_texts: int, length: int, *, is_filled: bool) -> int:
        """Returns the rows of a batch of texts of a length, a power of two."""
        most = max(_FEWEST_ROWS, _power_of_two(self.params.batch_tokens // length))
        if is_filled or (self.params.xla == "search" and num_texts > _FEWEST_ROWS):
            return most  # compiling another shape would take longer than searching padding rows
        return min(most, max(_FEWEST_ROWS, 1 << (num_texts - 1).bit_length()))

    def encode(self, input: PairTexts, text: str, language: str | None) -> np.ndarray:
        """Returns the model input of a text; a text that is too long is cut."""
        return _cut(input.encode_source(text, language=language), self.longest_source(input))

    def longest_source(self, input: PairTexts) -> int:
        """Returns the most tokens of a source, end included."""
        return int(self.params.max_source_length or input.params.source_length)


def source_batch(sources: Sequence[np.ndarray], *, rows: int, length: int) -> Batch:
    """Returns the source side of a batch; rows beyond the sources are padding.

    Shapes:
      sources: [tokens] each, `length` at most
      returns: "source_ids" and "source_segment_ids" [rows, length] int32
    """
    ids = np.zeros([rows, length], np.int32)
    segment_ids = np.zeros([rows, length], np.int32)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = source
        segment_ids[row, : len(source)] = 1
    return {"source_ids": ids, "source_segment_ids": segment_ids}


def one_line(text: str) -> str:
    """Returns a text without line ends."""
    return " ".join(text.split("\n")).replace("\r", " ")


def _by_length(
    encoded: Sequence[np.ndarray], texts: Sequence[str], shortest: int, longest: int
) -> dict[int, list[int]]:
    """Returns {length of a row: texts, the longest first}, without blank texts."""
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(texts)), key=lambda i: -len(encoded[i])):
        if texts[i].strip():
            length = shortest
            while length < len(encoded[i]):
                length *= 2
            members.setdefault(min(length, longest), []).append(i)
    return members


def _cut(ids: np.ndarray, longest: int) -> np.ndarray:
    """Returns at most `longest` tokens: the first ones, and the end token."""
    return ids if len(ids) <= longest else np.concatenate([ids[: longest - 1], ids[-1:]])


def _power_of_two(number: int) -> int:
    """Returns the largest power of two up to `number`, at least 1."""
    return 1 << max(number.bit_length() - 1, 0)
