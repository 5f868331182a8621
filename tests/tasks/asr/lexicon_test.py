"""Phonemes by a lexicon: encoding, words from phonemes, and broken files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tekso.framework.input.errors import InputError
from tekso.tasks.asr.lexicon import Lexicon
from tekso.tasks.asr.transcriber import text_of, words_of

LINES = """;;; a comment
ONE  W AH N
WON  W AH N
ONE(2)  HH W AH N
TWO  T UW

a  AH
"""


def lexicon(tmp_path: Path, text: str = LINES) -> Lexicon:
    (tmp_path / "words.dict").write_text(text)
    found: Lexicon = Lexicon.Params(file=str(tmp_path / "words.dict")).instantiate()
    return found


def test_words_become_phonemes_and_phonemes_words(tmp_path: Path) -> None:
    tokenizer = lexicon(tmp_path)
    ah, hh, n, t, uw, w = range(3, 9)  # in alphabetical order
    assert tokenizer.vocab_size == 9 and tokenizer.end_id == 0
    assert tokenizer.encode("won two a").tolist() == [w, ah, n, 2, t, uw, 2, ah]
    assert tokenizer.decode([w, ah, n, 2, 2, hh, w, ah, n, 2, t, uw]) == "one one two"
    assert tokenizer.decode([t, ah, 2, 2, 1, 99]) == "T-AH <UNK>-<UNK>"
    assert tokenizer.encode("two three").tolist() == [t, uw, 2, 1]
    assert tokenizer.unknown("One three two three") == ["three"]
    assert tokenizer.encode("").tolist() == [] and tokenizer.decode([]) == ""


def test_words_of_phonemes_have_the_times_of_their_first_ones(tmp_path: Path) -> None:
    tokenizer = lexicon(tmp_path)
    ids = tokenizer.encode("two a").tolist()
    assert text_of(ids, tokenizer) == "two a"
    assert words_of(ids, [0.1, 0.2, 0.3, 0.4], tokenizer) == [["two", 0.1], ["a", 0.4]]


@pytest.mark.parametrize(
    ("text", "reason"), [("one\n", "line 1: 'one' has no phonemes"), ("\n", "no pronunciations")]
)
def test_a_file_without_phonemes_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        lexicon(tmp_path, text)
