"""The base class of tokenizers, and `Bytes`, a tokenizer without a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework.input.sources import TrainingText, digest
from tekso.framework.params import Configurable

REPLACEMENT = "\ufffd"  # shown for bytes that are not text


class Tokenizer(Configurable):
    """Base class of tokenizers; every id stands for some bytes of UTF-8.

    A separate id, `end_id`, marks the end of a text. It stands for no bytes, and `encode` never
    returns it. A stream of texts has it between texts and at both ends.
    """

    is_fast = False  # whether encoding is about as fast as reading, so that caching ids is useless
    keeps_lines_apart = False  # whether the ids of a text are those of its lines, one after another

    def __init__(
        self,
        params: Any,
        *,
        assets_dir: str | None = None,
        training: TrainingText | None = None,
    ) -> None:
        """Loads the table, or makes it from the training text.

        Args:
          params: Params.
          assets_dir: folder in which learned tables are stored.
          training: text to learn the table from, if it is not stored yet.
        """
        super().__init__(params)
        del assets_dir, training

    end_id: int
    token_bytes: Sequence[bytes]  # the bytes of each id

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.token_bytes)

    @property
    def token_num_bytes(self) -> np.ndarray:
        """Number of bytes of text per id: [vocab_size] int32."""
        return np.fromiter(map(len, self.token_bytes), np.int32, self.vocab_size)

    @property
    def dtype(self) -> Any:
        """The smallest dtype for all ids."""
        small = self.vocab_size <= 1 << 16
        return (np.uint8 if self.vocab_size <= 1 << 8 else np.uint16) if small else np.int32

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text: [tokens] int32."""
        return self._encode(text).astype(np.int32)

    def encode_all(self, texts: Iterable[str]) -> list[np.ndarray]:
        """Returns the ids of each text, with dtype `dtype`."""
        dtype = self.dtype
        return [self._encode(text).astype(dtype, copy=False) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of some ids; invalid UTF-8 and invalid ids become U+FFFD."""
        table, size = self.token_bytes, self.vocab_size
        unknown = REPLACEMENT.encode()
        parts = [table[i] if 0 <= i < size else unknown for i in map(int, ids)]
        return b"".join(parts).decode("utf-8", "replace")

    @property
    def unused_ids(self) -> Sequence[int]:
        """Ids that no training text contains; a model should not sample them."""
        return ()

    def unknown(self, text: str) -> list[str]:
        """Returns the characters or words of a text that have no id and are lost, each once."""
        del text
        return []

    def fingerprint(self) -> str:
        """Returns a digest; tokenizers with different ids have different digests."""
        return digest([type(self).__qualname__.encode(), *self.token_bytes])

    def _encode(self, text: str) -> np.ndarray:
        raise NotImplementedError


class Bytes(Tokenizer):
    """256 ids, one per byte of UTF-8; id 0 is the end of a text, since text has no NUL bytes."""

    is_fast = True
    keeps_lines_apart = True
    end_id = 0
    token_bytes = (b"", *(bytes([byte]) for byte in range(1, 256)))

    def _encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)
