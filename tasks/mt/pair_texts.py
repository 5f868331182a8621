"""Converts sources to tokens, and target tokens to text, for models of pairs.

If a corpus has several target languages, the source begins with a token of the target language. Its
id is the vocabulary size of the source tokenizer plus the number of the language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework import files
from tekso.framework.input.errors import InputError
from tekso.framework.input.input import Input
from tekso.framework.input.sources import TrainingText
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.spelling import close_matches
from tekso.tasks.mt.vocabulary import Side


class PairTexts:
    """Base of classes with the tokenizers of both sides.

    Attributes:
      params: Params of the input.
      source_tokenizer: tokenizer of the source.
      target_tokenizer: tokenizer of the target; the same object if both sides share one.
      tokenizer: the same as target_tokenizer.
      languages: target languages in the order of their tokens; empty if there is only one.
    """

    params: Any
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    tokenizer: Tokenizer
    languages: tuple[str, ...]

    @property
    def vocab_size(self) -> int:
        """Number of ids of the target side."""
        return self.target_vocab_size

    @property
    def source_vocab_size(self) -> int:
        """Number of ids of the source side, including language tokens."""
        return self.source_tokenizer.vocab_size + len(self.languages)

    @property
    def target_vocab_size(self) -> int:
        """Number of ids of the target side; equal to the source's if they share a tokenizer."""
        is_shared = self.source_tokenizer is self.target_tokenizer
        return self.source_vocab_size if is_shared else self.target_tokenizer.vocab_size

    def encode_source(self, text: str, language: str | None = None) -> npt.NDArray[np.int32]:
        """Returns the model input of a source: a language token if needed, the text, the end token.

        Raises:
          InputError: the language is missing or unknown.
        """
        ids = self.source_tokenizer.encode(text).tolist()
        whole = [*self._language_ids(language), *ids, self.source_tokenizer.end_id]
        return np.array(whole, np.int32)

    def decode_target(self, ids: Iterable[int]) -> str:
        """Returns the text of target tokens, up to the first end token."""
        tokens = [int(i) for i in ids]
        end = self.target_tokenizer.end_id
        return self.target_tokenizer.decode(
            tokens[: tokens.index(end)] if end in tokens else tokens
        )

    def source_token(self, token: int) -> str:
        """Returns the text of a source token; a language token is written as <de>."""
        number = token - self.source_tokenizer.vocab_size
        if 0 <= number < len(self.languages):
            return f"<{self.languages[number]}>"
        return self.source_tokenizer.decode([token])

    def _language_ids(self, language: str | None) -> list[int]:
        if not self.languages:
            if language:
                raise InputError(
                    f"there is only one target language, without a name: leave out {language!r}"
                )
            return []
        if language not in self.languages:
            close = close_matches(language or "", self.languages)
            hint = f"; did you mean {', '.join(close)}?" if close else ""
            raise InputError(
                f"no target language {language!r}; there are {', '.join(self.languages)}{hint}"
            )
        return [self.source_tokenizer.vocab_size + self.languages.index(language)]

    def _make_tokenizers(
        self, assets_dir: str | None, training: Callable[[Side], TrainingText] | None
    ) -> None:
        """Sets the tokenizers: loads those of a run, or learns them from `training(side)`."""
        p = self.params
        if (p.source_tokenizer is None) != (p.target_tokenizer is None):
            missing = "source" if p.source_tokenizer is None else "target"
            raise InputError(
                f"{p.path_of(f'{missing}_tokenizer')} is missing: set a tokenizer for each side, "
                "or for neither, so that both share `tokenizer`"
            )

        def make(params: Tokenizer.Params, side: Side) -> Tokenizer:
            folder = assets_dir
            if folder is not None and side != "both":
                folder = files.join(folder, side)
            text = training(side) if training is not None else None
            one: Tokenizer = params.instantiate(assets_dir=folder, training=text)
            return one

        if p.source_tokenizer is None:
            self.source_tokenizer = self.target_tokenizer = make(p.tokenizer, "both")
        else:
            self.source_tokenizer = make(p.source_tokenizer, "source")
            self.target_tokenizer = make(p.target_tokenizer, "target")
        self.tokenizer = self.target_tokenizer


def texts_of(input: Input | PairTexts) -> PairTexts:
    """Returns the input as PairTexts, unwrapped if it is wrapped for evaluation.

    Raises:
      InputError: the input is not one of pairs.
    """
    found = getattr(input, "inner", input)
    if not isinstance(found, PairTexts):
        raise InputError(
            f"the task needs an input of pairs (a TranslationInput), but its input is "
            f"{type(found).__name__}"
        )
    return found


class KnownPairs(PairTexts):
    """The tokenizers and languages of a run, loaded without its data."""

    def __init__(self, params: Any, *, assets_dir: str | None) -> None:
        """Loads the tokenizers.

        Raises:
          InputError: the run has no learned tokenizer.
          OSError: a file cannot be read.
        """
        self.params = params
        self.languages = type(params.corpus).owner.languages_of(params.corpus)
        self._make_tokenizers(assets_dir, None)
