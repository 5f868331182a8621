"""Transcripts in the form that is learned and scored: spoken words, without punctuation."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

TextForm = Literal["spoken", "raw"]

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_REMARK = re.compile(r"\[[^\]]*\]|\([^)]*\)|<[^>]*>")


def spoken_form(text: str) -> str:
    """Returns a text in lower case, without punctuation and remarks, with digits as words.

    Remarks are in brackets: "[tone]", "(5 seconds of silence)", "<beep>". Each digit becomes an
    English word. Letters, marks and apostrophes inside words are kept.
    """
    text = _REMARK.sub(" ", unicodedata.normalize("NFC", text)).lower().replace("\u2019", "'")
    parts = []
    for character in text:
        if character in "0123456789":
            parts.append(f" {_DIGITS[int(character)]} ")
        elif character == "'" or unicodedata.category(character)[0] in "LM":
            parts.append(character)
        else:
            parts.append(" ")
    words = (word.strip("'") for word in "".join(parts).split())
    return " ".join(word for word in words if word)


def as_form(text: str, form: TextForm) -> str:
    """Returns a text as it is, or in its spoken form."""
    return spoken_form(text) if form == "spoken" else text.strip()
