"""Finds the arrays of a batch that a loss reads as classes, and checks their labels.

TensorFlow does not refuse a label that is too large: its `tf.one_hot` is all zeros, and a compiled
softmax cross-entropy is NaN, also for a negative label. Which arrays are labels is known when the
ops of a loss run one by one, as they do for a few examples before the first step. `LabelWatch`
follows the elements of each array through these ops; what it finds, `BatchCheck` checks on the
host, before each step.

    labels [3, 4]  ─ labels[:, 1:] ─ reshape [9] ─ one_hot 5     elements 1 to 3 of an example: < 5
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tekso.framework.batch_part import example_of
from tekso.framework.label_advice import EXCLUDED_LABELS
from tekso.framework.run.ran_ops import RanOp, observing
from tekso.framework.task import Task
from tekso.framework.theta import SEPARATOR

_SPARSE = "SparseSoftmaxCrossEntropyWithLogits"
_SAME_ORDER = frozenset({"ExpandDims", "Reshape", "Squeeze"})
_CUTS = frozenset({"Slice", "Split", "StridedSlice", "Unpack"})


@dataclasses.dataclass(frozen=True)
class LabelLimit:
    """The number of classes of an array, or of some of its elements.

    Attributes:
      name: name of the array.
      classes: number of classes: its labels are below it.
      takes_negative: whether a negative label is one that the loss does not count, as of
        `tf.one_hot`. A sparse softmax cross-entropy fails for it, also if its weight is 0.
      elements: the elements of an example that are labels, a bool array of the shape of an example;
        examples of other shapes are not checked. None: all, of examples of any shape.
    """

    name: str
    classes: int
    elements: np.ndarray | None = None
    takes_negative: bool = True

    def first_wrong(self, batch: Mapping[str, Any]) -> tuple[int, ...] | None:
        """Returns the position of the first label that is out of range; None: there is none.

        Examples of weight 0 are not checked if `takes_negative`; see `weights_of`.
        """
        array = batch[self.name]
        least = None if self.takes_negative else 0
        if not array.size or (
            array.max() < self.classes and (least is None or array.min() >= least)
        ):
            return None
        is_wrong = array >= self.classes
        if least is not None:
            is_wrong |= array < least
        if self.elements is not None:
            if self.elements.shape != array.shape[1:]:
                return None
            is_wrong &= self.elements
        if self.takes_negative and (weights := weights_of(self.name, batch)) is not None:
            is_wrong[weights == 0] = False
        places = np.argwhere(is_wrong)
        return tuple(places[0].tolist()) if len(places) else None


def weights_of(name: str, batch: Mapping[str, Any]) -> np.ndarray | None:
    """Returns the weights of the examples of an array: "weights"; for "a/x" of task a "a/weights".

    None: the batch has none, or they are no vector.
    """
    head, separator, _ = name.rpartition(SEPARATOR)
    weights: np.ndarray | None = batch.get(f"{head}{separator}weights")
    return weights if weights is not None and weights.shape == batch[name].shape[:1] else None


@dataclasses.dataclass(frozen=True)
class BatchCheck:
    """Checks a batch on the host: `Task.check_batch`, and the labels that were found.

    Attributes:
      task: the task.
      limits: the labels to check.
    """

    task: Task
    limits: Sequence[LabelLimit] = ()

    def __call__(self, what: str, batch: Mapping[str, Any]) -> None:
        """Checks a batch.

        Args:
          what: the input and the number of the batch, for messages: "input.batch(3)".
          batch: the batch.

        Raises:
          ValueError: the task rejects the batch, or a label is out of range.
        """
        self.task.check_batch(what, batch)
        for limit in self.limits:
            name, classes = limit.name, limit.classes
            if name not in batch or (place := limit.first_wrong(batch)) is None:
                continue
            kind, label = type(self.task).__name__, batch[name][place]
            raise ValueError(
                f"{name!r} (example {example_of(batch, place[0])} of {what}) has the label "
                f"{label}, but the loss of {kind} has {classes} classes for it: labels are "
                f"0 to {classes - 1}{_cure(limit)}"
            )


def _cure(limit: LabelLimit) -> str:
    """Returns the end of the message about a label that is out of range."""
    if limit.takes_negative:
        return (
            ", or -1 for what the loss does not count. Correct the input or the number of "
            f"classes; if the loss excludes larger labels itself, add {limit.name!r} to "
            "unchecked_labels of the task"
        )
    return f". Correct the input or the number of classes. {EXCLUDED_LABELS}"


class _Followed(NamedTuple):
    """A tensor with elements of an array.

    Attributes:
      name: name of the array.
      numbers: for each element of the tensor, its number in the array.
      tensor: keeps the tensor alive, so that no other one gets its id.
      is_cut: whether it is a slice, which may leave out elements of longer arrays.
    """

    name: str
    numbers: np.ndarray
    tensor: Any
    is_cut: bool = False


class _Kind(NamedTuple):
    """What elements of an array have in common that are read as labels.

    Attributes:
      name: name of the array.
      shape: shape of an example.
      classes, takes_negative: as of `LabelLimit`.
      is_cut: as of `_Followed`.
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    is_cut: bool
    takes_negative: bool


def _both(one: LabelLimit, other: LabelLimit) -> LabelLimit:
    """Returns the limit of whole arrays that have two limits."""
    takes_negative = one.takes_negative and other.takes_negative
    return LabelLimit(one.name, min(one.classes, other.classes), takes_negative=takes_negative)


def _implies(whole: LabelLimit | None, kind: _Kind) -> bool:
    """Whether the limit of a whole array refuses all labels that a limit of elements refuses."""
    if whole is None or kind.classes < whole.classes:
        return False
    return kind.takes_negative or not whole.takes_negative


class LabelWatch:
    """Watches ops that run one by one; `found` has the labels of all blocks that were watched."""

    def __init__(self) -> None:
        self._found: dict[_Kind, np.ndarray] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}  # of the arrays of the block
        self._followed: dict[int, _Followed] = {}  # by id of the tensor
        self._dims: frozenset[int] = frozenset()  # of all arrays of the block

    @property
    def found(self) -> tuple[LabelLimit, ...]:
        """The labels, by name of the array and number of classes.

        A limit of all elements of an array holds for examples of any shape, if no slice was taken.
        """
        whole: dict[str, LabelLimit] = {}
        for kind, elements in self._found.items():
            if elements.all() and not kind.is_cut:
                found = LabelLimit(kind.name, kind.classes, takes_negative=kind.takes_negative)
                whole[kind.name] = _both(found, whole.get(kind.name, found))
        parts = [
            LabelLimit(kind.name, kind.classes, elements, kind.takes_negative)
            for kind, elements in self._found.items()
            if elements.any() and (kind.is_cut or not elements.all())
            if not _implies(whole.get(kind.name), kind)
        ]
        return (*whole.values(), *parts)

    @contextlib.contextmanager
    def watching(self, batch: Mapping[str, Any]) -> Iterator[None]:
        """Watches the ops of a block; ops inside of compiled functions are not seen.

        Args:
          batch: the tensors whose elements are followed.
        """
        self._dims = frozenset(size for x in batch.values() for size in x.shape)
        for name, x in batch.items():
            if x.dtype.is_integer and x.shape.rank and x.shape.num_elements():
                self._shapes[name] = tuple(x.shape)
                index = np.arange(x.shape.num_elements()).reshape(x.shape)
                self._followed[id(x)] = _Followed(name, index, x)
        try:
            with observing(self._observe):
                yield
        finally:
            self._followed = {}

    def _observe(self, op: RanOp) -> None:
        kind, inputs, attrs, outputs = op
        if not inputs:
            return
        known = self._followed.get(id(inputs[1 if kind in (_SPARSE, "Split") else 0]))
        if known is None:
            return
        if kind == _SPARSE:
            self._limit(known, int(inputs[0].shape[1]), takes_negative=False)
        elif kind == "OneHot":
            self._limit(known, int(inputs[1]), takes_negative=True)
        elif all(output.dtype.is_integer for output in outputs):
            moved = _moved(kind, known.numbers, inputs, attrs, outputs)
            is_cut = known.is_cut or _is_cut(kind, inputs, attrs)
            for index, output in zip(moved, outputs, strict=False):
                if index.shape == tuple(output.shape):
                    self._followed[id(output)] = _Followed(known.name, index, output, is_cut)

    def _limit(self, known: _Followed, classes: int, *, takes_negative: bool) -> None:
        """Adds the elements of a tensor to those that have a number of classes.

        Only elements that are read of all examples count: others were chosen by their example.
        A number of classes that is a dim of the batch may be another one in other batches: indices
        of examples, or of positions in a row, are below it. So it is left out of this block.
        """
        if classes in self._dims:
            return
        shape = self._shapes[known.name]
        is_read = np.zeros(shape, bool)
        is_read.flat[known.numbers.ravel()] = True
        key = _Kind(known.name, shape[1:], classes, known.is_cut, takes_negative)
        elements = is_read.all(0)
        self._found[key] = self._found.get(key, np.zeros_like(elements)) | elements


def _moved(
    kind: str, numbers: np.ndarray, inputs: Any, attrs: Any, outputs: Any
) -> Sequence[np.ndarray]:
    """Returns the numbers of the elements in the outputs of an op; (): it computes other values."""
    if kind == "Identity" or (kind == "Cast" and _keeps_values(inputs[0].dtype, outputs[0].dtype)):
        return [numbers]
    if kind in _SAME_ORDER:
        return [numbers.reshape(outputs[0].shape)]
    if kind == "Transpose":
        return [numbers.transpose(inputs[1].numpy())]
    if kind == "Slice":
        begins, sizes = (x.numpy().tolist() for x in inputs[1:])
        lasts = (None if n < 0 else b + n for b, n in zip(begins, sizes, strict=True))
        return [numbers[tuple(map(slice, begins, lasts))]]
    if kind == "StridedSlice":
        return [numbers[_strided(inputs, attrs)]]
    if kind == "Unpack":
        axis = _attribute(attrs, "axis")
        return [one.squeeze(axis) for one in np.split(numbers, numbers.shape[axis], axis)]
    if kind == "Split":
        return np.split(numbers, len(outputs), int(inputs[0]))
    return ()


def _keeps_values(before: tf.DType, after: tf.DType) -> bool:
    """Whether a cast of labels changes none: 255 of uint8 becomes -1 of int8, which is no label."""
    if (before, after) == (tf.int64, tf.int32):
        return True
    return bool(np.can_cast(before.as_numpy_dtype, after.as_numpy_dtype, "safe"))


def _is_cut(kind: str, inputs: Any, attrs: Any) -> bool:
    """Whether an op takes slices; `x[:, None]`, which takes all elements, does not."""
    if kind != "StridedSlice":
        return kind in _CUTS
    return any(one not in (Ellipsis, None, slice(None, None, 1)) for one in _strided(inputs, attrs))


def _strided(inputs: Any, attrs: Any) -> tuple[Any, ...]:
    """Returns the arguments of the op StridedSlice as an index of NumPy."""
    begins, ends, strides = (x.numpy().tolist() for x in inputs[1:])

    def has(mask: str, i: int) -> bool:
        return bool(_attribute(attrs, mask) >> i & 1)

    found: list[Any] = []
    for i, (begin, end, stride) in enumerate(zip(begins, ends, strides, strict=True)):
        if has("ellipsis_mask", i):
            found.append(Ellipsis)
        elif has("new_axis_mask", i):
            found.append(None)
        elif has("shrink_axis_mask", i):
            found.append(begin)
        else:
            first = None if has("begin_mask", i) else begin
            found.append(slice(first, None if has("end_mask", i) else end, stride))
    return tuple(found)


def _attribute(attrs: Any, name: str) -> int:
    """Returns a number of the attributes (name, value, name, value, …) of an op; by default 0."""
    for key, value in zip(attrs or (), (attrs or ())[1:], strict=False):
        if key in (name, name.encode()):
            return int(value)
    return 0
