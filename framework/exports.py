"""What a task gives to programs that do not have Tekso: pure functions, by name.

A function is traced for a few fixed shapes, since models need to know theirs. What is exported
takes any number of examples of any length up to the largest: rows are filled up, and examples
computed some at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class ExportedInput:
    """An input of an exported function.

    Attributes:
      doc: what it is.
      dtype: of its elements.
      has_length: whether it is [examples, length], and not [examples].
      padding: what fills up the rows.
      longest: of its rows, where they cannot be as long as those of other inputs; None: they can.
    """

    doc: str
    dtype: Any = tf.int32
    has_length: bool = False
    padding: int = 0
    longest: int | None = None

    def length_in(self, length: int) -> int:
        """Returns the length of its rows, where those of the function are filled up to `length`."""
        return length if self.longest is None else min(length, self.longest)


@dataclasses.dataclass(frozen=True)
class ExportedOutput:
    """An output of an exported function.

    Attributes:
      doc: what it is.
      length_of: the input whose length dim 1 has; empty: none.
      padding: what fills up the other dims, which are as large as for the longest rows.
    """

    doc: str
    length_of: str = ""
    padding: float = 0


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """A function that is exported.

    Attributes:
      doc: what it does, in a sentence.
      function: pure function(theta, *inputs, ctx), theta that of the task; returns a dict of
        tensors, the example first, whose shapes are known when it is traced.
      inputs: by name, in the order of the arguments.
      outputs: by name; others that the function returns are left out.
      lengths: rows are filled up to the next of these, at most to the last.
      is_random: whether it draws; then the exported form takes a seed as well.
      for_litert: whether it is worth a file of its own for small devices.
    """

    doc: str
    function: Callable[..., Mapping[str, tf.Tensor]]
    inputs: Mapping[str, ExportedInput]
    outputs: Mapping[str, ExportedOutput]
    lengths: Sequence[int]
    is_random: bool = False
    for_litert: bool = False


@dataclasses.dataclass(frozen=True)
class ExportedTexts:
    """What turns texts into the inputs of an exported function, and its outputs into texts.

    Attributes:
      read: function(texts by the names of `inputs`) that returns the inputs of the function.
      write: function(outputs of the function, the texts that were read) that returns texts, or
        numbers of them, by the names of `outputs`.
      inputs: what each text is, by name; all are strings, [examples].
      outputs: what each output is, by name.
      resources: trackable objects that `read` and `write` use.
    """

    read: Callable[[Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]
    write: Callable[[Mapping[str, tf.Tensor], Mapping[str, tf.Tensor]], Mapping[str, tf.Tensor]]
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    resources: Sequence[Any] = ()


def lengths_up_to(longest: int, *, first: int = 16, ratio: int = 4) -> list[int]:
    """Returns a few lengths that end with the longest: 16, 64, 200."""
    lengths = []
    while first < longest:
        lengths.append(first)
        first *= ratio
    return [*lengths, longest]
