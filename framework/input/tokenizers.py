"""Tokenizers: text to ids and back; `Bytes`, the one that needs no table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework.input.sources import TrainingText, digest
from tekso.framework.params import Configurable

REPLACEMENT = "\ufffd"  # shown for what is no text


class Tokenizer(Configurable):
    """Base: every id stands for some bytes of UTF-8.

    The end of a text has an id of its own, `end_id`, which `encode` of text never gives and which
    stands for no bytes. A stream of texts has it between them and at both ends.
    """

    is_fast = False  # whether encoding is about as fast as reading, so that keeping it does not pay

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Loads the table, or makes it.

        Args:
          params: Params.
          assets_dir: folder where a table that was learned from the data is kept.
          training: text to learn it from, if it is not there yet.
        """
        super().__init__(params)
        del assets_dir, training

    end_id: int
    token_bytes: Sequence[bytes]  # what each id stands for, shown if it is no text

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.token_bytes)

    @property
    def token_num_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for: [vocab_size] int32."""
        return np.fromiter(map(len, self.token_bytes), np.int32, self.vocab_size)

    @property
    def dtype(self) -> Any:
        """The smallest type that holds every id."""
        small = self.vocab_size <= 1 << 16
        return (np.uint8 if self.vocab_size <= 1 << 8 else np.uint16) if small else np.int32

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text: [tokens] int32."""
        return self._encode(text).astype(np.int32)

    def encode_all(self, texts: Iterable[str]) -> list[np.ndarray]:
        """The ids of each text, of type `dtype`."""
        return [self._encode(text).astype(self.dtype, copy=False) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. What is no UTF-8, or no id, is shown as U+FFFD."""
        table, size = self.token_bytes, self.vocab_size
        unknown = REPLACEMENT.encode()
        parts = [table[i] if 0 <= i < size else unknown for i in map(int, ids)]
        return b"".join(parts).decode("utf-8", "replace")

    @property
    def unused_ids(self) -> Sequence[int]:
        """Ids that no training text has, so that a model is not to draw them."""
        return ()

    def unknown(self, text: str) -> list[str]:
        """What of a text has no id of its own and is lost: characters or words, each once."""
        del text
        return []

    def fingerprint(self) -> str:
        """A digest: another one gives other ids."""
        return digest([type(self).__qualname__.encode(), *self.token_bytes])

    def _encode(self, text: str) -> np.ndarray:
        raise NotImplementedError


class Bytes(Tokenizer):
    """256 ids, the bytes of UTF-8. No text has a NUL byte, so 0 is the end of a text."""

    is_fast = True
    end_id = 0
    token_bytes = (b"", *(bytes([byte]) for byte in range(1, 256)))

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)
