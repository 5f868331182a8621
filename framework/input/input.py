"""What an input is: batches by step, computed on the host in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tekso.framework.input import shuffle
from tekso.framework.input.skips import InputError, SkipReport
from tekso.framework.input.splits import Split
from tekso.framework.params import REQUIRED, Configurable, param

Batch = dict[str, np.ndarray]
Signature = dict[str, tuple[tuple[int, ...], Any]]
"""Shape and dtype of every array of a batch, by name."""


@dataclasses.dataclass(frozen=True)
class KnownText:
    """What is known of an input of texts without its data.

    Attributes:
      params: of the input.
      tokenizer: of its texts.
    """

    params: Any
    tokenizer: Any

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return int(self.tokenizer.vocab_size)


class Input(Configurable):
    """Base of all inputs.

    `batch(step)` is a pure function of the data, the seed and the step: the same in every process,
    on any number of devices, after every restart, in any order of calls. There is nothing to save.

    Attributes:
      tokenizer: of the texts; None where there are none.
      arrays: all examples, {name: array [examples, ...]}, of an input that has them in memory; None
        of others.
    """

    tokenizer: Any = None  # of text inputs
    arrays: Batch | None = None

    def __init__(
        self,
        params: Any,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Any = None,
    ) -> None:
        """Opens the data.

        Args:
          params: Params.
          seed: of the order.
          assets_dir: folder of what is learned from the data once (vocabularies) and kept.
          train: for an evaluation input: Params of the training input that it belongs to.
        """
        super().__init__(params)
        self.seed = seed
        self.assets_dir = assets_dir
        del train

    @classmethod
    def signature(cls, params: Any) -> Signature | None:
        """What the largest batches look like, told without any data; None: only data can tell.

        A class whose Params fix all shapes should say them: then its experiments can be inspected
        (`--mode=inspect_sharding`) where the data is not.
        """
        del params
        return None

    def form(self) -> Signature | None:
        """Returns shape and dtype of every array of one example, by name.

        A run refuses inputs of different forms. None: batches of one experiment may have different
        shapes, as those of texts.
        """
        return None

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> Any:
        """What a run of these Params knows of its texts without its data; None: only data can tell.

        Args:
          params: Params.
          assets_dir: what the run has learned from the data.

        Returns:
          what has the Params and the tokenizers of the input, and what turns text into tokens.

        Raises:
          InputError: the run has not come so far.
          OSError: a file cannot be read.
        """
        if "tokenizer" not in params:
            return None
        return KnownText(params, params.tokenizer.instantiate(assets_dir=assets_dir))

    def batch(self, step: int) -> Batch:
        """The global batch of a step.

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch(step)")

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass; None: there is no end."""
        return None

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """Which examples of a batch only pad it and must not count; None: it is not known.

        Before its first step, a run checks an input that has an end: the task's `loss_weight`, loss
        and metrics must not count them. (See framework/run/loss_check.py for what is not checked.)

        Shapes:
          returns: [batch size]
        """
        del step
        return None

    def check_unchanged(self) -> None:
        """Checks that the data is that with which the run began, as far as `assets_dir` tells.

        The first call of a run keeps in `assets_dir` what later ones compare.

        Raises:
          InputError: the data has changed.
        """

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None where there are no tokens."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    def skipped(self) -> SkipReport:
        """What of the data was malformed and left out."""
        return SkipReport()

    def reference_bits_per_byte(self) -> dict[str, float]:
        """What a model's bits per byte of this data are compared with, by name."""
        return {}

    def describe(self) -> str:
        """The data in a line: what, how much."""
        return type(self).__name__


class ExampleInput(Input):
    """Base of inputs whose batches are examples by index, all of one shape.

    A subclass has `num_examples` and `examples(index, epoch)`. In a pass of order "once", copies of
    the last example fill the last batch up; of these, the arrays named in `padding_keys` are 0. So
    an input whose passes do not divide evenly has such an array ("weights"), and the task
    multiplies by it all that it sums, in `loss_weight`, `loss` and metrics.
    """

    class Params(Input.Params):
        """Params of ExampleInput."""

        batch_size: int = param("Examples in a global batch.", default=REQUIRED)
        split: Split = param("Which part of the data.", default="train")
        order: Literal["shuffled", "sequential", "once"] = param(
            "shuffled: every epoch in another order, without end. sequential: in the order of the "
            "data, without end. once: one pass in the order of the data, the last batch filled up "
            "with examples of weight 0.",
            default="shuffled",
        )

    padding_keys: tuple[str, ...] = ("weights",)  # arrays that are 0 for what fills up a batch

    def __init__(self, params: Any, **kwargs: Any) -> None:
        """Checks batch_size."""
        super().__init__(params, **kwargs)
        if self.params.batch_size < 1:
            raise ValueError(
                f"{self.params.path_of('batch_size')} is {self.params.batch_size}, but has to be "
                "at least 1"
            )
        self._key = shuffle.key_of(self.seed, "order")

    @property
    def num_examples(self) -> int:
        """Examples of one epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no property num_examples")

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """Some examples.

        Shapes:
          index: [n], each in [0, num_examples)
          epoch: [n]; what an example holds may depend on it, unless the order is "once"
          returns: arrays [n, ...]
        """
        raise NotImplementedError(f"{type(self).__name__} has no examples(index, epoch)")

    @property
    def num_batches(self) -> int | None:
        """Batches of one pass; None: there is no end."""
        if self.params.order != "once":
            return None
        return -(-self.num_examples // self.params.batch_size)

    def batch(self, step: int) -> Batch:
        """The global batch of a step.

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        check_step(step, self.num_batches)
        size = self.params.batch_size
        position = np.arange(step * size, (step + 1) * size, dtype=np.int64)
        if self.params.order != "once":
            return self.at(position)
        index = np.minimum(position, self.num_examples - 1)
        batch = self.examples(index, np.zeros_like(index))
        if isinstance(batch, dict) and position[-1] != index[-1]:
            self._check_can_be_marked(batch)
            clear(batch, position != index, self.padding_keys)
        return batch

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """See `Input`; a subclass that makes its batches in another way says it itself."""
        if type(self).batch is not ExampleInput.batch:
            return None
        size = self.params.batch_size
        place = np.arange(step * size, (step + 1) * size)
        return (self.params.order == "once") & (place >= self.num_examples)

    def _check_can_be_marked(self, batch: Batch) -> None:
        """Checks that a batch has an array that says which of its examples count.

        Raises:
          InputError: it has none.
        """
        if any(key in batch for key in self.padding_keys):
            return
        size, count = self.params.batch_size, self.num_examples
        even = next(n for n in range(min(size, count), 0, -1) if count % n == 0)
        raise InputError(
            f"one pass over the {count} examples of {type(self).__name__} fills its last batch of "
            f"{size} up with copies ({-count % size}), and no array marks them, so they would "
            f"count. Add {next(iter(self.padding_keys), 'weights')!r} to the arrays of examples(), "
            "as np.ones(len(index), np.float32), and multiply by it in loss_weight and loss of the "
            f"task; or set the batch_size of this input to a divisor of {count}, as {even}"
        )

    def at(self, position: npt.NDArray[np.int64]) -> Batch:
        """The examples at some positions of the endless stream, epoch after epoch.

        Shapes:
          position: [n], not negative
          returns: arrays [n, ...]
        """
        epoch, index = np.divmod(position, self.num_examples)
        if self.params.order == "shuffled":
            index = shuffle.permute(index, self.num_examples, shuffle.fold(self._key, epoch))
        return self.examples(index, epoch)


def form_of(batch: Batch) -> Signature:
    """Returns shape and dtype of every array of one example of a batch, by name."""
    return {name: (array.shape[1:], array.dtype) for name, array in batch.items()}


def form_text(form: Signature) -> str:
    """Returns a form as text, sorted by name."""
    return ", ".join(
        f"{name!r} {list(shape)} {dtype}" for name, (shape, dtype) in sorted(form.items())
    )


def check_step(step: int, num_batches: int | None) -> None:
    """Checks that there is a batch of this step.

    Raises:
      IndexError: there is none.
    """
    if step < 0:
        raise IndexError(f"there is no batch of step {step}: the first step is 0")
    if num_batches is not None and step >= num_batches:
        raise IndexError(f"there is no batch {step}: one pass has {num_batches} batches")


def clear(batch: Batch, rows: npt.NDArray[np.bool_], keys: tuple[str, ...]) -> None:
    """Sets rows of some arrays to 0, in copies of the arrays."""
    for key in keys:
        if key in batch:
            batch[key] = np.array(batch[key])
            batch[key][rows] = 0
