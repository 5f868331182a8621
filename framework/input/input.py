"""Base classes of inputs: batches by step, computed on the host in NumPy."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tekso.framework.batch_part import BatchPart, RowsOf
from tekso.framework.input import example_errors, parts_of_batches, shuffle
from tekso.framework.input.errors import InputError
from tekso.framework.input.param_checks import check_counts
from tekso.framework.input.skips import SkipReport
from tekso.framework.input.splits import Split
from tekso.framework.input.unchanged_examples import check_examples, spread_over
from tekso.framework.input.unread import KnownText
from tekso.framework.params import REQUIRED, Configurable, param
from tekso.framework.signature import Signature as Signature

Batch = dict[str, np.ndarray]


class Input(Configurable):
    """Base class of all inputs.

    `batch(step)` is a pure function of the data, the seed and the step: the same in every process,
    on any number of devices, after every restart, in any order of calls. An input has no state to
    save.

    Where processes share a batch, each calls `own_part(step, rows)` for its examples. An input that
    overrides `batch_rows` (and `num_rows`, if the size of its batches varies) builds only these.
    If a class overrides `batch` alone, its batches are built whole, and then divided.

    Attributes:
      tokenizer: the tokenizer of a text input; None for other inputs.
      arrays: all examples, {name: array [examples, ...]}, if the input has them in memory;
        otherwise None.
    """

    tokenizer: Any = None
    arrays: Batch | None = None

    def __init__(
        self,
        params: Input.Params,
        *,
        seed: int = 0,
        assets_dir: str | None = None,
        train: Input.Params | None = None,
    ) -> None:
        """Opens the data.

        Args:
          params: Params.
          seed: seed of the order of examples.
          assets_dir: folder of assets, which are learned from the data once (vocabularies).
          train: for an evaluation input: Params of the training input.
        """
        super().__init__(params)
        self.check_params(self.params)
        self.seed = seed
        self.assets_dir = assets_dir
        del train

    @classmethod
    def check_params(cls, params: Input.Params) -> None:
        """Checks what can be checked without data; `--mode=plan` calls it too.

        A class that overrides it calls the base class first. Fields may be REQUIRED and not set.

        Raises:
          ValueError: Params are invalid; the message names their path.
        """
        del params

    @classmethod
    def signature(cls, params: Input.Params) -> Signature | None:
        """Returns {name: (shape, dtype)} of the largest batches; None: unknown without data.

        A class whose Params determine all shapes should override it. Its experiments can then be
        inspected (`--mode=inspect_sharding`) without data.
        """
        del params
        return None

    def form(self) -> Signature | None:
        """Returns {name: (shape, dtype)} of one example.

        A run rejects inputs with different forms. None: examples may have different shapes, as
        texts have.
        """
        return None

    @classmethod
    def known(cls, params: Input.Params, *, assets_dir: str | None) -> object | None:
        """Returns the parts of the input that need no data; None: all parts need data.

        Args:
          params: Params.
          assets_dir: folder of the assets that the run has learned from the data.

        Returns:
          an object with the Params and the tokenizers of the input, and with its methods that
          tokenize text.

        Raises:
          InputError: the run has not stored its assets yet.
          OSError: a file cannot be read.
        """
        if "tokenizer" not in params:
            return None
        return KnownText(params, params.get("tokenizer").instantiate(assets_dir=assets_dir))

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch(step)")

    def steps_of_each_kind(self) -> list[int]:
        """Returns one step for every kind of batch, by the names of the arrays."""
        return [0]

    def largest_batch(self) -> Batch:
        """Returns a batch with the largest arrays, for estimates; by default the first batch."""
        return self.batch(0)

    def num_rows(self, step: int) -> int:
        """Returns the number of examples in the global batch of a step."""
        return len(next(iter(self.batch(step).values())))

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """Returns the examples from `begin` to before `end` of the global batch of a step.

        Raises:
          IndexError: as `batch`.
        """
        return {name: array[begin:end] for name, array in self.batch(step).items()}

    def own_part(self, step: int, rows: RowsOf) -> BatchPart:
        """Returns the examples of the global batch of a step that a process computes.

        Args:
          step: the step.
          rows: returns which examples these are, given the number of examples of the batch.

        Raises:
          InputError: the batch does not divide over the processes; IndexError: as `batch`.
        """
        return parts_of_batches.built(self, step, rows)

    @property
    def num_batches(self) -> int | None:
        """Number of batches in one pass; None: the input has no end."""
        return None

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """Returns which examples of a batch are padding and must not count; None: unknown.

        Before its first step, a run checks for every finite input that the task's `loss_weight`,
        loss and metrics do not count padding. (See framework/run/loss_check.py for what is not
        checked.)

        Shapes:
          returns: [batch size]
        """
        del step
        return None

    def excerpt(self) -> list[Batch]:
        """Returns arrays by which the data of a pass is recognised: its size, and some of it.

        By default, the first and the last batch.
        """
        count = self.num_batches or 0
        ends = [self.batch(number) for number in sorted({0, count - 1}) if count]
        return [{"num_batches": np.array(count)}, *ends]

    @property
    def inner(self) -> Input:
        """The input that reads the data: itself, unless it selects batches of another."""
        return self

    def inner_step(self, step: int) -> int:
        """Returns the step of `inner` that has the batch of a step."""
        return step

    def check_unchanged(self) -> None:
        """Checks that the data is that of the first call in the run, described in `assets_dir`.

        Raises:
          InputError: the data has changed.
        """

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids; None if there are no tokens."""
        return None if self.tokenizer is None else self.tokenizer.vocab_size

    def skipped(self) -> SkipReport:
        """Returns a report of the malformed data that was skipped."""
        return SkipReport()

    def reference_bits_per_byte(self) -> dict[str, float]:
        """Returns {name: bits per byte} of references for this data, to compare a model with."""
        return {}

    def describe(self) -> str:
        """Returns a one-line description of the data: its kind and amount."""
        return type(self).__name__


class ExampleInput(Input):
    """Base class of inputs with examples by index, all of the same shape.

    A subclass defines `num_examples` and `examples(index, epoch)`. With order "once", the last
    batch is padded with copies of the last example, in which the arrays named in `padding_keys` are
    0. If the number of examples is not a multiple of the batch size, the input must have such an
    array ("weights"), and the task must multiply by it in `loss_weight`, `loss` and metrics.
    """

    class Params(Input.Params):
        """Params of ExampleInput."""

        batch_size: int = param("Examples in a global batch.", default=REQUIRED)
        split: Split = param("Split of the data.", default="train")
        order: Literal["shuffled", "sequential", "once"] = param(
            "shuffled: every epoch in a different order, without end. sequential: in the order of "
            "the data, without end. once: one pass in the order of the data; the last batch is "
            "padded with examples of weight 0.",
            default="shuffled",
        )

    padding_keys: tuple[str, ...] = ("weights",)  # arrays that are 0 for padding examples

    def __init__(self, params: Any, **kwargs: Any) -> None:
        super().__init__(params, **kwargs)
        self._key = shuffle.key_of(self.seed, "order")

    @classmethod
    def check_params(cls, params: Any) -> None:
        """See `Input`: checks batch_size."""
        super().check_params(params)
        check_counts(params, "batch_size")

    @property
    def num_examples(self) -> int:
        """Number of examples per epoch."""
        raise NotImplementedError(f"{type(self).__name__} has no property num_examples")

    def describe(self) -> str:
        """Returns a one-line description of the data: the class, the split and the size."""
        name = type(self).__name__
        if type(self).num_examples is ExampleInput.num_examples:
            return name
        return f"{name}, {self.params.split}: {self.num_examples:,} examples"

    def examples(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """Returns the examples with the given indices.

        Shapes:
          index: [n], each in [0, num_examples)
          epoch: [n]; an example may depend on its epoch, unless the order is "once"
          returns: arrays [n, ...]
        """
        raise NotImplementedError(f"{type(self).__name__} has no examples(index, epoch)")

    @property
    def num_batches(self) -> int | None:
        """Number of batches in one pass; None: the input has no end."""
        if self.params.order != "once":
            return None
        found: int | None = -(-self.num_examples // self.params.batch_size)
        return found

    def batch(self, step: int) -> Batch:
        """Returns the global batch of a step.

        Raises:
          IndexError: the step is negative, or the pass has fewer batches.
        """
        return self.batch_rows(step, 0, self.params.batch_size)

    def num_rows(self, step: int) -> int:
        """See `Input`."""
        del step
        size: int = self.params.batch_size
        return size

    def batch_rows(self, step: int, begin: int, end: int) -> Batch:
        """See `Input`; builds only these examples."""
        self.check_has_examples()
        check_step(step, self.num_batches)
        size = self.params.batch_size
        position = np.arange(step * size + begin, step * size + end, dtype=np.int64)
        if self.params.order != "once":
            return self.at(position)
        index = np.minimum(position, self.num_examples - 1)
        batch = self._built(index, np.zeros_like(index))
        if isinstance(batch, dict) and (step + 1) * size > self.num_examples:
            self._check_can_be_marked(batch)
            clear(batch, position != index, self.padding_keys)
        return batch

    def is_padding(self, step: int) -> npt.NDArray[np.bool_] | None:
        """See `Input`. None (unknown) if a subclass overrides only `batch`."""
        if type(self).batch is not ExampleInput.batch:
            return None
        size = self.params.batch_size
        place = np.arange(step * size, (step + 1) * size)
        found: npt.NDArray[np.bool_] = (place >= self.num_examples) & (self.params.order == "once")
        return found

    def excerpt(self) -> list[Batch]:
        """See `Input`: the first and the last example, unless a subclass ends another order."""
        is_defined = type(self).num_examples is not ExampleInput.num_examples
        is_usual = self.params.order == "once" or self.num_batches is None
        count = self.num_examples if is_defined and is_usual else 0
        if type(self).batch is not ExampleInput.batch or not count:
            return super().excerpt()
        ends = np.array([0, count - 1], np.int64)
        return [{"num_examples": np.array(count)}, self._built(ends, np.zeros_like(ends))]

    def check_unchanged(self) -> None:
        """See `Input`: compares four examples, unless a subclass overrides `batch`."""
        if type(self).batch is ExampleInput.batch and (count := self.num_examples):
            index = spread_over(count)
            epoch = np.zeros_like(index)
            check_examples(self, "examples", [count], lambda: [self._built(index, epoch)])

    def check_has_examples(self) -> None:
        """Checks that there are examples, if `num_examples` is defined.

        Raises:
          InputError: there are none; the text names the input and its settings.
        """
        is_defined = type(self).num_examples is not ExampleInput.num_examples
        if is_defined and self.num_examples < 1:
            raise example_errors.empty(self.params, type(self).__name__, ExampleInput.Params)

    def _built(self, index: npt.NDArray[np.int64], epoch: npt.NDArray[np.int64]) -> Batch:
        """Returns `examples(index, epoch)`; an error of it has the examples as a note."""
        method = f"{type(self).__name__}.examples"
        found: Batch = example_errors.built(method, self.examples, index, epoch)
        return found

    def _check_can_be_marked(self, batch: Batch) -> None:
        """Checks that a batch has an array that marks padding examples.

        Raises:
          InputError: it has none.
        """
        if any(key in batch for key in self.padding_keys):
            return
        size, count = self.params.batch_size, self.num_examples
        even = next(n for n in range(min(size, count), 0, -1) if count % n == 0)
        raise InputError(
            f"one pass over the {count} examples of {type(self).__name__} pads its last batch of "
            f"{size} with {-count % size} copies, but no array marks them, so they would count. "
            f"Add {next(iter(self.padding_keys), 'weights')!r} to the arrays of examples(), as "
            "np.ones(len(index), np.float32), and multiply by it in loss_weight and loss of the "
            f"task; or set the batch_size of this input to a divisor of {count}, for example {even}"
        )

    def at(self, position: npt.NDArray[np.int64]) -> Batch:
        """Returns the examples at some positions of the endless stream of epochs.

        Shapes:
          position: [n], not negative
          returns: arrays [n, ...]
        """
        self.check_has_examples()
        epoch, index = np.divmod(position, self.num_examples)
        if self.params.order == "shuffled":
            index = shuffle.permute(index, self.num_examples, shuffle.fold(self._key, epoch))
        return self._built(index, epoch)


def check_step(step: int, num_batches: int | None) -> None:
    """Checks that there is a batch for this step.

    Raises:
      IndexError: there is none.
    """
    if step < 0:
        raise IndexError(f"there is no batch of step {step}: the first step is 0")
    if num_batches is not None and step >= num_batches:
        raise IndexError(f"there is no batch {step}: one pass has {num_batches} batches")


def clear(batch: Batch, rows: npt.NDArray[np.bool_], keys: tuple[str, ...]) -> None:
    """Sets rows of some arrays of a batch to 0; replaces these arrays by copies."""
    for key in keys:
        if key in batch:
            batch[key] = np.array(batch[key])
            batch[key][rows] = 0
