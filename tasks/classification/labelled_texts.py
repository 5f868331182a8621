"""An input of texts and their classes, in memory: bytes of UTF-8, padded with 0."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tekso.framework.input.arrays import Arrays
from tekso.framework.input.errors import InputError, NoSplitError
from tekso.framework.input.input import Signature
from tekso.framework.input.splits import Split
from tekso.framework.params import param


class LabelledTexts(Arrays):
    """Texts as bytes of UTF-8, and their classes, returned by the method `texts`.

        class Subjects(LabelledTexts):
            class_names = ("ham", "spam")

            def texts(self, split):
                return [("win a prize", 1), ("see you at noon", 0)]

    Texts that are longer than `length` are cut. `texts` must return the same in every call; see
    `Arrays`.

    Batches contain "x" [batch, length] int32, padded with 0, "labels" and "weights" [batch].

    Attributes:
      class_names: names of the classes in the order of their numbers; a class without one is shown
        as its number.
    Raises:
      NoSplitError: a split is empty.
      InputError: `length` is below 1, or `texts` does not return pairs of a text and a number.
    """

    class Params(Arrays.Params):
        """Params of LabelledTexts."""

        length: int = param("Number of bytes of a text.", default=96)

    class_names: tuple[str, ...] = ()

    def texts(self, split: Split) -> Iterable[tuple[str, int]]:
        """Returns the texts of a split and their classes."""
        raise NotImplementedError(f"{type(self).__name__} has no texts(split)")

    def load(self, split: Split) -> dict[str, Any]:
        """Returns "x" [texts, length] int32 and "labels" [texts] int32."""
        length, what = checked_length(self.params), f"{type(self).__name__}.texts({split!r})"
        want = f'{what} must return pairs of a text and the number of its class, [("spam", 1), …]'
        given: Any = self.texts(split)
        if not isinstance(given, Iterable):
            raise InputError(f"{want}; it returns {given!r}")
        pairs = list(given)  # outside of `try`: an error of `texts` itself keeps its message
        if not pairs:
            raise NoSplitError(f"{what} returns no texts: the split {split} is empty")
        try:
            texts, labels = zip(*pairs, strict=True)
            numbers = [operator.index(label) for label in labels]
            return {"x": encoded(texts, length), "labels": np.array(numbers, np.int32)}
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(f"{want}; {error}") from error

    @classmethod
    def signature(cls, params: Any) -> Signature:
        """See `Input`."""
        rows = params.batch_size
        return {
            "x": ((rows, checked_length(params)), np.dtype(np.int32)),
            "labels": ((rows,), np.dtype(np.int32)),
            "weights": ((rows,), np.dtype(np.float32)),
        }

    @classmethod
    def known(cls, params: Any, *, assets_dir: str | None) -> KnownTexts:
        """See `Input`: the encoding of texts, and the names of the classes."""
        del assets_dir
        return KnownTexts(params, tuple(cls.class_names))


@dataclasses.dataclass(frozen=True)
class KnownTexts:
    """What is known of `LabelledTexts` without the data.

    Attributes:
      params: Params of the input.
      class_names: names of the classes; (): their numbers.
    """

    params: Any
    class_names: tuple[str, ...]


def checked_length(params: Any) -> int:
    """Returns the number of bytes of a text.

    Raises:
      InputError: it is below 1.
    """
    if params.length < 1:
        raise InputError(f"{params.path_of('length')} is {params.length}, must be at least 1")
    return int(params.length)


def class_name(names: Sequence[str], number: int) -> str:
    """Returns the name of a class, or its number if it has no name."""
    return names[number] if number < len(names) else str(number)


def encoded(texts: Iterable[str], length: int) -> np.ndarray:
    """Returns the bytes of texts, cut or padded with 0.

    Shapes:
      returns: [texts, length] int32
    """
    rows = [np.frombuffer(text.encode()[:length], np.uint8) for text in texts]
    x = np.zeros([len(rows), length], np.int32)
    for into, row in zip(x, rows, strict=True):
        into[: len(row)] = row
    return x
