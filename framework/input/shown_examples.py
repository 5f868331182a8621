"""The examples that decoding shows: held-out ones if there are any, spread evenly over all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from tekso.framework.input.errors import NoSplitError
from tekso.framework.input.held_out import HeldOut, spread
from tekso.framework.input.input import Batch, ExampleInput, Input
from tekso.framework.input.splits import Split

AnyInput = TypeVar("AnyInput", bound=Input)


@dataclasses.dataclass(frozen=True)
class ShownExamples(Generic[AnyInput]):
    """Examples to decode.

    Attributes:
      input: one pass over a held-out split, or the training examples.
      split: the split.
      reason: why they are no examples of dev; "": they are, or the data has no dev split.
    """

    input: AnyInput
    split: Split
    reason: str = ""

    def titled(self, text: str, unit: str) -> str:
        """Returns a text about the examples, below a line that says why they are not those of dev.

        Args:
          text: what was decoded.
          unit: what the examples are, in the plural.
        """
        split = "training" if self.split == "train" else self.split
        return f"{split} {unit}, because {self.reason}:\n{text}" if self.reason else text


def held_out_or_training(
    held_out: Callable[[Split], AnyInput], training: Callable[[], AnyInput]
) -> ShownExamples[AnyInput]:
    """Returns the held-out examples of dev, else of test, else the training examples.

    Args:
      held_out: returns one pass over a split; it may raise anything if it cannot be loaded.
      training: returns the training examples.
    """
    splits: tuple[Split, ...] = ("dev", "test")
    reason = ""
    for split in splits:
        try:
            found = held_out(split)
        except NoSplitError:
            continue
        except Exception as error:  # of the user's code, for example
            if not (isinstance(error, KeyError) and error.args == (split,)):
                text = str(error).partition("\n")[0]
                failed = f"the {split} split cannot be loaded ({type(error).__name__}: {text})"
                reason = reason or failed
            continue
        if found.num_batches:
            return ShownExamples(found, split, reason)
    return ShownExamples(training(), "train", reason or "the data has no dev or test split")


@dataclasses.dataclass(frozen=True)
class ShownRows:
    """Rows of a batch to decode.

    Attributes:
      examples: the examples that the batch is from.
      batch: the batch.
      rows: numbers of the rows to show, without padding.
    """

    examples: ShownExamples[Input]
    batch: Batch
    rows: list[int]


def shown_rows(input: Input, *, most: int) -> ShownRows:
    """Returns some held-out examples of arrays.

    If the input reads examples by index, they are spread evenly over all of them, because those of
    a class are often side by side; otherwise over the first batch.

    Args:
      input: the training input, whose batches have "weights"; its own examples are shown if no
        held-out ones can be loaded.
      most: largest number of rows.
    """
    examples: ShownExamples[Input] = held_out_or_training(
        lambda split: HeldOut.Params(split=split).instantiate(train=input.params), lambda: input
    )
    batch = _spread_batch(examples.input)
    counted = np.flatnonzero(batch["weights"])
    return ShownRows(examples, batch, counted[spread(len(counted), most)].tolist())


def _spread_batch(input: Input) -> Batch:
    """Returns a batch of the usual size, of examples from the whole pass where that is possible."""
    inner = input.inner if type(input) is HeldOut else input
    if (
        not isinstance(inner, ExampleInput)
        or type(inner).batch is not ExampleInput.batch
        or inner.params.order != "once"
        or inner.num_examples <= inner.params.batch_size
    ):
        return input.batch(0)
    index = spread(inner.num_examples, inner.params.batch_size)
    return inner.examples(index, np.zeros_like(index))
