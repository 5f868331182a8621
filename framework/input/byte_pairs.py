"""The tokenizer of GPT-2: byte pairs that are merged by a published list."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np

from tekso.framework import files
from tekso.framework.input import assets
from tekso.framework.input.errors import InputError
from tekso.framework.input.sources import TrainingText, digest
from tekso.framework.input.tokenizers import Tokenizer
from tekso.framework.params import REQUIRED, param

# Texts are split into contractions, words, numbers, other characters and spaces.
_PARTS = (
    r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the order matters
)
_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
_CACHED = 1 << 17  # parts


class BytePairs(Tokenizer):
    """Bytes, and pairs of tokens that are merged, in the order of a file `merges.txt`.

    Ids 0 to 255 are bytes, printable ones first. Then each line "a b" of the file is a token, and
    the last id is the end of a text (`<|endoftext|>`). A text is split into parts, and in each part
    the pair that is first in the file is merged until there is none.

    Source: Sennrich et al. 2016, algorithm 1; Radford et al. 2019, section 2.2 (bytes).
    """

    class Params(Tokenizer.Params):
        """Params of BytePairs."""

        file: str = param("The published merges.txt.", default=REQUIRED)

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Reads the merges.

        Raises:
          InputError: a line of the file is no pair of known tokens.
        """
        super().__init__(params)
        import regex

        order = [byte for part in _PRINTABLE for byte in part]
        order += [byte for byte in range(256) if byte not in order]
        self._of_byte = {byte: i for i, byte in enumerate(order)}
        self._merged: dict[tuple[int, int], int] = {}
        tokens = [bytes([byte]) for byte in order]
        self._read(self._given(assets_dir).decode("utf-8", "replace"), tokens)
        self.end_id = len(tokens)
        self.token_bytes = [*tokens, b""]
        self._split = regex.compile(_PARTS)
        self._part = functools.lru_cache(_CACHED)(self._encode_part)

    def _given(self, assets_dir: str | None) -> bytes:
        path = self.params.file
        if assets_dir and not files.exists(path):
            kept = files.join(assets_dir, "merges.txt")
            if files.exists(kept):  # training has copied it, so the original file may be gone
                return files.read(kept)
        data = files.read(files.glob([path], what=self.params.path_of("file"))[0])
        same = TrainingText(lambda: [], lambda: digest([data]), f"the merges {path}")
        return assets.obtain(
            "merges.txt", assets_dir=assets_dir, settings={}, training=same, make=lambda _: data
        )

    def _read(self, text: str, tokens: list[bytes]) -> None:
        """Reads the merges; appends their tokens to those of single bytes."""
        # In the file, a byte that is not printable is written as the character 256 + its rank.
        id_of = {_written(byte, i): i for byte, i in self._of_byte.items()}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or (number == 1 and line.startswith("#version")):
                continue
            pair = line.split(" ")
            if len(pair) != 2 or not set(pair) <= id_of.keys():
                raise InputError(
                    f"{self.params.path_of('file')}: line {number} of {self.params.file} is "
                    f"{line[:40]!r}, expected two tokens of bytes or of earlier lines"
                )
            first, second = (id_of[token] for token in pair)
            id_of["".join(pair)] = self._merged[first, second] = len(tokens)
            tokens.append(tokens[first] + tokens[second])

    def _encode(self, text: str) -> np.ndarray:
        ids = [i for part in self._split.findall(text) for i in self._part(part)]
        return np.array(ids, np.int32)

    def _encode_part(self, part: str) -> tuple[int, ...]:
        ids = [self._of_byte[byte] for byte in part.encode("utf-8")]
        while True:
            pairs = itertools.pairwise(ids)
            best = min((self._merged[p] for p in pairs if p in self._merged), default=None)
            if best is None:
                return tuple(ids)
            merged: list[int] = []
            for i in ids:
                if merged and self._merged.get((merged[-1], i)) == best:
                    merged[-1] = best
                else:
                    merged.append(i)
            ids = merged


def _written(byte: int, rank: int) -> str:
    """Returns the character that the file has for a byte; `rank` is the id of the byte."""
    printable = sum(map(len, _PRINTABLE))
    return chr(byte) if rank < printable else chr(256 + rank - printable)
