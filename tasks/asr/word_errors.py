"""Word and character error rates, by jiwer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tekso.framework.input.errors import InputError
from tekso.framework.tables import table

WER, CER = "wer", "cer"
KINDS = ("substitutions", "deletions", "insertions")
"""Kinds of errors of words."""
CONSTANT = "constant_"
"""Prefix of the rates of the best constant word; see `BestConstant`."""


@dataclasses.dataclass(frozen=True)
class WordErrors:
    """The errors of transcripts of a data set.

    Attributes:
      figures: {"wer", "cer": errors per word or character of the references; "substitutions",
        "deletions", "insertions": the same of words by kind; their sum is the WER}.
      by_utterance: word errors of each utterance.
    """

    figures: dict[str, float]
    by_utterance: list[int]

    def worst(self, count: int) -> list[int]:
        """Returns the utterances with most word errors, the worst first."""
        order = sorted(range(len(self.by_utterance)), key=lambda i: (-self.by_utterance[i], i))
        return [i for i in order[:count] if self.by_utterance[i]]

    def lines(self) -> list[str]:
        """Returns the rates in percent, as a table."""
        names = (WER, *KINDS, CER)
        return table(
            names, [[f"{100 * self.figures[name]:.2f} %" for name in names]], right=range(5)
        )


def jiwer_module() -> Any:
    """Returns the package jiwer.

    Raises:
      InputError: it is not installed.
    """
    try:
        import jiwer
    except ImportError as error:
        raise InputError(
            "word error rates need the package jiwer: pip install 'tekso[speech]', or do not "
            "transcribe in evaluations: --set task.scoring=None"
        ) from error
    return jiwer


def word_errors(references: Sequence[str], found: Sequence[str]) -> WordErrors:
    """Returns the errors of transcripts against their references, which must have words.

    Raises:
      InputError: jiwer is not installed.
    """
    jiwer = jiwer_module()
    words = jiwer.process_words(list(references), list(found))
    total = words.hits + words.substitutions + words.deletions
    figures = {kind: getattr(words, kind) / total for kind in KINDS}
    figures = {WER: words.wer, CER: jiwer.cer(list(references), list(found)), **figures}
    by_utterance = [
        sum(
            max(chunk.ref_end_idx - chunk.ref_start_idx, chunk.hyp_end_idx - chunk.hyp_start_idx)
            for chunk in chunks
            if chunk.type != "equal"
        )
        for chunks in words.alignments
    ]
    return WordErrors(figures, by_utterance)


@dataclasses.dataclass(frozen=True)
class BestConstant:
    """The word that has the lowest WER as the transcript of every utterance: a baseline.

    It is chosen by the references themselves, so no other constant word is better. A model with a
    higher WER has not learned to listen.

    Attributes:
      word: the word that is in most references.
      figures: {"constant_wer", "constant_cer": its rates}.
    """

    word: str
    figures: dict[str, float]

    def note(self, errors: WordErrors) -> str:
        """Returns a line that compares a model with the baseline."""
        wer, cer = (f"{name.upper()} {errors.figures[name]:.3f}" for name in (WER, CER))
        constant = ", ".join(
            f"{name.upper()} {self.figures[CONSTANT + name]:.3f}" for name in (WER, CER)
        )
        return f"{wer}, {cer}; the word {self.word!r} as every transcript: {constant}"


def best_constant(references: Sequence[str]) -> BestConstant:
    """Returns the constant baseline of some references, which must have words.

    Raises:
      InputError: jiwer is not installed.
    """
    jiwer = jiwer_module()
    # A reference of n words that has the word has n - 1 errors; any other has n, and at least one.
    texts = jiwer.wer_default(list(references))
    counts = Counter(word for text in texts for word in set(text))
    word = min(counts, key=lambda word: (-counts[word], word))
    figures = word_errors(references, [word] * len(references)).figures
    return BestConstant(word, {CONSTANT + name: figures[name] for name in (WER, CER)})
