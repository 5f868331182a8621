"""A trial of a task: its sums over a few examples, on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework import error_advice, task_results
from tekso.framework.collected import Pairs
from tekso.framework.context import Form, Mode
from tekso.framework.draws import Repeats
from tekso.framework.execution.workarounds.call_counts import counted_alone
from tekso.framework.foreign_variables import refused
from tekso.framework.run.label_limits import LabelWatch
from tekso.framework.run.repeated_softmax import RepeatedSoftmax
from tekso.framework.run.trial_context import (
    NUM_EXAMPLES,
    OpByOp,
    OpCount,
    TrialContext,
)
from tekso.framework.task import LossSums, Task

Batch = Mapping[str, np.ndarray]
_Loss = Callable[..., LossSums]

_TIMES_RANDOM = 100.0  # a change, compared with that of a repetition
REPETITIONS = 3
"""Of a sum that may be random; by chance, a single one may give almost the same."""
_MOST_WORK = 10**9  # maximum number of weights times elements of the examples
_TOLERANCE, _TOLERANCE_OF_16_BITS = 1e-3, 0.02  # relative; a mean of two is half of their sum


@dataclasses.dataclass(frozen=True)
class TrialSums:
    """Sums over some examples.

    Attributes:
      loss, weight: of the task.
      metrics: (sum, weight) of the metrics of the task.
      of_layers: (sum, weight) of the metrics that layers collect.
      auxiliary: sums of the auxiliary losses that layers collect.
      statistics: (sum, weight) of the statistics that layers collect, elementwise.
    """

    loss: float
    weight: float
    metrics: dict[str, tuple[float, float]]
    of_layers: dict[str, tuple[float, float]]
    auxiliary: dict[str, float]
    statistics: dict[str, tuple[np.ndarray, np.ndarray]]

    def named(self) -> dict[str, float]:
        """Returns the loss and the parts of the metrics by name; "{}" stands for the method."""
        return {"the loss sum of {}": self.loss, **_named(self.metrics)}

    def named_of_layers(self) -> dict[str, float]:
        """Returns the parts of the metrics that layers collect, by name."""
        return _named(self.of_layers)


def _named(metrics: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Returns the sums and the weights of metrics by name."""
    parts = {}
    for name, (one, weight) in metrics.items():
        parts[f"the sum of the metric {name!r} of {{}}"] = one
        parts[f"the weight of the metric {name!r} of {{}}"] = weight
    return parts


class _Tensors(NamedTuple):
    """What a task computes for some examples.

    Attributes:
      loss, weight: of the task.
      total: the loss with the auxiliary losses of layers.
      metrics, of_layers, auxiliary, statistics: as in `TrialSums`.
    """

    loss: tf.Tensor
    weight: tf.Tensor
    total: tf.Tensor
    metrics: Pairs
    of_layers: Pairs
    auxiliary: dict[str, tf.Tensor]
    statistics: Pairs


_OPS_OF_TRACE = 30  # so many ops run in about the time in which one is traced


@contextlib.contextmanager
def _unoptimized() -> Iterator[None]:
    """Runs functions as they were traced: optimizing a graph takes longer than a few runs."""
    options = tf.config.optimizer
    before = options.get_experimental_options().get("disable_meta_optimizer", False)
    options.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.set_experimental_options({"disable_meta_optimizer": before})


class Trial:
    """Computes the loss of a task over few examples: op by op, or traced if loops are long.

    The first computation of each kind of batch is always op by op: that is where `softmax` sees its
    values, and where ops are counted. Others are traced only if that takes less time.

    Args:
      task: the task.
      weights: {path: value}.
      forms: {name: function} of primitives that the trial computes differently.

    Attributes:
      task, weights: as given.
      softmax: what was found about softmaxes in the computations so far.
      labels: the arrays that the loss reads as classes.
      repeats: random numbers that are drawn several times.
      seen: kinds of batches that were computed, as `kind_of` returns them.
      kinds: types of the ops that were computed op by op.
      not_finite: the first loss that was not finite, and the arrays of its examples that were not
        finite; None: all losses were finite, or infinite sums of 16 bits, which overflow early.
    """

    def __init__(
        self,
        task: Task,
        weights: Mapping[str, tf.Tensor],
        *,
        forms: Mapping[str, Form] = MappingProxyType({}),
    ) -> None:
        self.task, self.weights, self._forms = task, weights, forms
        self.softmax, self.labels, self.repeats = RepeatedSoftmax(), LabelWatch(), Repeats()
        self.not_finite: tuple[float, list[str]] | None = None
        self._traced: dict[Any, Any] = {}  # {mode, sizes and how: its tf.function}
        self._long = set[Any]()  # kinds of batches that take less time if traced
        self.seen, self.kinds = set[Any](), set[str]()
        self._read = set[str]()  # attributes of a context

    def _run(
        self,
        weights: Mapping[str, tf.Tensor],
        batch: Mapping[str, tf.Tensor],
        offset: tf.Tensor | int,
        *,
        mode: Mode,
        by: _Loss = task_results.loss,
        whole: int | None = None,
        kind: Callable[..., TrialContext] = TrialContext,
    ) -> _Tensors:
        size = whole or next(iter(batch.values())).shape[0]
        ctx = kind(mode=mode, num_examples=size, example_offset=offset, read=self._read)
        ctx.forms = {**ctx.forms, **self._forms}
        ctx.collected.repeats = self.repeats
        sums = by(self.task, self.task.theta(weights), batch, ctx)
        loss = tf.reduce_sum(sums.loss_sum)
        auxiliary = {name: value * size for name, (value, _) in ctx.collected.sums["loss"].items()}
        return _Tensors(
            loss=loss,
            weight=tf.reduce_sum(task_results.loss_weight(self.task, batch)),
            total=loss + tf.cast(ctx.collected.total("loss"), loss.dtype),
            metrics=sums.metrics,
            of_layers=ctx.collected.sums["metric"],
            auxiliary=auxiliary,
            statistics=ctx.collected.sums["statistic"],
        )

    def _tensors(
        self,
        batch: Batch,
        mode: Mode,
        offset: int = 0,
        by: _Loss = task_results.loss,
        whole: int | None = None,
    ) -> _Tensors:
        """Computes the task: op by op, or traced if loops repeated most ops before."""
        examples = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        arguments = (self.weights, examples, tf.constant(offset, tf.int64))
        if (kind := kind_of(batch)) in self._long:
            sizes = ((name, array.shape) for name, array in sorted(batch.items()))
            with _unoptimized():
                run = self._traced_for((mode, by, whole, *sizes))
                found: _Tensors = run(*arguments, mode=mode, by=by, whole=whole)
            return found
        self.seen.add(kind)
        count = OpCount()
        with self._watching(batch, examples), count.counting():
            context = functools.partial(OpByOp, count=count)
            found = self._run(*arguments, mode=mode, by=by, whole=whole, kind=context)
        self.kinds |= count.kinds
        if count.run > _OPS_OF_TRACE * count.traced:
            self._long.add(kind)
        return found

    @contextlib.contextmanager
    def _watching(self, batch: Batch, examples: Mapping[str, tf.Tensor]) -> Iterator[None]:
        """Watches the ops of a block that computes the task for a batch, op by op."""
        naming = error_advice.naming_labels(batch)
        with self.softmax.watching(), self.labels.watching(examples), naming:
            yield

    def _traced_for(self, kind: tuple[Any, ...]) -> Any:
        """Returns the function for a kind of call. A single one would be retraced for each kind.

        TensorFlow warns of that, although every kind is traced only once.
        """
        if kind not in self._traced:
            self._traced[kind] = counted_alone(tf.function(self._run, autograph=False))
        return self._traced[kind]

    @property
    def reads_size(self) -> bool:
        """Whether the task has read the number of examples of the global batch from its context."""
        return NUM_EXAMPLES in self._read

    @property
    def tolerance(self) -> float:
        """Relative tolerance of sums for rounding."""
        sizes = {weight.dtype.size for weight in self.weights.values()}
        return _TOLERANCE_OF_16_BITS if sizes & {1, 2} else _TOLERANCE

    def differ(self, one: float, other: float, *, scale: float) -> bool:
        """Whether two sums differ by more than rounding; False if one of them is not finite."""
        finite = bool(np.isfinite([one, other]).all())
        return finite and abs(one - other) > self.tolerance * scale + 1e-6

    def sums(
        self,
        batch: Batch,
        *,
        mode: Mode = "eval",
        offset: int = 0,
        by: _Loss = task_results.loss,
        whole: int | None = None,
    ) -> TrialSums:
        """Returns the sums of these examples.

        Args:
          batch: the examples.
          mode: as of StepContext.
          offset: position of the first example in the global batch; random numbers depend on it.
          by: function that computes the loss, (task, theta, batch, ctx) -> sums.
          whole: number of examples of the global batch; None: these are all.
        """
        found = self._tensors(batch, mode, offset, by, whole)
        loss = float(found.loss)
        may_overflow = self.tolerance == _TOLERANCE_OF_16_BITS and not np.isnan(loss)
        if self.not_finite is None and not np.isfinite(loss) and not may_overflow:
            self.not_finite = loss, [n for n, array in batch.items() if not _is_finite(array)]
        return TrialSums(
            loss=float(found.loss),
            weight=float(found.weight),
            metrics=_numbers(found.metrics),
            of_layers=_numbers(found.of_layers),
            auxiliary={name: float(value) for name, value in found.auxiliary.items()},
            statistics={
                name: (np.asarray(one, np.float64), np.asarray(weight, np.float64))
                for name, (one, weight) in found.statistics.items()
            },
        )

    def ops(self, batch: Batch, mode: Mode) -> list[Any]:
        """Returns the ops of a trace of the task, without computing anything.

        Raises:
          ForeignVariableError: the task creates variables, or draws random numbers that are not
            those of the context.
        """

        def run(*arguments: Any) -> _Tensors:
            with refused(self.task):
                return self._run(*arguments, mode=mode)

        examples = {name: tf.convert_to_tensor(array) for name, array in batch.items()}
        traced = tf.function(run, autograph=False)
        traced = traced.get_concrete_function(self.weights, examples, tf.constant(0, tf.int64))
        found: list[Any] = traced.graph.get_operations()
        return found

    def most_rows(self, batch: Batch) -> int:
        """Returns the number of examples that are cheap to compute, from 1 to 32."""
        elements = max(array[0].size for array in batch.values())
        weights = sum(int(tf.size(weight)) for weight in self.weights.values())
        return int(np.clip(_MOST_WORK // max(1, elements * weights), 1, 32))

    def unused(self, batch: Batch, learned: Iterable[str]) -> list[str]:
        """Returns the paths of learned weights that get no gradient."""
        sources = {path: self.weights[path] for path in learned}
        unused = list(sources)
        for mode in ("train", "eval"):  # training may use more weights
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                total = self._tensors(batch, mode).total
            with _unoptimized():
                gradients = tape.gradient(total, sources)
            unused = [path for path in unused if gradients[path] is None]
            if not unused:
                break
        return unused


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind not in "fc" or bool(np.isfinite(array).all())


def _numbers(pairs: Pairs) -> dict[str, tuple[float, float]]:
    return {name: (float(one), float(weight)) for name, (one, weight) in pairs.items()}


def different_repetition(one: float, other: float, again: Iterable[float]) -> float | None:
    """Returns a repetition of a sum that shows that its difference may be random; None: none does.

    Args:
      one: the sum.
      other: the sum that should be the same.
      again: repetitions of the first one.
    """
    change = abs(other - one) if np.isfinite(other) else np.inf
    for found in again:
        if not np.isfinite(found) or change <= _TIMES_RANDOM * abs(found - one):
            return found
    return None


def repeated(compute: Callable[[], float]) -> Iterator[float]:
    """Yields what a function computes, several times."""
    return (compute() for _ in range(REPETITIONS))


def kind_of(batch: Batch) -> tuple[Any, ...]:
    """Returns what batches have in common for which a task runs the same ops: names and shapes."""
    return tuple(sorted((name, array.shape[1:]) for name, array in batch.items()))


def rows_of(batch: Batch, rows: list[int] | slice) -> dict[str, np.ndarray]:
    """Returns some examples of a batch."""
    return {name: array[rows] for name, array in batch.items()}


def fullest(batch: Batch) -> int:
    """Returns the example with the least padding: with the most elements that are not 0."""
    filled = [(array != 0).reshape(len(array), -1).sum(1) for array in batch.values()]
    return int(np.argmax(np.sum(filled, 0)))
