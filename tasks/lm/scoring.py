"""Scores a given text: the log-probability of every token except the first.

The text is cut into windows as long as the training examples. With an overlap, each window starts
with the last tokens of the one before, which only give context and are not scored again:

    window 0   s s s s s s s s             s scored, c context only
    window 1             c c s s s s s s   (overlap 2)

Legend: B windows computed together, L length of a window.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tekso.framework.context import StepContext
from tekso.framework.task import Program
from tekso.framework.theta import Theta


class ScoredModel(Protocol):
    """A task whose texts can be scored: a `LanguageModel`."""

    model: Any

    def log_probs(
        self, theta: Theta, ids_BL: tf.Tensor, labels_BL: tf.Tensor, ctx: StepContext
    ) -> Any:
        """Returns the log-probability of every label in nats, [B, L] float32; pure."""
        ...


@dataclasses.dataclass(frozen=True)
class TextScore:
    """Score of a text.

    Attributes:
      token_ids: [n] int32, all tokens of the text.
      log_probs: [n - 1] float32 in nats, of every token except the first, given the tokens before.
      num_bytes: UTF-8 bytes of the scored tokens.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    num_bytes: int

    @property
    def total(self) -> float:
        """Log-probability of the text given its first token, in nats."""
        return float(self.log_probs.sum(dtype=np.float64))

    @property
    def loss(self) -> float:
        """Nats per token."""
        return -self.total / len(self.log_probs)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte."""
        return -self.total / math.log(2.0) / self.num_bytes


@dataclasses.dataclass(frozen=True)
class TextScorer:
    """Scores texts of any length.

    Attributes:
      log_probs: pure `function(theta, ids_BL, labels_BL, ctx)` that returns the log-probability of
        each label.
      window: context length in tokens.
      overlap: tokens of a window that only give context, fewer than `window`.
      batch_size: windows computed together.
    """

    log_probs: Callable[[Theta, tf.Tensor, tf.Tensor, Any], tf.Tensor]
    window: int
    overlap: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        """Checks the sizes."""
        if self.window < 1 or not 0 <= self.overlap < self.window:
            raise ValueError(
                f"scoring with windows of {self.window} tokens that overlap by {self.overlap}: a "
                "window needs at least 1 token, and the overlap must be at least 0 and smaller "
                "than the window"
            )

    def score(self, program: Program, token_ids: npt.ArrayLike, *, num_bytes: int) -> TextScore:
        """Returns the score of a text.

        Args:
          program: runs a function with the weights of the run.
          token_ids: the text, at least two tokens.
          num_bytes: UTF-8 bytes of the text without its first token.

        Raises:
          ValueError: the text has fewer than two tokens.
        """
        ids = np.asarray(token_ids, np.int32)
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens cannot be scored: needs at least 2")
        num_scored, stride = len(ids) - 1, self.window - self.overlap
        # Windows begin `stride` tokens apart; the last one may extend beyond the text.
        count = 1 + max(0, math.ceil((num_scored - self.window) / stride))
        rows = math.ceil(count / self.batch_size) * self.batch_size
        padded = np.zeros((rows - 1) * stride + self.window + 1, np.int32)
        padded[: len(ids)] = ids[: len(padded)]
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.window + 1)[::stride]

        found = np.zeros([rows, self.window], np.float32)
        for first in range(0, rows, self.batch_size):
            part = windows[first : first + self.batch_size]
            inputs = tf.constant(part[:, :-1]), tf.constant(part[:, 1:])
            found[first : first + len(part)] = program.call(self.log_probs, *inputs)
        parts = [found[0], *found[1:count, self.overlap :]]
        return TextScore(ids, np.concatenate(parts)[:num_scored], num_bytes)
