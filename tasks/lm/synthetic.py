"""Random tokens in memory, for measuring speed; no file is read and nothing can be learned."""

from __future__ import annotations

from typing import Any

import numpy as np

from tekso.framework.input import shuffle
from tekso.framework.input.input import Batch, ExampleInput, Signature
from tekso.framework.input.packing import Ints
from tekso.framework.input.sides import SideForm
from tekso.framework.params import REQUIRED, param


class SyntheticTokens(ExampleInput):
    """Windows of a stream of uniform random ids: "ids", "labels", "weights", no "num_bytes"."""

    class Params(ExampleInput.Params):
        """Params of SyntheticTokens."""

        length: int = param("Tokens in an example.", default=REQUIRED)
        vocab_size: int = param("Number of ids.", default=REQUIRED)
        num_tokens: int = param("Length of the stream in tokens.", default=1 << 20)

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Draws the tokens.

        Raises:
          ValueError: a size is out of range.
        """
        super().__init__(params, **kwargs)
        p = self.params
        if p.length < 1 or p.vocab_size < 1 or p.num_tokens <= p.length:
            raise ValueError(
                f"{p.path_of('length')} {p.length} and vocab_size {p.vocab_size} must be at least "
                f"1, and num_tokens {p.num_tokens} more than length"
            )
        drawn = np.random.default_rng(int(shuffle.key_of(self.seed, f"tokens {p.split}")[0]))
        self._tokens = drawn.integers(0, p.vocab_size, p.num_tokens, np.int32)

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """See `Input`."""
        return SideForm(params.length, has_labels=True).signature(params.batch_size)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        size: int = self.params.vocab_size
        return size

    @property
    def num_examples(self) -> int:
        """Number of windows in an epoch."""
        found: int = (len(self._tokens) - 1) // self.params.length
        return found

    def examples(self, index: Ints, epoch: Ints) -> Batch:
        """Returns the windows with the given indices.

        Shapes:
          index, epoch: [n]
          returns: arrays [n, length]
        """
        del epoch
        length = self.params.length
        tokens = self._tokens[(index * length)[:, None] + np.arange(length + 1)]
        return {
            "ids": np.ascontiguousarray(tokens[:, :-1]),
            "labels": np.ascontiguousarray(tokens[:, 1:]),
            "weights": np.ones((len(index), length), np.float32),
        }
