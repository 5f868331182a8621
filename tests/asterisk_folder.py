"""Writes a folder like the unpacked packages of Asterisk's prompts, with tones for voices."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import soundfile

LETTERS = "abcdef"


def tones_of(text: str) -> np.ndarray:
    """Returns 0.1 seconds of a tone per letter, and a short pause after it, at 8 kHz."""
    time = np.arange(800) / 8000
    parts = []
    for letter in text:
        hz = 300 + 500 * LETTERS.index(letter) if letter in LETTERS else 0
        parts += [0.3 * np.sin(2 * np.pi * hz * time), np.zeros(240)]
    return np.concatenate(parts).astype(np.float32)


def write(folder: Path, texts: list[str]) -> None:
    """Writes a prompt for every text."""
    sounds = folder / "usr/share/asterisk/sounds/en_US_f_Allison"
    about = folder / "usr/share/doc/asterisk-core-sounds-en"
    for path in (sounds / "digits", about):
        path.mkdir(parents=True)
    lines = ["; comment", "silence: (1 second of silence)", "missing: no such file"]
    for i, text in enumerate(texts):
        soundfile.write(sounds / "digits" / f"{i}.wav", tones_of(text), 8000)
        lines.append(f"digits/{i}: {text.capitalize()}.")
    (about / "core-sounds-en.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
