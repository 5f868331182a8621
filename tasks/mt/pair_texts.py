"""Texts of both sides as tokens, and back: what a model of pairs reads and writes.

Where a corpus has several target languages, a token of the wanted language is before the source;
its id is the size of the source's tokenizer plus the number of the language.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.input import Input
from tekso.framework.input.skips import InputError
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Tokenizer
from tekso.tasks.mt.vocabulary import Side


class PairTexts:
    """Base of what knows the tokens of both sides.

    Attributes:
      params: of the input.
      source_tokenizer: of the source.
      target_tokenizer: of the target; the same object where one is shared.
      tokenizer: that of the target.
      languages: target languages in the order of their tokens; empty where there is one only.
    """

    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    tokenizer: Any
    languages: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of ids of the target side."""
        return self.target_vocab_size

    @property
    def source_vocab_size(self) -> int:
        """Number of ids of the source side, those of languages among them."""
        return self.source_tokenizer.vocab_size + len(self.languages)

    @property
    def target_vocab_size(self) -> int:
        """Number of ids of the target side: that of the source where they share a tokenizer."""
        is_shared = self.source_tokenizer is self.target_tokenizer
        return self.source_vocab_size if is_shared else self.target_tokenizer.vocab_size

    def encode_source(self, text: str, language: str | None = None) -> npt.NDArray[np.int32]:
        """What a model reads of a source: the language's token, if any, the text's, the end.

        Raises:
          InputError: the language is missing, or unknown.
        """
        ids = self.source_tokenizer.encode(text).tolist()
        whole = [*self._language_ids(language), *ids, self.source_tokenizer.end_id]
        return np.array(whole, np.int32)

    def decode_target(self, ids: Iterable[int]) -> str:
        """The text of target tokens, up to the first end."""
        tokens = [int(i) for i in ids]
        end = self.target_tokenizer.end_id
        return self.target_tokenizer.decode(
            tokens[: tokens.index(end)] if end in tokens else tokens
        )

    def source_token(self, token: int) -> str:
        """The text of a token of the source side; <de> for the token of a language."""
        number = token - self.source_tokenizer.vocab_size
        if 0 <= number < len(self.languages):
            return f"<{self.languages[number]}>"
        return self.source_tokenizer.decode([token])

    def _language_ids(self, language: str | None) -> list[int]:
        if not self.languages:
            if language:
                raise InputError(f"there is one target language only, so {language!r} is too much")
            return []
        if language not in self.languages:
            close = difflib.get_close_matches(language or "", self.languages, n=3)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise InputError(
                f"there is no target language {language!r}, only {', '.join(self.languages)}{hint}"
            )
        return [self.source_tokenizer.vocab_size + self.languages.index(language)]

    def _make_tokenizers(
        self, assets_dir: str | None, training: Callable[[Side], TrainingText] | None
    ) -> None:
        """Sets the tokenizers: those of a run, or learned from `training(side)`."""
        p = self.params
        if (p.source_tokenizer is None) != (p.target_tokenizer is None):
            missing = "source" if p.source_tokenizer is None else "target"
            raise InputError(
                f"{p.path_of(f'{missing}_tokenizer')} is missing: give one for each side, or for "
                "neither, and both share `tokenizer`"
            )

        def make(tokenizer: Any, side: Side) -> Tokenizer:
            folder = assets_dir
            if folder is not None and side != "both":
                folder = files.join(folder, side)
            text = training(side) if training is not None else None
            one: Tokenizer = tokenizer.instantiate(assets_dir=folder, training=text)
            return one

        if p.source_tokenizer is None:
            self.source_tokenizer = self.target_tokenizer = make(p.tokenizer, "both")
        else:
            self.source_tokenizer = make(p.source_tokenizer, "source")
            self.target_tokenizer = make(p.target_tokenizer, "target")
        self.tokenizer = self.target_tokenizer


def texts_of(input: Input | PairTexts) -> PairTexts:
    """Returns an input as the tokens of both sides; of held-out data, the input that it is of.

    Raises:
      InputError: it has none.
    """
    found = getattr(input, "inner", input)
    if not isinstance(found, PairTexts):
        raise InputError(
            f"the task needs an input of pairs, a TranslationInput, and its input is "
            f"{type(found).__name__}"
        )
    return found


class KnownPairs(PairTexts):
    """What a run has learned of its texts, without its data."""

    def __init__(self, params: Any, *, assets_dir: str | None) -> None:
        """Loads the tokenizers.

        Raises:
          InputError: the run has not learned them.
          OSError: a file cannot be read.
        """
        self.params = params
        self.languages = type(params.corpus).owner.languages_of(params.corpus)
        self._make_tokenizers(assets_dir, None)
