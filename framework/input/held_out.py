"""An evaluation input: one pass over another split of the training input's data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tekso.framework.batch_part import BatchPart, RowsOf
from tekso.framework.input.errors import NoSplitError
from tekso.framework.input.input import Batch, Input, Signature, check_step
from tekso.framework.input.param_checks import check_counts
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.splits import Split
from tekso.framework.params import param


class HeldOut(Input):
    """One pass over another split of the training input's data, in the same form.

    All settings, such as files, tokenizer and length, are taken from the training input, including
    settings from the command line.
    """

    class Params(Input.Params):
        """Params of HeldOut."""

        split: Split = param("Split of the data.", default="dev")
        batch_size: int | None = param(
            "Examples in a global batch. None: as in training.", default=None
        )
        max_batches: int | None = param(
            "Maximum number of batches, spread evenly over the pass. None: all.", default=None
        )
        changes: dict[str, Any] = param(
            "Other differences from the training input: {dotted path: value}.", default={}
        )
        part: str = param(
            "If the training input is a mixture: path of one of its inputs, for example inputs.0.",
            default="",
        )

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the split.

        Raises:
          NoSplitError: the training input has no splits, or not this one.
          ValueError: there is no training input; a number is below 1; the input has no end.
        """
        super().__init__(params, seed=seed, assets_dir=assets_dir)
        p = self.params
        if train is None:
            raise ValueError(
                "HeldOut reads the data of a training input: pass its Params as "
                "instantiate(train=…)"
            )
        whole = train.get(p.part) if p.part else train
        if "split" not in whole or "order" not in whole:
            raise NoSplitError(
                f"the training input {type(whole).__qualname__} has no splits: set part to the "
                "path of one of its inputs, or define the evaluation input without HeldOut"
            )
        inner = whole.copy().set(split=p.split, order="once")
        if p.batch_size is not None:
            inner.batch_size = p.batch_size
        inner.set(dict(p.changes))
        self._inner: Input = inner.instantiate(seed=seed, assets_dir=assets_dir, train=whole)
        if self._inner.num_batches is None:
            raise ValueError(
                f"{p.path_of('changes')} gives the evaluation input no end, but it must be one "
                "pass: keep its order 'once'"
            )
        self._steps = spread(self._inner.num_batches, p.max_batches)
        self.tokenizer = self._inner.tokenizer
        self.arrays = self._inner.arrays

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`."""
        super().check_params(params)
        check_counts(params, "max_batches", "batch_size")

    def batch(self, step: int) -> Batch:
        """Returns a batch of the pass.

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        check_step(step, self.num_batches)
        return self._inner.batch(self.inner_step(step))

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        return self._inner.num_rows(self.inner_step(step))

    def own_part(self, step: int, rows: RowsOf) -> BatchPart:
        """See `Input`."""
        if type(self).batch is not HeldOut.batch:
            return super().own_part(step, rows)
        check_step(step, self.num_batches)
        return self._inner.own_part(self.inner_step(step), rows)

    def form(self) -> Signature | None:
        """See `Input`."""
        return self._inner.form()

    def check_unchanged(self) -> None:
        """See `Input`."""
        self._inner.check_unchanged()

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """See `Input`."""
        return self._inner.is_padding(self.inner_step(step))

    def excerpt(self) -> list[Batch]:
        """See `Input`; that of the whole pass, unless `max_batches` selects a part of it."""
        if (
            len(self._steps) < (self._inner.num_batches or 0)
            or type(self).batch is not HeldOut.batch
        ):
            return super().excerpt()
        return self._inner.excerpt()

    @property
    def num_batches(self) -> int:
        """Number of batches in the pass."""
        return len(self._steps)

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if there are no tokens."""
        return self._inner.vocab_size

    @property
    def inner(self) -> Input:
        """The input that reads the split."""
        return self._inner

    def inner_step(self, step: int) -> int:
        """See `Input`."""
        return int(self._steps[step])

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return self._inner.skipped()

    def reference_bits_per_byte(self) -> dict[str, float]:
        """Returns {name: bits per byte} of references for this split, to compare a model with."""
        return self._inner.reference_bits_per_byte()

    def describe(self) -> str:
        """Returns a one-line description of the data."""
        return self._inner.describe()


def spread(count: int, most: int | None) -> npt.NDArray[np.int64]:
    """Returns at most `most` indices, spread evenly over `count`; None: all.

    Shapes:
      returns: [min(count, most)], ascending
    """
    taken = count if most is None else min(count, most)
    return np.arange(taken) * count // max(taken, 1)
